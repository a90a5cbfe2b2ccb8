"""Who gives which slice to whom: a list of copies, balanced over holders, and a bound on how good any could be.

At first each demand is given to its nearest holder. Then demands are swept, largest slice first, and each goes to the
holder whose accumulated latency stays smallest (after arXiv 2610.16866, where accumulators begin at zero: then the
first receivers use up the holders that are near to later ones). Tensors that are cut alike on both sides, as those of
all layers, make one demand with a count; it is handed out in portions, none more than a fiftieth of a mean load.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.core.errors import WeightsUnavailable
from pipeline.gps.layout import Box, Layout, Shapes
from pipeline.gps.loads import Demand, Ends, Loads, Rates, lower_bound_s
from pipeline.gps.slices import coalesce, refine

_PORTIONS = 50
_SWEEPS = 3
_CLOSE = 1.02
"""A plan this near to the bound is not swept again."""


class Share(NamedTuple):
    """The box of each of `names`, from one holder to one rank of one replica."""

    source: int
    replica: int
    rank: int
    box: Box
    names: tuple[str, ...]


class Copy(NamedTuple):
    source: int
    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """`given_s`: the load of each who holds anything that is wanted; `lower_bound_s`: by the same rates no plan has a
    smaller makespan."""

    shares: tuple[Share, ...]
    given_s: Mapping[int, float]
    makespan_s: float
    lower_bound_s: float

    @property
    def balance(self) -> float:
        """The largest load of a holder over the mean; 1 where nothing is given."""
        total_s = sum(self.given_s.values())
        return max(self.given_s.values()) * len(self.given_s) / total_s if total_s else 1.0

    def into(self, replica: int, rank: int) -> list[Copy]:
        """What one receiver gets, adjoining slices of the same holder as one."""
        boxes: defaultdict[tuple[int, str], list[Box]] = defaultdict(list)
        for share in self.shares:
            if (share.replica, share.rank) == (replica, rank):
                for name in share.names:
                    boxes[share.source, name].append(share.box)
        return [Copy(source, name, box) for (source, name), of in boxes.items() for box in coalesce(of)]


def plan_transfer(
    shapes: Shapes, item_bytes: int, have: Layout, want: Layout, ends: Ends, rates: Rates | None = None
) -> TransferPlan:
    """All replicas of layout `want` from holders of layout `have`. Raises WeightsUnavailable if nobody has a part."""
    rates = rates or Rates()
    demands = _demands(shapes, item_bytes, have, want, ends)
    loads = Loads(ends, rates)
    taken_s = _taken_s(demands, rates)
    bound_s = lower_bound_s(demands, loads)
    portions = list(_portions(demands, loads))
    given = []
    for demand, names in portions:
        given.append(loads.nearest(demand, len(names)))
        loads.add(demand, given[-1], len(names))
    for _ in range(_SWEEPS):
        if loads.longest_s <= _CLOSE * bound_s:
            break
        for number, (demand, names) in enumerate(portions):
            loads.add(demand, given[number], len(names), -1)
            given[number] = loads.least(demand, len(names))
            loads.add(demand, given[number], len(names))
    able = {holder for demand in demands for holder in demand.holders}
    return TransferPlan(
        tuple(
            Share(holder, d.replica, d.rank, d.box, names) for holder, (d, names) in zip(given, portions, strict=True)
        ),
        {holder: loads.given[holder] for holder in sorted(able)},
        max(loads.longest_s, taken_s),
        max(bound_s, taken_s),
    )


def _demands(shapes: Shapes, item_bytes: int, have: Layout, want: Layout, ends: Ends) -> list[Demand]:
    """Largest slices first; those of equal size in the order of names."""
    alike: defaultdict[tuple[tuple[int, ...], int, int], list[str]] = defaultdict(list)
    held, wanted = have.patterns, want.patterns
    for name, pattern in wanted.items():
        if name not in held:
            raise WeightsUnavailable(f"nobody holds {name}, which rank {pattern[0][0]} wants")
        alike[shapes[name], id(held[name]), id(pattern)].append(name)
    demands = []
    for names in alike.values():
        for box, holders, ranks in refine(names[0], held[names[0]], wanted[names[0]]):
            demands += [
                Demand(tuple(names), box, box.size * item_bytes, holders, replica, rank, nodes[rank])
                for replica, nodes in enumerate(ends.replicas)
                for rank in ranks
            ]
    return sorted(demands, key=lambda demand: -demand.size_bytes)


def _portions(demands: Sequence[Demand], loads: Loads) -> Iterator[tuple[Demand, tuple[str, ...]]]:
    """Demands in pieces that are small beside what a holder gives on average, if each took its nearest."""
    least_s = [min(loads.cost_s(demand, holder, 1) for holder in demand.holders) for demand in demands]
    able = {holder for demand in demands for holder in demand.holders}
    total_s = sum(len(d.names) * cost_s for d, cost_s in zip(demands, least_s, strict=True))
    for demand, cost_s in zip(demands, least_s, strict=True):
        count = max(1, int(total_s / len(able) / _PORTIONS / cost_s))
        for first in range(0, len(demand.names), count):
            yield demand, demand.names[first : first + count]


def _taken_s(demands: Sequence[Demand], rates: Rates) -> float:
    """Of the receiver with most to take."""
    taken: defaultdict[tuple[int, int], float] = defaultdict(float)
    for demand in demands:
        cost_s = rates.latency_s + demand.size_bytes / rates.local
        taken[demand.replica, demand.rank] += len(demand.names) * cost_s
    return max(taken.values(), default=0.0)
