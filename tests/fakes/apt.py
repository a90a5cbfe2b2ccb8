"""Debian's packages, for tests that need programs: with PIVOT_TEST_INSTALL=1, and only then."""

import os
import subprocess
from pathlib import Path

_POLICY = Path("/usr/sbin/policy-rc.d")
_INSTALL_S = 240


def may_install() -> bool:
    return os.environ.get("PIVOT_TEST_INSTALL") == "1"


def install(what: str, *packages: str) -> None:
    """None of their services is started. RuntimeError with what apt said if that fails."""
    if os.getuid() != 0:
        raise RuntimeError("PIVOT_TEST_INSTALL=1 installs packages, which needs root")
    own_policy = not _POLICY.exists()
    if own_policy:
        _POLICY.write_text("#!/bin/sh\nexit 101\n")  # "starting services is forbidden", to the packages' scripts
        _POLICY.chmod(0o755)
    try:
        if _apt("install", "-y", "--no-install-recommends", *packages) is not None:  # perhaps there are no lists yet
            said = _apt("update") or _apt("install", "-y", "--no-install-recommends", *packages)
            if said is not None:
                raise RuntimeError(f"{what} could not be installed:\n{said[-2000:]}")
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
