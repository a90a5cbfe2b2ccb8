"""`simulate`: what a configuration would do on other GPUs and in other modes, before any is used."""

import json
from collections.abc import Sequence
from pathlib import Path

import click

from pipeline.cli.page_file import check_page, try_file
from pipeline.cli.plan import load_arguments
from pipeline.cli.terminal import table
from pipeline.core.errors import ConfigError, RunError
from pipeline.core.modes import ModeName
from pipeline.simulator.forecast import Forecast, forecast, setup_of
from pipeline.simulator.scenarios import scenario_of
from pipeline.simulator.setup import Setup
from pipeline.simulator.study import IDLE_STATES, Study, growth, inputs, speed_text, why_none


def simulate(
    arguments: Sequence[str],
    *,
    gpu: str,
    gpus: str,
    modes: str,
    num_seeds: int,
    lengths: str,
    scenarios: Sequence[str],
    html: str,
    png: str,
    as_json: bool,
) -> int:
    config = load_arguments(arguments)
    sizes = (
        list(dict.fromkeys(_number(text) for text in gpus.split(",")))
        if gpus
        else [config.cluster.nodes * config.cluster.slots_per_node]
    )
    names = list(ModeName) if modes == "all" else list(dict.fromkeys(_mode(text.strip()) for text in modes.split(",")))
    setups = {n: setup_of(config, gpu=gpu, num_gpus=n, lengths=lengths) for n in sizes}
    if html:
        check_page(Path(html), "--html", "forecast.html")
    if png:
        check_folder(Path(png))
    wrong = {n: [scenario_of(text, setup) for text in scenarios] for n, setup in setups.items()}
    found = {n: forecast(config, setup, names, num_seeds, wrong[n]) for n, setup in setups.items()}
    if as_json:
        click.echo(json.dumps([{"gpus": n, **row.as_json()} for n, rows in found.items() for row in rows]))
    else:
        _print(found, setups)
    if html or png:
        judged_by = config.judge_model.path if config.judge_model else ""
        policy, judge = (Path(path).name for path in (config.model.policy.path, judged_by))
        study = Study(
            title=f"{policy} judged by {judge} on {gpu.upper()}",
            setups=setups,
            rows=found,
            inputs=inputs(config, setups[sizes[0]], gpu=gpu, lengths=lengths, num_seeds=num_seeds),
        )
        for line in _write(study, html, png):
            click.echo(line, err=as_json)
    return 0


def check_folder(folder: Path) -> None:
    """Makes the folder. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--png {folder}: is no folder and cannot be made: {error.strerror}") from error
    try_file(folder / ".probe", f"--png {folder}")


def _write(study: Study, html: str, png: str) -> list[str]:
    """Returns what to say of it."""
    from pipeline.simulator.page import page, pictures
    from pipeline.simulator.plots import as_png

    shown, said = list(pictures(study)), []
    try:
        if html:
            Path(html).write_text(page(study, shown), encoding="utf-8")
            said.append(f"page: {html}")
        if png:
            for picture in shown:
                (Path(png) / f"{picture.name}.png").write_bytes(as_png(picture.figure))
            said.append(f"plots: {len(shown)} in {png}")
    except OSError as error:
        raise RunError(f"{error.filename or html or png}: cannot be written: {error.strerror}") from error
    return said


def _print(found: dict[int, list[Forecast]], setups: dict[int, Setup]) -> None:
    header = ("GPUS", "MODE, BEST SPLIT", "SEQUENCES/S", "STEP", "IDLE", "IN", "SHIFTS/STEP", "OF BOUND")
    lines = [
        line
        for n, rows in found.items()
        for line in (map(_line, [n] * len(rows), rows) if rows else [_none(n, setups[n])])
    ]
    click.echo(table([header, *lines], indent=""))
    click.echo(
        "\nsplit: rollout/reward/train   idle: share of GPU time, in: rollout/reward/train GPUs/shifts\n"
        "bound: no GPU idles, the longest response is waited for"
    )
    for step in growth(found):
        click.echo(str(step))


def _line(num_gpus: int, row: Forecast) -> tuple[str, ...]:
    return (
        str(num_gpus),
        row.schedule,
        speed_text(row.sequences_per_s),
        f"{row.step_s:.0f} s" if row.step_s >= 10 else f"{row.step_s:.2f} s",
        f"{row.idle:.0%}",
        "/".join(f"{100 * abs(row.idle_by.get(state, 0.0)):.0f}" for state in IDLE_STATES),
        f"{row.shifts_per_step:.1f}",
        f"{row.of_tail_bound:.0%}",
    )


def _none(num_gpus: int, setup: Setup) -> tuple[str, ...]:
    return (str(num_gpus), f"none fits: {why_none(setup)}", *["-"] * 6)


def _number(text: str) -> int:
    if not (text.strip().isascii() and text.strip().isdigit()) or int(text) < 1:
        raise ConfigError(f"--gpus {text!r}: not a number of GPUs; valid: such as 16,32,64")
    return int(text)


def _mode(text: str) -> ModeName:
    if text not in list(ModeName):
        raise ConfigError(f"--modes {text!r}; valid: all, or some of {', '.join(ModeName)}")
    return ModeName(text)
