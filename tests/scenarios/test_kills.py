"""Strict runs, killed: the run that goes on is bit for bit the one that was never killed. The whole matrix of places
and moments is benchmarks/resume.py; here are some of its cells."""

from pathlib import Path

import pytest

from tests.scenarios.conftest import SETTINGS
from tests.scenarios.runs import check_same, killed_run, submit, succeed

VLLM = (
    "run.determinism=strict",
    "trainer.total_training_steps=5",
    "checkpoint.save_freq=2",
    "checkpoint.keep=100",
    "data.train_batch_size=4",
    "rollout.n=4",
    "evaluate.freq=2",
    "evaluate.num_prompts=8",
    "tracking.uri=none",
)


@pytest.mark.parametrize(
    "kill",
    [
        "shell.batch_committed:5:run",  # steps 4 and 5 are trained again, without rollout
        "publish.half:4:run",
        "rollout.mid:70:run",  # step 5 is generated anew
    ],
)
def test_r02_r11_r12_a_killed_run_goes_on_bit_for_bit(reference: Path, tmp_path: Path, kill: str) -> None:
    run = tmp_path / "run"
    assert killed_run(run, kill, *SETTINGS) == 2
    check_same(run, reference)


@pytest.mark.parametrize(
    "kill",
    [
        "train.between_updates:5",  # the trainer rewinds from step 3: it trains step 4's recorded batch again, then 5's
        "queue.after_commit:40",
    ],
)
def test_a_run_survives_its_trainer_and_its_queue_server_bit_for_bit(
    reference: Path, tmp_path: Path, kill: str
) -> None:
    run = tmp_path / "run"
    assert killed_run(run, kill, *SETTINGS) == 1
    check_same(run, reference)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_real_engines_go_on_bit_for_bit(tmp_path: Path) -> None:
    undisturbed = tmp_path / "undisturbed"
    succeed(submit(undisturbed, *VLLM, config="configs/quickstart.yaml"))
    for kill in ("train.between_updates:5:run", "rollout.mid:30"):
        run = tmp_path / kill.replace(":", "-")
        killed_run(run, kill, *VLLM, config="configs/quickstart.yaml")
        check_same(run, undisturbed, lost=() if kill.endswith("run") else ("rollout/num_tokens",))
