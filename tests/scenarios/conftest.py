from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.runs import STRICT, submit, succeed

SETTINGS = (*STRICT, "trainer.total_training_steps=6", "checkpoint.save_freq=3")
"""Eight prompts, four a step: an epoch ends every second step. Checkpoints of steps 3 and 6."""


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A strict run of emulated engines that nothing disturbed. Tests leave it as it is."""
    run = tmp_path_factory.mktemp("reference") / "run"
    succeed(submit(run, *SETTINGS))
    yield run
