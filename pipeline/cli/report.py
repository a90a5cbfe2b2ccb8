"""`report`: what a run's folder says, as one page for a browser."""

from pathlib import Path

import click

from pipeline.cli.page_file import check_page
from pipeline.cli.runs import find_run, how_it_stands, read_status
from pipeline.core.errors import ConfigError
from pipeline.run_folder import write_atomic


def report(name: str, out: str) -> int:
    run = find_run(name)
    path = Path(out or f"{run.name}.html")
    check_page(path, "-o", "report.html")
    status = read_status(run)
    if how_it_stands(status) == "new":
        raise ConfigError(f"{run.name} has not begun: there is nothing to report yet")
    from pipeline.report.build import build

    write_atomic(path, build(run, is_live=status["live"]), durable=False)
    click.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0
