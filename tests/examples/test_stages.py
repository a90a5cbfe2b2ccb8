"""The example of stages: it drops what is too long, goes on from its own checkpoint, and its exception ends the run."""

import json
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.examples.runs import EXAMPLES, STEPS, submit, train
from tests.scenarios.runs import begin, pivot, rows, sequences, succeed, wait_for_end

CONFIG = ("configs/emulated.yaml", "configs/examples/stages.yaml")


def test_the_example_of_stages_trains_and_drops_what_is_too_long(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, "stages")
    dropped = 0
    for step, of_step in sequences(run).items():
        for row in of_step:
            is_long = len(row.tokens) > 24
            assert (row.state == "dropped") >= is_long
            assert row.reason in (("length_filter:too_long",) if is_long else ("", "group_too_small"))
            dropped += is_long
        (row_of_step,) = [row for row in rows(run) if row["step"] == step]
        assert row_of_step["length_filter/num_dropped"] == sum(len(row.tokens) > 24 for row in of_step)
        assert row_of_step["length_filter/mean_tokens"] > 0 and row_of_step["timing_s/length_filter"] > 0
    assert dropped
    assert "look at " in succeed(pivot("logs", str(run), "--step", "2"))
    assert re.search(r"length_filter +a process of its own +reward ▶", succeed(pivot("dag", *CONFIG)))


def looked_at(run: Path) -> Counter[str]:
    logs = (path.read_text() for path in (run / "tasks").rglob("length_filter-*_log.out"))
    return Counter(re.findall(r"look at (\S+)", "".join(logs)))


def told_to_pause(tmp_path: Path, pause_s: float) -> str:
    """A file that goes after the example."""
    file = tmp_path / "slow.yaml"
    text = (EXAMPLES / "stages.yaml").read_text().replace("{longest: 24}", f"{{longest: 24, pause_s: {pause_s}}}")
    file.write_text(text.replace("examples/length_filter.py", str(EXAMPLES / "length_filter.py")))
    return str(file)


def test_r01_a_stage_that_is_stopped_halfway_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    """TERM, in the middle of step 2's sixteen items; none is done twice."""
    run = tmp_path / "run"
    process = begin("submit", CONFIG[0], told_to_pause(tmp_path, 0.1), "--run-dir", str(run), "--wait", *STEPS)
    state = run / "stages" / "length_filter" / "step_000002.json"
    deadline = time.monotonic() + 60
    while not state.exists() or len(json.loads(state.read_text())) < 5:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    wait_for_end(run)
    before = looked_at(run)
    assert 16 < sum(before.values()) < 32 and len(json.loads(state.read_text())) == sum(before.values()) - 16
    succeed(pivot("resume", str(run)))
    after = looked_at(run)
    assert set(after.values()) == {1} and len(after) == 3 * 16
    assert [row["step"] for row in rows(run)] == [1, 2, 3]


def test_r06_its_exception_ends_the_run_and_is_its_first_cause(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def stage(stage):\n    raise LookupError('no such thing here')\n")
    own = f"stages=[{{name: bad, path: '{bad}:stage'}}]"
    ended = submit(tmp_path / "run", "data", own)
    assert ended.code == 1 and "LookupError: no such thing here" in ended.out
    status = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert status["reason"].startswith("stage bad of step 1 failed on ")


def test_a_stage_that_takes_too_long_ends_the_run_and_keeps_what_it_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = told_to_pause(tmp_path, 0.2)
    Path(file).write_text(Path(file).read_text().replace("timeout_s: 60", "timeout_s: 1"))
    ended = pivot("submit", CONFIG[0], file, "--run-dir", str(run), "--wait", *STEPS)
    assert ended.code == 1 and "took longer than its timeout_s, 1 s" in ended.out
    before = looked_at(run)
    assert 2 <= sum(before.values()) <= 6
    assert pivot("resume", str(run)).code == 1
    after = looked_at(run)
    assert len(after) > len(before) and set(after.values()) == {1}


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("{name: reward, path: 'stages.checkers:digit_sort'}", "there is a stage 'reward' already"),
        ("{name: a, path: 'stages.checkers:digit_sort', after: [rewrd]}", "no stage 'rewrd'; valid: prompts"),
        ("{name: a, path: 'stages.checkers:digit_sort', after: [train], before: [batch]}", "would wait for itself"),
        ("{name: a, path: 'nowhere_here:f'}", "no module 'nowhere_here'"),
        ("{name: a-b, path: 'stages.checkers:digit_sort'}", "valid are letters, digits and _"),
        ("{name: a, path: 'stages.checkers:digit_sort', option: {}}", "did you mean stages.options?"),
    ],
)
def test_r40_a_stage_that_cannot_be_is_refused(own: str, said: str) -> None:
    ended = pivot("validate", "configs/emulated.yaml", f"stages=[{own}]")
    assert ended.code == 2 and said in ended.out, ended.out
