"""The quickstart with its real engines in jobs of a real Slurm: bit for bit what it trains on `local`.

The nodes have each a shared memory of their own, where this process may mount one: what a node holds has come to it.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.run_folder import RunFolder
from tests.cluster import SlurmCluster, require
from tests.cluster.machine import can_own_memory
from tests.scenarios.awake import shifts
from tests.scenarios.jobs import JOB
from tests.scenarios.runs import begin, check_same, checkpoints, pivot, sequences, submit, succeed

pytestmark = [pytest.mark.slurm, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4
QUICKSTART = (
    *("run.determinism=strict", f"trainer.total_training_steps={STEPS}", "tracking.uri=none"),
    *("checkpoint.save_freq=2", "checkpoint.keep=100", "data.train_batch_size=4", "rollout.n=4"),
    *("evaluate.freq=2", "evaluate.num_prompts=16"),
)
ONE_NODE = (*JOB, "cluster.nodes=1", "trainer.ranks=1")
TWO_NODES = (*JOB, "cluster.nodes=2", "cluster.slots_per_node=2", "trainer.ranks=1")
"""Engines on one, the trainer on the other: each version goes from memory to memory."""


@dataclass(frozen=True)
class Watched:
    """A run in a job, and what was seen while it went on: what each node's memory held, where its zygote compiled."""

    path: Path
    home: Path
    seen: dict[str, set[str]]
    caches: dict[str, set[str]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    require()
    folder = tmp_path_factory.mktemp("slurm")
    with (
        SlurmCluster(folder, nodes=4, gpus=4, own_memory=can_own_memory()) as cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in cluster.env.items():
            patch.setenv(name, value)
        yield cluster


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pivot-quickstart-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def local(folder: Path) -> Path:
    run = folder / "local"
    succeed(submit(run, *QUICKSTART, config="configs/quickstart.yaml"))
    assert set(checkpoints(run)) == {"step_2", "step_4"} and set(sequences(run)) == set(range(1, STEPS + 1))
    return run


@pytest.fixture(scope="module")
def two_nodes(folder: Path, cluster: SlurmCluster) -> Watched:
    seen, caches = ({node: set[str]() for node in cluster.nodes} for _ in range(2))
    run = Watched(folder / "two", folder / "home", seen, caches)
    run.home.mkdir()
    arguments = ("submit", "configs/quickstart.yaml", "--run-dir", str(run.path), "--wait", *QUICKSTART, *TWO_NODES)
    process = begin(*arguments, HOME=str(run.home))
    out = None
    while out is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, _ = process.communicate(timeout=0.2)
        for node in cluster.nodes:
            run.seen[node].update(os.listdir(cluster.memory(node)))
            run.caches[node].update(caches_of(cluster.processes(node), run.home))
    assert process.returncode == 0, out
    return run


def test_a_job_of_one_node_trains_what_local_trains(local: Path, folder: Path, cluster: SlurmCluster) -> None:
    run = folder / "one"
    succeed(submit(run, *QUICKSTART, *ONE_NODE, config="configs/quickstart.yaml"))
    check_same(run, local)
    assert checkpoints(run) == checkpoints(local)

    back = ("resume", str(run), "--step", "2", "--cluster", "local")
    succeed(pivot(*back, "cluster.slots_per_node=3"))
    check_same(folder / "one-from2", local)
    assert checkpoints(folder / "one-from2") == checkpoints(local)


def caches_of(pids: list[int], home: Path) -> set[str]:
    """Where zygotes and workers have what they compile, of those that have this home."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            told = dict(one.partition("=")[::2] for one in Path(f"/proc/{pid}/environ").read_text().split("\0"))
            if told.get("HOME") == str(home) and "VLLM_CACHE_ROOT" in told:
                found |= {value for name, value in told.items() if "CACHE" in name and os.path.isabs(value)}
    return found


def test_r08_what_is_compiled_lies_on_its_node_and_nothing_in_the_home(
    two_nodes: Watched, cluster: SlurmCluster
) -> None:
    used = [found for found in two_nodes.caches.values() if found]
    assert len(used) == 2 and not used[0] & used[1], used
    paths = used[0] | used[1]
    assert all(path.startswith(f"{tempfile.gettempdir()}/pivot-") for path in paths), paths
    cluster.wait_until(lambda: not any(Path(path).exists() for path in paths), "they go with the nodes' agents")
    assert list(two_nodes.home.rglob("*")) == []
    assert {path.name for path in (two_nodes.path / "cache").iterdir()} <= {"rendezvous"}


def test_a_job_of_two_nodes_trains_what_local_trains(local: Path, two_nodes: Watched) -> None:
    check_same(two_nodes.path, local)
    assert checkpoints(two_nodes.path) == checkpoints(local)


def test_a_node_holds_its_own_stores_alone(two_nodes: Watched, cluster: SlurmCluster) -> None:
    if not cluster.settings.own_memory:
        pytest.skip("NODES SHARE ONE /dev/shm HERE: giving each its own takes the right to mount")
    used = {node: names for node, names in two_nodes.seen.items() if names}
    assert len(used) == 2
    for node, names in used.items():
        assert all(f"-{node}-" in name for name in names), names
        for store in ("policy.0", "policy.1", "genrm.0"):
            assert any(name.endswith(f"-{store}") for name in names), (store, names)
    cluster.wait_until(lambda: not any(os.listdir(cluster.memory(node)) for node in cluster.nodes), "nothing is left")


@pytest.mark.parametrize(("began", "place"), [("local", TWO_NODES), ("two", ONE_NODE)])
def test_a_run_goes_on_in_a_job_from_a_step_between_checkpoints(
    local: Path, two_nodes: Watched, folder: Path, began: str, place: tuple[str, ...]
) -> None:
    """Step 3 is trained again from its recorded batch, on another number of nodes than before."""
    succeed(pivot("resume", str(folder / began), "--step", "3", "--cluster", "slurm", "--wait", *place))
    fork = folder / f"{began}-from3"
    check_same(fork, local)
    assert checkpoints(fork) == checkpoints(local)


COLOCATED = ("placement.mode=colocated", "cluster.nodes=1", "cluster.slots_per_node=1")


def test_a_job_whose_slot_serves_all_roles_trains_what_local_trains(
    local: Path, folder: Path, cluster: SlurmCluster
) -> None:
    """Each shift drops weights and cache and reads them again."""
    run = folder / "colocated"
    succeed(submit(run, *QUICKSTART, *JOB, "trainer.ranks=1", *COLOCATED, config="configs/quickstart.yaml"))
    assert sequences(run) == sequences(local) and checkpoints(run) == checkpoints(local)


def test_gpus_of_two_nodes_move_between_roles(folder: Path, cluster: SlurmCluster) -> None:
    run = folder / "shiftable"
    shiftable = ("run.determinism=default", "placement.mode=shiftable", "algorithm.staleness=1")
    shiftable += ("placement.planner.min_dwell_s=0.3", "placement.planner.tick_s=0.3")
    succeed(submit(run, *QUICKSTART, *TWO_NODES, *shiftable, config="configs/quickstart.yaml"))
    assert set(checkpoints(run)) == {"step_2", "step_4"}
    found = sequences(run)
    assert {step: len(rows) for step, rows in found.items()} == dict.fromkeys(range(1, STEPS + 1), 16)
    changes = {(line["old"], line["new"]) for line in shifts(RunFolder(run))}
    assert {("train", "rollout"), ("train", "reward")} & changes and any(new == "train" for _, new in changes), changes
    assert {("rollout", "reward"), ("reward", "rollout")} & changes, changes
