"""A run on this host: how its controller is started, and how nodes are held and agents started.

Every node is an agent process of its own, `local-0` and so on, each with its own shared memory.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

from pipeline.config import Config
from pipeline.processes import dying_with, python_command, python_environment
from pipeline.run_folder import RunFolder

_LEAVE_S = 5.0  # an agent on TERM has weights to unlink and a zygote to end; both take milliseconds


def start_controller(run: RunFolder, detach: bool) -> "subprocess.Popen[bytes]":
    """Start the run's controller in a process group of its own, so that a Ctrl-C reaches only the caller.

    Detached it outlives the caller and its terminal, else it dies with the caller (from its main thread only). What
    it prints goes to logs/controller.log.
    """
    log = controller_log(run)
    log.parent.mkdir(mode=0o700, exist_ok=True)
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        return subprocess.Popen(
            python_command("pipeline.cli.main", "_controller", str(run.path)),
            env=python_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=detach,
            process_group=None if detach else 0,
            preexec_fn=None if detach else dying_with(signal.SIGKILL),
        )


class LocalCluster:
    """The nodes of a local run. The agents die with the process that starts them (from its main thread only)."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        self._run = run
        self._num_slots = config.cluster.slots_per_node
        self._nodes = [f"local-{index}" for index in range(config.cluster.nodes)]
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._attempt = 0
        self._endpoint = ""

    def start_agents(self, attempt: int, endpoint: str) -> list["subprocess.Popen[bytes]"]:
        """One agent per node, in the nodes' order; each joins the controller at `endpoint` by itself."""
        self._attempt, self._endpoint = attempt, endpoint
        return [self.restart(node) for node in self._nodes]

    def restart(self, node: str) -> "subprocess.Popen[bytes]":
        """Start the node's agent, again if there was one: a silent one is killed first, with all it has."""
        old = self._agents.get(node)
        if old is not None:
            old.kill()
            old.wait()
        log = self._run.process_log(self._attempt, node, "agent")
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
            self._agents[node] = subprocess.Popen(
                self.agent_command(node),
                env=python_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return self._agents[node]

    def agent_command(self, node: str) -> list[str]:
        return python_command(
            "slurm.agent",
            str(self._run.path),
            *("--node", node, "--slots", str(self._num_slots)),
            *("--attempt", str(self._attempt), "--endpoint", self._endpoint),
            *("--parent", str(os.getpid())),
        )

    def stop(self) -> None:
        """End what is left of the agents: first TERM, so that they unlink their shared memory, then KILL."""
        left = [agent for agent in self._agents.values() if agent.poll() is None]
        for agent in left:
            agent.terminate()
        deadline = time.monotonic() + _LEAVE_S
        for agent in left:
            try:
                agent.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


def controller_log(run: RunFolder) -> Path:
    return run.path / "logs" / "controller.log"
