from collections.abc import Iterator

import pytest

from pipeline import wire
from tests.slurm.rig import Rig


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One node with a rollout and a train worker, shared by a module's tests, each of which leaves it as it was."""
    rig = Rig(tmp_path_factory.mktemp("rig") / "run", cluster={"env": {"FROM_CONFIG": "yes", "OMP_NUM_THREADS": "2"}})
    try:
        rig.welcome()
        rig.expect(wire.NodeReady)
        rig.start_worker("rollout-0")
        rig.start_worker("train-0", "train")
        rig.ready("rollout-0")
        rig.ready("train-0")
        yield rig
    finally:
        rig.close()
