"""Needed bytes are compared with every limit that could kill the run, and the message has the numbers."""

import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from pipeline.config import load_files
from pipeline.core.errors import ConfigError
from pipeline.gps.placement import piles_of
from pipeline.gps.room import check_budget, check_room, needed_bytes
from pipeline.gps.store import Store

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine whose only limits are those that a test writes (and the real disk's, as /dev/shm)."""
    (tmp_path / "dev/shm").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable: 9000000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    return tmp_path


def write_group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_needed_is_what_a_store_takes(tmp_path: Path, store_name: str) -> None:
    safetensors.numpy.save_file({"a": np.zeros((300, 100), np.float32)}, tmp_path / "model.safetensors")
    needed = needed_bytes(str(tmp_path), "bfloat16", 2)
    store = Store.create(store_name, str(tmp_path), "bfloat16", 0)
    taken = sum(os.stat(f"/dev/shm/{f}").st_blocks * 512 for f in os.listdir("/dev/shm") if f.startswith(store_name))
    store.unlink()
    assert taken == needed


def test_room_on_this_machine() -> None:
    check_room({"policy": MIB})
    with pytest.raises(ConfigError, match=r"need 1048576\.00 GiB .*policy 1048576\.00 GiB.*/dev/shm has"):
        check_room({"policy": 1 << 50})


def test_memory_of_the_machine(machine: Path) -> None:
    (machine / "proc/meminfo").write_text("MemAvailable: 10240 kB\n")
    check_room({"policy": 10 * MIB}, root=machine)
    with pytest.raises(ConfigError, match=r"MemAvailable\) has 10\.00 MiB free"):
        check_room({"policy": 8 * MIB, "genrm": 3 * MIB}, root=machine)


def test_memory_limit_of_a_parent_group(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/job/step\n")
    groups = machine / "sys/fs/cgroup"
    write_group(groups / "job/step", memory__max="max", memory__current=MIB, memory__stat=f"inactive_file {MIB}")
    write_group(groups / "job", memory__max=9 * MIB, memory__current=5 * MIB, memory__stat=f"inactive_file {MIB}")
    check_room({"policy": 5 * MIB}, root=machine)
    with pytest.raises(ConfigError, match=r"job/memory\.max has 5\.00 MiB free"):
        check_room({"policy": 6 * MIB}, root=machine)


def test_memory_limit_of_the_old_kind_seen_from_a_container(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("4:cpu,memory:/outside/name\n0::/\n")
    stat = "inactive_file 0\ntotal_inactive_file 0"
    group = {"memory__limit_in_bytes": 4 * MIB, "memory__usage_in_bytes": MIB, "memory__stat": stat}
    write_group(machine / "sys/fs/cgroup/memory", **group)
    with pytest.raises(ConfigError, match=r"limit_in_bytes has 3\.00 MiB free"):
        check_room({"policy": 4 * MIB}, root=machine)


def test_weights_that_are_more_than_the_budget_are_refused_with_numbers_and_what_fits_instead() -> None:
    def check(*changes: str) -> None:
        check_budget(load_files(["quickstart.yaml"], changes))

    check("gps.budget=0")
    check("gps.budget=1384448")
    with pytest.raises(ConfigError, match=r"gps.budget is 1.32 MiB, but the weights need 1.32 MiB .*at least 1384448"):
        check("gps.budget=1384447")
    two_nodes = ("cluster.nodes=2", "gps.budget=1300000")
    with pytest.raises(ConfigError, match=r"or gps.replication: 1, with which"):
        check(*two_nodes)
    check(*two_nodes, "gps.replication=1")
    with pytest.raises(ConfigError, match=r"gps\.replication 3 exceeds cluster.nodes 2"):
        check(*two_nodes, "gps.replication=3")


def test_what_a_node_with_some_piles_needs_is_at_least_what_its_store_takes(tmp_path: Path, store_name: str) -> None:
    tensors = {f"t{i}": np.zeros((1 + 97 * i, 100), np.float32) for i in range(9)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    needed = needed_bytes(str(tmp_path), "bfloat16", 2, 4, 2)
    taken = []
    for node in range(4):
        store = Store.create(store_name, str(tmp_path), "bfloat16", 0, 2, 4, piles_of(node, 4, 2))
        names = [name for name in os.listdir("/dev/shm") if name.startswith(store_name)]
        taken.append(sum(os.stat(f"/dev/shm/{name}").st_blocks * 512 for name in names))
        store.unlink()
    assert max(taken) <= needed < needed_bytes(str(tmp_path), "bfloat16", 2)
