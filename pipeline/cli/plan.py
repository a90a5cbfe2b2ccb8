"""`validate` and `dag`: what a configuration means, without running it. Also how CONFIG arguments are read."""

import re
from collections.abc import Sequence
from pathlib import Path

import click

from pipeline.cli.site import check_site
from pipeline.cli.terminal import table
from pipeline.config import Config, load_files
from pipeline.core.errors import ConfigError

_KEY = re.compile(r"\w+(\.\w+)+")


def load_arguments(arguments: Sequence[str], overrides: Sequence[str] = ()) -> Config:
    """CONFIG arguments: those with `=` are overrides, the others files; `overrides` come last."""
    files = [argument for argument in arguments if "=" not in argument]
    for name in files:
        if _KEY.fullmatch(name) and name.split(".")[0] in Config.model_fields and not Path(name).exists():
            raise ConfigError(f"{name!r} names no file; a setting needs a value: {name}=VALUE")
    if not files:
        raise ConfigError("no configuration file was named, such as configs/quickstart.yaml")
    return load_files(files, [*(a for a in arguments if "=" in a), *overrides])


def validate(arguments: Sequence[str]) -> int:
    from pipeline.checks import check_all

    config = load_arguments(arguments)
    check_all(config)
    notes = check_site(config)
    trainer, data = config.trainer, config.data
    click.echo(
        f"valid: {trainer.total_training_steps} steps of {data.train_batch_size} prompts x {config.rollout.n} "
        f"responses, {trainer.updates_per_step} updates each"
    )
    for note in notes:
        click.echo(f"not checked: {note}")
    return 0


def dag(arguments: Sequence[str]) -> int:
    from pipeline.core.dag import OWN_PATH, After, Edge, step_graph

    config = load_arguments(arguments)
    stages = step_graph(
        config.algorithm.staleness, is_streaming=config.placement.admission == "stream", own=config.own_stages
    )
    arrows = {Edge.BARRIER: "▶", Edge.STREAM: "▷"}

    def edge(after: After) -> str:
        return f"{after.stage}{f' (step - {after.lag})' if after.lag else ''} {arrows[after.edge]}"

    rows = [("STAGE", "RUNS ON", "WAITS FOR")]
    for stage in stages:
        where = stage.role.value if stage.role else "index of the queue"
        where = "a process of its own" if stage.path == OWN_PATH else where
        rows.append((stage.name, f"every {where}" if stage.everywhere else where, ", ".join(map(edge, stage.after))))
    click.echo(table(rows, indent=""))
    click.echo("\n▶ waits for the whole stage   ▷ each sequence goes on by itself")
    return 0
