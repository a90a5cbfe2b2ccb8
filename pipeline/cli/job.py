"""Runs whose nodes are held by a Slurm job: submitted, followed, asked after and cancelled from the login node."""

import functools
import math
import subprocess
import time
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.runs import Status, as_argument
from pipeline.config import Config
from pipeline.core.errors import ConfigError, SlurmError
from pipeline.run_folder import RunFolder, read_json, write_json
from pipeline.status import EXIT_CODES

if TYPE_CHECKING:
    from slurm.parse import JobState

_POLL_S = 0.5
_FRESH_S = 2.0
"""So old may be what is shown of a job, however often one looks: each question costs Slurm's controller a lock."""
_SILENT_S = 60.0
"""A controller writes its status every second or so."""
_LEAVE_S = 120.0
"""How long a run may take to stop in order before its job is ended."""


class JobProcess:
    """The job, as one follows a process, or the one that took its place. What ends it is the run's marker; or that
    Slurm knows the job no more."""

    def __init__(self, run: RunFolder, job: str) -> None:
        from slurm.commands import Clients
        from slurm.lookout import Lookout

        self._run, self._job, self._lookout = run, job, Lookout(Clients())
        self._lookout.watch(job)
        self.pid = None
        self.returncode: int | None = None
        self._waits = ""
        self._leaves_by = math.inf

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._said()
        if self.returncode is None:
            seen = self._lookout.look(self._job)
            self._tell_queue(seen.job)
            if seen.is_gone or (seen.job is not None and seen.job.is_ended):
                time.sleep(_POLL_S)  # its last words may be on their way through the file system
                code = self._said(is_over=True)
                if code is None and (job := (read_json(self._run.job) or {}).get("id", self._job)) != self._job:
                    self._job = job
                    self._lookout.watch(job)
                else:
                    self.returncode = 1 if code is None else code
        return self.returncode

    def _said(self, is_over: bool = False) -> int | None:
        """The exit code for what the marker of the run's end says, once it is there. `cancel` writes it first, and the
        controller may still save."""
        end = read_json(self._run.ended)
        if end is None:
            return None
        self._leaves_by = min(self._leaves_by, time.monotonic() + _LEAVE_S)
        saves = end["status"] == "cancelled" and (read_json(self._run.status) or {}).get("status") not in EXIT_CODES
        if saves and not is_over and time.monotonic() < self._leaves_by:
            return None
        return EXIT_CODES.get(end["status"], 1)

    def _tell_queue(self, job: "JobState | None") -> None:
        """Why the job waits, whenever Slurm says something else."""
        waits = f"{self._job} is queued ({job.reason or 'no reason given'})" if job and job.state == "PENDING" else ""
        if waits and waits != self._waits:
            click.echo(f"job {waits}")
        self._waits = waits

    def wait(self, timeout: float) -> int:
        """Raises subprocess.TimeoutExpired, as a process does."""
        time.sleep(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"job {self._job}", timeout)
        return code

    def send_signal(self, sig: int) -> None:
        """Who stops looking stops nothing: the run is on other machines. `cancel` does."""
        click.echo(f"{self._run.name} goes on in job {self._job}; pivot-pipeline cancel {as_argument(self._run)}")
        raise SystemExit(128 + sig)


def start_job(run: RunFolder, config: Config, in_allocation: bool) -> str:
    """Submit the job of the run's next attempts, or go on in the allocation that this process is in; its id."""
    from pipeline.cli.controller import control_job
    from slurm.allocation import submit_job
    from slurm.held import hold
    from slurm.names import forget_restarts

    run.ended.unlink(missing_ok=True)  # the script of the job goes by it
    forget_restarts(run)
    job = (hold if in_allocation else submit_job)(run, config, control_job)
    if in_allocation:
        click.echo(f"{run.name} runs in allocation {job} and ends with it, {run.path} is what it writes")
    else:
        click.echo(f"{run.name}: job {job} holds its nodes, {run.path} what it writes")
    click.echo(f"  pivot-pipeline status {as_argument(run)}")
    return job


