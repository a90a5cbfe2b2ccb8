"""`export-config`: a run's configuration, to give the same run again."""

from pathlib import Path

import click

from pipeline.cli.runs import find_run
from pipeline.config import load_resolved
from pipeline.config_export import exported
from pipeline.core.errors import ConfigError


def export_config(name: str, out: str) -> int:
    run = find_run(name)
    text = exported(load_resolved(run.config), run.name)
    if not out:
        click.echo(text, nl=False)
        return 0
    try:
        with open(out, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{out} is there already: choose another file") from None
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    click.echo(f"configuration: {Path(out)}")
    return 0
