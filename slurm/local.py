"""A run on this host: how its controller is started, and how nodes are held and agents started.

Every node is an agent process of its own, `local-0` and so on, each with its own shared memory.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pipeline.compose import read_tree
from pipeline.core.errors import RunError
from pipeline.processes import STOPPING, dying_with, python_command, python_environment
from pipeline.run_folder import RunFolder
from slurm.allocator import VISIBLE, devices_here

if TYPE_CHECKING:
    from pipeline.config import Config

_LEAVE_S = 5.0  # an agent on TERM has weights to unlink and a zygote to end; both take milliseconds
_GONE_S = 5.0  # what a dead agent had is killed by the kernel, and removed by its guardian, within milliseconds


def start_controller(run: RunFolder, detach: bool) -> "subprocess.Popen[bytes]":
    """Start the run's controller in a process group of its own, so that a Ctrl-C reaches only the caller.

    Detached it outlives the caller and its terminal, else it dies with the caller (from its main thread only). What
    stops a run is kept from it until it can take that. What it prints goes to logs/controller.log.
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
            preexec_fn=_before_controller(detach),
        )


def _before_controller(detach: bool) -> Callable[[], None]:
    """What the child does before it becomes the controller."""
    die_with_caller = None if detach else dying_with(signal.SIGKILL)

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        if die_with_caller is not None:
            die_with_caller()

    return prepare


@dataclass(frozen=True, slots=True)
class _Agent:
    """`witness`: the end of a pipe whose other end is closed when nothing of this life of the agent is left: no
    process, no shared memory, no temporary file."""

    process: "subprocess.Popen[bytes]"
    witness: int

    def end(self, grace_s: float) -> None:
        """TERM, so that it ends in order, then KILL."""
        if self.process.poll() is None and grace_s:
            self.process.terminate()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a broken disk cannot be killed
                self.process.wait(_GONE_S)

    def is_gone(self, timeout_s: float) -> bool:
        return bool(select.select([self.witness], [], [], timeout_s)[0])


class LocalCluster:
    """The nodes of a local run. The agents die with the process that starts them (from its main thread only)."""

    host = "127.0.0.1"
    agents_come = False
    returns_times = 0

    def __init__(self, run: RunFolder, config: "Config | None" = None) -> None:
        """Without `config` the run's own is read, as it is: it was validated at submit, and loading the schema takes
        as long as starting an agent."""
        size = config.cluster.model_dump() if config is not None else read_tree(run.config)["cluster"]
        self._run = run
        self._num_slots: int = size["slots_per_node"]
        self.nodes = [f"local-{index}" for index in range(size["nodes"])]
        self._agents: dict[str, _Agent] = {}

    def start_agents(self, attempt: int, endpoint: str) -> dict[str, "subprocess.Popen[bytes]"]:
        return {node: self.start_agent(node, attempt, endpoint) for node in self.nodes}

    def start_agent(self, node: str, attempt: int, endpoint: str) -> "subprocess.Popen[bytes]":
        """Start the node's agent; it joins the controller at `endpoint` by itself. An older one is killed first, with
        all it has. Raises RunError while something of that is left."""
        old = self._agents.get(node)
        if old is not None:
            old.end(0)
            if not old.is_gone(_GONE_S):
                raise RunError(f"processes of its old agent {old.process.pid} are still there {_GONE_S:g} s after it")
            os.close(old.witness)
            del self._agents[node]
        log = self._run.process_log(attempt, node, "agent")
        environment = python_environment()
        if (devices := devices_here(environment)) is not None:  # each node has GPUs of its own
            first = self.nodes.index(node) * self._num_slots
            environment[VISIBLE] = ",".join(devices[first : first + self._num_slots])
        witness, its = os.pipe()
        try:
            with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
                process = subprocess.Popen(
                    self.agent_command(node, attempt, endpoint, its),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[its],
                )
        except OSError:
            os.close(witness)
            raise
        finally:
            os.close(its)
        self._agents[node] = _Agent(process, witness)
        return process

    async def watch(self, gone: Callable[[str, str], None]) -> NoReturn:
        """This host is always there."""
        import asyncio

        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable: nobody sets it")

    def agent_command(self, node: str, attempt: int, endpoint: str, witness: int) -> list[str]:
        return python_command(
            "slurm.agent",
            str(self._run.path),
            *("--node", node, "--slots", str(self._num_slots)),
            *("--attempt", str(attempt), "--endpoint", endpoint),
            *("--parent", str(os.getpid()), "--witness", str(witness)),
        )

    def taken(self, warning_s: float) -> None:
        """Nobody lends these nodes."""

    def stop(self) -> None:
        """End what is left of the agents, and see to it that nothing of them is left."""
        deadline = time.monotonic() + _LEAVE_S
        for agent in self._agents.values():
            if agent.process.poll() is None:
                agent.process.terminate()
        for agent in self._agents.values():
            agent.end(max(0.0, deadline - time.monotonic()))
        deadline = time.monotonic() + _GONE_S
        for agent in self._agents.values():
            agent.is_gone(max(0.0, deadline - time.monotonic()))
            os.close(agent.witness)
        self._agents.clear()


def controller_log(run: RunFolder) -> Path:
    return run.path / "logs" / "controller.log"
