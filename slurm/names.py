"""What the things of a node's agent are called outside its run's folder. Every name says whose it is."""

import hashlib
import os
from pathlib import Path

from pipeline.run_folder import RunFolder

RESTARTS = "PIVOT_RESTARTS"
"""In a job's environment: how often this job, and those before it in whose place it is, were started again."""
REPLACES = "PIVOT_REPLACES"
"""In a job's environment: the job in whose place it is."""


def user_prefix() -> str:
    return f"pivot-{os.getuid()}-"


def run_prefix(run: RunFolder) -> str:
    """Of this user and run, whatever the attempt and node."""
    return f"{user_prefix()}{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:8]}"


def agent_step(run: RunFolder) -> str:
    """Name of the Slurm steps of its agents: an allocation may have steps of others."""
    return f"{run_prefix(run)}-agent"


def controller_step(run: RunFolder) -> str:
    return f"{run_prefix(run)}-controller"


def gps_base(run: RunFolder, attempt: int, node: str) -> str:
    """Of this user, run, attempt and node alone."""
    return f"{run_prefix(run)}-{attempt}-{node}"


def life_name(run: RunFolder, attempt: int, node: str, pid: int) -> str:
    """Base name of the shared memory of one life of the node's agent: an old and a new one never meet."""
    return f"{gps_base(run, attempt, node)}-{pid}"


def temporary_prefix(run: RunFolder, pid: int) -> str:
    """Short, for sockets are made in there and their paths have 107 bytes."""
    return f"{run_prefix(run)}-{pid}-"


def contact(run: RunFolder, life: str) -> Path:
    """Where the controller of this life of a job (`ID.RESTARTS`) says how to reach it."""
    return run.secrets / f"contact-{life}.json"


def script_beat(run: RunFolder, life: str) -> Path:
    """What the batch script of this life of a job touches every second."""
    return run.secrets / f"script-{life}"


def left_marker(run: RunFolder, life: str, node: str) -> Path:
    """Of a node's agent that wants no other to take its place in this life of a job. Its exit code would not tell: srun
    returns 0 also for one whose node is lost."""
    return run.secrets / f"left-{life}-{node}"


def taken_marker(run: RunFolder, life: str) -> Path:
    """Of a life of a job that Slurm ended long before its time limit, for another job or at somebody's word."""
    return run.secrets / f"taken-{life}"


def num_charged(run: RunFolder, restarts: int) -> int:
    """How many of so many restarts had a reason of the run's own, which is what `max_requeues` bounds."""
    return restarts - len(list(run.secrets.glob("taken-*")))


def forget_restarts(run: RunFolder) -> None:
    """Its user has started it: what was counted before counts no more."""
    for marker in run.secrets.glob("taken-*"):
        marker.unlink(missing_ok=True)


def again_marker(run: RunFolder, life: str) -> Path:
    """Who makes it has the job start again after this life of it."""
    return run.secrets / f"again-{life}"
