"""`doctor`: whether runs can work here, and what mends what is in their way."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import click

from pipeline.cli.terminal import table
from pipeline.core.errors import ConfigError
from pipeline.doctor.finding import Finding, State, fault, ok
from pipeline.doctor.machine import look_at_machine, tracking
from pipeline.doctor.packages import look_at_packages
from pipeline.wording import visible

_SIGNS = {State.OK: "ok", State.WARNING: "warning", State.FAULT: "FAULT", State.ABSENT: "-"}


def doctor(arguments: Sequence[str], *, as_json: bool) -> int:
    """Exit code 1 if something is found with which no run works, or with which that of the configuration does not."""
    from slurm.site import jobs_of, look_at_slurm

    root, uri = Path("runs"), os.environ.get("MLFLOW_TRACKING_URI", "")
    of_config: list[Finding] = []
    if arguments:
        of_config, root, uri = _configuration(arguments, root, uri)
    found = [
        *look_at_packages(),
        *look_at_machine(root),
        tracking(uri),
        *look_at_slurm(),
        jobs_of(os.environ),
        *of_config,
    ]
    if as_json:
        click.echo(json.dumps([one.as_json() for one in found]))
    else:
        _print(found)
    return 1 if any(one.state is State.FAULT for one in found) else 0


def _configuration(arguments: Sequence[str], root: Path, uri: str) -> tuple[list[Finding], Path, str]:
    from pipeline.checks import check_all
    from pipeline.cli.plan import load_arguments
    from pipeline.cli.site import check_site

    try:
        config = load_arguments(arguments)
        check_all(config)
        check_site(config)
    except ConfigError as error:
        said = [fault("configuration", line, "see the message") for line in str(error).splitlines()]
        return said, root, uri
    return [ok("configuration", f"{arguments[0]} is valid here")], Path(config.run.root), config.tracking.uri or uri


def _print(found: Sequence[Finding]) -> None:
    click.echo(table([(_SIGNS[one.state], one.what, one.said) for one in found], indent=""))
    if to_do := [one for one in found if one.fix and one.state is not State.OK]:
        click.echo("\nwhat to do:")
        for one in to_do:
            click.echo(visible(f"  {one.what}: {one.fix}"))
    num = {state: sum(one.state is state for one in found) for state in State}
    click.echo(f"\n{num[State.FAULT]} faults, {num[State.WARNING]} warnings")
