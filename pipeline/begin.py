"""What an attempt starts first: agents and queue server take longest to be ready, the controller's own imports next.

So nothing that the start of these does not need may be imported here.
"""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from pipeline.channel import ControllerEnd, make_keys
from pipeline.kill_points import be_controller
from pipeline.queue.process import QueueProcess
from pipeline.run_folder import RunFolder


class Cluster(Protocol):
    """The two functions in which `local` and `slurm` differ: hold nodes, start agents.

    `host`: the address of this process's node, for the others to connect to; `agents_come`: agents are started by
    somebody else, and come by themselves.
    """

    host: str
    agents_come: bool

    @property
    def returns_times(self) -> int:
        """How often nodes that are taken from the run are given back to it."""

    def taken(self, warning_s: float) -> None:
        """The nodes are wanted back, of which one is told so long before the time for which they were lent is over."""

    def start_agents(self, attempt: int, endpoint: str) -> dict[str, "subprocess.Popen[bytes]"]:
        """The first agent of each node, by node; nothing of those that come by themselves once they know of
        `endpoint`."""

    def start_agent(self, node: str, attempt: int, endpoint: str) -> "subprocess.Popen[bytes] | None":
        """Start the node's agent again. What is left of an older one is ended first; OSError or RunError if that fails.
        None where it comes by itself."""

    async def watch(self, gone: Callable[[str, str], None]) -> NoReturn:
        """Endless. `gone(node, reason)`: it is no node of the run's any more, and does not come back."""

    def stop(self) -> None:
        """End at once what is left of the agents. Idempotent."""


@dataclass(frozen=True, slots=True)
class Begun:
    """`agents` by node."""

    attempt: int
    channel: ControllerEnd
    agents: dict[str, "subprocess.Popen[bytes]"]
    queue: QueueProcess


def begin(run: RunFolder, attempt: int, cluster: Cluster, restarts: int) -> Begun:
    """Start all processes of an attempt. Call it inside the running loop, on the main thread."""
    be_controller()
    make_keys(run.secrets)
    channel = ControllerEnd(run.secrets, attempt, cluster.host)
    agents = cluster.start_agents(attempt, channel.endpoint)
    queue = QueueProcess(run, attempt, restarts, cluster.host)
    queue.make_key()
    queue.start()
    return Begun(attempt, channel, agents, queue)
