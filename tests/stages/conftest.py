from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.scripted import queue_server
from tests.stages.shared_slot import MakeRig, Shared

if TYPE_CHECKING:
    from pipeline.queue.client import QueueClient

_steps = count(1)


@pytest.fixture(scope="session")
def queue_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator["QueueClient"]:
    """One real queue server for all stage tests; they keep apart by their steps."""
    with queue_server(tmp_path_factory.mktemp("queue")) as client:
        yield client


@pytest.fixture
def step() -> int:
    """A step that no other test uses."""
    return next(_steps)


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    made: list[Shared] = []

    def make(**sections: Any) -> Shared:
        made.append(Shared(tmp_path / f"run-{len(made)}", **sections))
        return made[-1]

    yield make
    for rig in made:
        rig.close()
