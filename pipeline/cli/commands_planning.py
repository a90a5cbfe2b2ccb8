"""`simulate`, `plan` and `compare`, as the command line declares them."""

import click

from pipeline.cli.arguments import cluster_option, config_arguments


@click.command()
@config_arguments
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


@click.command()
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


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="RUN RUN... | CONFIG... [KEY.PATH=VALUE ...]")
@click.option("--modes", default="all", metavar="MODE,...", show_default=True, help="Modes of placement.")
@click.option("--seeds", default=1, type=click.IntRange(min=1), show_default=True, help="Runs of each mode.")
@cluster_option
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
