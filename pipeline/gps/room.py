"""Is there room for the weights? Asked before anything starts: a full /dev/shm or cgroup kills without a message."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import ConfigError
from pipeline.gps.placement import deal, piles_of
from pipeline.gps.segment import plan_image
from pipeline.wording import amount

if TYPE_CHECKING:
    from pipeline.config import Config

META_BYTES = 4096
_PAGE = 4096
_NO_LIMIT = 1 << 60


def needed_bytes(model_path: str, dtype: str, slots: int, num: int = 1, replication: int = 1) -> int:
    """Shared memory that a store of `slots` slots takes on the node with most, of `num` piles each on `replication`
    nodes. Reads only the headers of the model's files."""
    image = plan_image(model_path, dtype)
    if num == 1:
        return slots * (-(-image.nbytes // _PAGE) * _PAGE) + META_BYTES
    pile_of = deal({name: entry.nbytes for name, entry in image.entries.items()}, num)
    sizes = [len(image.header)] * num
    for name, entry in image.entries.items():
        for node in range(num):
            if pile_of[name] in piles_of(node, num, replication):
                sizes[node] += -(-entry.nbytes // _PAGE) * _PAGE + _PAGE
    return slots * max(sizes) + META_BYTES


def store_bytes(config: "Config") -> dict[str, int]:
    """Shared memory that a node gives to weights, by store: one on which ranks train, for its memory has all of it."""
    policy = config.model.policy
    whole = {"policy, two versions": needed_bytes(policy.path, policy.dtype, 2)}
    return least_store_bytes(config) | whole


def least_store_bytes(config: "Config") -> dict[str, int]:
    """The same of a node without such ranks."""
    return _dealt_bytes(config, config.num_piles, config.gps.replication)


def _dealt_bytes(config: "Config", num: int, replication: int) -> dict[str, int]:
    policy, genrm = config.model.policy, config.judge_model
    stores = {"policy, two versions": needed_bytes(policy.path, policy.dtype, 2, num, replication)}
    if genrm is not None:
        stores["genrm"] = needed_bytes(genrm.path, genrm.dtype, 1, num, replication)
    return stores


def check_room(needed: Mapping[str, int], *, root: Path = Path("/")) -> None:
    """Raise ConfigError unless `needed` (bytes per store) fits into free /dev/shm and into free memory.

    Shared memory counts against the memory limit (cgroup) of whoever writes it first.
    """
    total = sum(needed.values())
    parts = ", ".join(f"{name} {amount(size)}" for name, size in needed.items())
    for where, free in _limits(root):
        if total > free:
            raise ConfigError(
                f"the weights need {amount(total)} of shared memory on each node ({parts}), but {where} has "
                f"{amount(free)} free. Use a smaller model or dtype, or give the node more"
            )


def check_budget(config: "Config") -> None:
    """Raise ConfigError if the weights on a node without training ranks are larger than it may give; 0 is no budget."""
    budget, num_nodes = config.gps.budget, config.cluster.nodes
    total = sum((stores := least_store_bytes(config)).values())
    if not budget or total <= budget:
        return
    parts = ", ".join(f"{name} {amount(size)}" for name, size in stores.items())
    less = [r for r in range(num_nodes - 1, 0, -1) if sum(_dealt_bytes(config, num_nodes, r).values()) <= budget]
    hint = f", or gps.replication: {less[0]}, with which a node that trains nothing needs less" if less else ""
    raise ConfigError(
        f"gps.budget is {amount(budget)}, but the weights need {amount(total)} of shared memory on each node "
        f"({parts}). Valid: at least {total} bytes, or 0 for no budget{hint}"
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
