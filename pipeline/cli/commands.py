"""The command line. Declared here, done in the modules beside: a command imports what it needs when it runs, so that
`--help` loads neither torch, pyarrow, mlflow nor vllm.

Exit codes: 0 done, 1 failed, 2 the user's fault, 130 cancelled.
"""

import sys
from collections.abc import Sequence

import click

from pipeline.core.errors import ConfigError, PivotError
from pipeline.disk import is_full_error

FAILED, USER_FAULT, CANCELLED = 1, 2, 130
_ROLES = ("rollout", "reward", "train", "controller", "queue", "agent", "zygote")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def commands() -> None:
    """RL post-training of LLMs against a generative judge.

    RUN is the folder of a run, or its name under ./runs. Exit codes: 0 done, 1 failed, 2 wrong input, 130 cancelled.
    """


_config_arguments = click.argument("config", nargs=-1, required=True, metavar="CONFIG... [KEY.PATH=VALUE ...]")
_run_argument = click.argument("run")
_cluster_option = click.option(
    "--cluster", type=click.Choice(["local", "slurm"]), help="Where it runs; overrides cluster.kind."
)
_allocation_option = click.option(
    "--in-allocation", is_flag=True, help="In the Slurm allocation that this shell holds (salloc), not in a job."
)
_wait_option = click.option(
    "--wait/--detach", default=None, help="Stay and show progress, or return.  [default: wait on local]"
)


@commands.command()
@_config_arguments
@_cluster_option
@click.option("--run-dir", type=click.Path(file_okay=False), help="The run's folder.  [default: run.root/run.name]")
@click.option("--name", help="The run's name; overrides run.name.  [default: the first file's name and the time]")
@_allocation_option
@_wait_option
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
@_run_argument
@click.argument("settings", nargs=-1, metavar="[KEY.PATH=VALUE ...]")
@click.option("--step", type=click.IntRange(min=0), help="Go back to after this version was published.")
@_cluster_option
@_allocation_option
@_wait_option
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
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object (without RUN: a list of them).")
def status(run: str | None, as_json: bool) -> int:
    """Show how a run stands; without RUN, the runs in ./runs."""
    from pipeline.cli.show import status

    return status(run, as_json)


@commands.command()
@_run_argument
def watch(run: str) -> int:
    """Show slots, queues, steps and shifts of a run, live; Ctrl-C leaves the run alone.

    On a terminal until the run ends, elsewhere once.
    """
    from pipeline.cli.watch import watch

    return watch(run)


@commands.command()
@_run_argument
@click.option("-f", "follow", is_flag=True, help="Go on until the run ends.")
@click.option("--role", type=click.Choice(_ROLES), help="Only of this role or process.")
@click.option("--step", type=click.IntRange(min=0), help="Of the stage tasks of this step.")
def logs(run: str, follow: bool, role: str | None, step: int | None) -> int:
    """Print the logs of the newest attempt."""
    from pipeline.cli.logs import logs

    return logs(run, follow=follow, role=role, step=step)


@commands.command()
@_run_argument
def cancel(run: str) -> int:
    """Stop a run in order and wait for its end; Ctrl-C meanwhile stops it at once."""
    from pipeline.cli.show import cancel

    return cancel(run)


@commands.command()
@_run_argument
@click.option("--step", type=click.IntRange(min=1), help="Of this checkpoint.  [default: the newest]")
@click.option("--to", type=click.Path(file_okay=False), help="The folder.  [default: RUN/exports/step_N]")
@click.option("--engine/--no-engine", default=True, show_default=True, help="Also load it with vLLM.")
def export(run: str, step: int | None, to: str | None, engine: bool) -> int:
    """Write the policy as a folder that transformers and vLLM load; it is loaded to make sure."""
    from pipeline.cli.export import export

    return export(run, step, to, with_engine=engine)


@commands.command("eval")
@_run_argument
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
@_config_arguments
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
@_config_arguments
def dag(config: tuple[str, ...]) -> int:
    """Print the stages of a step and what each waits for."""
    from pipeline.cli.plan import dag

    return dag(config)


@commands.command()
@_config_arguments
@click.option("--gpu", default="h100", show_default=True, help="Kind of GPU: a100, h800, h100, h200, h20.")
@click.option("--gpus", default="", metavar="16,32,...", help="How many.  [default: the cluster's slots]")
@click.option("--modes", default="all", metavar="MODE,...", show_default=True, help="Modes of placement.")
@click.option("--seeds", default=1, type=click.IntRange(min=1), show_default=True, help="Runs that are averaged.")
@click.option("--lengths", default="", help="A run's folder, or a file with a response's length per line.")
@click.option(
    "--scenario",
    "scenarios",
    multiple=True,
    metavar="lost:NODE@SECONDS[+SECONDS] | slow:GPU*FACTOR",
    help="A node dies, and another comes some time later, or never; a GPU is slow. Can be given more than once.",
)
@click.option("--html", default="", metavar="FILE.html", help="Also one page with tables and plots, for a browser.")
@click.option("--png", default="", metavar="FOLDER", help="Also the plots, as PNG files.")
@click.option("--json", "as_json", is_flag=True, help="One JSON list.")
def simulate(
    config: tuple[str, ...],
    gpu: str,
    gpus: str,
    modes: str,
    seeds: int,
    lengths: str,
    scenarios: tuple[str, ...],
    html: str,
    png: str,
    as_json: bool,
) -> int:
    """Predict step times in each mode of placement, at its best split of the GPUs.

    Nothing is started. Models are read from their config.json; lengths are assumed where --lengths names none.
    """
    from pipeline.cli.simulate import simulate

    return simulate(
        config,
        gpu=gpu,
        gpus=gpus,
        modes=modes,
        num_seeds=seeds,
        lengths=lengths,
        scenarios=scenarios,
        html=html,
        png=png,
        as_json=as_json,
    )


@commands.command()
@click.argument("config", nargs=-1, required=True, metavar="RUN | CONFIG... [KEY.PATH=VALUE ...]")
@click.option("--gpu", help="Kind of GPU, as of simulate.  [default: h100; of a RUN: as it was measured]")
@click.option("--gpus", type=click.IntRange(min=1), help="How many.  [default: the cluster's slots]")
@click.option("--lengths", default="", help="A run's folder, or a file with a response's length per line.")
@click.option("--seed", default=0, type=click.IntRange(min=0), show_default=True, help="Of the simulated run.")
@click.option("--at", "at_s", type=click.FloatRange(min=0), metavar="SECONDS", help="The moment that is looked at.")
@click.option("--version", type=click.IntRange(min=0), help="The same: when this version is published.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def plan(
    config: tuple[str, ...],
    gpu: str | None,
    gpus: int | None,
    lengths: str,
    seed: int,
    at_s: float | None,
    version: int | None,
    as_json: bool,
) -> int:
    """Show what the planner would do, and why.

    Of a CONFIG: the schedule and the number of training GPUs that would be chosen, and a moment of a simulated run. Of
    a RUN: now, or at a moment of it; of one whose GPUs change hands, what was decided and shifted, with its predicted
    and measured gain and cost. Nothing is started or changed.
    """
    from pipeline.cli.planning import plan

    return plan(
        config,
        gpu=gpu,
        num_gpus=gpus,
        lengths=lengths,
        seed=seed,
        at_s=at_s,
        version=version,
        as_json=as_json,
    )


@commands.command()
@click.argument("what", nargs=-1, required=True, metavar="RUN RUN... | CONFIG... [KEY.PATH=VALUE ...]")
@click.option("--modes", default="all", metavar="MODE,...", show_default=True, help="Modes of placement.")
@click.option("--seeds", default=1, type=click.IntRange(min=1), show_default=True, help="Runs of each mode.")
@_cluster_option
@click.option("--folder", default="", help="Of the runs.  [default: run.root/<first file>-compare]")
@click.option("--html", default="", metavar="FILE.html", help="Also one page with plots, for a browser.")
@click.option("--json", "as_json", is_flag=True, help="One JSON list.")
def compare(
    what: tuple[str, ...], modes: str, seeds: int, cluster: str | None, folder: str, html: str, as_json: bool
) -> int:
    """Run a configuration in each mode of placement, on the same data and seeds, and show what each achieved.

    Runs that are done in the folder are not run again, others go on. Of two or more RUNs nothing is started.
    """
    from pipeline.cli.compare import compare

    return compare(what, modes=modes, num_seeds=seeds, cluster=cluster, folder=folder, html=html, as_json=as_json)


@commands.command()
@_run_argument
@click.option("-o", "--out", default="", metavar="FILE.html", help="Where to.  [default: RUN.html, here]")
def report(run: str, out: str) -> int:
    """Write one page, for a browser, of what a run did: slots, shifts, curves, samples, and what to change first.

    Nothing but the run's folder is read, and the page needs nothing but itself.
    """
    from pipeline.cli.report import report

    return report(run, out)


@commands.command()
@_run_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def gps(run: str, as_json: bool) -> int:
    """Show which node's shared memory holds which weights, who reads them, and the last copies."""
    from pipeline.cli.weights import gps

    return gps(run, as_json)


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
