import itertools
from collections.abc import Iterator

import pytest

from pipeline.queue.client import QueueClient
from tests.queue.processes import Server, make_run

_steps = itertools.count(1, 10)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it alive; each works on a step of its own."""
    server = Server(make_run(tmp_path_factory.mktemp("queue") / "run"))
    yield server
    assert server.process.poll() is None, "a test ended the shared server"
    server.kill()


@pytest.fixture
def queue(shared: Server) -> QueueClient:
    return shared.client()


@pytest.fixture
def step() -> int:
    """The first of ten steps that no other test uses; larger than those of every test before."""
    return next(_steps)


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    """A server of the test's own."""
    server = Server(make_run(tmp_path / "run"))
    yield server
    server.kill()
