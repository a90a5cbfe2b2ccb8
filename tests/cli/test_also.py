"""`tracking.also` in runs: real ones, of emulated engines."""

import json
import subprocess
from pathlib import Path

from tests.cli.conftest import COMMAND, Pivot, environment

SINK = """
import json

class Sink:
    def start(self, run):
        self.path = run.folder + "/told.jsonl"
        self.say(["start", run.attempt, run.first_step])
    def log(self, step, metrics):
        self.say(["log", step, metrics["critic/score/mean"]])
    def close(self, status):
        self.say(["close", status])
    def say(self, event):
        with open(self.path, "a") as file:
            file.write(json.dumps(event) + "\\n")

class Broken:
    def start(self, run):
        raise OSError("no network")
"""


def test_a_run_and_its_resume_tell_each_step_once(pivot: Pivot, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SINK)
    also = "tracking.also=[mine.py:Sink, mine.py:Broken]"
    for arguments in (
        ["submit", "emulated.yaml", also, "--name", "a"],
        ["resume", "a", "trainer.total_training_steps=4"],
    ):
        done = subprocess.run(
            [*COMMAND, *arguments],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in (tmp_path / "runs/a/told.jsonl").read_text().splitlines()]
    assert [event for event in told if event[0] != "log"] == [
        ["start", 1, 0],
        ["close", "done"],
        ["start", 2, 4],
        ["close", "done"],
    ]
    rows = [json.loads(line) for line in (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()]
    assert [event[1:] for event in told if event[0] == "log"] == [[r["step"], r["critic/score/mean"]] for r in rows]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    status = pivot("status", "a").out
    assert f"{tmp_path}/mine.py:Sink: has step 4" in status
    assert f"{tmp_path}/mine.py:Broken: it could not be started: OSError: no network" in status
    assert (tmp_path / "runs/a/logs/controller.log").read_text().count("OSError: no network; the run goes on") == 2


def test_a_sink_that_is_not_there_is_refused(pivot: Pivot, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SINK)
    done = pivot("validate", "emulated.yaml", "tracking.also=mine.py:Sinks")
    assert done.code == 2 and "tracking.also: " in done.err and "has no 'Sinks' (did you mean Sink?)" in done.err
