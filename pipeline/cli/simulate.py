"""`simulate`: what a configuration would do on other GPUs and in other modes, before any is used."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import click

from pipeline.cli.plan import load_arguments
from pipeline.cli.terminal import table
from pipeline.core.errors import ConfigError
from pipeline.simulator.forecast import Forecast, forecast, setup_of
from pipeline.simulator.modes import ModeName


def simulate(
    arguments: Sequence[str], *, gpu: str, gpus: str, modes: str, num_seeds: int, lengths: str, as_json: bool
) -> int:
    config = load_arguments(arguments)
    sizes = (
        [_number(text) for text in gpus.split(",")] if gpus else [config.cluster.nodes * config.cluster.slots_per_node]
    )
    names = list(ModeName) if modes == "all" else [_mode(text) for text in modes.split(",")]
    setups = {n: setup_of(config, gpu=gpu, num_gpus=n, lengths=lengths) for n in sizes}
    found = {n: forecast(config, setup, names, num_seeds) for n, setup in setups.items()}
    if as_json:
        rows = [{"gpus": n, **asdict(row), "schedule": str(row.schedule)} for n, rows in found.items() for row in rows]
        click.echo(json.dumps(rows))
        return 0
    header = ("GPUS", "MODE, BEST SPLIT", "SEQUENCES/S", "STEP", "IDLE", "SHIFTS/STEP", "OF BOUND")
    click.echo(table([header, *(_line(n, row) for n, rows in found.items() for row in rows)], indent=""))
    click.echo("\nsplit: rollout/reward/train   bound: no GPU idles, the longest response is waited for")
    return 0


def _line(num_gpus: int, row: Forecast) -> tuple[str, ...]:
    return (
        str(num_gpus),
        str(row.schedule),
        f"{row.sequences_per_s:.2f}",
        f"{row.step_s:.0f} s" if row.step_s >= 10 else f"{row.step_s:.2f} s",
        f"{row.idle:.0%}",
        f"{row.shifts_per_step:.1f}",
        f"{row.of_tail_bound:.0%}",
    )


def _number(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ConfigError(f"--gpus {text!r}: not a number of GPUs; valid: such as 16,32,64")
    return int(text)


def _mode(text: str) -> ModeName:
    if text not in list(ModeName):
        raise ConfigError(f"--modes {text!r}; valid: all, or some of {', '.join(ModeName)}")
    return ModeName(text)
