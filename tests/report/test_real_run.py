"""A real run of emulated engines on slots that change hands: what it leaves, what is seen of it, and its report."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.report.build import build
from pipeline.report.run import RunRecord, read_run
from pipeline.report.spent import slot_seconds
from pipeline.run_folder import RunFolder, read_json
from tests.cli.conftest import COMMAND, Pivot, environment, pivot
from tests.report.test_build import data_of

__all__ = ["pivot"]

STEPS = 6
CHANGES = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.options.step_seconds=0.3",
    "rollout.engine.options.step_s=0.02",
    "reward.genrm.engine.options.step_s=0.02",
)


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, seen: list[dict[str, Any]]) -> Iterator[RunFolder]:
    """`seen`: its status, whenever it was another one."""
    folder = tmp_path_factory.mktemp("real") / "run"
    command = [*COMMAND, "submit", "configs/emulated.yaml", "configs/placement/shiftable.yaml", *CHANGES]
    with subprocess.Popen(
        [*command, "--run-dir", str(folder)], env=environment(), stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 90
        while process.poll() is None and time.monotonic() < deadline:
            status = read_json(folder / "status.json")
            if status is not None and status not in seen:
                seen.append(status)
            time.sleep(0.05)
        process.kill()
    assert process.returncode == 0
    yield RunFolder(folder)


@pytest.fixture(scope="module")
def record(run: RunFolder) -> RunRecord:
    return read_run(run)


def test_who_looks_on_sees_slots_at_work_and_steps_that_advance(run: RunFolder, seen: list[dict[str, Any]]) -> None:
    working = [slot for status in seen for slot in status["slots"] if slot["state"] == "work"]
    assert {slot["role"] for slot in working} >= {"rollout", "reward"}
    assert any(slot["tokens_per_s"] > 0 and slot["running"] > 0 for slot in working)
    assert all(len(status["slots"]) in (0, 4) for status in seen)
    steps = [step for status in seen for step in status["steps"]]
    assert {step["step"] for step in steps} == set(range(1, STEPS + 1))
    assert all(0 <= step["scored"] <= step["rolled_out"] <= step["sequences"] == 16 for step in steps)
    assert any(0 < step["rolled_out"] < 16 for step in steps) and any(step["expected_s"] for step in steps)
    assert any(status["shifts"] for status in seen)


def test_each_step_is_in_the_timeline_as_in_its_row(record: RunRecord) -> None:
    timeline = record.timeline
    assert sorted(timeline.steps) == list(record.rows) == list(range(1, STEPS + 1))
    for number, step in timeline.steps.items():
        row = record.rows[number]
        spans = {stage: end - start for stage, start, end in step.spans}
        assert spans["train"] == pytest.approx(row["timing_s/train"], abs=0.01)
        assert step.recorded == pytest.approx(row["time"], abs=0.5)
        assert sum(step.lengths["rollout"].values()) == 16  # type: ignore[index]


def test_slots_were_seen_to_do_what_the_metrics_say(record: RunRecord) -> None:
    timeline = record.timeline
    assert [row.name for row in timeline.rows] == [f"local-0:{i}" for i in range(4)]
    spent = {code: float(s[0]) for code, s in slot_seconds(timeline.rows, [timeline.began, timeline.ended]).items()}
    assert sum(spent.values()) == pytest.approx(4 * (timeline.ended - timeline.began), rel=1e-6)
    trained_s = sum(row["task_s/train"] or 0.0 for row in record.rows.values())
    assert spent["T"] == pytest.approx(trained_s, abs=0.1 * STEPS)
    assert min(spent["R"], spent["J"], spent["S"]) > 0.3
    assert sum(max(v) for v in (timeline.loads[role].tokens_per_s for role in timeline.loads)) > 0


def test_every_shift_is_on_the_page(run: RunFolder, record: RunRecord) -> None:
    slots = data_of(build(run))["charts"]["slots"]
    shifts = [shift for shift in record.decided.shifts if shift["old"]]
    assert len(slots["marks"]) == len(shifts) > STEPS
    assert len(slots["notes"]) == len(record.shifting) > 0
    for mark, shift in zip(slots["marks"], shifts, strict=True):
        assert [slots["rows"][row]["name"] for row in mark[2]] == shift["slots"]
        assert mark[1] - mark[0] == pytest.approx(shift["took_s"], abs=0.02)


def test_samples_of_each_step_can_be_read(record: RunRecord) -> None:
    for step in range(1, STEPS + 1):
        group = [sample for sample in record.samples if sample["step"] == step and not sample["failure"]]
        assert len({sample["id"] for sample in group}) == len(group) >= 2
        assert len({sample["prompt"] for sample in group}) == 1 and all(sample["response"] for sample in group)


def test_the_commands_show_it(pivot: Pivot, run: RunFolder) -> None:
    assert "done, " not in pivot("status", str(run.path)).err
    watched = pivot("watch", str(run.path))
    assert watched.code == 0 and f"run  done  {STEPS} of {STEPS} steps" in watched.out and "SHIFT AT" in watched.out
    assert pivot("report", str(run.path), "-o", "page.html").code == 0
    assert len(json.dumps(data_of(Path("page.html").read_text()))) > 5000
