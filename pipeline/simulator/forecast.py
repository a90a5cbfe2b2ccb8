"""What a run of a configuration would do in each mode, each at its best split and training size."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Protocol

from pipeline.config import Config
from pipeline.core.errors import ConfigError, RunError
from pipeline.core.events import INFERENCE, Role
from pipeline.core.modes import ModeName
from pipeline.core.planner.settings import PlannerSettings
from pipeline.simulator.admission import Admission
from pipeline.simulator.choice import Choice
from pipeline.simulator.cluster import LostNode, SlowGpu
from pipeline.simulator.guard import choose
from pipeline.simulator.lengths import POLICY_16K, VERDICT_4K, Lengths, lognormal_mixture, read_lengths
from pipeline.simulator.measured import response_lengths, verdict_lengths
from pipeline.simulator.modes import Schedule, shiftable_schedule, static_schedules, train_sizes
from pipeline.simulator.profiles import GPUS, ModelShape, known_model, known_models, model_shape
from pipeline.simulator.result import Result, simulate
from pipeline.simulator.setup import Beliefs, Setup, Workload

_LARGEST = 65_536
"""GPUs; more are surely a slip of the hand."""
_CLOSE = 0.92
"""Schedules this close to the best of their mode on the first seed are run on the others too."""


Scenario = LostNode | SlowGpu


class Run(Protocol):
    """One simulated run of a candidate."""

    def __call__(self, *, seed: int, is_traced: bool = False) -> Result: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What may be the best of a mode: its text in the table, and how it is run. A mode that plans with estimates draws
    their errors by the seed (`Beliefs.draw`)."""

    mode: str
    schedule: str
    staleness: int
    run: Run = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The best candidate of a mode; means over the seeds."""

    mode: str
    schedule: str
    staleness: int
    sequences_per_s: float
    step_s: float
    idle: float
    """Share of GPU-seconds in which nothing is computed."""
    idle_by: dict[str, float]
    """The same by the role that the GPUs are ready for, and in `shift`: on the way to one."""
    shifts_per_step: float
    of_tail_bound: float
    run: Run = field(compare=False, repr=False)
    """Its candidate's."""

    def as_json(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "run"}


def setup_of(config: Config, *, gpu: str, num_gpus: int, lengths: str = "") -> Setup:
    """`lengths`: a run's folder, or a file of response lengths; empty: assumed, in proportion to the limits. Raises
    ConfigError."""
    genrm, judge = config.reward.genrm, config.judge_model
    if genrm is None or judge is None:
        raise ConfigError("nothing is simulated without a judge on slots of the run: reward.genrm, without an endpoint")
    longest, longest_verdict = config.rollout.max_response_length, genrm.max_tokens
    try:
        rollout, verdict = (
            assumed_lengths(POLICY_16K, 16_384, longest),
            assumed_lengths(VERDICT_4K, 4096, longest_verdict),
        )
        if lengths and Path(lengths).is_dir():
            rollout, verdict = response_lengths(Path(lengths), longest), verdict_lengths(Path(lengths), longest_verdict)
        elif lengths:
            rollout = read_lengths(Path(lengths), longest)
        work = Workload(
            num_prompts=config.data.train_batch_size,
            num_each=config.rollout.n,
            rollout=rollout,
            verdict=verdict,
            shares_prefix=config.rollout.engine.enable_prefix_caching,
        )
        if num_gpus > _LARGEST:
            raise ValueError(f"{num_gpus} GPUs; valid: up to {_LARGEST}")
        if gpu.lower() not in GPUS:
            raise ValueError(f"no GPU {gpu!r}; valid: {', '.join(GPUS)}")
        setup = Setup(
            gpu=GPUS[gpu.lower()],
            num_gpus=num_gpus,
            policy=_shape("policy", config.model.policy.path),
            judge=_shape("genrm", judge.path),
            rollout_gpus=config.placement.roles.rollout.slots,
            reward_gpus=config.placement.roles.reward.slots,
            workload=work,
            gpus_per_node=config.cluster.slots_per_node,
            max_num_seqs=config.rollout.engine.max_num_seqs,
            recomputes_on_update=config.rollout.on_update == "recompute",
            flush_s=config.rollout.flush_s,
        )
        for role in INFERENCE:
            _check_weights(setup, role)
        return setup
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot be simulated: {error}") from error


def _check_weights(setup: Setup, role: Role) -> None:
    """Raises ValueError where a replica has no room for its model."""
    try:
        setup.role(role)
    except ValueError as error:
        raise ValueError(f"{error}; valid: more placement.roles.{role.value}.slots, or larger GPUs") from error


