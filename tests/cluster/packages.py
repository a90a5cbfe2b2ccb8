"""Where Slurm's programs come from: the machine, or with PIVOT_TEST_INSTALL=1 (and only then) Debian's packages."""

import os
import shutil
import subprocess

import pytest

from tests.fakes.apt import install, may_install

PROGRAMS = ("slurmctld", "slurmd", "munged", "munge", "srun", "sbatch", "squeue", "sinfo", "scontrol", "scancel")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"


def program(name: str) -> str | None:
    """Path of a program; the daemons lie in folders that are not on every user's PATH."""
    return shutil.which(name, path=PATH)


def missing() -> list[str]:
    return [name for name in PROGRAMS if program(name) is None]


def require() -> None:
    """Skip the test, with one loud line, where there is no Slurm and none may be installed."""
    lacking, failed = missing(), ""
    if lacking and may_install():
        try:
            install("Slurm", *PACKAGES)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed = f" ({error})"
        lacking = missing()
    if lacking:
        pytest.skip(
            f"NO SLURM HERE, NOTHING OF IT IS TESTED: {', '.join(lacking)} not found{failed}. "
            f"`apt-get install {' '.join(PACKAGES)}`, or PIVOT_TEST_INSTALL=1 to have the tests do that."
        )
