"""How many tokens each engine makes per second, from what it counts."""

from dataclasses import dataclass

from pipeline.wire_counts import Counts

_SILENT_LOOKS = 2
"""An engine says nothing while nothing changes. It may also be within one long prefill."""


@dataclass(slots=True)
class _Counted:
    """Tokens in all, as an engine said at `at_s`; and as it had said at the last look."""

    at_s: float
    num_tokens: int
    before_s: float
    before: int
    num_silent: int = 0


class Rates:
    """`of`: tokens per second by worker, between the last two looks."""

    def __init__(self) -> None:
        self._counted: dict[str, _Counted] = {}
        self.of: dict[str, float] = {}

    def heard(self, counts: Counts, now: float) -> None:
        known = self._counted.get(counts.worker)
        if known is None or counts.num_tokens < known.num_tokens:  # another process, which counts anew
            self._counted[counts.worker] = _Counted(now, counts.num_tokens, now, counts.num_tokens)
        else:
            known.at_s, known.num_tokens = now, counts.num_tokens

    def ended(self, worker: str) -> None:
        self._counted.pop(worker, None)
        self.of.pop(worker, None)

    def look(self, now: float) -> None:
        for name, counted in self._counted.items():
            if counted.at_s > counted.before_s:
                self.of[name] = (counted.num_tokens - counted.before) / (counted.at_s - counted.before_s)
                counted.before_s, counted.before, counted.num_silent = counted.at_s, counted.num_tokens, 0
            else:
                counted.num_silent += 1
                if counted.num_silent >= _SILENT_LOOKS:
                    self.of[name], counted.before_s = 0.0, now
