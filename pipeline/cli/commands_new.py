"""`new`, as the command line declares it."""

from typing import Any

import click


@click.command()
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--policy", default="", metavar="FOLDER", help="The model that is trained.")
@click.option("--genrm", default="", metavar="FOLDER", help="The judge's model.")
@click.option("--judge-url", default="", metavar="URL", help="Or where a server has it; ends with /v1.")
@click.option("--judge-model", default="", metavar="NAME", help="Its name there.")
@click.option(
    "--function", "functions", multiple=True, metavar="FILE.py:NAME", help="A reward function (compute_score)."
)
@click.option("--data", multiple=True, metavar="FILE", help="Prompts, jsonl or parquet; can be given more than once.")
@click.option("--val", multiple=True, metavar="FILE", help="Held-out prompts.")
@click.option("--prompt-key", default="prompt", show_default=True, help="Column of the prompts.")
@click.option("--template", default="", metavar="FILE", help="Of the judge.  [default: one is written]")
@click.option("--choices", default="yes,no", show_default=True, metavar="RIGHT,WRONG", help="The judge's words.")
@click.option("--cluster", default="", type=click.Choice(["local", "slurm", ""]), metavar="local|slurm", help="Where.")
@click.option("--nodes", default=1, type=click.IntRange(min=1), show_default=True, help="Of the cluster.")
@click.option("--gpus", type=click.IntRange(min=1), help="Per node.  [default: this machine's; slurm: 8]")
@click.option("--partition", default="", help="Of Slurm, as sinfo lists them.")
@click.option("--account", default="", help="Who pays for the job.")
@click.option("--time", default="", help="Time limit of the job (24:00:00).")
@click.option("--steps", default=100, type=click.IntRange(min=1), show_default=True, help="Of the run.")
def new(folder: str, gpus: int | None, choices: str, **said: Any) -> int:
    """Write FOLDER/run.yaml for your models, data and cluster, with each key explained.

    What is not said is asked on a terminal. What was written is checked as `validate` does it: if something is missing,
    it is told (exit code 2).
    """
    from pipeline.cli.new import new
    from pipeline.new_config import answers_of

    return new(folder, answers_of(choices=choices, **said), gpus)
