"""Sinks of the user's: each step comes once, and whatever they do, the run goes on."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.processes import log_tail
from pipeline.run_folder import RunFolder
from pipeline.sinks.feed import Sinks

CHECKOUT = Path(__file__).parents[1]
LIMIT_S = 60.0
SOURCE = """
import json, os, sys, time

class Base:
    def say(self, *event):
        with open(os.path.join(self.folder, "told.jsonl"), "a") as file:
            file.write(json.dumps(event) + "\\n")
    def start(self, run):
        self.folder = run.folder
        print("to the log, and not to who asks", flush=True)
        self.say("start", run.name, run.id, run.attempt, run.first_step, run.config["cluster"]["env"], os.getpid())
    def log(self, step, metrics):
        self.say("log", step, metrics)
    def close(self, status):
        self.say("close", status)

class Good(Base):
    pass

class Picky(Base):
    def log(self, step, metrics):
        if step in (2, 3):
            raise ValueError(f"no step {step}")
        super().log(step, metrics)

class Slow(Base):
    def log(self, step, metrics):
        super().log(step, metrics)
        time.sleep(600)

class Dying(Base):
    def log(self, step, metrics):
        os._exit(3)

class Lazy(Base):
    def close(self, status):
        time.sleep(600)

class Broken(Base):
    def start(self, run):
        raise KeyError("WANDB_API_KEY")
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "mine.py").write_text(SOURCE)
    made = RunFolder(tmp_path / "my run")
    made.create()
    return made


def sinks_of(run: RunFolder, *names: str, call_s: float = LIMIT_S) -> Sinks:
    config = Config.model_validate(
        {
            "cluster": {"env": {"MY_TOKEN": "hunter2"}},
            "model": {"policy": {"path": "emulated"}, "genrm": {"path": "emulated"}},
            "data": {"train_files": ["x.jsonl"]},
            "reward": {"genrm": {"template": "{{ response }}"}},
            "trainer": {"total_training_steps": 5},
            "tracking": {"also": [f"{run.path.parent}/mine.py:{name}" for name in names]},
        }
    )
    return Sinks(run, config, run.begin_attempt(), call_s)


def told(run: RunFolder) -> list[Any]:
    path = run.path / "told.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_rows_come_in_order_without_time_and_what_is_not_finite(run: RunFolder) -> None:
    sinks = sinks_of(run, "Good")
    sinks.open()
    for step in range(1, 4):
        sinks.log(step, {"time": 9.0, "reward": step / 4, "bad": float("nan"), "none": None})
    sinks.close("done", LIMIT_S)
    start, *logs, close = told(run)
    assert start[:2] == ["start", "my run"] and start[3:6] == [1, 0, {"MY_TOKEN": "***"}]
    assert logs == [["log", step, {"reward": step / 4, "tracking/nonfinite": 2.0}] for step in (1, 2, 3)]
    assert close == ["close", "done"] and is_gone(start[-1])
    assert sinks.state[0]["last_step"] == 3 and sinks.state[0]["trouble"] == ""
    assert log_tail(run.logs(1) / "sink-mine_py_Good.log") == "to the log, and not to who asks"


def test_a_run_that_goes_on_tells_only_what_was_not_taken(run: RunFolder) -> None:
    first = sinks_of(run, "Good")
    first.open()
    first.log(1, {"a": 1.0})
    until(lambda: first.state[0]["last_step"] == 1)
    os.kill(told(run)[0][-1], 9)  # with the controller, as it were
    first.close("failed", LIMIT_S)
    second = sinks_of(run, "Good")
    second.resume([(1, {"a": 1.0}), (2, {"a": 2.0})])
    second.open()
    second.log(3, {"a": 3.0})
    second.close("done", LIMIT_S)
    starts = [event for event in told(run) if event[0] == "start"]
    assert [event[3:5] for event in starts] == [[1, 0], [2, 2]] and starts[0][2] == starts[1][2], "the same run"
    assert [event[1] for event in told(run) if event[0] == "log"] == [1, 2, 3]
    assert told(run)[-1] == ["close", "done"]


