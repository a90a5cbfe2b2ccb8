import os
import signal
from collections.abc import Iterator

import fsspec
import pytest

from tests.begun import end_what_was_begun
from tests.fakes.s3 import S3Server

BUCKET = "bucket"

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts into the background without it


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server that this process and its children reach, with an empty bucket `bucket`."""
    server = S3Server()
    before = {name: os.environ.get(name) for name in server.environment}
    os.environ.update(server.environment)
    fsspec.filesystem("s3").mkdir(BUCKET)
    yield server
    server.close()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    yield
    end_what_was_begun()
