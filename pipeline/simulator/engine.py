"""One replica's engine, event by event: continuous batching, a bounded KV cache, prefill before decoding.

Each running sequence gets a token per iteration, so one number, `stepped`, is the progress of all: a sequence ends when
it reaches the value noted at its start. Between two events the batch stands still and time follows from
`IterationCost` in closed form.

Prefill goes first and stops decoding meanwhile (chunked prefill is not modelled). A full cache preempts those that came
last, until there is room for some iterations; their tokens stay theirs.
"""

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field

from pipeline.core.events import Role
from pipeline.core.iteration import IterationCost

_ITERATIONS_FREED = 128
"""A preemption makes room for so many iterations, so that the next one is not at once."""
_NEARLY = 1e-6  # tokens: rounding of the closed form and its inverse


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One response and its verdict, with the lengths that they will have."""

    id: int
    step: int
    group: int
    num_response: float
    num_verdict: float
    generated: float = 0.0
    """By the role that serves it, up to its last abort."""
    finish_at: float = 0.0
    place: int = 0
    """Its turn on the replica: the last to come is preempted first."""


@dataclass(slots=True, eq=False)
class Replica:
    index: int
    role: Role
    block: int
    num_gpus: int
    cost: IterationCost
    kv_tokens: float
    max_num_seqs: int
    prefix_tokens: int
    """Of each request: shared by its group if `shares_prefix`."""
    shares_prefix: bool
    at: float
    """The time up to which everything below is true."""
    prefilled_at: float = 0.0
    """When the prefill that was taken is done."""
    stepped: float = 0.0
    context: float = 0.0
    """Tokens that an iteration reads."""
    doubled: float = 0.0
    """Of these, prefixes that the cache holds once and several sequences read."""
    alarm: int = 0
    """Number of the newest change: an event of an older one is void."""
    is_dead: bool = False
    decode_s: float = 0.0
    prefill_s: float = 0.0
    num_tokens: float = 0.0
    num_preempted: int = 0
    num_prefilled: float = 0.0
    read_tokens: float = 0.0
    """Contexts of all iterations, in sum."""
    num_started: int = 0
    """Sequences that came without a token of this role."""
    started_tokens: float = 0.0
    """Their contexts, in sum."""
    started_prefill_tokens: float = 0.0
    noted_at: float = 0.0
    """Up to which time its work is in the trace."""
    noted_tokens: float = 0.0
    running: list[tuple[float, int, Sequence]] = field(default_factory=list)
    """A heap by when they end."""
    groups: Counter[tuple[int, int]] = field(default_factory=Counter)
    steps: Counter[int] = field(default_factory=Counter)
    _turn: int = 0

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def held(self) -> float:
        """Tokens in the cache."""
        return self.context - self.doubled

    def length(self, sequence: Sequence) -> float:
        return sequence.num_response if self.role is Role.ROLLOUT else sequence.num_verdict

    def prompt_tokens(self, sequence: Sequence) -> float:
        return self.prefix_tokens + (0.0 if self.role is Role.ROLLOUT else sequence.num_response)

    def generated(self, sequence: Sequence) -> float:
        """By now, of one that runs here."""
        return max(0.0, self.length(sequence) - (sequence.finish_at - self.stepped))

    def advance(self, now: float) -> None:
        start = max(self.at, self.prefilled_at)
        if now > start and self.running:
            num = self.cost.num_iterations(now - start, len(self.running), self.context)
            if math.isfinite(num):
                self.stepped += num
                self.read_tokens += num * (self.context + len(self.running) * num / 2)
                self.context += len(self.running) * num
                self.num_tokens += len(self.running) * num
            self.decode_s += now - start
        self.at = now

    def add(self, sequence: Sequence, now: float) -> None:
        self.advance(now)
        if not self.running:
            self.noted_at = now  # idle until then
        context = self.prompt_tokens(sequence) + sequence.generated
        key = (sequence.step, sequence.group)
        shared = self.prefix_tokens if self.shares_prefix and self.groups[key] else 0
        self._prefill(context - shared, now)
        if not sequence.generated:
            self.num_started += 1
            self.started_tokens += context
            self.started_prefill_tokens += context - shared
        self.context += context
        self.doubled += shared
        self.groups[key] += 1
        self.steps[sequence.step] += 1
        self._turn += 1
        sequence.place = self._turn
        sequence.finish_at = self.stepped + self.length(sequence) - sequence.generated
        heapq.heappush(self.running, (sequence.finish_at, sequence.id, sequence))

    def reload(self, now: float, load_s: float, recomputes: bool) -> None:
        """New weights: the engine stands still, and then perhaps computes its caches again."""
        self.advance(now)
        self.prefilled_at = max(self.prefilled_at, now) + load_s
        if recomputes and self.running:
            self._prefill(self.held, now)

    def finished(self) -> list[Sequence]:
        """Take out those that are done by now."""
        done = []
        while self.running and self.running[0][0] <= self.stepped + _NEARLY:
            sequence = heapq.heappop(self.running)[2]
            self._forget(sequence, self.length(sequence))
            sequence.generated = 0.0
            done.append(sequence)
        return done

    def preempted(self) -> list[Sequence]:
        """Take out those that the cache has no room for."""
        out: list[Sequence] = []
        if self.held < self.kv_tokens - _NEARLY * len(self.running) or len(self.running) < 2:
            return out
        latest = sorted((entry[2] for entry in self.running), key=lambda s: -s.place)
        for sequence in latest[:-1]:
            out.append(sequence)
            self._abort(sequence)
            if self.held + _ITERATIONS_FREED * (len(latest) - len(out)) <= self.kv_tokens:
                break
        self._drop(out)
        self.num_preempted += len(out)
        return out

    def abort(self, now: float, num: int | None = None) -> list[Sequence]:
        """Take out all, or the `num` with the fewest tokens: the cheapest to prefill elsewhere."""
        self.advance(now)
        out = [entry[2] for entry in self.running]
        if num is not None:
            out = sorted(out, key=lambda s: (self.generated(s), s.id))[:num]
        for sequence in out:
            self._abort(sequence)
        self._drop(out)
        return out

    def next_event(self, now: float) -> float | None:
        """When the first sequence ends or the cache is full; None if nothing runs."""
        if not self.running:
            return None
        batch = len(self.running)
        num = self.running[0][0] - self.stepped
        if batch > 1:
            num = min(num, (self.kv_tokens - self.held) / batch)
        return max(now, self.prefilled_at) + self.cost.iterations_s(max(num, 0.0), batch, self.context)

    def _prefill(self, num_tokens: float, now: float) -> None:
        seconds = num_tokens * self.cost.prefill_s
        self.prefilled_at = max(self.prefilled_at, now) + seconds
        self.prefill_s += seconds
        self.num_prefilled += num_tokens

    def _abort(self, sequence: Sequence) -> None:
        sequence.generated = self.generated(sequence)
        self._forget(sequence, sequence.generated)

    def _drop(self, out: list[Sequence]) -> None:
        gone = {sequence.id for sequence in out}
        self.running = [entry for entry in self.running if entry[1] not in gone]
        heapq.heapify(self.running)

    def _forget(self, sequence: Sequence, generated: float) -> None:
        key = (sequence.step, sequence.group)
        self.context -= self.prompt_tokens(sequence) + generated
        if self.shares_prefix and self.groups[key] > 1:
            self.doubled -= self.prefix_tokens
        self.groups[key] -= 1
        if not self.groups[key]:
            del self.groups[key]
        self.steps[sequence.step] -= 1
        if not self.steps[sequence.step]:
            del self.steps[sequence.step]
        if not self.steps:
            self.context = self.doubled = 0.0  # no rounding survives an empty engine
