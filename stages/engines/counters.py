"""What makes a shift slow and must not happen in one, counted: captured graphs, new communicators, pinned memory.

All three are told by who does them, vLLM and torch, for the whole process; where these are not loaded there is nothing
to count. Of an engine's ranks that are other processes this one counts what it has heard.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Costly:
    graph_captures: int = 0
    communicators: int = 0
    pinnings: int = 0

    def __add__(self, other: "Costly") -> "Costly":
        return Costly(
            graph_captures=self.graph_captures + other.graph_captures,
            communicators=self.communicators + other.communicators,
            pinnings=self.pinnings + other.pinnings,
        )

    def __sub__(self, other: "Costly") -> "Costly":
        return Costly(
            graph_captures=self.graph_captures - other.graph_captures,
            communicators=self.communicators - other.communicators,
            pinnings=self.pinnings - other.pinnings,
        )


_in_shifts = Costly()
_of_ranks = Costly()


def hear(more: Costly) -> None:
    """What an engine's ranks did since they were last heard."""
    global _of_ranks
    _of_ranks += more


def so_far() -> Costly:
    """Of this process since it began, and of its ranks."""
    captures = communicators = pinnings = 0
    if compilation := sys.modules.get("vllm.compilation.counter"):
        captures = compilation.compilation_counter.num_cudagraph_captured
    if distributed := sys.modules.get("torch.distributed.distributed_c10d"):
        communicators = distributed._world.group_count
    if cuda := sys.modules.get("torch.cuda"):
        pinnings = cuda.host_memory_stats().get("num_host_alloc", 0)  # nothing until CUDA is used
    return _of_ranks + Costly(graph_captures=captures, communicators=communicators, pinnings=pinnings)


def in_shifts() -> Costly:
    """Of all shifts of this process."""
    return _in_shifts


@contextmanager
def shift() -> Iterator[None]:
    """What happens inside belongs to a shift."""
    global _in_shifts
    before = so_far()
    try:
        yield
    finally:
        _in_shifts += so_far() - before
