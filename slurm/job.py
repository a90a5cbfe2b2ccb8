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
from slurm.names import REPLACES, RESTARTS, contact
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
    """How often the job may still be started again."""
    replaces: str = ""
    """The job in whose place this one is: ended, unless that was done."""
    agents_come = True

    @classmethod
    def here(cls, run: RunFolder, max_requeues: int) -> "JobCluster":
        life = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        host = socket.gethostbyname(socket.gethostname())
        replaces = os.environ.get(REPLACES, "")
        return cls(run, life, host, max_requeues - int(os.environ.get(RESTARTS, "0")), replaces)

    def start_agents(self, attempt: int, endpoint: str) -> dict[str, "subprocess.Popen[bytes]"]:
        write_json(contact(self.run, self.life), {"attempt": attempt, "endpoint": endpoint})
        return {}

    def start_agent(self, node: str, attempt: int, endpoint: str) -> None:
        """The script does."""

    async def watch(self, gone: Callable[[str, str], None]) -> NoReturn:
        """A node that Slurm has taken from the job never returns to it. Slurm's silence says nothing."""
        job, watcher, missing = self.life.partition(".")[0], Watcher(Clients()), set[str]()
        watcher.watch(job)
        await asyncio.to_thread(self._take_over, job)
        had: set[str] = set()
        while True:
            seen = await asyncio.to_thread(watcher.look, job)
            if seen.job is not None and seen.silent_s is None and seen.job.nodes:
                had |= set(seen.job.nodes)
                for node in sorted(had - set(seen.job.nodes) - missing):
                    missing.add(node)
                    gone(node, f"Slurm has taken it from job {job}")
            await asyncio.sleep(_WATCH_S)

    def _take_over(self, job: str) -> None:
        """Whoever submitted this job may have died before it did this."""
        if self.replaces:
            write_json(self.run.job, {"id": job})
            with contextlib.suppress(SlurmError):
                Clients().cancel(self.replaces)

    def stop(self) -> None:
        """They are told to quit, and leave when they hear nothing any more."""
