"""The controller's side of a node, with real agents: one NodeLost per life, whatever ends it."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline import wire
from pipeline.channel import AgentEnd, ControllerEnd
from pipeline.checkpoint import Newest
from pipeline.core import events as ev
from pipeline.core.errors import RunError
from pipeline.nodes import Nodes
from pipeline.shell import Node
from slurm.local import LocalCluster
from tests.fakes.scripted import make_config
from tests.slurm.rig import NODE, WAIT_S, children, is_gone, make_run, shared_memory


@dataclass
class Inbox:
    """The shell as its nodes see it."""

    nodes: dict[str, Node] = field(default_factory=dict)
    posted: list[Any] = field(default_factory=list)

    def post(self, event: Any) -> None:
        self.posted.append(event)

    def on_worker(self, message: Any) -> None:
        self.posted.append(message)


class Watch:
    """Nodes of a run without a core: the test decides."""

    def __init__(self, path: Path, **limits: float) -> None:
        self.runner = asyncio.Runner()
        self.config = make_config(limits=limits)
        self.run, self.attempt = make_run(path, self.config)
        self.cluster = LocalCluster(self.run)
        self.shell = Inbox()
        self.newest = Newest(0, "", [])
        self.do(self._open())

    async def _open(self) -> None:
        channel = ControllerEnd(self.run.secrets, self.attempt)
        self.nodes = Nodes(self.run, self.config, self.attempt, self.cluster, channel, lambda: self.newest)
        self.nodes.shell = self.shell  # type: ignore[assignment]
        self.nodes.restored = self.newest
        self.nodes.adopt({NODE: self.cluster.start_agent(NODE, self.attempt, channel.endpoint)})
        self.tasks = [asyncio.create_task(work) for work in (self.nodes.listen(), self.nodes.beat())]

    def do(self, work: Any) -> Any:
        return self.runner.run(asyncio.wait_for(work, WAIT_S))

    def next(self) -> Any:
        return self.do(self._next())

    async def _next(self) -> Any:
        while not self.shell.posted:
            await asyncio.sleep(0.005)
        return self.shell.posted.pop(0)

    def start(self) -> None:
        async def start() -> None:
            self.nodes.start(NODE)

        self.do(start())

    @property
    def life(self) -> Any:
        return self.nodes._lives[NODE]

    def serve(self) -> list[int]:
        """Wait for the node; the pids of its agent, guardian and zygote."""
        joined = self.next()
        assert isinstance(joined, ev.NodeJoined), joined
        return [self.life.process.pid, *children(self.life.process.pid)]

    def close(self) -> None:
        async def close() -> None:
            for task in self.tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*self.tasks)
            await self.nodes.close("the test is over")
            self.nodes.channel.close()

        self.do(close())
        self.runner.close()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    watch = Watch(tmp_path / "run", heartbeat_s=1.0)
    yield watch
    watch.close()


def test_each_life_of_a_node_is_lost_once_however_it_ends(watch: Watch) -> None:
    first = watch.serve()
    os.kill(first[2], signal.SIGKILL)  # NodeFailed comes before the agent's end
    lost = watch.next()
    assert isinstance(lost, ev.NodeLost) and lost.reason.startswith(
        "the zygote ended: killed by SIGKILL\nlast lines of"
    )
    assert all(map(is_gone, first)) and watch.shell.nodes == {}

    watch.start()
    second = watch.serve()
    assert not set(first) & set(second) and list(watch.shell.nodes) == [NODE]
    os.kill(second[0], signal.SIGSTOP)
    start = time.monotonic()
    lost = watch.next()
    assert lost.reason.startswith("its agent was silent for 1.") and "(limits.heartbeat_s)" in lost.reason
    assert 0.9 < time.monotonic() - start < 3
    assert "the zygote ended" not in lost.reason  # that was said in another life
    watch.start()
    watch.serve()
    assert watch.shell.posted == []


def test_what_a_lost_agent_still_says_is_answered_quit(watch: Watch) -> None:
    """Another process in its place, and one that nobody started."""
    watch.serve()
    for pid in (watch.life.process.pid, 1):
        stranger = watch.do(say_join(watch, pid))
        assert isinstance(stranger, wire.Quit)
    assert watch.shell.posted == []


async def say_join(watch: Watch, pid: int) -> Any:
    end = AgentEnd(watch.run.secrets, watch.attempt, watch.nodes.channel.endpoint, f"stranger-{pid}")
    end.send(wire.Join(node=NODE, num_slots=1, pid=pid))
    frame = await end.recv()
    end.close()
    return frame.body


def test_an_agent_that_never_joins_is_lost_with_its_exit_and_its_log(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "run")
    watch.serve()
    code = "import sys; print('it broke', flush=True); sys.exit(7)"
    watch.cluster.agent_command = lambda *args: [sys.executable, "-c", code]  # type: ignore[method-assign]
    watch.start()
    lost = watch.next()
    assert lost.reason == "its agent ended: exit code 7\nlast lines of local-0-agent.log:\nit broke"

    def refuse(*args: Any) -> Any:
        raise RunError("processes of its old agent 7 are still there")

    watch.cluster.start_agent = refuse  # type: ignore[method-assign]
    watch.start()
    assert watch.next().reason == "its agent cannot be started: processes of its old agent 7 are still there"
    watch.close()
    assert shared_memory(watch.run, watch.attempt) == []


def test_an_agent_that_does_not_join_in_time_is_lost(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "run", engine_start_s=1.0, heartbeat_s=0.5)
    os.kill(watch.life.process.pid, signal.SIGSTOP)
    lost = watch.next()
    assert lost.reason.startswith("its agent was silent for 1.") and "(limits.engine_start_s)" in lost.reason
    watch.close()
