"""What an attempt starts first: agents and queue server take longest to be ready, the controller's own imports next.

So nothing that the start of these does not need may be imported here.
"""

import subprocess
from dataclasses import dataclass
from typing import Protocol

from pipeline.channel import ControllerEnd, make_keys
from pipeline.kill_points import be_controller
from pipeline.queue.process import QueueProcess
from pipeline.run_folder import RunFolder


class Cluster(Protocol):
    """The two functions in which `local` and `slurm` differ: hold nodes, start agents."""

    nodes: list[str]

    def start_agent(self, node: str, attempt: int, endpoint: str) -> "subprocess.Popen[bytes]":
        """Start the node's agent. What is left of an older one is ended first; OSError or RunError if that fails."""

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
    channel = ControllerEnd(run.secrets, attempt)
    agents = {node: cluster.start_agent(node, attempt, channel.endpoint) for node in cluster.nodes}
    queue = QueueProcess(run, attempt, restarts)
    queue.make_key()
    queue.start()
    return Begun(attempt, channel, agents, queue)