def forecast(
    config: Config, setup: Setup, modes: Iterable[ModeName], num_seeds: int, scenarios: Sequence[Scenario] = ()
) -> list[Forecast]:
    """In the order of `modes`; modes none of whose training states fit, those without a split, and those that a
    scenario ends are left out."""
    found = [best_of(candidates(config, setup, mode, scenarios), num_seeds) for mode in modes]
    return [row for row in found if row is not None]


def candidates(config: Config, setup: Setup, mode: ModeName, scenarios: Sequence[Scenario] = ()) -> list[Candidate]:
    """With the configuration's staleness, which is 0 for colocated, and its `placement.admission`."""
    judging, staleness = Admission(config.placement.admission), config.algorithm.staleness
    schedules = dict.fromkeys(
        s.bound_to(staleness, judging)
        for s in [*static_schedules(setup), *(shiftable_schedule(setup, size) for size in train_sizes(setup))]
        if s.mode is mode and setup.train.fits(s.train)
    )
    settings = config.placement.planner.settings()
    return [
        Candidate(
            mode=mode.value, schedule=str(s), staleness=s.staleness, run=partial(_run, setup, s, settings, scenarios)
        )
        for s in schedules
    ]


def choose_for(config: Config, setup: Setup) -> Choice:
    """What a submission of the configuration is given, and its run folder keeps (`Choice.record`)."""
    return choose(
        setup,
        settings=config.placement.planner.settings(),
        staleness=config.algorithm.staleness,
        judging=Admission(config.placement.admission),
    )


def _run(
    setup: Setup,
    schedule: Schedule,
    settings: PlannerSettings,
    scenarios: Sequence[Scenario],
    *,
    seed: int,
    is_traced: bool = False,
) -> Result:
    """What a planner believes is wrong in another way with each seed."""
    mode = schedule.policy(setup.believed(Beliefs.draw(seed)), settings)
    return simulate(setup, mode, seed=seed, scenarios=scenarios, is_traced=is_traced)


def best_of(candidates: Sequence[Candidate], num_seeds: int) -> Forecast | None:
    """None: there are no candidates, or none of them comes to its end."""
    runs = []
    for candidate in candidates:
        with suppress(RunError):  # a scenario left a role without GPUs
            runs.append((candidate, [candidate.run(seed=0)]))
    best = max((results[0].sequences_per_s for _, results in runs), default=0.0)
    for candidate, results in runs:
        if results[0].sequences_per_s >= _CLOSE * best:
            results += [candidate.run(seed=seed) for seed in range(1, num_seeds)]
    rows = [_mean(candidate, results) for candidate, results in runs if len(results) == num_seeds]
    return max(rows, key=lambda row: row.sequences_per_s, default=None)


def _mean(candidate: Candidate, results: Sequence[Result]) -> Forecast:
    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(results)

    return Forecast(
        mode=candidate.mode,
        schedule=candidate.schedule,
        staleness=candidate.staleness,
        sequences_per_s=mean(r.sequences_per_s for r in results),
        step_s=mean(r.step_s for r in results),
        idle=1 - mean(sum(r.busy.values()) for r in results),
        idle_by={state: mean(r.idle[state] for r in results) for state in results[0].idle},
        shifts_per_step=mean(r.shifts_per_step for r in results),
        of_tail_bound=mean(r.sequences_per_s / r.tail_bound for r in results),
        run=candidate.run,
    )


def assumed_lengths(parts: Sequence[tuple[float, float, float]], known: int, longest: int) -> Lengths:
    """The shape that is known at one limit, at another."""
    return lognormal_mixture([(share, median * longest / known, sigma) for share, median, sigma in parts], longest)


def _shape(which: str, path: str) -> ModelShape:
    """Of the folder's config.json; without a folder, its name may be that of a model that is known."""
    described = Path(path) / "config.json"
    if described.is_file():
        try:
            return model_shape(json.loads(described.read_text(encoding="utf-8")))
        except KeyError as error:
            raise ValueError(f"model.{which}.path: {described} lacks {error}, of which costs are reckoned") from error
        except (ValueError, TypeError, ArithmeticError) as error:
            raise ValueError(f"model.{which}.path: {described} describes no model: {error}") from error
    if Path(path).name in known_models():
        return known_model(Path(path).name)
    raise ValueError(
        f"model.{which}.path: {path} holds no config.json; valid: a model's folder, or one of "
        f"{', '.join(known_models())}"
    )
