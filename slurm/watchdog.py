"""What an agent does in a Slurm job when its controller is gone, and with it, maybe, the batch script that would have
the job requeued."""

import os

from pipeline.core.errors import SlurmError
from pipeline.run_folder import RunFolder, write_json
from slurm.commands import Clients
from slurm.names import requeue_marker

_ALIVE_S = 3.0
"""A controller that lives has written its status within this time."""


def requeue(run: RunFolder, life: str, max_requeues: int, clients: Clients | None = None) -> str:
    """Have the job start again, on other nodes than its batch host, if that is this agent's to do; says what it did.

    It is, unless the run is over, its controller lives and only this agent has lost it, or another agent was first.
    """
    job, _, restarts = life.partition(".")
    if run.ended.exists():
        return "the run is over"
    marker = requeue_marker(run, life)
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return "another agent has the job requeued"
    try:  # both times are those of the file system's host
        age_s = marker.stat().st_mtime - run.status.stat().st_mtime
    except FileNotFoundError:
        age_s = _ALIVE_S
    if age_s < _ALIVE_S:
        marker.unlink()
        return f"the controller lives, it wrote its status {age_s:.1f} s ago: it has given up this agent"
    if int(restarts) >= max_requeues:
        reason = f"its controller is gone, and its job was requeued {restarts} times (cluster.slurm.max_requeues)"
        write_json(run.ended, {"status": "failed", "attempt": 0, "reason": reason})
        return reason
    clients = clients or Clients()
    try:
        exclude_batch_host(job, clients)
        clients.requeue(job)
    except SlurmError as error:
        return f"the job could not be requeued: {error}"
    return f"job {job} is requeued"


def exclude_batch_host(job: str, clients: Clients) -> None:
    """A batch host that crashed still has the old script when it returns: a job that starts there again is held."""
    found = clients.jobs().get(job)
    if found is not None and found.batch_host:
        clients.update_job(job, ExcNodeList=found.batch_host)
