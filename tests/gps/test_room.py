"""Needed bytes are compared with every limit that could kill the run, and the message has the numbers."""

import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from pipeline.core.errors import ConfigError
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


def test_weights_that_are_more_than_the_budget_are_refused_with_numbers() -> None:
    stores = {"policy, two versions": 3 << 30, "genrm": 1 << 30}
    for enough in (0, 4 << 30):
        check_budget(stores, enough)
    message = (
        r"gps.budget is 4.00 GiB, but the weights need 4.00 GiB .*\(policy, two versions 3.00 GiB, genrm 1.00 GiB\)"
    )
    with pytest.raises(ConfigError, match=message):
        check_budget(stores, (4 << 30) - 1)
