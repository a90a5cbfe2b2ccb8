"""`list`, `export-config` and `completion`, as the command line declares them."""

import click

from pipeline.cli.arguments import run_argument
from pipeline.cli.completion import SHELLS, script


@click.command("list")
@click.argument("folder", required=False, type=click.Path(file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="One JSON list.")
def list_runs(folder: str | None, as_json: bool) -> int:
    """List the runs in FOLDER (./runs): status, step, age, reward, accuracy, where each is."""
    from pipeline.cli.listing import list_runs

    return list_runs(folder, as_json)


@click.command("export-config")
@run_argument
@click.option("-o", "--out", default="", metavar="FILE.yaml", help="Where to.  [default: printed]")
def export_config(run: str, out: str) -> int:
    """Write the whole configuration of a run as one that gives the same run again; without secrets."""
    from pipeline.cli.export_config import export_config

    return export_config(run, out)


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print what makes a shell propose commands, options, runs, configurations and keys.

    Put it where your shell reads it at its start: `pivot-pipeline completion bash >> ~/.bashrc` (zsh: ~/.zshrc, fish:
    ~/.config/fish/completions/pivot-pipeline.fish).
    """
    assert context.parent is not None
    click.echo(script(shell, context.parent.command))
    return 0
