"""The controller's side of nodes with real agents, without a core: the test decides."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pipeline import wire, wire_gps
from pipeline.channel import ControllerEnd
from pipeline.checkpoint import Newest
from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.nodes import Nodes
from pipeline.shell import Node
from slurm.local import LocalCluster
from slurm.names import life_name
from tests.fakes.scripted import make_config
from tests.slurm.rig import NODE, WAIT_S, children, make_run

M = TypeVar("M")


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
    """Nodes of a run without a core."""

    def __init__(
        self, path: Path, num_nodes: int = 1, policy: str = "emulated", num_slots: int = 3, **limits: float
    ) -> None:
        """`policy`: the path of the model."""
        self.runner = asyncio.Runner()
        model = {"policy": {"path": policy}}
        cluster = {"nodes": num_nodes, "slots_per_node": num_slots}
        self.config = make_config(limits=limits, cluster=cluster, model=model)
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
        endpoint = channel.endpoint
        self.nodes.adopt({n: self.cluster.start_agent(n, self.attempt, endpoint) for n in self.cluster.nodes})
        self.tasks = [asyncio.create_task(work) for work in (self.nodes.listen(), self.nodes.beat())]

    def do(self, work: Any) -> Any:
        return self.runner.run(asyncio.wait_for(work, WAIT_S))

    def next(self) -> Any:
        return self.do(self._next())

    async def _next(self) -> Any:
        while not self.shell.posted:
            await asyncio.sleep(0.005)
        return self.shell.posted.pop(0)

    def expect(self, kind: type[M], **fields: Any) -> M:
        """The first that was posted of this kind with these fields, now or to come."""

        def is_it(message: Any) -> bool:
            return isinstance(message, kind) and all(getattr(message, name) == fields[name] for name in fields)

        found: M = self.do(self._expect(is_it))
        return found

    async def _expect(self, is_it: Callable[[Any], bool]) -> Any:
        while (found := next(filter(is_it, self.shell.posted), None)) is None:
            await asyncio.sleep(0.005)
        self.shell.posted.remove(found)
        return found

    def until(self, condition: Callable[[], bool]) -> None:
        """While the nodes are listened to."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.005)

        self.do(wait())

    def start(self, node: str = NODE) -> None:
        async def start() -> None:
            self.nodes.start(node)

        self.do(start())

    def send(self, node: str, body: wire.ToAgent) -> None:
        """As the shell does: nothing is said to a node that is lost."""
        if node in self.shell.nodes:
            self.do(self.nodes.send(self.shell.nodes[node].peer, body))

    def begin(self, copy: de.CopyVersion) -> dict[str, wire_gps.Move]:
        """What the shell then says to which node."""
        return self.nodes.copies.begin(copy, (self.shell.nodes[copy.source].peer, self.shell.nodes[copy.node].peer))

    def copy(self, copy: de.CopyVersion) -> None:
        for end, move in self.begin(copy).items():
            self.send(end, move)

    def gps(self, node: str) -> str:
        """Base name of the node's shared memory."""
        return life_name(self.run, self.attempt, node, self.nodes._lives[node].process.pid)

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
