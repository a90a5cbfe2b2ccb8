"""Two nodes on one host, with real agents, movers and workers: versions come from one to the other by copies alone."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import wire, wire_gps
from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.gps.store import Reader, Store, Writer
from pipeline.wire_counts import Counts
from tests.slurm.rig import children, start_order
from tests.slurm.watch import Watch

ONE, OTHER = "local-0", "local-1"


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    """Each test goes on with what the one before it has left: version 1, 2, ... on ONE."""
    watch = Watch(tmp_path_factory.mktemp("two") / "run", 2, engine_s=1.0)
    try:
        for node in (ONE, OTHER):
            watch.expect(ev.NodeJoined, node=node)
        yield watch
    finally:
        watch.close()


def values(held: Reader | Writer) -> np.ndarray:
    return np.frombuffer(held.buffer, np.float32, 1024, held.entries["weight"].offset)


def policy(watch: Watch, node: str) -> Store:
    return Store.attach(f"{watch.gps(node)}-policy")


def write(watch: Watch, version: int) -> None:
    with policy(watch, ONE).write(version, 1.0) as writer:
        values(writer)[:] = version


def copy(number: int, version: int, *, is_first: bool = False) -> de.CopyVersion:
    return de.CopyVersion(number=number, version=version, source=ONE, node=OTHER, is_first=is_first)


def unexpected(watch: Watch) -> list[Any]:
    return [m for m in watch.shell.posted if not isinstance(m, Counts)]


def copy_again(watch: Watch, number: int, version: int) -> None:
    """As the core does it after a failure: one more for each end that had not yet been told of."""
    for attempt in range(number, number + 3):
        watch.copy(copy(attempt, version))
        ended = watch.expect(ev.VersionCopied | ev.CopyFailed)
        assert ended.number == attempt
        if isinstance(ended, ev.VersionCopied):
            return
    raise AssertionError("three copies in a row failed")


def seal(watch: Watch, version: int) -> None:
    for node in (ONE, OTHER):
        watch.send(node, wire.SealVersion(version=version))
        watch.expect(ev.VersionSealed, version=version, node=node)


def holds(watch: Watch, version: int) -> bool:
    with policy(watch, OTHER).read(version, 1.0) as reader:
        return bool((values(reader) == version).all())


def family(pid: int) -> list[int]:
    pids = [pid]
    for each in pids:
        pids += children(each)
    return pids


def mapped(watch: Watch, node: str) -> dict[str, set[str]]:
    """Files of shared memory that the node's processes have mapped, by command and pid."""
    found = {}
    for pid in family(watch.nodes._lives[node].pid):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found[f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}"] = {
            line.split()[5].removeprefix("/dev/shm/") for line in lines if "/dev/shm/pivot" in line
        }
    return found


def mover(watch: Watch, node: str) -> int:
    """Its pid; 0 while there is none."""
    zygote = children(watch.nodes._lives[node].pid)[1]
    order = watch.run.process_log(watch.attempt, node, "mover").read_text().rpartition("pid ")[2]
    pid = int(order.split()[0])
    return pid if pid in children(zygote) else 0


def test_a_version_is_copied_then_sealed_and_loaded_from_the_nodes_own_memory(watch: Watch) -> None:
    for node in (ONE, OTHER):
        watch.send(node, start_order(f"rollout-{node}"))
        watch.expect(wire.WorkerReady, worker=f"rollout-{node}")
    for version in (1, 2):
        write(watch, version)
        watch.copy(copy(version, version))
        assert watch.expect(ev.VersionCopied, node=OTHER).number == version
        assert policy(watch, OTHER).current() == version - 1
        seal(watch, version)
        for node in (ONE, OTHER):
            worker = f"rollout-{node}"
            watch.send(node, wire.LoadVersion(worker=worker, version=version, keep_kv=False, probe=None))
            watch.expect(wire.VersionLoaded, worker=worker, version=version)
        assert holds(watch, version)
    assert len(list(watch.run.rendezvous.iterdir())) <= 1  # one pair for both
    for node in (ONE, OTHER):
        files = mapped(watch, node)
        assert len([found for found in files.values() if found]) == 3  # agent, mover, engine
        strangers = {who: f for who, found in files.items() for f in found if not f.startswith(f"{watch.gps(node)}-")}
        assert not strangers
    assert not unexpected(watch)


def test_the_memory_of_another_node_cannot_be_opened(watch: Watch) -> None:
    said = {}
    for node in (ONE, OTHER):
        store = f"{watch.gps(node)}-policy"
        watch.send(ONE, start_order("trespasser", main="tests.slurm.tasks:trespass", store=store))
        said[node] = watch.expect(wire.UpdateFailed, worker="trespasser").reason
        watch.expect(wire.WorkerExited, worker="trespasser")
    assert said[ONE] == "nothing"
    assert said[OTHER].startswith(f"PermissionError: the weight store {watch.gps(OTHER)}-policy is of another node")


def test_a_dead_mover_fails_its_copy_once_and_the_next_one_copies_again(watch: Watch) -> None:
    write(watch, 3)
    old = mover(watch, OTHER)
    watch.send(OTHER, watch.begin(copy(3, 3))[OTHER])  # whom nobody will send anything
    os.kill(old, signal.SIGKILL)
    failed = watch.expect(ev.CopyFailed, number=3)
    assert failed.reason.startswith(f"the mover of {OTHER} ended: killed by SIGKILL"), failed
    watch.copy(copy(4, 3))  # at once: it waits for the next mover
    assert watch.expect(ev.VersionCopied).number == 4
    assert mover(watch, OTHER) != old

    with policy(watch, OTHER).read(3, 1.0, is_sealed=False):  # in the receiver's way
        watch.copy(copy(5, 3))
        for end in (ONE, OTHER):  # what ends a copy by force; the one without a mover keeps it for the next one
            watch.send(end, wire.KillWorker(worker=wire_gps.MOVER, reason="it took too long"))
        watch.expect(ev.CopyFailed, number=5)
    copy_again(watch, 6, 3)
    seal(watch, 3)
    assert holds(watch, 3)
    assert not unexpected(watch)


def test_a_stopped_mover_is_found_by_its_agent(watch: Watch) -> None:
    stopped = mover(watch, OTHER)
    os.kill(stopped, signal.SIGSTOP)
    watch.until(lambda: mover(watch, OTHER) not in (stopped, 0))
    write(watch, 4)
    copy_again(watch, 20, 4)


def test_a_node_that_comes_again_takes_any_version_first(watch: Watch) -> None:
    os.kill(watch.nodes._lives[OTHER].pid, signal.SIGKILL)
    watch.expect(ev.NodeLost, node=OTHER)
    assert not watch.nodes.copies.node_lost(OTHER, "killed")
    watch.start(OTHER)
    watch.expect(ev.NodeJoined, node=OTHER, version=0)
    watch.copy(copy(21, 4, is_first=True))
    assert watch.expect(ev.VersionCopied).number == 21
    assert policy(watch, OTHER).current() == -1
    seal(watch, 4)
    assert holds(watch, 4)
