"""`submit`: check, make the run's folder, start the controller, stay with it."""

import contextlib
import json
import os
import shutil
import time
from pathlib import Path

import click

from pipeline.cli.follow import follow, wait_for_start
from pipeline.cli.plan import load_arguments
from pipeline.cli.runs import Rows, as_argument
from pipeline.cli.site import check_site
from pipeline.config import Config, save_resolved, without_secrets
from pipeline.core.errors import ConfigError
from pipeline.run_folder import RunFolder


def submit(
    arguments: tuple[str, ...],
    *,
    cluster: str | None,
    run_dir: str | None,
    name: str | None,
    wait: bool | None,
    dry_run: bool,
    in_allocation: bool,
) -> int:
    from pipeline.checks import check_all
    from pipeline.resume import keep_inputs

    overrides = cluster_settings(cluster, in_allocation)
    overrides += [f"run.name={json.dumps(name)}"] if name is not None else []
    config = load_arguments(arguments, overrides)
    run = RunFolder(Path(run_dir).absolute() if run_dir else _default_folder(config, arguments[0]))
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": run.name})})
    _refuse_taken(run)
    check_all(config, run.path)
    check_site(config, in_allocation=in_allocation)
    if config.checkpoint.uri:
        from pipeline.checkpoint import CheckpointStore  # with fsspec, which a local folder of the run's own spares

        CheckpointStore(config.checkpoint.uri).require_unused()
    if dry_run:
        click.echo(f"# would run in {run.path}\n{without_secrets(config)}", nl=False)
        if config.cluster.kind == "slurm":
            from slurm.allocation import script

            click.echo(f"# the job's script\n{script(run, config)}")
        return 0
    is_new = not run.path.parent.exists()
    _claim(run)
    try:
        keep_inputs(run, config)
        save_resolved(config, run.config)
    except BaseException:  # such as a full disk: this is no run yet
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    try:
        return start(run, config, wait, in_allocation)
    except ConfigError:  # Slurm took no job
        if not run.job.exists():
            shutil.rmtree(run.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                if is_new:
                    run.path.parent.rmdir()
        raise


def cluster_settings(cluster: str | None, in_allocation: bool) -> list[str]:
    """What the options say of where it runs, as settings."""
    if in_allocation and cluster == "local":
        raise ConfigError("--in-allocation is for --cluster slurm")
    return [f"cluster.kind={cluster or 'slurm'}"] if cluster or in_allocation else []


def start(run: RunFolder, config: Config, wait: bool | None, in_allocation: bool = False) -> int:
    attempt = (run.attempts() or [0])[-1] + 1
    rows = Rows(run)
    rows.new()  # those of earlier attempts were shown then
    if config.cluster.kind == "slurm":
        from pipeline.cli.job import JobProcess, start_job

        job = start_job(run, config, in_allocation)
        return follow(run, attempt, JobProcess(run, job), rows=rows) if wait else 0
    from slurm.local import start_controller

    run.job.unlink(missing_ok=True)  # an earlier life's: what Slurm says of it is not said of this one
    waits = wait is None or wait
    process = start_controller(run, detach=not waits)
    if waits:
        return follow(run, attempt, process, rows=rows)
    code = wait_for_start(run, attempt, process)
    if code is None:
        click.echo(f"{run.name} runs in {run.path}\n  pivot-pipeline status {as_argument(run)}")
    return code or 0


def _default_folder(config: Config, first_file: str) -> Path:
    """`run.root/run.name`; without a name one that is new: the first file's, and the time."""
    named = "name" in config.run.model_fields_set
    name = config.run.name if named else f"{Path(first_file).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(config.run.root) / name


def _refuse_taken(run: RunFolder) -> None:
    try:
        run.path.stat()
    except FileNotFoundError:
        pass
    except OSError as error:  # too long, a link to itself
        raise ConfigError(f"the run's folder cannot be made: {error}") from None
    if run.config.exists() or run.attempts():
        raise ConfigError(
            f"{run.path} holds a run: go on with it by `pivot-pipeline resume {as_argument(run)}`, "
            "or choose another --name or --run-dir"
        )
    if run.path.exists() and not (run.path.is_dir() and not any(run.path.iterdir())):
        raise ConfigError(f"{run.path} exists and is not an empty folder: choose another --name or --run-dir")


def _claim(run: RunFolder) -> None:
    """Of two submits into one folder, one makes its config.yaml."""
    try:
        run.create()
        os.close(os.open(run.config, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        _refuse_taken(run)
        raise ConfigError(f"{run.path} is a link that leads nowhere") from None
    except OSError as error:
        raise ConfigError(f"the run's folder cannot be made: {error}") from None
