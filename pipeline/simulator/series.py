"""What plots of a simulated run show, as numbers: rates, GPUs and utilisation over time.

All rates are in sequences per second: tokens by the mean length of the role. So the curves of the roles can be held
against each other, and the average of each is the rate of the whole run.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.events import INFERENCE, Role
from pipeline.report.spent import covered
from pipeline.simulator.cluster import Stay, Work
from pipeline.simulator.lengths import Array
from pipeline.simulator.result import NUM_SKIPPED, Result, window
from pipeline.simulator.setup import Setup

ROLES = (*INFERENCE, Role.TRAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Who has how many GPUs, from one change to the next. States as in `Stay`; those with none are left out."""

    start_s: float
    end_s: float
    gpus: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Some steps of a run. Seconds count from the first of them."""

    edges_s: Array  # [num_bins + 1]
    rates: dict[Role, Array]  # [num_bins], sequences per second
    stretches: list[Stretch]
    shifts_s: list[float]
    """When blocks set out for another role; each time once."""
    published_s: list[float]
    """When a version was, from the start of the first step to the end of the last."""


def timeline(setup: Setup, result: Result, *, num_steps: int = 4, num_bins: int = 240) -> Timeline:
    """The first `num_steps` of those that are measured. The run must be traced."""
    ends = _published(result)
    first, last = window(len(ends), NUM_SKIPPED)
    last = min(last, first + num_steps)
    start, end = ends[first], ends[last]
    edges = np.linspace(start, end, num_bins + 1)
    shifts = sorted({shift.at_s for shift in result.usage.shifts if start <= shift.at_s < end})
    return Timeline(
        edges_s=edges - start,
        rates=_rates(setup, result, edges),
        stretches=stretches(result.usage.stays(ends[-1]), setup.block, start, end),
        shifts_s=[at - start for at in shifts],
        published_s=[at - start for at in ends[first : last + 1]],
    )


def utilisation(setup: Setup, result: Result, *, bins_per_step: int = 100) -> Array:
    """[num_bins] of the steps that are measured: throughput per GPU, where 1 is what every GPU gives at its most
    efficient, whatever its role. Its mean is sequences per second over `work_bound`; young responses, which are
    cheap to go on with, can bring it above 1 for a while. The run must be traced."""
    ends = _published(result)
    first, last = window(len(ends), NUM_SKIPPED)
    rates = _rates(setup, result, np.linspace(ends[first], ends[last], bins_per_step * (last - first) + 1))
    total: Array = sum((rates[role] * result.least_gpu_s[role] for role in ROLES), np.zeros(1))
    return total / setup.num_gpus


def share_of_time(values: Array, levels: Sequence[float] | Array) -> Array:
    """[num_levels]: how much of the time, in equal bins, `values` are at or below each level."""
    return np.searchsorted(np.sort(values), np.asarray(levels), side="right") / len(values)


def worked(trace: Iterable[Work], role: Role, edges: Array) -> Array:
    """[num_edges - 1]: the amount of work of the role between edges, each stretch even in itself."""
    spans = [(work.start_s, work.end_s, work.amount) for work in trace if work.role is role]
    if not spans:
        return np.zeros(len(edges) - 1)
    start, end, amount = np.asarray(spans).T
    return covered(start, end, amount / np.maximum(end - start, 1e-9), edges)


def stretches(stays: Iterable[Stay], block_gpus: int, start_s: float, end_s: float) -> list[Stretch]:
    """From `start_s` to `end_s`, in seconds from `start_s`."""
    shown = [stay for stay in stays if stay.end_s > start_s and stay.start_s < end_s]
    times = sorted({start_s, end_s, *(min(end_s, max(start_s, t)) for s in shown for t in (s.start_s, s.end_s))})
    found: list[Stretch] = []
    for left, right in itertools.pairwise(times):
        gpus: dict[str, int] = {}
        for stay in shown:
            if stay.start_s <= left and stay.end_s >= right:
                gpus[stay.state] = gpus.get(stay.state, 0) + block_gpus
        if found and found[-1].gpus == gpus:
            left = found.pop().start_s + start_s
        found.append(Stretch(start_s=left - start_s, end_s=right - start_s, gpus=gpus))
    return found


def _rates(setup: Setup, result: Result, edges: Array) -> dict[Role, Array]:
    each = {role: setup.workload.lengths(role).mean if role in INFERENCE else 1.0 for role in ROLES}
    trace = result.usage.trace
    return {role: worked(trace, role, edges) / (np.diff(edges) * each[role]) for role in ROLES}


def _published(result: Result) -> list[float]:
    return [step.trained_s for step in result.steps if step.trained_s is not None]
