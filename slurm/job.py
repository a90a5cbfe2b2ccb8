"""Inside a run's Slurm job: the controller's step, and what its cluster is."""

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from pipeline.core.errors import SlurmError
from pipeline.processes import say
from pipeline.run_folder import RunFolder, write_json
from slurm.commands import Clients
from slurm.lookout import Lookout
from slurm.names import REPLACES, RESTARTS, agent_step, contact, num_charged, taken_marker
from slurm.parse import JobState, expand_nodes

_WATCH_S = 3.0
_DRAINED_S = 12.0
_STEP_S = 10.0
"""So long after a node's agent was lost its step is ended, if that is still there: then the script starts it again."""
_EARLY_S = 90.0
"""So much earlier than asked for Slurm may warn of a time limit, which it looks at each half minute."""


@dataclass(slots=True)
class JobCluster:
    """The nodes of the job that this process runs in. Agents are started by its batch script, and come by
    themselves."""

    run: RunFolder
    life: str
    host: str
    max_requeues: int
    min_nodes: int = 1
    replaces: str = ""
    """The job in whose place this one is: ended, unless that was done."""
    lost: dict[str, float] = field(default_factory=dict)
    """Since when (monotonic) which nodes' agents are waited for."""
    ends: float = -math.inf
    """When (monotonic) the job's time limit comes, as far as Slurm has said so."""
    agents_come = True

    @classmethod
    def here(cls, run: RunFolder, max_requeues: int, min_nodes: int) -> "JobCluster":
        life = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        host = _own_address(expand_nodes(os.environ.get("SLURM_JOB_NODELIST", "")))
        replaces = os.environ.get(REPLACES, "")
        return cls(run, life, host, max_requeues, min_nodes, replaces)

    @property
    def returns_times(self) -> int:
        return self.max_requeues - num_charged(self.run, int(os.environ.get(RESTARTS, "0")))

    def taken(self, warning_s: float) -> None:
        """Long before its time limit this is a preemption, or somebody's requeue: nothing that the run is charged
        with."""
        if self.ends - time.monotonic() > warning_s + _EARLY_S:
            taken_marker(self.run, self.life).touch(0o600)

    def start_agents(self, attempt: int, endpoint: str) -> dict[str, "subprocess.Popen[bytes]"]:
        write_json(contact(self.run, self.life), {"attempt": attempt, "endpoint": endpoint})
        return {}

    def start_agent(self, node: str, attempt: int, endpoint: str) -> None:
        """The script does, as soon as the step of the old one has ended. Where all of a node died at once, srun hears
        of that only from Slurm, and Slurm maybe never, if the node is back soon."""
        self.lost[node] = time.monotonic()

    async def watch(self, gone: Callable[[str, str], None]) -> NoReturn:
        """A node that Slurm has taken from the job never returns to it; one that is to be drained is given to it. Its
        silence says nothing."""
        job, lookout, missing = self.life.partition(".")[0], Lookout(Clients()), set[str]()
        lookout.watch(job)
        await asyncio.to_thread(self._take_over, job)
        had, drained_at = set[str](), 0.0
        while True:
            seen = await asyncio.to_thread(lookout.look, job)
            if seen.job is not None and seen.silent_s is None and seen.job.nodes:
                left_s = seen.job.time_left_s
                self.ends = time.monotonic() + (math.inf if left_s is None else left_s)
                had |= set(seen.job.nodes)
                for node in sorted(had - set(seen.job.nodes) - missing):
                    missing.add(node)
                    gone(node, f"Slurm has taken it from job {job}")
                if time.monotonic() > drained_at:
                    drained_at = time.monotonic() + _DRAINED_S
                    await asyncio.to_thread(self._give_back, seen.job)
            await asyncio.to_thread(self._end_dead_steps, job)
            if self.run.ended.exists():  # cancelled, and the signal has not come
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(_WATCH_S)

    def _take_over(self, job: str) -> None:
        """Whoever submitted this job may have died before it did this."""
        if self.replaces:
            write_json(self.run.job, {"id": job})
            with contextlib.suppress(SlurmError):
                Clients().cancel(self.replaces)

    def _give_back(self, job: JobState) -> None:
        """Who drains a node waits for this job to leave it. If the run can do without, the job goes on without; else,
        or if it is the batch host, the run saves and leaves, as on Slurm's own warning, and a new job takes its place.
        """
        with contextlib.suppress(SlurmError):
            clients = Clients(tries=1)
            seen = clients.nodes()
            kept = [node for node in job.nodes if node not in seen or not seen[node].is_draining]
            if len(kept) == len(job.nodes):
                return
            drained = ", ".join(f"{node} ({seen[node].reason})" for node in job.nodes if node not in kept)
            if job.batch_host in kept and len(kept) >= self.min_nodes:
                say(f"to be drained: {drained}: given back")
                clients.keep_nodes(job.id, kept)
            else:
                say(f"to be drained: {drained}: the run goes on in a new job")
                os.kill(os.getpid(), signal.SIGUSR2)

    def _end_dead_steps(self, job: str) -> None:
        """A step on a lost node that is older than the loss."""
        now = time.monotonic()
        due = {node: now - since for node, since in self.lost.items() if now - since > _STEP_S}
        if due:
            with contextlib.suppress(SlurmError):
                clients = Clients(tries=1)
                for step in clients.steps(job).values():
                    if step.name == agent_step(self.run) and any(
                        step.age_s > due.get(node, math.inf) for node in step.nodes
                    ):
                        clients.cancel(step.id)
                for node in due:
                    del self.lost[node]

    def stop(self) -> None:
        """They are told to quit, and leave when they hear nothing any more."""


def _own_address(nodes: Sequence[str]) -> str:
    """That by which the job's other nodes reach this one. Its own name may stand for 127.0.1.1 here, so it is asked
    which address a packet to one of the others would have."""
    for node in nodes:
        with contextlib.suppress(OSError):
            other = socket.gethostbyname(node)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((other, 9))  # sends nothing
                mine = str(probe.getsockname()[0])
            if mine != other and not mine.startswith("127."):
                return mine
    return socket.gethostbyname(socket.gethostname())