def test_a_row_that_is_refused_is_said_once_and_the_next_comes(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    sinks = sinks_of(run, "Picky")
    sinks.open()
    for step in range(1, 5):
        sinks.log(step, {})
    sinks.close("done", LIMIT_S)
    assert [event[1] for event in told(run) if event[0] == "log"] == [1, 4]
    said = capsys.readouterr().err
    assert said.count("mine.py:Picky: ValueError: no step 2; the run goes on") == 1 and "step 3" not in said
    assert sinks.state[0]["trouble"] == "ValueError: no step 2" and sinks.state[0]["last_step"] == 4


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Slow", "it took longer than 0.5 s, and was ended"),
        ("Dying", "its process ended: exit code 3"),
        ("Broken", "it could not be started: KeyError: 'WANDB_API_KEY'"),
        ("Absent", "it could not be started: AttributeError"),
    ],
)
def test_a_sink_that_hangs_dies_or_never_begins_is_given_up_and_the_others_go_on(
    run: RunFolder, name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sinks = sinks_of(run, name, "Good", call_s=0.5 if name == "Slow" else LIMIT_S)
    sinks.open()
    for step in range(1, 4):
        sinks.log(step, {})
    until(lambda: sinks.state[0]["trouble"] and sinks.state[1]["last_step"] == 3)
    assert why in sinks.state[0]["trouble"] and capsys.readouterr().err.count("the run goes on") == 1
    sinks.close("done", LIMIT_S)
    assert all(is_gone(event[-1]) for event in told(run) if event[0] == "start")
    assert ["close", "done"] in told(run)


def test_a_sink_that_does_not_close_is_ended(run: RunFolder) -> None:
    sinks = sinks_of(run, "Lazy")
    sinks.open()
    sinks.log(1, {})
    until(lambda: sinks.state[0]["last_step"] == 1)
    sinks.close("done", 0.2)
    assert "did not close in time" in sinks.state[0]["trouble"] and is_gone(told(run)[0][-1])


def test_of_a_run_that_never_began_nothing_is_told(run: RunFolder) -> None:
    sinks_of(run, "Good").close("failed", LIMIT_S)
    assert told(run) == []


WANDB = """
import json, os
def init(**options):
    made = Run()
    made.path = os.path.join(options["dir"], "wandb.jsonl")
    made.write(["init", options["project"], options["name"], options["id"], options["resume"]])
    return made
class Run:
    def write(self, event):
        with open(self.path, "a") as file:
            file.write(json.dumps(event) + "\\n")
    def log(self, metrics, step):
        self.write(["log", step, metrics])
    def finish(self, exit_code):
        self.write(["finish", exit_code])
"""


def test_the_example_for_wandb_calls_it_as_it_wants(run: RunFolder) -> None:
    (run.path.parent / "wandb.py").write_text(WANDB)
    config = Config.model_validate(
        {
            "run": {"code_path": [str(run.path.parent)]},
            "model": {"policy": {"path": "emulated"}, "genrm": {"path": "emulated"}},
            "data": {"train_files": ["x.jsonl"]},
            "reward": {"genrm": {"template": "{{ response }}"}},
            "trainer": {"total_training_steps": 5},
            "tracking": {"experiment": "mine", "also": [f"{CHECKOUT}/configs/examples/wandb_sink.py:Wandb"]},
        }
    )
    sinks = Sinks(run, config, run.begin_attempt())
    sinks.open()
    sinks.log(1, {"reward": 0.5})
    sinks.close("failed", LIMIT_S)
    assert sinks.state[0]["trouble"] == ""
    init, log, finish = [json.loads(line) for line in (run.cache / "wandb.jsonl").read_text().splitlines()]
    assert init[:3] == ["init", "mine", "my run"] and len(init[3]) == 32 and init[4] == "allow"
    assert log == ["log", 1, {"reward": 0.5, "tracking/nonfinite": 0.0}] and finish == ["finish", 1]
