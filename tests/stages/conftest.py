from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

import pytest

from tests.fakes.scripted import queue_server

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
