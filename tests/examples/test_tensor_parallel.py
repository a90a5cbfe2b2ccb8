"""The example of a rollout engine of two ranks, on one of two nodes, with training on the other."""

import json
from pathlib import Path

import pytest

from pipeline.run_folder import RunFolder
from tests.examples.runs import EXAMPLES, train
from tests.scenarios.runs import measured, pivot, rows, succeed

pytestmark = pytest.mark.vllm

QUICKSTART = "configs/quickstart.yaml"
SMALL = ("data.train_batch_size=4", "rollout.n=4", "trainer.updates_per_step=1", "evaluate.freq=0")


def test_the_example_of_tensor_parallel_trains(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, "tensor_parallel", *SMALL, base=QUICKSTART)
    for row in rows(run)[-3:]:
        assert 0 < row["mismatch/max_abs_logprob_diff"] < 1e-4, "each rank has the trainer's weights"
    on_nodes = [{path.stem[8:] for path in run.glob(f"logs/attempt_1/local-{n}-*-0.log")} for n in (0, 1)]
    assert sorted(on_nodes, key=len) == [{"rollout-0"}, {"reward-0", "train-0"}]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_what_one_rank_learns(tmp_path: Path) -> None:
    run = tmp_path / "run"
    example = str(EXAMPLES / "tensor_parallel.yaml")
    succeed(pivot("submit", QUICKSTART, example, "--run-dir", str(run), "--wait", "tracking.uri=none"))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_last"] - summary["eval_first"] >= 0.25
    assert all(
        row["queue/num_trained"] + row["queue/num_dropped"] == 128 for step, row in measured(run).items() if step
    )
    assert not (RunFolder(run).path / "attempt_2").exists()
