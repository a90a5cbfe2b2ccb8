"""Run a command (by default a shell) with a Slurm of its own, which ends with it: python -m tests.cluster --nodes 4"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cluster import SlurmCluster
from tests.cluster.packages import PACKAGES, missing


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=4, help="fake ones, of each node")
    parser.add_argument("command", nargs="*", default=[os.environ.get("SHELL", "/bin/sh")])
    asked = parser.parse_args()
    if lacking := missing():
        parser.error(f"{', '.join(lacking)} not found: apt-get install {' '.join(PACKAGES)}")
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        SlurmCluster(Path(folder), nodes=asked.nodes, gpus=asked.gpus) as cluster,
    ):
        return subprocess.call(asked.command, env=cluster.client_env)


if __name__ == "__main__":
    sys.exit(main())
