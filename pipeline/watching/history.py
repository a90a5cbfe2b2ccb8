"""timeline.jsonl: what happened to slots, loads and steps, in the form that the report reads.

Lines are those of a `Book`; times are seconds of the controller's clock, `ms` from the line's own `at`:

    slots   names {number: "node:slot"} of new ones, changes [[ms, number, code of pipeline.watching.slots], ...]
    load    rollout and reward: [running, waiting, tokens per second]
    step    what ran: spans [[stage, begin ms, end ms], ...]; lengths {role: {bin: number}}, bins as `length_bin` has it

What is sampled is sampled more seldom as the run gets older: a run of a day has five times the lines of one of an
hour. Steps have one line each.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from pipeline.core.events import INFERENCE, Role
from pipeline.core.reports import Report, SequencesEnded
from pipeline.core.sequences import RUNNING, WAITING
from pipeline.watching.ports import WatchedCore
from pipeline.watching.rates import Rates
from pipeline.watching.slots import Slots

Line = tuple[str, float, dict[str, Any]]
"""Kind, when, and what is in it."""

_LOOK_S, _LOOK_SHARE = 0.1, 1 / 10_000
_LOAD_S, _LOAD_SHARE = 0.5, 1 / 2000
"""The least time between two samples, and the least share of the run's age: a page as wide as a screen shows no more of
the whole of it."""
BINS_PER_OCTAVE = 4


def length_bin(num_tokens: float) -> int:
    """Bin b holds 2^(b/4) tokens to less than 2^((b+1)/4)."""
    return int(BINS_PER_OCTAVE * math.log2(max(1.0, num_tokens)))


class History:
    """`age_s`: how old the run was when this attempt began, at `now`."""

    def __init__(self, core: WatchedCore, now: float, age_s: float = 0.0) -> None:
        self._core, self._born_s = core, now - age_s
        self.slots, self.rates = Slots(core), Rates()
        self._codes: list[str] = []
        self._names: dict[int, str] = {}
        self._changes: list[tuple[float, int, str]] = []
        self._look_at = self._load_at = now
        self._lengths: dict[int, dict[Role, Counter[int]]] = {}

    def look(self, now: float) -> Iterator[Line]:
        """Call often; what is due is looked at, and what is to be written comes out."""
        age_s = now - self._born_s
        if now < self._look_at:
            return
        self._look_at = now + max(_LOOK_S, _LOOK_SHARE * age_s)
        self.slots.look()
        for number, slot in enumerate(self.slots.all):
            if number == len(self._codes):
                self._codes.append("")
                self._names[number] = f"{slot.node}:{slot.number}"
            if slot.doing.code != self._codes[number]:
                self._codes[number] = slot.doing.code
                self._changes.append((now, number, slot.doing.code))
        if now >= self._load_at:
            self._load_at = now + max(_LOAD_S, _LOAD_SHARE * age_s)
            self.rates.look(now)
            yield from self.rest()
            yield "load", now, {role.value: self._load(role) for role in INFERENCE}

    def rest(self) -> Iterator[Line]:
        """The changes of slots that are not written yet."""
        if self._changes:
            names, changes, began = self._names, self._changes, self._changes[0][0]
            self._names, self._changes = {}, []
            told = [[_ms(at - began), number, code] for at, number, code in changes]
            yield "slots", began, {"names": {str(n): name for n, name in names.items()}, "changes": told}

    def take(self, reports: Iterable[Report]) -> None:
        """Lengths of what has ended."""
        for report in reports:
            if isinstance(report, SequencesEnded) and report.lengths:
                lengths = self._lengths.setdefault(report.step + 1, {})
                lengths.setdefault(report.role, Counter()).update(map(length_bin, report.lengths))

    def record(self, number: int, now: float) -> Iterator[Line]:
        """The step is recorded."""
        lengths = self._lengths.pop(number, {})
        step = self._core.steps.get(number)
        if step is None:
            return
        spans = [[stage, _ms(begin - now), _ms(end - now)] for stage, begin, end in step.spans(now)]
        told = {role.value: {str(b): n for b, n in sorted(found.items())} for role, found in lengths.items()}
        yield "step", now, {"step": number, "spans": spans, "lengths": told}

    def _load(self, role: Role) -> list[float]:
        sequences, workers = self._core.sequences, self._core.fleet.workers
        rates = [rate for name, rate in self.rates.of.items() if name in workers and workers[name].role is role]
        return [sequences.num_at(RUNNING[role]), sequences.num_at(WAITING[role]), round(sum(rates), 1)]


def _ms(seconds: float) -> int:
    return round(1e3 * seconds)
