"""How fast an engine is, added up between two reports.

A step may compute prompts and give tokens in one pass, so its seconds have to be told apart. What it gave a token to,
`batch` sequences, is one iteration; it is taken to have cost what steps that computed nothing else took lately for a
batch like it (1, 2-3, 4-7, ..), and the rest of the step is prefill. Until there was such a step, the seconds are
shared by tokens. The sum is always what was measured.
"""

from dataclasses import asdict, dataclass

from stages.engines.base import EngineCounts, EngineReport, Work

_NEWEST = 0.2
"""The share of the newest step in what steps take lately: one that was held up counts as a fifth."""


@dataclass(slots=True)
class _Sums:
    num_iterations: int = 0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    num_started: int = 0
    started_tokens: int = 0
    started_prefill_tokens: int = 0


class Speed:
    def __init__(self) -> None:
        self._lately: dict[int, float] = {}  # seconds of a step that only decodes, by the size of its batch
        self._begin()

    def step(self, seconds: float, work: Work) -> None:
        sums = self._sums
        decode_s = self._decode_s(seconds, work)
        sums.decode_s += decode_s
        sums.prefill_s += seconds - decode_s
        sums.prefill_tokens += work.prefill_tokens
        if work.batch:
            sums.num_iterations += 1
            self._batch += work.batch
            self._context += work.context

    def start(self, num_tokens: int, num_cached: int) -> None:
        """A sequence of so many tokens, none of them made in this role, got its first one."""
        self._sums.num_started += 1
        self._sums.started_tokens += num_tokens
        self._sums.started_prefill_tokens += num_tokens - num_cached

    def take(self, counts: EngineCounts) -> EngineReport:
        """All since the last call."""
        num = self._sums.num_iterations
        report = EngineReport(
            running=counts.running,
            waiting=counts.waiting,
            num_tokens=counts.num_tokens,
            kv_tokens=counts.held_tokens,
            batch=self._batch / num if num else 0.0,
            context=self._context / num if num else 0.0,
            **asdict(self._sums),
        )
        self._begin()
        return report

    def _begin(self) -> None:
        self._sums = _Sums()
        self._batch = self._context = 0

    def _decode_s(self, seconds: float, work: Work) -> float:
        if not work.batch:
            return 0.0
        size = work.batch.bit_length()
        lately = self._lately.get(size)
        if not work.prefill_tokens:
            self._lately[size] = seconds if lately is None else lately + _NEWEST * (seconds - lately)
            return seconds
        if lately is None:
            return seconds * work.batch / (work.batch + work.prefill_tokens)
        return min(seconds, lately)
