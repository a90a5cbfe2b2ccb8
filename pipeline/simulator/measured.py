"""Lengths as a run had them, from its journal: those of responses one by one, those of verdicts by their mean.

A judge's segments are no events, so of its verdicts only the number of tokens of each task is known.
"""

from collections.abc import Iterator
from pathlib import Path

from pipeline.core.events import Event, Finish, SegmentClosed, TaskEnded
from pipeline.journal import read_journal
from pipeline.simulator.lengths import VERDICT_4K, Lengths, lognormal_of_mean, measured_lengths


def response_lengths(folder: Path, longest: int) -> Lengths:
    """Of each finished response of the run in `folder`. Raises ValueError if there is none."""
    tokens: dict[str, dict[int, int]] = {}
    finished: set[str] = set()
    for event in _events(folder):
        if isinstance(event, SegmentClosed):
            for segment in event.segments:
                tokens.setdefault(segment.id, {})[segment.idx] = segment.num_tokens
                if segment.finish in (Finish.STOP, Finish.LENGTH):
                    finished.add(segment.id)
    if not finished:
        raise ValueError(f"{folder}: its journal has no finished response")
    return measured_lengths([sum(tokens[id].values()) for id in sorted(finished)], longest)


def verdict_lengths(folder: Path, longest: int) -> Lengths:
    """As spread as is assumed of verdicts, with the mean of those of the run. Raises ValueError if there is none."""
    results = [event.result for event in _events(folder) if isinstance(event, TaskEnded) and event.ok]
    num = sum(result.get("genrm/num_verdicts", 0.0) for result in results)
    if not num:
        raise ValueError(f"{folder}: its journal has no verdict")
    (_, _, sigma), *_ = VERDICT_4K
    return lognormal_of_mean(sum(result.get("genrm/num_tokens", 0.0) for result in results) / num, sigma, longest)


def _events(folder: Path) -> Iterator[Event]:
    for path in sorted(folder.glob("journal/attempt_*.jsonl")):
        for _, event in read_journal(path):
            yield event
