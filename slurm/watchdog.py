"""What an agent does in a Slurm job when its controller is gone, and with it, maybe, the batch script that would have
the job requeued."""

import math
import os
import time
from pathlib import Path

from pipeline.core.errors import SlurmError
from pipeline.run_folder import RunFolder, write_json
from slurm.commands import Clients
from slurm.names import requeue_marker, script_beat

_ALIVE_S = 3.0
"""A controller that lives has written its status within this time."""
_SCRIPT_ALIVE_S = 5.0
_EXCLUDE_S, _EXCLUDE_POLL_S = 5.0, 0.1


def requeue(run: RunFolder, life: str, max_requeues: int, clients: Clients | None = None) -> str:
    """Have the job start again, on other nodes than its batch host, if that is this agent's to do; says what it did.

    It is, unless the run is over, its controller lives and only this agent has lost it, or another agent was first.
    """
    job, _, restarts = life.partition(".")
    if run.ended.exists():
        return "the run is over"
    if (silent_s := age_s(run, run.status)) < _ALIVE_S:
        return f"the controller lives, it wrote its status {silent_s:.1f} s ago: it has given up this agent"
    try:
        os.close(os.open(requeue_marker(run, life), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return "another agent has the job requeued"
    if int(restarts) >= max_requeues:
        reason = f"its controller is gone, and its job was requeued {restarts} times (cluster.slurm.max_requeues)"
        write_json(run.ended, {"status": "failed", "attempt": 0, "reason": reason})
        return reason
    clients = clients or Clients()
    try:
        host = _batch_host(job, clients)
        clients.requeue(job)
    except SlurmError as error:
        return f"the job could not be requeued: {error}"
    return f"job {job} is requeued; {_exclude(job, host, clients)}"


def leave_on_term(run: RunFolder, life: str, clients: Clients | None = None) -> str:
    """Slurm ends this life of the job by itself, or has it start again. Only where its batch host had crashed, that
    must be elsewhere; says what it did."""
    if age_s(run, script_beat(run, life)) < _SCRIPT_ALIVE_S:
        return "the job's script lives"
    job, clients = life.partition(".")[0], clients or Clients(timeout_s=5.0, tries=1)
    try:
        return _exclude(job, _batch_host(job, clients), clients)
    except SlurmError as error:
        return f"its batch host is not known: {error}"


def age_s(run: RunFolder, path: Path) -> float:
    """Since when the file was not written any more, by the clock of the file system's own host; for ever, if there is
    none."""
    now = run.secrets / f"now-{os.getpid()}-{time.monotonic_ns()}"
    try:
        now.touch(0o600, exist_ok=False)
        return now.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
    finally:
        now.unlink(missing_ok=True)


def _batch_host(job: str, clients: Clients) -> str:
    found = clients.jobs().get(job)
    return found.batch_host if found is not None else ""


def _exclude(job: str, host: str, clients: Clients) -> str:
    """A batch host that crashed still has the old script when it returns: a job that starts there again is held. Slurm
    takes this only of a job that does not run any more, which may be a moment away; says what became of it."""
    deadline = time.monotonic() + _EXCLUDE_S
    while host:
        try:
            clients.update_job(job, ExcNodeList=host)
        except SlurmError as error:
            if time.monotonic() > deadline:
                return f"{host} could not be excluded from its next start: {error}"
            time.sleep(_EXCLUDE_POLL_S)
        else:
            return f"{host} is excluded from its next start"
    return "its batch host is not known"
