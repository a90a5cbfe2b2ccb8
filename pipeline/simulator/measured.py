"""Lengths as a run had them, from its journal."""

from pathlib import Path

from pipeline.core.events import Finish, Role, SegmentClosed
from pipeline.journal import read_journal
from pipeline.simulator.lengths import Lengths, measured_lengths


def lengths_of_run(folder: Path, role: Role, longest: int) -> Lengths:
    """Tokens of each finished response, or verdict, of the run in `folder`. Raises ValueError if there is none."""
    tokens: dict[str, dict[int, int]] = {}
    finished: set[str] = set()
    for path in sorted(folder.glob("journal/attempt_*.jsonl")):
        for _, event in read_journal(path):
            if isinstance(event, SegmentClosed) and event.task.startswith(f"{role.value}-"):
                for segment in event.segments:
                    tokens.setdefault(segment.id, {})[segment.idx] = segment.num_tokens
                    if segment.finish in (Finish.STOP, Finish.LENGTH):
                        finished.add(segment.id)
    if not finished:
        raise ValueError(f"{folder}: its journal has no finished sequence of {role.value}")
    return measured_lengths([sum(tokens[id].values()) for id in sorted(finished)], longest)
