"""Which replica takes which waiting sequence, and which leave a crowded one: docs/policies/scheduler.md.

A policy: it reads queue and replicas and proposes, one by one, two operations. `Dispatch`: this sequence to this
replica. `Abort`: so many sequences of this replica, those with the fewest tokens, back into the queue, from which they
are dispatched like all others. Who calls it performs them, or refuses. It reads no clock and no cache but through
`ReplicaView`, so it serves the live core and the simulator alike.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from pipeline.core.iteration import IterationCost

HEADROOM_TOKENS = 700
"""Free KV cache per running sequence before another is taken: an eighth of a mean response (assumed)."""
UNKNOWN = IterationCost(per_sequence_s=1.0)
"""Of engines of which nothing is known: all equal, and slower the more they run. So the fewest are the best."""

_MOST_OLD = 16
"""So many entries per replica may be in the ranking before the old ones are thrown out."""


class Waits(Protocol):
    """A sequence, as far as its turn depends on it."""

    @property
    def step(self) -> int: ...
    @property
    def generated(self) -> float:
        """Tokens, by the role that serves it."""

    @property
    def id(self) -> Any:
        """In order of submission."""


S = TypeVar("S", bound=Waits)
S_contra = TypeVar("S_contra", contravariant=True)


class ReplicaView(Protocol[S_contra]):
    """A replica, as it was when last heard of."""

    @property
    def index(self) -> int:
        """Decides ties."""

    @property
    def num_running(self) -> int: ...
    @property
    def max_num_seqs(self) -> float: ...
    @property
    def context(self) -> float:
        """Tokens that an iteration reads."""

    @property
    def held(self) -> float:
        """Tokens in its cache."""

    @property
    def kv_tokens(self) -> float:
        """That fit in."""

    @property
    def prefilled_at(self) -> float:
        """When the prefill that it took is done."""

    @property
    def cost(self) -> IterationCost | None:
        """None: not known."""

    def prompt_tokens(self, sequence: S_contra, /) -> float:
        """What it would read before the sequence's first token of this role."""


R = TypeVar("R", bound=ReplicaView[Any])
_Entry = tuple[float, int, int, int, R]
"""Price, sequences, index; the newer one of two that are equal is the larger."""


@dataclass(slots=True, kw_only=True)
class CountedReplica:
    """A replica of which little is known; by default only how many sequences it runs."""

    index: int
    num_running: int
    max_num_seqs: float = math.inf
    context: float = 0.0
    held: float = 0.0
    kv_tokens: float = math.inf
    prefilled_at: float = -math.inf
    cost: IterationCost | None = None

    def prompt_tokens(self, sequence: object, /) -> float:
        return 0.0


class Dispatch(NamedTuple, Generic[S, R]):
    sequence: S
    replica: R


class Abort(NamedTuple, Generic[R]):
    """`num` sequences, those with the fewest tokens: the cheapest to prefill elsewhere."""

    replica: R
    num: int


class WaitingQueue(Generic[S]):
    """The sequences that wait for one role: oldest step first, in it those with most tokens, then as submitted."""

    def __init__(self, sequences: Iterable[S] = ()) -> None:
        self.heap: list[tuple[int, float, Any, S]] = []
        self.put(sequences)

    def __len__(self) -> int:
        return len(self.heap)

    def put(self, sequences: Iterable[S]) -> None:
        for s in sequences:
            heapq.heappush(self.heap, (s.step, -s.generated, s.id, s))

    def waiting(self) -> list[S]:
        return [entry[-1] for entry in sorted(self.heap, key=lambda entry: entry[:3])]


