"""Arguments and options that several commands have."""

import click

from pipeline.cli.completion import configs, runs

config_arguments = click.argument(
    "config", nargs=-1, required=True, metavar="CONFIG... [KEY.PATH=VALUE ...]", shell_complete=configs
)
run_argument = click.argument("run", shell_complete=runs)
cluster_option = click.option(
    "--cluster", type=click.Choice(["local", "slurm"]), help="Where it runs; overrides cluster.kind."
)
allocation_option = click.option(
    "--in-allocation", is_flag=True, help="In the Slurm allocation that this shell holds (salloc), not in a job."
)
wait_option = click.option(
    "--wait/--detach", default=None, help="Stay and show progress, or return.  [default: wait on local]"
)
