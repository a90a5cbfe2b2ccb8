"""The command line. Declared here, done in the modules beside: a command imports what it needs when it runs, so that
`--help` loads neither torch, pyarrow, mlflow nor vllm.

Exit codes: 0 done, 1 failed, 2 the user's fault, 130 cancelled.
"""

import sys
from collections.abc import Sequence

import click

from pipeline.cli.arguments import allocation_option, cluster_option, config_arguments, run_argument, wait_option
from pipeline.cli.commands_new import new
from pipeline.cli.commands_planning import compare, plan, simulate
from pipeline.cli.commands_runs import completion, export_config, list_runs
from pipeline.cli.completion import runs
from pipeline.core.errors import ConfigError, PivotError
from pipeline.disk import is_full_error

FAILED, USER_FAULT, CANCELLED = 1, 2, 130
_ROLES = ("rollout", "reward", "train", "controller", "queue", "agent", "zygote")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def commands() -> None:
    """RL post-training of LLMs against a generative judge.

    RUN is the folder of a run, or its name under ./runs. Exit codes: 0 done, 1 failed, 2 wrong input, 130 cancelled.
    """


@commands.command()
@config_arguments
@cluster_option
@click.option("--run-dir", type=click.Path(file_okay=False), help="The run's folder.  [default: run.root/run.name]")
@click.option("--name", help="The run's name; overrides run.name.  [default: the first file's name and the time]")
@allocation_option
@wait_option
@click.option("--dry-run", is_flag=True, help="Check everything, print the whole configuration, start nothing.")
def submit(
    config: tuple[str, ...],
    cluster: str | None,
    run_dir: str | None,
    name: str | None,
    wait: bool | None,
    dry_run: bool,
    in_allocation: bool,
) -> int:
    """Start a run.

    YAML files are composed from left to right; an argument with `=` overrides one value. Ctrl-C stops the run in
    order (it can be resumed), a second one at once.
    """
    from pipeline.cli.submit import submit

    return submit(
        config, cluster=cluster, run_dir=run_dir, name=name, wait=wait, dry_run=dry_run, in_allocation=in_allocation
    )


@commands.command()
@run_argument
@click.argument("settings", nargs=-1, metavar="[KEY.PATH=VALUE ...]")
@click.option("--step", type=click.IntRange(min=0), help="Go back to after this version was published.")
@cluster_option
@allocation_option
@wait_option
def resume(
    run: str,
    settings: tuple[str, ...],
    step: int | None,
    cluster: str | None,
    wait: bool | None,
    in_allocation: bool,
) -> int:
    """Go on with a run from its newest complete checkpoint.

    Settings may change that alter neither data, their order, shapes nor the loss. With --step, where newer steps are
    there, a new run RUN-fromN is made beside the old one, which stays as it is. A run goes on where it ran, or with
    --cluster elsewhere.
    """
    from pipeline.cli.resume import resume

    return resume(run, settings, step, cluster=cluster, wait=wait, in_allocation=in_allocation)


@commands.command()
@click.argument("run", required=False, shell_complete=runs)
@click.option("--json", "as_json", is_flag=True, help="One JSON object (without RUN: a list of them).")
def status(run: str | None, as_json: bool) -> int:
    """Show how a run stands; without RUN, the runs in ./runs."""
    from pipeline.cli.show import status

    return status(run, as_json)


@commands.command()
@run_argument
def watch(run: str) -> int:
    """Show slots, queues, steps and shifts of a run, live; Ctrl-C leaves the run alone.

    On a terminal until the run ends, elsewhere once.
    """
    from pipeline.cli.watch import watch

    return watch(run)


@commands.command()
@run_argument
@click.option("-f", "follow", is_flag=True, help="Go on until the run ends.")
@click.option("--role", type=click.Choice(_ROLES), help="Only of this role or process.")
@click.option("--step", type=click.IntRange(min=0), help="Of the stage tasks of this step.")
def logs(run: str, follow: bool, role: str | None, step: int | None) -> int:
    """Print the logs of the newest attempt."""
    from pipeline.cli.logs import logs

    return logs(run, follow=follow, role=role, step=step)


@commands.command()
@run_argument
def cancel(run: str) -> int:
    """Stop a run in order and wait for its end; Ctrl-C meanwhile stops it at once."""
    from pipeline.cli.show import cancel

    return cancel(run)