class Scheduler(Generic[S, R]):
    """Of one role. It knows the replicas that were offered and not withdrawn; one that refused, for want of room, is
    not asked again before it is offered again."""

    def __init__(
        self,
        max_backlog_s: float = math.inf,
        rest_tokens: float = math.inf,
        assumed: IterationCost = UNKNOWN,
        headroom_tokens: float = HEADROOM_TOKENS,
    ) -> None:
        """`max_backlog_s`: of prefill that may wait at a replica. `assumed`: the cost where none is known.
        `headroom_tokens`: see HEADROOM_TOKENS."""
        self._backlog_s, self._rest_tokens, self._assumed = max_backlog_s, rest_tokens, assumed
        self._headroom_tokens = headroom_tokens
        self._changed: dict[int, R] = {}
        self._turns = itertools.count()
        self._asked_at = -math.inf
        self._open: list[_Entry[R]] = []
        self._listed: dict[int, _Entry[R]] = {}  # by index, its entry in `_open`; others are old

    def offer(self, replica: R) -> None:
        """It came up, or what it runs changed."""
        self._changed[replica.index] = replica

    def withdraw(self, replica: R) -> None:
        self._changed.pop(replica.index, None)
        self._listed.pop(replica.index, None)

    def dispatches(
        self, queue: WaitingQueue[S], now: float, ask_again: Callable[[float], None] = lambda when: None
    ) -> Iterator[Dispatch[S, R]]:
        """Take out of the queue what finds a place, one by one; each is to be performed before the next is asked for.

        The first in the queue goes to the replica with the lowest price; if that is busy with prefill, it waits for it
        (`ask_again(when)`: nothing else may happen until then), unless another costs less than the time of waiting.
        Who waits takes the place of others who do: all of the queue waits for a prefill more.
        """
        if not queue.heap:
            return
        for replica in self._changed.values():
            self._list(replica)
        self._changed.clear()
        if len(self._open) > _MOST_OLD * len(self._listed) + _MOST_OLD:
            self._open = sorted(self._listed.values())
        waiting, ranked, listed = queue.heap, self._open, self._listed
        busy: list[_Entry[R]] = []
        price_of_waiting = math.inf
        while waiting and ranked:
            entry = ranked[0]
            replica = entry[-1]
            if listed.get(entry[2]) is not entry:
                heapq.heappop(ranked)
            elif entry[0] > price_of_waiting:
                break
            elif not has_room(replica, waiting[0][-1], self._headroom_tokens):
                heapq.heappop(ranked)
                del listed[entry[2]]
            elif (wait_s := replica.prefilled_at - self._backlog_s - now) > 0:
                busy.append(heapq.heappop(ranked))
                wait_s += len(waiting) * self._prefill_s(replica, waiting[0][-1])
                price_of_waiting = min(price_of_waiting, entry[0] + wait_s / self._rest_tokens)
            else:
                yield Dispatch(heapq.heappop(waiting)[-1], replica)
                if listed.get(entry[2]) is entry:
                    self._list(replica)
        for entry in busy:
            heapq.heappush(ranked, entry)
        if busy and waiting:
            when = min(entry[-1].prefilled_at for entry in busy) - self._backlog_s
            if not now < self._asked_at <= when:
                self._asked_at = when
                ask_again(when)

    def _prefill_s(self, replica: R, sequence: S) -> float:
        return (replica.prompt_tokens(sequence) + sequence.generated) * (replica.cost or self._assumed).prefill_s

    def _list(self, replica: R) -> None:
        num, index = replica.num_running, replica.index
        dearness = price(replica.cost or self._assumed, num, replica.context, self._rest_tokens)
        self._listed[index] = entry = dearness, num, index, next(self._turns), replica
        heapq.heappush(self._open, entry)

    def migrations(self, replicas: Iterable[R], now: float) -> list[Abort[R]]:
        """Replicas came up and nothing waits any more: which sequences leave crowded ones.

        `rest_tokens`: what a running sequence has before it, on average. One by one goes from where the last one costs
        most to where another costs least, while that saves more than it costs: those who run there stand still while
        its tokens are prefilled, and it stands still until that begins.
        """
        planned = [
            _Planned(replica, replica.cost or self._assumed, self._rest_tokens, self._headroom_tokens, now)
            for replica in replicas
        ]
        crowded = [(-plan.last_price, plan.index, plan) for plan in planned if plan.num]
        free = [(plan.next_price, plan.index, plan) for plan in planned]
        heapq.heapify(crowded)
        heapq.heapify(free)
        while crowded and free:
            last_price, _, source = crowded[0]
            next_price, _, target = free[0]
            if -last_price != source.last_price or not source.num:
                heapq.heappop(crowded)
            elif target is source or target.num_given:
                heapq.heappop(free)  # who gives does not take: else the last bits of a price could go round for ever
            elif next_price != target.next_price:
                heapq.heapreplace(free, (target.next_price, target.index, target))
            elif target.takes(source.mean, source.last_price - next_price, self._backlog_s):
                target.take(source.mean)
                source.give()
                heapq.heapreplace(crowded, (-source.last_price, source.index, source))
                heapq.heapreplace(free, (target.next_price, target.index, target))
            else:
                heapq.heappop(free)  # nor would it take one that saves less
        return [Abort(plan.replica, plan.num_given) for plan in planned if plan.num_given]


class _Planned(Generic[R]):
    """A replica, as it would be after the moves that are planned."""

    def __init__(self, replica: R, cost: IterationCost, rest_tokens: float, headroom_tokens: float, now: float) -> None:
        self.replica, self.cost, self.index, self.rest_tokens = replica, cost, replica.index, rest_tokens
        self.headroom_tokens = headroom_tokens
        self.num, self.context, self.held = replica.num_running, replica.context, replica.held
        self.wait_s = max(0.0, replica.prefilled_at - now)
        self.num_given = 0
        self._price()

    @property
    def mean(self) -> float:
        """Context of one."""
        return self.context / self.num

    def takes(self, context: float, saved: float, backlog_s: float) -> bool:
        num = self.num + 1
        if num > self.replica.max_num_seqs or self.wait_s > backlog_s:
            return False
        if self.num and self.held + context + self.headroom_tokens * num > self.replica.kv_tokens:
            return False
        return saved * self.rest_tokens > num * context * self.cost.prefill_s + self.wait_s

    def take(self, context: float) -> None:
        self.num, self.context, self.held = self.num + 1, self.context + context, self.held + context
        self.wait_s += context * self.cost.prefill_s
        self._price()

    def give(self) -> None:
        context = self.mean
        self.num, self.context, self.held = self.num - 1, self.context - context, self.held - context
        self.num_given += 1
        self._price()

    def _price(self) -> None:
        self.next_price = price(self.cost, self.num, self.context, math.inf)
        self.last_price = price(self.cost, self.num - 1, self.context - self.mean, math.inf) if self.num else -math.inf


def has_room(replica: ReplicaView[S], sequence: S, headroom_tokens: float = HEADROOM_TOKENS) -> bool:
    """Whether it takes the sequence. An empty one takes even what is larger than its cache."""
    num = replica.num_running
    if not num:
        return True
    need = replica.held + replica.prompt_tokens(sequence) + sequence.generated + headroom_tokens * (num + 1)
    return num < replica.max_num_seqs and need <= replica.kv_tokens


def price(cost: IterationCost, num: int, context: float, rest_tokens: float) -> float:
    """Seconds per token that one more sequence costs a replica that runs `num` with `context` tokens.

    What it takes itself and what it takes from the others, over the `rest_tokens` of each: slower iterations, and its
    prefill, for which all stand still. It is taken to have the mean context.
    """
    more = num + 1
    if not num:
        return cost.iteration_s(1, 0.0)
    mean = context / num
    new_s = cost.iteration_s(more, context + mean) + mean * cost.prefill_s / rest_tokens
    return more * new_s - num * cost.iteration_s(num, context)
