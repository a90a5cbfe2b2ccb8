"""Is there room for the weights? Asked before anything starts: a full /dev/shm or cgroup kills without a message."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import ConfigError
from pipeline.gps.segment import plan_image

if TYPE_CHECKING:
    from pipeline.config import Config

META_BYTES = 4096
_PAGE = 4096
_NO_LIMIT = 1 << 60


def needed_bytes(model_path: str, dtype: str, slots: int) -> int:
    """Shared memory that a store of `slots` slots takes. Reads only the headers of the model's files."""
    return slots * (-(-plan_image(model_path, dtype).nbytes // _PAGE) * _PAGE) + META_BYTES


def store_bytes(config: "Config") -> dict[str, int]:
    """Shared memory that each node gives to weights, by store."""
    policy, genrm = config.model.policy, config.judge_model
    stores = {"policy, two versions": needed_bytes(policy.path, policy.dtype, 2)}
    if genrm is not None:
        stores["genrm"] = needed_bytes(genrm.path, genrm.dtype, 1)
    return stores


def check_room(needed: Mapping[str, int], *, root: Path = Path("/")) -> None:
    """Raise ConfigError unless `needed` (bytes per store) fits into free /dev/shm and into free memory.

    Shared memory counts against the memory limit (cgroup) of whoever writes it first.
    """
    total = sum(needed.values())
    parts = ", ".join(f"{name} {_text(size)}" for name, size in needed.items())
    for where, free in _limits(root):
        if total > free:
            raise ConfigError(
                f"the weights need {_text(total)} of shared memory on each node ({parts}), but {where} has "
                f"{_text(free)} free. Use a smaller model or dtype, or give the node more"
            )


def check_budget(stores: Mapping[str, int], budget_bytes: int) -> None:
    """Raise ConfigError if a node's stores are larger than it may give; 0 is no budget."""
    total = sum(stores.values())
    if budget_bytes and total > budget_bytes:
        parts = ", ".join(f"{name} {_text(size)}" for name, size in stores.items())
        raise ConfigError(
            f"gps.budget is {_text(budget_bytes)}, but the weights need {_text(total)} of shared memory on each node "
            f"({parts}). Valid: at least {total} bytes, or 0 for no budget"
        )


def _limits(root: Path) -> Iterator[tuple[str, int]]:
    shm = root / "dev/shm"
    stat = os.statvfs(shm)
    yield str(shm), stat.f_bavail * stat.f_frsize
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            yield "the machine's memory (MemAvailable)", int(line.split()[1]) << 10
    yield from _cgroups(root)


def _cgroups(root: Path) -> Iterator[tuple[str, int]]:
    """Free bytes of every memory cgroup that this process is in, version 1 or 2, up to the root."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        folder = base / path.strip("/")
        while True:
            free = _cgroup_free(folder, limit, usage, cache)
            if free is not None:
                yield f"the memory limit {folder / limit}", free
            if folder == base:
                break
            folder = folder.parent


def _cgroup_free(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except FileNotFoundError:  # the root group of version 2 has none; a container sees only its own part of the tree
        return None
    if most == "max" or int(most) >= _NO_LIMIT:
        return None
    return max(0, int(most) - used + int(rows.get(cache, 0)))  # inactive file cache is given back on demand


def _text(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 29 else f"{size / (1 << 20):.2f} MiB"
