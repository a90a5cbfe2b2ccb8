"""A judge that gives no verdicts: noticed while the first step is judged, told with two of its answers. Pure.

Without scores a run trains nothing, and the first row of metrics may be an hour away.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config_reward import GenRM
from pipeline.core.events import VerdictInfo

_SHARE = 0.5
_LEAST = 8
"""Verdicts, or a whole step of fewer: two bad ones at the start say little."""
_SAMPLES = 2
_SHOWN = 240
"""Characters of an answer: its end, where a verdict would be."""
_OF_FUNCTIONS = {
    "error": "it raised an error",
    "unparsed": "it returned neither a number nor {'score': number}",
    "memory": "it allocated more than its memory_bytes",
    "timeout": "it took longer than its timeout_s",
    "crashed": "its process ended",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """`ids`: two sequences without a verdict, of different failures where there are some."""

    step: int
    num_judged: int
    types: Mapping[str, int]
    ids: tuple[str, ...]


class JudgeWatch:
    """Counts the verdicts of the first step that an attempt judges."""

    def __init__(self, sequences_per_step: int) -> None:
        self._least = min(_LEAST, sequences_per_step)
        self._step: int | None = None
        self._failures: dict[str, str] = {}
        self._judged: set[str] = set()
        self._is_told = False

    def take(self, verdicts: Iterable[VerdictInfo]) -> Failing | None:
        """Once: more than half of the verdicts so far are failures."""
        if self._is_told:
            return None
        for verdict in verdicts:
            step = int(verdict.id.partition("-")[0])
            self._step = step if self._step is None else self._step
            if step == self._step:
                self._judged.add(verdict.id)
                if verdict.failure:
                    self._failures[verdict.id] = verdict.failure
        if len(self._judged) < self._least or len(self._failures) <= _SHARE * len(self._judged):
            return None
        self._is_told = True
        assert self._step is not None
        types = Counter(self._failures.values())
        of_each = {failure: id for id, failure in reversed(self._failures.items())}
        ids = [*of_each.values(), *self._failures]
        return Failing(
            step=self._step,
            num_judged=len(self._judged),
            types=types,
            ids=tuple(dict.fromkeys(ids))[:_SAMPLES],
        )


def why(failure: str, genrm: GenRM | None) -> str:
    """What is wrong with an answer that has this failure."""
    name, is_function, kind = failure.rpartition(":")
    if is_function:
        return f"the function {name}: {_OF_FUNCTIONS.get(kind, kind)}"
    assert genrm is not None
    verdict = genrm.verdict
    wanted = f"one of {', '.join(verdict.choices)}" if verdict.kind == "choice" else "a number"
    return {
        "unparsed": f"{wanted} must follow {verdict.marker!r}, and nothing else (reward.genrm.verdict)",
        "out_of_range": f"the number is not within {verdict.minimum:g} to {verdict.maximum:g} (reward.genrm.verdict)",
        "truncated": f"it was cut off before a verdict, at reward.genrm.max_tokens {genrm.max_tokens}",
        "empty": "the judge said nothing",
        "timeout": f"it was not there within reward.genrm.timeout_s {genrm.timeout_s:g}",
        "refused": "the judge does not take the prompt: it is longer than its context, or its server says no",
        "unreachable": "the judge's server does not answer (reward.genrm.endpoint)",
    }.get(failure, failure)


def told(failing: Failing, answers: Mapping[str, tuple[str, str]], genrm: GenRM | None) -> dict[str, Any]:
    """As status.json has it. `answers`: (failure, what was answered) by id, of those that could be read."""
    return {
        "step": failing.step,
        "num_judged": failing.num_judged,
        "types": dict(failing.types),
        "samples": [
            {"id": id, "failure": failure, "why": why(failure, genrm), "said": said[-_SHOWN:]}
            for id, (failure, said) in answers.items()
        ],
    }
