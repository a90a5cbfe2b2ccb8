"""One run of emulated engines that pages and metrics are held against."""

import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, environment


@pytest.fixture(scope="session")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the run `RUN` is done: its GPUs changed hands."""
    folder = tmp_path_factory.mktemp("documented")
    command = [*COMMAND, "submit", "emulated.yaml", "placement/shiftable.yaml", "--name", "RUN", "--wait"]
    ended = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder
