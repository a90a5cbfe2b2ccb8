"""Transfer plans that were made before, also for other nodes and replicas that stand in the same way.

Nodes are alike that hold the same boxes and on which as many replicas receive: two situations that differ only in
which of these is which, have the same plan under other numbers. So after "a replica on node 2" one "on node 3" is
known, where all nodes hold everything; and a situation with a lost node is another one.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from pipeline.gps.layout import Layout, Shapes
from pipeline.gps.loads import Ends, Rates
from pipeline.gps.transfer_plan import Share, TransferPlan, plan_transfer

_MOST = 256


class _Order(NamedTuple):
    """Numbers of sources and of replicas, as they come in a situation's pattern."""

    sources: tuple[int, ...]
    replicas: tuple[int, ...]


class PlanCache:
    """Of one model."""

    def __init__(self, shapes: Shapes, item_bytes: int, rates: Rates | None = None) -> None:
        self._shapes, self._item_bytes, self._rates = shapes, item_bytes, rates or Rates()
        self._plans: dict[object, tuple[_Order, TransferPlan]] = {}
        self.hits = 0

    def plan(self, have: Layout, want: Layout, ends: Ends) -> TransferPlan:
        """As plan_transfer. The oldest of many plans is forgotten."""
        key, order = _pattern(have, want, ends)
        if key in self._plans:
            self.hits += 1
            known, plan = self._plans[key]
            return plan if known == order else _renumbered(plan, known, order)
        plan = plan_transfer(self._shapes, self._item_bytes, have, want, ends, self._rates)
        if len(self._plans) == _MOST:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = (order, plan)
        return plan


def _pattern(have: Layout, want: Layout, ends: Ends) -> tuple[object, _Order]:
    """What two situations with one plan have in common, and how this one's numbers come in it."""
    here = {node: Counter[object]() for node in {*ends.sources, *(n for nodes in ends.replicas for n in nodes)}}
    for source, node in enumerate(ends.sources):
        here[node]["holds", have.contents[source]] += 1
    for replica, nodes in enumerate(ends.replicas):
        for rank, node in enumerate(nodes):
            # A replica on one node is as any other there; one that is spread ties its nodes together.
            here[node]["takes", rank, -1 if len(set(nodes)) == 1 else replica] += 1
    kinds = {node: tuple(sorted(counts.items(), key=repr)) for node, counts in here.items()}
    place: Mapping[int, int] = {node: i for i, node in enumerate(sorted(kinds, key=lambda n: (repr(kinds[n]), n)))}
    sources = sorted(range(len(ends.sources)), key=lambda s: (place[ends.sources[s]], have.contents[s], s))
    replicas = sorted(range(len(ends.replicas)), key=lambda r: ([place[n] for n in ends.replicas[r]], r))
    key = (
        want.contents,
        tuple((place[ends.sources[s]], have.contents[s]) for s in sources),
        tuple(tuple(place[n] for n in ends.replicas[r]) for r in replicas),
    )
    return key, _Order(tuple(sources), tuple(replicas))


def _renumbered(plan: TransferPlan, known: _Order, order: _Order) -> TransferPlan:
    source = dict(zip(known.sources, order.sources, strict=True))
    replica = dict(zip(known.replicas, order.replicas, strict=True))
    shares = tuple(Share(source[s], replica[r], rank, box, names) for s, r, rank, box, names in plan.shares)
    given_s = {source[s]: load_s for s, load_s in plan.given_s.items()}
    return TransferPlan(shares, given_s, plan.makespan_s, plan.lower_bound_s)
