"""From the ranks of a trainer into the weight store: each rank writes boxes that it has, and none is written twice.

Ranks that share a node's store write into its slot together. Where ranks are on several nodes, each node then has a
share of the version; what is in which share stands in files, for the movers that exchange them.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.gps import trainer_layout as trainers
from pipeline.gps.layout import Layout, Part, Shapes, part_of, stored
from pipeline.gps.loads import Ends
from pipeline.gps.ranges import byte_ranges, write_share
from pipeline.gps.segment import ITEM_BYTES
from pipeline.gps.store import Joined, Store, Writer
from pipeline.gps.transfer_plan import plan_transfer
from pipeline.kill_points import kill_point
from stages.rl.ranks import Ranks
from stages.weights.boxes import at, box_of
from stages.weights.tensors import require_fitting, views


class Publisher:
    """One rank's. `publish` is collective. `shares`: how the names of files begin that tell all nodes who writes what;
    needed where ranks are on several nodes."""

    def __init__(self, ranks: Ranks, shares: Path | None = None) -> None:
        self._ranks, self._shares = ranks, shares
        self._nodes: list[int] = []
        self._parts: tuple[Part, ...] = ()

    @torch.no_grad()
    def publish(
        self,
        parameters: Mapping[str, Tensor],
        store: Store,
        version: int,
        limit_s: float,
        present: Callable[[str, Tensor], Tensor] = lambda _, own: own,
    ) -> None:
        """Write a model's parameters (its state_dict) as `version` into each rank's own node's `store`, rounding to its
        dtype. `present` makes of a name, and of what this rank has of that parameter, what is to be written. Waits
        `limit_s` at most for the slot: WeightsUnavailable. Raises UpdateRefused, on all ranks and before anything is
        written, unless names and shapes are exactly those of the store."""
        require_fitting(parameters, store.entries)
        if not self._nodes:
            self._divide(parameters, store)
        own = {name: _local(tensor) for name, tensor in parameters.items()}
        with self._slot(store, version, limit_s) as slot:
            target = views(slot)
            for name, box, place in self._parts:
                box_of(target[name], box).copy_(at(present(place.tensor, own[place.tensor]), place, box))
                kill_point("publish.half")

    def _divide(self, parameters: Mapping[str, Tensor], store: Store) -> None:
        """Once: find out who is on which node, and write down what each writes."""
        told = [name for (name,) in self._ranks.gather([zlib.crc32(store.name.encode())])]
        order = list(dict.fromkeys(told))
        self._nodes = [order.index(name) for name in told]
        self._parts = written_by(parameters, store, self._ranks)
        if len(order) > 1:
            assert self._shares is not None, "ranks on several nodes cannot say what they write"
            ranges = (r for name, box, _ in self._parts for r in byte_ranges(store.entries[name], box))
            write_share(self._shares, self._ranks.rank, self._nodes[self._ranks.rank], ranges)

    @contextmanager
    def _slot(self, store: Store, version: int, limit_s: float) -> Iterator[Writer | Joined]:
        """The first rank of each node opens it, and closes it when all others have."""
        if self._nodes.index(self._nodes[self._ranks.rank]) == self._ranks.rank:
            store.grow(version)
            with store.write(version, limit_s) as writer:
                if self._ranks.num_ranks > 1:
                    writer.share()
                self._meet()
                yield writer
                self._meet()
        else:
            self._meet()
            with store.join(version, limit_s) as joined:
                yield joined
            self._meet()

    def _meet(self) -> None:
        self._ranks.gather([0.0])


def layout_of(parameters: Mapping[str, Tensor], num_ranks: int) -> Layout:
    """Of all ranks that hold such parameters, under canonical names: what is cut up is so by torch's fully_shard."""
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    cut_up = {name: shape for name, shape in shapes.items() if isinstance(parameters[name], DTensor)}
    rest = {name: shape for name, shape in shapes.items() if name not in cut_up}
    both = zip(trainers.fsdp2(cut_up, num_ranks).ranks, trainers.ddp(rest, num_ranks).ranks, strict=True)
    return trainers.unfused(Layout(tuple(a + b for a, b in both), ({},) * num_ranks), shapes)


def written_by(parameters: Mapping[str, Tensor], store: Store, ranks: Ranks) -> tuple[Part, ...]:
    """What one rank writes: of what several have, each a part."""
    shapes: Shapes = {name: entry.shape for name, entry in store.entries.items()}
    have, want = layout_of(parameters, ranks.num_ranks), stored(shapes, [shapes])
    item_bytes = max(ITEM_BYTES[entry.dtype] for entry in store.entries.values())
    ends = Ends(sources=(0,) * ranks.num_ranks, replicas=((0,),))
    own: dict[str, list[Part]] = {}
    for part in have.ranks[ranks.rank]:
        own.setdefault(part.name, []).append(part)
    shares = plan_transfer(shapes, item_bytes, have, want, ends).shares
    mine = [share for share in shares if share.source == ranks.rank]
    return tuple(part_of(own[name], share.box) for share in mine for name in share.names)


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    own: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    assert own.is_contiguous()
    return own
