"""Slurm's clients, as this package uses them: with a time limit, without a shell, from inside of jobs as from outside.

A client hangs or fails whenever Slurm's controller is busy, restarting or unreachable. That is an outage: nothing was
learnt, and asking again is all that one may do.
"""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipeline.core.errors import SlurmError
from pipeline.processes import SHIELD, describe_exit, python_environment
from slurm.parse import (
    JOB_FORMAT,
    NODE_FORMAT,
    STEP_FORMAT,
    JobState,
    NodeState,
    StepState,
    parse_jobs,
    parse_jobs_json,
    parse_nodes,
    parse_steps,
)

_OF_JOBS = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_")
_POINTERS = ("SLURM_CONF", "SLURM_CONF_SERVER")
"""Which cluster this is: kept."""

_UNREACHED = re.compile(r"Unable to contact|connect failure|Connection refused|Unable to establish", re.IGNORECASE)
"""The controller did not get the request."""
OUTAGE = re.compile(
    rf"{_UNREACHED.pattern}|timed out|Zero Bytes|standby mode|Transport endpoint|temporarily|connection failure"
    r"|Connection reset|Network is unreachable|authentication error|munge|rate limit|Unexpected message"
    r"|Insane message|DB index is being set",
    re.IGNORECASE,
)
"""The controller could not answer now, whatever it did with the request."""
_IS_OVER = re.compile(r"Invalid job id|already completing or completed", re.IGNORECASE)
_LONGEST_PAUSE_S = 10.0

T = TypeVar("T")


def outside_of_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a job's own (or a user's settings for the clients) would do to a client, or to a
    job submitted in it."""
    return {name: value for name, value in environment.items() if name in _POINTERS or not name.startswith(_OF_JOBS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """Each call takes at most `tries` times `timeout_s` and the pauses between, which double from `pause_s` on.

    They run in `environment`, or without one in this process's own at that moment, outside of jobs.

    All raise SlurmError with the command and what it said; its `is_outage` tells whether Slurm refused or was not
    there. What changes something is repeated only where that cannot do it twice.
    """

    timeout_s: float = 20.0
    tries: int = 4
    pause_s: float = 1.0
    environment: Mapping[str, str] | None = None

    def jobs(self) -> dict[str, JobState]:
        """All jobs of this user that Slurm remembers, also ended ones, by id.

        By user and not by id, for Slurm refuses a list of ids if it has none of them; and as text, for squeue's JSON
        of 22.05 takes no filter and brings the whole queue of the site.
        """
        user = f"--user={os.getuid()}"
        return self._ask(["squeue", "--all", "--array", "--states=all", user, f"--format={JOB_FORMAT}"], parse_jobs)

    def jobs_in_full(self) -> dict[str, JobState]:
        """As `jobs`, with `restarts`, and of all users where squeue takes no filter: not for polling."""
        command = ["squeue", "--all", "--array", "--states=all", f"--user={os.getuid()}", "--json"]
        return self._ask(command, lambda text: parse_jobs_json(text, time.time()))

    def steps(self, job: str) -> dict[str, StepState]:
        """Those of the job that Slurm believes to run, by id; also ones on a node that is dead."""
        return self._ask(["squeue", "--steps", f"--jobs={job}", f"--format={STEP_FORMAT}"], parse_steps)

    def nodes(self) -> dict[str, NodeState]:
        """All nodes of the cluster, by name."""
        return self._ask(["sinfo", "--Node", "--all", f"--format={NODE_FORMAT}"], parse_nodes)

    def config(self) -> str:
        """All settings of the site, as text."""
        return self._run(["scontrol", "show", "config"])

    def partitions(self, *, hidden: bool = False) -> list[str]:
        """Those that this user sees, or also those that are hidden from lists."""
        asked = ["sinfo", *(["--all"] if hidden else []), "--format=%P", "--noheader"]
        return sorted({line.strip().rstrip("*") for line in self._run(asked).split()})

    def requeue(self, job: str) -> None:
        """End what runs of the job, and have it start again. Never twice: where it is unknown whether Slurm heard it,
        the outage is raised."""
        self._run(["scontrol", "requeue", job], _UNREACHED)

    def keep_nodes(self, job: str, nodes: Sequence[str]) -> None:
        """Give Slurm the job's other nodes. It leaves scripts about the new size where it is called: in a folder that
        is removed."""
        with tempfile.TemporaryDirectory() as folder:
            self._run(["scontrol", "update", f"JobId={job}", f"NodeList={','.join(nodes)}"], cwd=folder)

    def cancel(self, job: str, signal_name: str | None = None) -> None:
        """End a job or a step, or send it a signal. That it is over or unknown is no error: scancel says so also of one
        whose processes it has just reached."""
        asked = [] if signal_name is None else [f"--signal={signal_name}"]
        try:
            self._run(["scancel", *asked, job])
        except SlurmError as error:
            if not _IS_OVER.search(str(error)):
                raise

    def _ask(self, command: Sequence[str], parse: Callable[[str], dict[str, T]]) -> dict[str, T]:
        text = self._run(command)
        try:
            return parse(text)
        except ValueError as error:
            raise SlurmError(f"`{' '.join(command)}` gave no answer: {error}", is_outage=True) from None

    def _run(self, command: Sequence[str], again: re.Pattern[str] = OUTAGE, cwd: str | None = None) -> str:
        """What the client printed. Repeated where its complaint is one that `again` knows."""
        pause_s = self.pause_s
        environment = outside_of_jobs(python_environment()) if self.environment is None else self.environment
        for tries_left in reversed(range(self.tries)):
            returncode, printed, said = _finish(command, environment, self.timeout_s, cwd)
            if returncode == 0:
                return printed
            if not tries_left or not again.search(said):
                raise SlurmError(
                    f"`{' '.join(command)}`: {said or describe_exit(returncode)}", bool(OUTAGE.search(said))
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise AssertionError("a client is tried at least once")


def _finish(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float, cwd: str | None
) -> tuple[int, str, str]:
    """Exit code, output and complaint of a command.

    It ignores signals, for those of a job's step reach it and would end a requeue half-way. It is ended with all that
    it started, for a site's client may be a script.
    """
    process = subprocess.Popen(
        [*SHIELD, *command],
        env=dict(environment),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, said = process.communicate(timeout=timeout_s)
        return process.returncode, printed, said.strip()
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL, "", f"timed out after {timeout_s:g} s"
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
