"""Where the time went: slot-seconds by what was done, between any moments. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pipeline.report.timeline import Row, Timeline
from pipeline.watching.slots import DOINGS, NOBODY

Array = npt.NDArray[np.float64]
IDLE_CODES = ("r", "j", "t", NOBODY.code)
"""A slot computes nothing, though nobody changes or starts anything there."""


def covered(starts: Array, ends: Array, rates: Array, edges: Array) -> Array:
    """[num_edges - 1]: how much of all stretches, each of which brings `rates` per second, lies between two edges."""
    return np.diff(_ramp(starts, rates, edges) - _ramp(ends, rates, edges))


def slot_seconds(rows: Iterable[Row], edges: Sequence[float]) -> dict[str, Array]:
    """By code of what was done: seconds of all slots between each two edges, which ascend. All codes, in the order of
    DOINGS; the time before a slot was known is nobody's."""
    at = np.asarray(edges, dtype=np.float64)
    spans: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    num_rows = 0
    for row in rows:
        num_rows += 1
        for start, end, code in row.spans():
            spans[code].append((start, end))
    found: dict[str, Array] = {}
    for code in DOINGS:
        starts, ends = np.asarray(spans[code], dtype=np.float64).reshape(-1, 2).T
        found[code] = covered(starts, ends, np.ones(len(starts)), at)
    known = sum((found[code] for code in DOINGS if code != NOBODY.code), np.zeros(len(at) - 1))
    found[NOBODY.code] = np.maximum(0.0, num_rows * np.diff(at) - known)
    return found


def shares(timeline: Timeline, skip: int = 1) -> dict[str, float]:
    """By code: share of the slots' time, without the first `skip` recorded steps, which are starts; {} where no time
    is left."""
    ordered = sorted(step.recorded for number, step in timeline.steps.items() if number > 0)
    if len(ordered) <= skip or not timeline.rows:
        return {}
    spent = slot_seconds(timeline.rows, [ordered[skip - 1] if skip else timeline.began, ordered[-1]])
    whole = float(sum(seconds[0] for seconds in spent.values()))
    return {code: float(seconds[0]) / whole for code, seconds in spent.items()} if whole else {}


def tail_share(timeline: Timeline, part: float = 0.1) -> float | None:
    """The share of the time in which the rollout of some step was down to less than `part` of the most sequences that
    ran at once, and nothing else waited to be rolled out: its longest responses were waited for."""
    loads = timeline.loads[next(iter(timeline.loads))]
    if len(loads.running) < 2 or max(loads.running) <= 0:
        return None
    limit = part * max(loads.running)
    steps = [step for number, step in timeline.steps.items() if number > 0]
    rolled = [(begin, end) for step in steps for stage, begin, end in step.spans if stage == "rollout"]
    if not rolled:
        return None
    tail = whole = 0.0
    for i, (start, end) in enumerate(zip(timeline.load_times, timeline.load_times[1:], strict=False)):
        whole += end - start
        is_rolling = any(begin < end and start < until for begin, until in rolled)
        if is_rolling and not loads.waiting[i] and 0 < loads.running[i] < limit:
            tail += end - start
    return tail / whole if whole else None


def _ramp(at: Array, rate: Array, edges: Array) -> Array:
    """[num_edges]: the sum of rate x (edge - at) over all that are before the edge."""
    order = np.argsort(at, kind="stable")
    at, rate = at[order], rate[order]
    rates = np.concatenate([[0.0], np.cumsum(rate)])
    moments = np.concatenate([[0.0], np.cumsum(rate * at)])
    num = np.searchsorted(at, edges, side="right")
    ramp: Array = rates[num] * edges - moments[num]
    return ramp
