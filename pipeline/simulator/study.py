"""A question to the simulator with its answer: forecasts for some numbers of GPUs, what they were made from, and what
follows from them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import Config
from pipeline.simulator.forecast import Forecast
from pipeline.simulator.lengths import Lengths
from pipeline.simulator.result import NUM_SKIPPED, NUM_STEPS, window
from pipeline.simulator.setup import Setup

IDLE_STATES = ("rollout", "reward", "train", "shift")
"""Of `Forecast.idle_by`, as they are shown."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Setups and rows by the number of GPUs, in the order in which they were asked for."""

    title: str
    setups: Mapping[int, Setup]
    rows: Mapping[int, Sequence[Forecast]]
    inputs: Sequence[tuple[str, str]]
    """What was simulated: names and texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """From the best mode of a number of GPUs to that of the next larger one."""

    fewer: int
    more: int
    before: Forecast
    after: Forecast

    @property
    def gain(self) -> float:
        return self.after.sequences_per_s / self.before.sequences_per_s

    def __str__(self) -> str:
        return (
            f"{self.fewer} to {self.more} GPUs, {self.more / self.fewer:.3g} times as many: {self.gain:.2f} times the "
            f"sequences/s, a step of {seconds_text(self.after.step_s)} instead of {seconds_text(self.before.step_s)} s "
            f"({self.before.schedule} to {self.after.schedule})"
        )


def best(rows: Sequence[Forecast]) -> Forecast | None:
    return max(rows, key=lambda row: row.sequences_per_s, default=None)


def growth(rows: Mapping[int, Sequence[Forecast]]) -> list[Growth]:
    """Ascending; numbers of GPUs that no mode fits on are left out."""
    found = [(n, row) for n in sorted(rows) if (row := best(rows[n])) is not None]
    return [
        Growth(fewer=fewer, more=more, before=before, after=after)
        for (fewer, before), (more, after) in itertools.pairwise(found)
    ]


def speed_text(sequences_per_s: float) -> str:
    """Slow ones too, of which two places after the point show nothing."""
    return f"{sequences_per_s:.2f}" if sequences_per_s >= 0.1 else f"{sequences_per_s:.2g}"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 1000 else f"{seconds:.3g}"


def why_none(setup: Setup) -> str:
    """Of a number of GPUs on which none of the modes that were asked for has a split."""
    if setup.train.fits(setup.num_gpus):
        return "they are too few for a split, or a scenario ended it"
    return "what training needs exceeds their memory"


def idle_text(row: Forecast) -> str:
    """Where the idle time is, most first."""
    parts = sorted(row.idle_by.items(), key=lambda part: -part[1])
    named = [f"{_place(state)} {share:.0%}" for state, share in parts if share >= 0.005]
    return f"{row.idle:.0%} of GPU time" + (f": {', '.join(named)}" if named else "")


def inputs(config: Config, setup: Setup, *, gpu: str, lengths: str, num_seeds: int) -> list[tuple[str, str]]:
    """`lengths`: as for `setup_of`."""
    work, placed, is_run = setup.workload, config.placement.roles, bool(lengths) and Path(lengths).is_dir()
    first, last = window(NUM_STEPS, NUM_SKIPPED)
    return [
        ("policy", _model(config.model.policy.path, setup.policy.parameters, placed.rollout.slots)),
        (
            "judge",
            _model(config.judge_model.path if config.judge_model else "", setup.judge.parameters, placed.reward.slots),
        ),
        ("GPUs", f"{gpu}, {setup.gpu.memory / 1e9:.0f} GB each, {setup.gpus_per_node} in a node"),
        ("a step", f"{work.num_prompts} prompts with {work.num_each} responses each: {work.num_sequences} sequences"),
        ("responses", f"{_tokens(work.rollout)}; {f'from {lengths}' if lengths else 'assumed'}"),
        ("verdicts", f"{_tokens(work.verdict)}; {f'mean from {lengths}' if is_run else 'assumed'}"),
        ("staleness", f"{config.algorithm.staleness}; 0 where a mode allows no other"),
        ("admission", config.placement.admission),
        ("runs", f"seeds 0 to {num_seeds - 1}" if num_seeds > 1 else "seed 0"),
        ("steps", f"{NUM_STEPS} of each run, of which the last {last - first} count"),
    ]


def _place(state: str) -> str:
    return "in shifts" if state == "shift" else f"{state} GPUs"


def _model(path: str, parameters: float, num_gpus: int) -> str:
    name = path if Path(path).is_dir() else Path(path).name  # a known model has no folder
    gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    return f"{name}: {parameters / 1e9:.3g} billion parameters, {gpus} a replica"


def _tokens(lengths: Lengths) -> str:
    half, most, nearly = (lengths.percentile(q) for q in (50, 90, 99))
    return (
        f"{lengths.mean:,.0f} tokens on average, half below {half:,.0f}, 90 % below {most:,.0f}, 99 % below "
        f"{nearly:,.0f}, at most {lengths.longest:,}"
    )
