"""What users bring, in a job of a real Slurm that is requeued: a stage of one's own, and rewards that need no GPU."""

import json
import time
from pathlib import Path

import pytest

from tests.cluster import SlurmCluster
from tests.examples.runs import EXAMPLES
from tests.examples.test_stages import looked_at
from tests.scenarios.jobs import JobRun, requeue
from tests.scenarios.runs import rows, sequences

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

STAGE = (
    "{name: length_filter, path: '%s:length_filter', after: [reward], before: [batch], timeout_s: 60, "
    "options: {longest: 24, pause_s: 0.2}}"
)
REWARD = "{genrm: null, functions: {brevity: {path: '%s:brevity', memory_bytes: 1073741824}}}"


@pytest.mark.timeout(180)
def test_r01_a_stage_of_ones_own_goes_on_from_its_own_checkpoint_in_a_job_that_is_requeued(
    cluster: SlurmCluster, folder: Path
) -> None:
    own = f"stages=[{STAGE % (EXAMPLES / 'length_filter.py')}]"
    reward = f"reward={REWARD % (EXAMPLES / 'verl_reward.py')}"
    run = JobRun(folder / "a run", cluster, own, reward, "model.genrm=null")
    state = run.path / "stages" / "length_filter" / "step_000002.json"
    deadline = time.monotonic() + 90
    while not state.exists() or len(json.loads(state.read_text())) < 5:
        assert time.monotonic() < deadline and run.process.poll() is None
        time.sleep(0.01)
    requeue(run)
    assert run.end() == 0, run.out
    assert run.attempt == 2
    logs = list((run.path / "tasks").rglob("length_filter-*_log.out"))
    assert {path.relative_to(run.path / "tasks").parts[0] for path in logs} == {"attempt_1", "attempt_2"}
    items = looked_at(run.path)
    assert len(items) == 3 * 16 and set(items.values()) == {1}  # items done twice: none
    assert [row["step"] for row in rows(run.path)] == [1, 2, 3]
    for step, of_step in sequences(run.path).items():
        assert len(of_step) == 16
        for row in of_step:
            assert row.state in ("trained", "dropped") and (row.state == "dropped") >= (len(row.tokens) > 24), step
            assert row.score is not None and 0 <= row.score < 1 and not row.failure
    first, cut, last = rows(run.path)
    for row in (first, last):
        assert 0 < row["reward/brevity/mean"] < 1 and row["genrm/num_failed"] == 0
    assert cut["critic/score/mean"] > 0  # its verdicts were given before: what was counted of them died with their task
    assert not (left := run.left()), left