@commands.command()
@run_argument
@click.option("--step", type=click.IntRange(min=1), help="Of this checkpoint.  [default: the newest]")
@click.option("--to", type=click.Path(file_okay=False), help="The folder.  [default: RUN/exports/step_N]")
@click.option("--engine/--no-engine", default=True, show_default=True, help="Also load it with vLLM.")
def export(run: str, step: int | None, to: str | None, engine: bool) -> int:
    """Write the policy as a folder that transformers and vLLM load; it is loaded to make sure."""
    from pipeline.cli.export import export

    return export(run, step, to, with_engine=engine)


@commands.command("eval")
@run_argument
@click.option("--step", type=click.IntRange(min=1), help="Of this checkpoint.  [default: the newest]")
@click.option("--data", multiple=True, help="A file; can be given more than once.  [default: data.val_files]")
@click.option("--samples", default=1, type=click.IntRange(min=1), show_default=True, help="Answers to each prompt.")
@click.option("--num-prompts", default=0, type=click.IntRange(min=0), help="The first so many.  [default: all]")
@click.option("--function", default="", help="The checker, module:name.  [default: evaluate.function]")
@click.option("--temperature", type=click.FloatRange(min=0), help="[default: rollout.temperature]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def evaluate(
    run: str,
    step: int | None,
    data: tuple[str, ...],
    samples: int,
    num_prompts: int,
    function: str,
    temperature: float | None,
    as_json: bool,
) -> int:
    """Sample answers of the policy and check them: avg@k, pass@k."""
    from pipeline.cli.export import evaluate

    return evaluate(
        run,
        step,
        data=data,
        samples=samples,
        num_prompts=num_prompts,
        function=function,
        temperature=temperature,
        as_json=as_json,
    )


@commands.command()
@config_arguments
def validate(config: tuple[str, ...]) -> int:
    """Check a configuration with all that it names: models, tokenizers, data, template, memory."""
    from pipeline.cli.plan import validate

    return validate(config)


@commands.command()
@click.argument("config", nargs=-1, metavar="[CONFIG... [KEY.PATH=VALUE ...]]")
@click.option("--json", "as_json", is_flag=True, help="One JSON list.")
def doctor(config: tuple[str, ...], as_json: bool) -> int:
    """Look at Python, packages, memory, disk, limits, GPUs, Slurm and MLflow: what is in the way, and what mends it.

    With a CONFIG also whether it is valid here. Exit code 1 if no run could work.
    """
    from pipeline.cli.doctor import doctor

    return doctor(config, as_json=as_json)


@commands.command()
@config_arguments
def dag(config: tuple[str, ...]) -> int:
    """Print the stages of a step and what each waits for."""
    from pipeline.cli.plan import dag

    return dag(config)


@commands.command()
@run_argument
@click.option("-o", "--out", default="", metavar="FILE.html", help="Where to.  [default: RUN.html, here]")
def report(run: str, out: str) -> int:
    """Write one page, for a browser, of what a run did: slots, shifts, curves, samples, and what to change first.

    Nothing but the run's folder is read, and the page needs nothing but itself.
    """
    from pipeline.cli.report import report

    return report(run, out)


@commands.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def gps(run: str, as_json: bool) -> int:
    """Show which node's shared memory holds which weights, who reads them, and the last copies."""
    from pipeline.cli.weights import gps

    return gps(run, as_json)


for _command in (new, list_runs, export_config, completion, simulate, plan, compare):
    commands.add_command(_command)


@commands.command("_controller", hidden=True)
@click.argument("run")
def controller(run: str) -> int:
    """The controller's process."""
    from pipeline.cli.controller import run_controller

    return run_controller(run)


def run(arguments: Sequence[str]) -> int:
    """Do what the arguments say; return the exit code."""
    try:
        return int(commands.main(list(arguments), prog_name="pivot-pipeline", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return USER_FAULT
    except ConfigError as error:
        click.echo(f"Error: {_visible(error)}", err=True)
        return USER_FAULT
    except PivotError as error:
        click.echo(f"Error: {_visible(error)}", err=True)
        return FAILED
    except (click.Abort, KeyboardInterrupt):
        return CANCELLED
    except BrokenPipeError:
        from pipeline.cli.terminal import abandon

        abandon(sys.stdout)
        return FAILED
    except OSError as error:
        if not is_full_error(error):
            raise
        click.echo(f"Error: {_visible(error)}", err=True)
        return FAILED


def _visible(error: Exception) -> str:
    from pipeline.wording import visible

    return visible(str(error))
