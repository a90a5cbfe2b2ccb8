"""Inside a run's Slurm job: the controller's step, and what its cluster is."""

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from pipeline.core.errors import SlurmError
from pipeline.run_folder import RunFolder, write_json
from slurm.commands import Clients
from slurm.names import contact
from slurm.watcher import Watcher

_WATCH_S = 3.0


@dataclass(slots=True)
class JobCluster:
    """The nodes of the job that this process runs in. Agents are started by its batch script, and come by
    themselves."""

    run: RunFolder
    life: str
    host: str
    returns_times: int
    """How often the job may still be requeued."""
    agents_come = True

    @classmethod
    def here(cls, run: RunFolder, max_requeues: int) -> "JobCluster":
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        life = f"{os.environ['SLURM_JOB_ID']}.{restarts}"
        return cls(run, life, socket.gethostbyname(socket.gethostname()), max_requeues - restarts)

    def start_agents(self, attempt: int, endpoint: str) -> dict[str, "subprocess.Popen[bytes]"]:
        write_json(contact(self.run, self.life), {"attempt": attempt, "endpoint": endpoint})
        return {}

    def start_agent(self, node: str, attempt: int, endpoint: str) -> None:
        """The script does."""

    async def watch(self, gone: Callable[[str, str], None]) -> NoReturn:
        """A node that Slurm has taken from the job never returns to it. Slurm's silence says nothing."""
        job, watcher, missing = self.life.partition(".")[0], Watcher(Clients()), set[str]()
        watcher.watch(job)
        await asyncio.to_thread(self._allow_all_hosts, job)
        had: set[str] = set()
        while True:
            seen = await asyncio.to_thread(watcher.look, job)
            if seen.job is not None and seen.silent_s is None and seen.job.nodes:
                had |= set(seen.job.nodes)
                for node in sorted(had - set(seen.job.nodes) - missing):
                    missing.add(node)
                    gone(node, f"Slurm has taken it from job {job}")
            await asyncio.sleep(_WATCH_S)

    def _allow_all_hosts(self, job: str) -> None:
        """The watchdog of an earlier life may have excluded one, for one start of the job."""
        if any(self.run.secrets.glob(f"requeue-{job}.*")):
            with contextlib.suppress(SlurmError):
                Clients().update_job(job, ExcNodeList="")

    def stop(self) -> None:
        """They are told to quit, and leave when they hear nothing any more."""
