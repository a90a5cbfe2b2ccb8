"""`resume`: go on with a run from its newest complete checkpoint, or, as a new run, from an earlier version."""

from collections.abc import Sequence

import click

from pipeline.cli.runs import as_argument, find_run, how_it_stands, read_status
from pipeline.cli.site import check_site
from pipeline.cli.submit import cluster_settings, start
from pipeline.config import Config, load_resolved, save_resolved
from pipeline.core.errors import ConfigError
from pipeline.run_folder import RunFolder
from pipeline.wording import visible


def resume(
    name: str,
    settings: Sequence[str],
    step: int | None,
    *,
    cluster: str | None = None,
    wait: bool | None = None,
    in_allocation: bool = False,
) -> int:
    """Raises ConfigError, and then has changed nothing, if the run lives, has nothing left to do, cannot go back to
    `step`, or if `settings` would change what a resume may not change."""
    from pipeline.checks import check_all
    from pipeline.fork import make_fork, plan_return
    from pipeline.queue.fork import recorded
    from pipeline.resume import check_changes

    if others := [text for text in settings if "=" not in text]:
        raise ConfigError(f"{others[0]!r} is no setting: write section.key=value")
    run = find_run(name)
    run.check_own()
    status = read_status(run)
    if status["live"]:
        where = f"job {status['job']['id']}" if status.get("job") else f"pid {status['pid']}"
        raise ConfigError(f"{run.name} goes on already ({where}): pivot-pipeline status {as_argument(run)}")
    before = load_resolved(run.config)
    config = load_resolved(run.config, [*settings, *cluster_settings(cluster, in_allocation)])
    check_changes(run, before, config)
    check_all(config, run.path)
    check_site(config, in_allocation=in_allocation)
    _name_skipped(run, before)
    total = config.trainer.total_training_steps
    if step is not None and (back := plan_return(run, before, recorded(run.queue), step)):
        if total <= step:
            raise ConfigError(f"nothing is left to do after step {step}: trainer.total_training_steps is {total}")
        fork = make_fork(run, before, config, back)
        source = f"checkpoint step_{back.base}" if back.base else "the base model"
        again = f" and the recorded batches of {back.base + 1}..{step}" if back.base < step else ""
        click.echo(visible(f"{fork.name} goes on after step {step} of {run.name}, from {source}{again}"))
        return start(fork, load_resolved(fork.config), wait, in_allocation)
    if status["status"] == "done" and total <= before.trainer.total_training_steps:
        raise ConfigError(
            f"{run.name} is done: all {before.trainer.total_training_steps} steps are trained, nothing is left to do; "
            "trainer.total_training_steps=... adds some, --step N goes back"
        )
    if total < before.trainer.total_training_steps and (begun := recorded(run.queue).begun) > total:
        raise ConfigError(f"trainer.total_training_steps is {total}, but step {begun} is begun: at least {begun}")
    _refuse_empty_store(run, before, config)
    if run.job.exists():
        from pipeline.cli.job import let_leave

        let_leave(run)
    if config != before:
        save_resolved(config, run.config)
    click.echo(f"resuming {visible(run.name)} ({how_it_stands(status)}, step {status.get('step', 0)})")
    return start(run, config, wait, in_allocation)


def _name_skipped(run: RunFolder, config: Config) -> None:
    """Say which damaged checkpoints are passed over."""
    from pipeline.checkpoint import store_of

    for name, why in store_of(run, config).newest_complete().skipped:
        click.echo(f"checkpoint {visible(name)} is skipped: {visible(why)}", err=True)


def _refuse_empty_store(run: RunFolder, before: Config, config: Config) -> None:
    """Where checkpoints get a new place, the newest must be there: else the run would start from the base model."""
    from pipeline.checkpoint import store_of

    if config.checkpoint.uri == before.checkpoint.uri:
        return
    newest, moved = (store_of(run, c).newest_complete() for c in (before, config))
    if moved.step < newest.step:
        raise ConfigError(
            f"checkpoint.uri {config.checkpoint.uri!r} lacks step_{newest.step}, from which this run goes on: copy "
            f"{newest.path} there first"
        )