def with_job(run: RunFolder, status: Status) -> Status:
    """The status with what Slurm says of its job; `live`: the job is there, or may be: Slurm did not answer."""
    told: dict[str, Any] = {"id": (read_json(run.job) or {}).get("id", ""), "state": "", "reason": "", "held": False}
    if (end := read_json(run.ended)) or not told["id"]:
        return status | _end_of(status, end) | {"live": False, "job": told}
    try:
        job = _lately(time.monotonic() // _FRESH_S).get(told["id"]) or _ask().get(told["id"])  # it may be new
    except SlurmError as error:
        return status | {"live": True, "job": told | {"state": "UNKNOWN", "reason": str(error)}}
    if job is None or job.is_ended:
        return status | {"live": False, "job": told | {"state": job.state if job else "GONE"}}
    told |= {"state": job.state, "reason": job.reason, "held": job.is_held}
    if job.state == "RUNNING" and (silent_s := time.time() - status.get("updated", time.time())) > _SILENT_S:
        told["silent_s"] = round(silent_s)
    return status | {"live": True, "job": told}


def _end_of(status: Status, end: dict[str, Any] | None) -> dict[str, Any]:
    """What the marker of the run's end says, where the controller could not write how it ended."""
    if end is None or status["status"] in EXIT_CODES:
        return {}
    return {"status": end["status"], "error": {"reason": end["reason"]} if end.get("reason") else None}


def describe_job(job: dict[str, Any]) -> str:
    text = f"{job['id']} {job['state']}".strip() + (f" ({job['reason']})" if job["reason"] else "")
    if job["held"]:
        text += f": Slurm holds it; `scontrol release {job['id']}` lets it go on, or cancel and resume the run"
    if job.get("silent_s"):
        text += (
            f": nothing of the run was heard of for {job['silent_s']} s; unless Slurm starts it again (it lists a dead "
            "node for a while), cancel and resume the run"
        )
    if job["reason"] == "BadConstraints":
        text += (
            f": it waits for nodes that it may not have; `scontrol update JobId={job['id']} ExcNodeList=` lets it have "
            "its last batch host, which had crashed"
        )
    return text


def cancel_job(run: RunFolder, status: Status) -> None:
    """The marker first: then nothing of the job is started again or requeued. One that waits is ended at once; else
    the controller saves and leaves. An allocation that its user holds stays."""
    told = read_json(run.job) or {}
    write_json(run.ended, {"status": "cancelled", "attempt": status["attempt"]})
    _end(run, told, "TERM" if told.get("in_allocation") or status["job"]["state"] == "RUNNING" else None)
    try:
        let_leave(run)
    except ConfigError:
        _end(run, told, None)
        raise ConfigError(f"{run.name} did not stop within {_LEAVE_S:g} s: its job {told['id']} is ended") from None


def _end(run: RunFolder, told: dict[str, Any], signal_name: str | None) -> None:
    """End the job, or send it a signal. Of an allocation only the run's own steps: the controller hears the signal,
    ended are all."""
    from slurm.commands import Clients
    from slurm.held import steps
    from slurm.names import controller_step

    clients = Clients()
    if not told.get("in_allocation"):
        clients.cancel(told["id"], signal_name)
        return
    for id, name in steps(run, told["id"], clients).items():
        if signal_name is None or name == controller_step(run):
            clients.cancel(id, signal_name)


def let_leave(run: RunFolder) -> None:
    """Wait until the job of a run that is over is over too: its script goes by the marker of the run's end, which the
    next attempt takes away. Raises ConfigError if it stays. Where Slurm does not answer, the marker is enough."""
    told = read_json(run.job) or {}
    deadline = time.monotonic() + _LEAVE_S
    while told and (state := _state(run, told)):
        if time.monotonic() > deadline:
            raise ConfigError(f"job {told['id']} of {run.name} is {state}, though the run is over: `scancel` it first")
        time.sleep(_POLL_S)


def _state(run: RunFolder, told: dict[str, Any]) -> str:
    """Slurm's word for a run's job that is not over; "" for one that is, or is unknown, or where Slurm is silent. Of an
    allocation only the run's own steps count."""
    from slurm.commands import Clients
    from slurm.held import steps

    try:
        found = _ask().get(told["id"])
        if found is None or found.is_ended or (told.get("in_allocation") and not steps(run, found.id, Clients())):
            return ""
    except SlurmError:
        return ""
    return found.state


@functools.lru_cache(maxsize=1)
def _lately(period: float) -> "dict[str, JobState]":
    """What Slurm says of all jobs, asked once in each period of `_FRESH_S`; SlurmError as below."""
    return _ask()


def _ask() -> "dict[str, JobState]":
    """What Slurm says now of all jobs that it knows; SlurmError if it does not answer soon."""
    from slurm.commands import Clients

    return Clients(timeout_s=5.0, tries=2).jobs()
