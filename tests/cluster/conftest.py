"""`slurm_cluster` for this folder's tests; another folder's conftest imports it and so has a cluster of its own."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import SlurmCluster, require


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two nodes with four GPUs each. A test leaves it as it was: all nodes serve, no job is left."""
    require()
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=2, gpus=4, grace_s=3, kill_wait_s=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The session's cluster; what the test leaves of jobs and dead nodes is put right after it."""
    yield slurm_cluster
    slurm_cluster.reset()


@pytest.fixture
def folder(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Outside of pytest's long paths, as a user's is; commands given meanwhile find the cluster."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    path = Path(tempfile.mkdtemp(prefix="pivot runs-"))
    yield path
    shutil.rmtree(path)
