"""From the judge's generated text to a score, or to the type of its failure. Pure.

The verdict is what follows the last marker after the end of the reasoning; nothing before that can give a score. What
is not exactly a verdict is a failure with a type, never a score of 0.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from pipeline.config_reward import Verdict
from pipeline.core.errors import ConfigError


class FailureType(StrEnum):
    """`refused`: the judge cannot take its prompt, which is longer than its context, or a server says no. Of a server
    alone: `unreachable`. Of a reward function alone: `error` (it raised), `memory`, `crashed` (its process did)."""

    TIMEOUT = "timeout"
    EMPTY = "empty"
    UNPARSED = "unparsed"
    OUT_OF_RANGE = "out_of_range"
    TRUNCATED = "truncated"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    ERROR = "error"
    MEMORY = "memory"
    CRASHED = "crashed"


TRANSIENT = frozenset({FailureType.TIMEOUT, FailureType.EMPTY, FailureType.UNPARSED, FailureType.TRUNCATED})
"""Another try, with another seed, may succeed."""


@dataclass(frozen=True, slots=True)
class Score:
    value: float


@dataclass(frozen=True, slots=True)
class Failure:
    type: FailureType


@dataclass(frozen=True, slots=True)
class Found:
    """A verdict, and where in the text it stands."""

    value: float
    begin: int
    end: int


_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_CLOSING = r"""[.,;:!?)\]}"'*_]*"""
"""May stand between a verdict and the blank or end that must follow: `10abc`, `10/20`, `1,000`, `yes/no` are none."""


def parse(text: str, finish: str, verdict: Verdict) -> Score | Failure:
    """The score in `text`; see `find`."""
    found = find(text, finish, verdict)
    return found if isinstance(found, Failure) else Score(found.value)


def soften(found: Found, pieces: Iterable[tuple[int, int, float]], verdict: Verdict) -> Score | Failure:
    """The mean of the two choices' scores, by the probability of the one that was said. `pieces`: (begin, end, logprob)
    of tokens in the text, from the last one backwards. UNPARSED where the verdict's tokens are not among them."""
    logprob, reached = 0.0, found.end
    for begin, end, of_piece in pieces:
        if end <= found.begin:
            break
        if begin < found.end:
            logprob, reached = logprob + of_piece, min(reached, begin)
    if reached > found.begin:
        return Failure(FailureType.UNPARSED)
    said = math.exp(min(0.0, logprob))
    one, two = verdict.choices.values()
    other = two if found.value == one else one
    return Score(said * found.value + (1 - said) * other)


def find(text: str, finish: str, verdict: Verdict) -> Found | Failure:
    """The verdict in `text`, which the judge generated; `finish` (stop, length) says how it ended.

    A number may be signed, decimal or scientific. A text that was cut off gives a score only if a blank follows the
    verdict: `Score: 1` may have been going to be 10.
    """
    is_cut = finish != "stop"
    nothing = Failure(FailureType.TRUNCATED if is_cut else FailureType.EMPTY)
    if not text.strip():
        return nothing
    length = len(text)
    if verdict.reasoning_end:
        _, reasoning_end, text = text.rpartition(verdict.reasoning_end)
        if not reasoning_end:
            return Failure(FailureType.TRUNCATED)
        if not text.strip():
            return nothing
    _, marker, after = text.rpartition(verdict.marker)
    end = r"\s" if is_cut else r"(?:\s|$)"
    match = re.match(rf"\s*({_pattern(verdict)})(?={_CLOSING}{end})", after) if marker else None
    if match is None:
        return Failure(FailureType.TRUNCATED if is_cut else FailureType.UNPARSED)
    before = length - len(after)
    if verdict.kind == "choice":
        return Found(verdict.choices[match[1]], before + match.start(1), before + match.end(1))
    value = float(match[1])
    if not verdict.minimum <= value <= verdict.maximum:
        return Failure(FailureType.OUT_OF_RANGE)
    return Found(value, before + match.start(1), before + match.end(1))


def middle(verdict: Verdict) -> float:
    """A score above it says that the response is right."""
    values = verdict.choices.values() if verdict.kind == "choice" else (verdict.minimum, verdict.maximum)
    return (min(values) + max(values)) / 2


def regex(verdict: Verdict) -> str:
    """What a structured verdict must match: free text, which must end with a verdict before the judge may stop."""
    if verdict.kind == "choice":
        form = "(" + "|".join(map(_escape, verdict.choices)) + ")"
    else:
        form = r"-?[0-9]{1,9}(\.[0-9]{1,6})?" if verdict.minimum < 0 else r"[0-9]{1,9}(\.[0-9]{1,6})?"
    reasoning = rf"[\s\S]*{_escape(verdict.reasoning_end)}" if verdict.reasoning_end else ""
    return rf"{reasoning}[\s\S]*{_escape(verdict.marker)} {form}"


def check_verdict(verdict: Verdict) -> None:
    """Raise ConfigError for a verdict that no generated text could satisfy, or that says nothing."""
    where = "reward.genrm.verdict"
    if not verdict.marker.strip():
        raise ConfigError(f"{where}.marker {verdict.marker!r}: valid is a text that is not blank")
    if verdict.kind == "number":
        return
    if len(set(verdict.choices.values())) < 2:
        raise ConfigError(f"{where}.choices {verdict.choices}: valid are words with at least two different scores")
    for word in verdict.choices:
        if not word or word != word.strip():
            raise ConfigError(f"{where}.choices {word!r}: valid is a word without blanks around it")


def _pattern(verdict: Verdict) -> str:
    if verdict.kind == "number":
        return _NUMBER
    return "|".join(re.escape(word) for word in sorted(verdict.choices, key=len, reverse=True))


def _escape(text: str) -> str:
    return re.sub(r"([\\^$.|?*+()\[\]{}])", r"\\\1", text)
