"""What `pivot-pipeline gps` shows, as JSON: whose memory holds which versions, who reads them, the last copies."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.copies import Made
from pipeline.core.events import Role
from pipeline.core.memories import Memories

if TYPE_CHECKING:
    from pipeline.core.core import Core


def describe_weights(
    core: "Core", copies: Iterable[Made], reads: Iterable[Made], store_bytes: Mapping[str, int]
) -> dict[str, Any]:
    """`store_bytes`: shared memory that a node gives to each store."""
    return {
        "bytes": dict(store_bytes),
        "nodes": {node: _of_node(core.crew.memories, node) for node in core.crew.memories},
        "readers": {
            worker.name: {"node": worker.node, "version": worker.version}
            for worker in core.fleet.workers.values()
            if worker.role is Role.ROLLOUT and worker.serves
        },
        "copies": [asdict(copy) for copy in copies],
        "reads": [asdict(read) for read in reads],
    }


def _of_node(memories: Memories, node: str) -> dict[str, Any]:
    memory = memories[node]
    copy = memory.copy
    return {
        "visible": memory.shown if memory.shown >= 0 else None,
        "piles": list(memory.piles),
        "holds": sorted(version for version in memory.held if memories.is_whole(node, version)),
        "copying": {"version": copy.version, "source": copy.source} if copy else None,
    }
