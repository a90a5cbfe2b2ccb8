import os
import uuid
from collections.abc import Iterator

import pytest


@pytest.fixture
def store_name() -> Iterator[str]:
    """A name in /dev/shm that nothing is left of afterwards."""
    name = f"pivot-{os.getuid()}-test{uuid.uuid4().hex[:12]}-1-n0-policy"
    yield name
    for file in os.listdir("/dev/shm"):
        if file.startswith(name):
            os.unlink(f"/dev/shm/{file}")
