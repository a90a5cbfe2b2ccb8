"""Where Slurm's programs come from: the machine, or with PIVOT_TEST_INSTALL=1 (and only then) Debian's packages."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAMS = ("slurmctld", "slurmd", "munged", "munge", "srun", "sbatch", "squeue", "sinfo", "scontrol", "scancel")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
_POLICY = Path("/usr/sbin/policy-rc.d")
_INSTALL_S = 240


def program(name: str) -> str | None:
    """Path of a program; the daemons lie in folders that are not on every user's PATH."""
    return shutil.which(name, path=PATH)


def missing() -> list[str]:
    return [name for name in PROGRAMS if program(name) is None]


def require() -> None:
    """Skip the test, with one loud line, where there is no Slurm and none may be installed."""
    lacking, failed = missing(), ""
    if lacking and os.environ.get("PIVOT_TEST_INSTALL") == "1":
        try:
            install()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed = f" ({error})"
        lacking = missing()
    if lacking:
        pytest.skip(
            f"NO SLURM HERE, NOTHING OF IT IS TESTED: {', '.join(lacking)} not found{failed}. "
            f"`apt-get install {' '.join(PACKAGES)}`, or PIVOT_TEST_INSTALL=1 to have the tests do that."
        )


def install() -> None:
    """Install Debian's packages. None of their services is started. RuntimeError with what apt said if that fails."""
    if os.getuid() != 0:
        raise RuntimeError("PIVOT_TEST_INSTALL=1 installs packages, which needs root")
    own_policy = not _POLICY.exists()
    if own_policy:
        _POLICY.write_text("#!/bin/sh\nexit 101\n")  # "starting services is forbidden", to the packages' scripts
        _POLICY.chmod(0o755)
    try:
        if _apt("install", "-y", "--no-install-recommends", *PACKAGES) is not None:  # perhaps there are no lists yet
            said = _apt("update") or _apt("install", "-y", "--no-install-recommends", *PACKAGES)
            if said is not None:
                raise RuntimeError(f"Slurm could not be installed:\n{said[-2000:]}")
    finally:
        if own_policy:
            _POLICY.unlink()


def _apt(*args: str) -> str | None:
    """None, or what it said when it failed."""
    done = subprocess.run(
        ["apt-get", "-q", *args],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_INSTALL_S,
        check=False,
    )
    return None if done.returncode == 0 else done.stdout
