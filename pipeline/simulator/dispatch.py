"""Which replica takes which waiting sequence: the rule of `pipeline.core.scheduler`, under the limits of engines.

Oldest step first, in it those with most tokens first (the closest to the end of the step); each to the replica that
runs the fewest and has room, ties to the one that woke first. A scheduler that weighs more replaces this file.
"""

import heapq
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listed
from typing import Protocol

from pipeline.simulator.engine import Replica, Sequence

_LEAST_EXCESS = 0.15
"""Sequences leave a replica that runs this much more than its share: less is not worth the prefill."""
_REMAINING = 0.6
"""Of a mean length: what a sequence taken from a crowded replica has before it, on average (assumed)."""


class WaitingQueue:
    """The sequences that wait for one role, in order of dispatch."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, sequences: Iterable[Sequence]) -> None:
        for s in sequences:
            heapq.heappush(self._heap, (s.step, -s.generated, s.id, s))

    def first(self) -> Sequence:
        return self._heap[0][3]

    def pop(self) -> Sequence:
        return heapq.heappop(self._heap)[3]

    def ages(self) -> list[tuple[int, float]]:
        """Step and tokens of each, in no order."""
        return [(entry[0], -entry[1]) for entry in self._heap]

    def waiting(self) -> list[Sequence]:
        return [entry[3] for entry in sorted(self._heap, key=lambda entry: entry[:3])]


class Dispatch(Protocol):
    """The scheduler of one role, as the simulation calls it."""

    def offer(self, replica: Replica) -> None:
        """It came up, or what it runs changed."""

    def fill(self, queue: WaitingQueue, now: float, wake: Callable[[Replica, float], None]) -> list[Replica]:
        """Give out what fits; `wake(replica, when)` is called for one that is busy with prefill until then. Returns
        the replicas that got something."""
        ...

    def plan_migration(self, replicas: Listed[Replica], mean_length: float) -> list[tuple[Replica, int]]:
        """Replicas came up and nothing waits any more: how many sequences leave each crowded one."""
        ...


class LeastLoaded:
    """A replica that refused is asked again when something changed there."""

    def __init__(self, max_prefill_backlog_s: float) -> None:
        self._backlog_s = max_prefill_backlog_s
        self._open: list[tuple[int, int, Replica]] = []
        self._listed: dict[int, int] = {}  # replica to the load under which it stands in `_open`; other entries are old

    def offer(self, replica: Replica) -> None:
        if self._listed.get(replica.index) != replica.num_running:
            self._listed[replica.index] = replica.num_running
            heapq.heappush(self._open, (replica.num_running, replica.index, replica))

    def fill(self, queue: WaitingQueue, now: float, wake: Callable[[Replica, float], None]) -> list[Replica]:
        changed: dict[int, Replica] = {}
        while len(queue) and self._open:
            num, index, replica = self._open[0]
            if self._listed.get(index) != num:
                heapq.heappop(self._open)
                continue
            free_at = replica.prefilled_at - self._backlog_s
            if replica.is_dead or free_at > now or not replica.has_room(queue.first()):
                heapq.heappop(self._open)
                del self._listed[index]
                if free_at > now and not replica.is_dead:
                    wake(replica, free_at)
                continue
            replica.add(queue.pop(), now)
            self._listed[index] = replica.num_running
            heapq.heapreplace(self._open, (replica.num_running, index, replica))
            changed[index] = replica
        return list(changed.values())

    def plan_migration(self, replicas: Listed[Replica], mean_length: float) -> list[tuple[Replica, int]]:
        return plan_migration(replicas, mean_length)


def plan_migration(replicas: Listed[Replica], mean_length: float) -> list[tuple[Replica, int]]:
    """Sequences leave only if their own prefill and slower company elsewhere cost less than the crowd here.

    All are taken to have the same remaining length, and to meet equals where they go.
    """
    if len(replicas) < 2:
        return []
    share = sum(r.num_running for r in replicas) / len(replicas)
    plan = []
    for replica in replicas:
        num, running = int(replica.num_running - share - 1), replica.num_running
        if num < 2:
            continue
        context, rest, cost = replica.context / running, _REMAINING * mean_length, replica.cost
        stay_s = rest * cost.iteration_s(running, replica.context)
        while num >= 2 and num * context * cost.prefill_s + rest * cost.iteration_s(num, num * context) > stay_s:
            num //= 2
        if num >= max(2, _LEAST_EXCESS * share):
            plan.append((replica, num))
    return plan
