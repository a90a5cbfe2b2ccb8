"""Clients of a Slurm that does what a test wants: executables on a PATH of their own."""

import os
import shlex
from pathlib import Path

from slurm.parse import SEPARATOR

HEADER = SEPARATOR.join(("JOBID", "STATE", "REASON", "NODELIST", "EXEC_HOST", "TIME_LEFT", "NAME"))
NO_CONTROLLER = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
HANG = "sleep 60"
"""In a child of the script, as in a site's wrapper: to end the script is not enough."""


def queue(**states: str) -> str:
    """The script of a squeue that lists these jobs (`j17="RUNNING"`)."""
    jobs = [SEPARATOR.join((id[1:], state, "None", "n1", "n1", "5:00", "x")) for id, state in states.items()]
    return f"printf '%s\\n' {' '.join(map(shlex.quote, [HEADER, *jobs]))}"


class FakeSlurm:
    """Each call of a client runs the next of its scripts, the last one for ever."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.environment = {"PATH": f"{folder}:{os.defpath}", "SLURM_CONF": "/the/conf"}

    def script(self, name: str, *scripts: str) -> None:
        cases = "\n".join(f"{n}) {script} ;;" for n, script in enumerate(scripts[:-1], start=1))
        calls = shlex.quote(str(self.folder / f"{name}.calls"))
        path = self.folder / f"{name}.new"
        path.write_text(
            f'#!/bin/sh\necho "$$ $*" >> {calls}\ncase $(wc -l < {calls}) in\n{cases}\n*) {scripts[-1]} ;;\nesac\n'
        )
        path.chmod(0o755)
        (self.folder / f"{name}.calls").write_text("")
        path.rename(self.folder / name)

    def calls(self, name: str) -> list[str]:
        """The arguments of each call so far."""
        return [line.partition(" ")[2] for line in self._lines(name)]

    def pids(self, name: str) -> list[int]:
        return [int(line.split()[0]) for line in self._lines(name)]

    def _lines(self, name: str) -> list[str]:
        return (self.folder / f"{name}.calls").read_text().splitlines()
