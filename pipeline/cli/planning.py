"""`plan`: the schedule that the guard would choose for a configuration, and what the planner would do at one moment of
it, or of a run; of a run whose GPUs change hands, what it did.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pipeline.cli.decisions import show_decisions
from pipeline.cli.plan import load_arguments
from pipeline.cli.planning_text import moment_as_json, show_choice, show_cycle, show_moment
from pipeline.cli.runs import DEFAULT_ROOT, find_run, holds_run, how_it_stands, read_status
from pipeline.config import Config, load_resolved
from pipeline.core.errors import ConfigError, RunError
from pipeline.core.modes import SHARED, ModeName
from pipeline.run_folder import RunFolder
from pipeline.simulator.admission import Admission
from pipeline.simulator.choice import Choice
from pipeline.simulator.forecast import choose_for, setup_of
from pipeline.simulator.modes import Schedule, shiftable_schedule, train_sizes
from pipeline.simulator.moment import Moment, look_at
from pipeline.simulator.setup import Beliefs, Setup
from pipeline.watching.decided import read_decisions

_OVER = ("done", "failed", "cancelled", "died")


def plan(
    arguments: Sequence[str],
    *,
    gpu: str | None,
    num_gpus: int | None,
    lengths: str,
    seed: int,
    at_s: float | None,
    version: int | None,
    as_json: bool,
) -> int:
    if at_s is not None and not math.isfinite(at_s):
        raise ConfigError(f"--at {at_s}: no number of seconds; valid: such as 120")
    if at_s is not None and version is not None:
        raise ConfigError("--at and --version name one moment in two ways; valid: one of them")
    if _is_run(arguments):
        if num_gpus is not None or lengths:
            raise ConfigError("--gpus and --lengths are of a configuration: a run has its own")
        return _of_run(arguments[0], gpu or "", at_s, version, as_json)
    return _of_config(
        load_arguments(arguments), gpu or "h100", num_gpus, lengths, seed, at_s=at_s, version=version, as_json=as_json
    )


def _is_run(arguments: Sequence[str]) -> bool:
    """One name that is no YAML file: a run, or one that is missing."""
    if len(arguments) != 1 or "=" in arguments[0]:
        return False
    path = Path(arguments[0])
    return holds_run(path) or holds_run(DEFAULT_ROOT / path) or path.suffix not in (".yaml", ".yml")


def _of_config(
    config: Config,
    gpu: str,
    num_gpus: int | None,
    lengths: str,
    seed: int,
    *,
    at_s: float | None,
    version: int | None,
    as_json: bool,
) -> int:
    num = num_gpus or config.cluster.nodes * config.cluster.slots_per_node
    setup = setup_of(config, gpu=gpu, num_gpus=num, lengths=lengths)
    choice = choose_for(config, setup)
    small = setup.scaled_down(choice.stands_for)
    shiftable = _shiftable(small, choice, config)
    try:
        moment = look_at(
            small,
            shiftable,
            settings=config.placement.planner.settings(),
            beliefs=Beliefs.draw(seed),
            seed=seed,
            at_s=at_s,
            version=version,
        )
    except ValueError as error:
        raise ConfigError(f"--at or --version: {error}") from error
    if as_json:
        told = {"gpu": gpu, "gpus": num, "choice": choice.record(), "moment": _simulated(shiftable, moment)}
        click.echo(json.dumps(told))
    else:
        click.echo(show_choice(choice, setup, gpu))
        click.echo()
        click.echo(f"The planner of {shiftable} at {moment.snapshot.at_s:.0f} s of a simulated run")
        click.echo(show_moment(moment.snapshot, moment.plan))
        click.echo(show_cycle(moment))
    return 0


def _shiftable(small: Setup, choice: Choice, config: Config) -> Schedule:
    """The best shiftable schedule, on the cluster that is simulated; none was simulated to the end: the one whose
    training is as large as that of the best static one."""
    best = choice.best_shiftable
    train = max((best or choice.schedule).train // choice.stands_for, min(train_sizes(small)))
    schedule = shiftable_schedule(small, train, best.admission) if best else shiftable_schedule(small, train)
    return schedule.bound_to(config.algorithm.staleness, Admission(config.placement.admission))


def _simulated(schedule: Schedule, moment: Moment) -> dict[str, Any]:
    shifts = [
        {"at_s": s.at_s, "before": list(s.before), "after": list(s.after), "gain_s": s.gain_s} for s in moment.shifts
    ]
    return {
        "schedule": str(schedule),
        **moment_as_json(moment.snapshot, moment.plan),
        "cycle": {"num_asked": moment.num_asked, "shifts": shifts},
    }


def _of_run(name: str, gpu: str, at_s: float | None, version: int | None, as_json: bool) -> int:
    from pipeline.controller import make_plan
    from pipeline.core.core import Core
    from pipeline.simulator.of_run import look_at_run

    run = find_run(name)
    status, attempts = read_status(run), run.attempts()
    config = load_resolved(run.config)
    if SHARED[ModeName(config.placement.mode)]:
        if gpu or at_s is not None or version is not None:
            raise ConfigError(f"the GPUs of {run.name} change hands: what was decided is shown, and no other moment")
        return _decided(run, config, how_it_stands(status), as_json)
    if not attempts or not run.journal(attempts[-1]).exists():
        raise ConfigError(f"{run.name} is {how_it_stands(status)} and has no journal yet; ask again when it runs")
    try:
        moment = look_at_run(
            run.path,
            config,
            Core(make_plan(config)),
            run.journal(attempts[-1]),
            is_over=how_it_stands(status) in _OVER,
            gpu=gpu,
            at_s=at_s,
            version=version,
        )
    except RunError as error:
        raise RunError(f"{run.name}: {error}") from error
    if as_json:
        told = {"run": run.name, "mode": config.placement.mode, "costs": moment.costs, "after_s": moment.after_s}
        click.echo(json.dumps({**told, "moment": moment_as_json(moment.snapshot, moment.plan)}))
    else:
        click.echo(f"{run.name}, {how_it_stands(status)}: {moment.after_s:.1f} s after attempt {attempts[-1]} began")
        click.echo(show_moment(moment.snapshot, moment.plan))
        click.echo(
            f"\nNothing is shifted: placement.mode is {config.placement.mode}. This is what the planner would do with "
            f"the same GPUs:\ncosts {moment.costs}, the time of a shift as assumed."
        )
    return 0


def _decided(run: RunFolder, config: Config, status: str, as_json: bool) -> int:
    decided = read_decisions(run.decisions)
    if as_json:
        click.echo(json.dumps({"run": run.name, "status": status, "mode": config.placement.mode, **decided.as_json()}))
    else:
        click.echo(f"{run.name}, {status}: {config.placement.mode}")
        click.echo(show_decisions(decided))
    return 0
