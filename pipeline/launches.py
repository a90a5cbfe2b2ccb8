"""Workers that are steps of their own: what agents ask of the launcher, and what it says to them.

A launch is known from its agent's word until its end (the words: pipeline.wire_launch). What was asked for while there
is no launcher waits for one; what was asked of one that has ended is over, for its steps end with it.
"""

from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field

from pipeline import wire
from pipeline.core.errors import ChannelBroken
from pipeline.processes import say
from pipeline.wire_launch import EndLaunch, Launch, LaunchAsked, LaunchEnded, LauncherJoined

_Key = tuple[str, str, int]


@dataclass
class Launches:
    """`send` is the channel's. The agents' peers change with each life of theirs."""

    send: Callable[[bytes, wire.ToAgent], Awaitable[None]]
    _launcher: bytes = b""
    _waiting: dict[_Key, tuple[bytes, Launch]] = field(default_factory=dict)
    _begun: dict[_Key, bytes] = field(default_factory=dict)

    async def hear(self, peer: bytes, body: wire.FromAgent) -> bool:
        """False if it is not the launcher that speaks."""
        if isinstance(body, LauncherJoined):
            await self._join(peer)
        elif peer != self._launcher:
            return False
        elif isinstance(body, LaunchEnded):
            agent = self._begun.pop((body.node, body.worker, body.life), b"")
            if agent:
                await self._try(agent, body)
        return True

    async def note(self, node: str, peer: bytes, body: wire.FromAgent) -> None:
        """The node's agent speaks, and that may concern the launcher."""
        if isinstance(body, LaunchAsked):
            launch = Launch(node=node, worker=body.worker, life=body.life, num_slots=body.num_slots, door=body.door)
            self._waiting[node, body.worker, body.life] = (peer, launch)
            await self._begin()
        elif isinstance(body, wire.WorkerExited):
            await self._end((node, body.worker, body.life))

    async def beat(self, agents: Container[bytes]) -> None:
        """Nothing is launched for an agent that is none of `agents` any more. Called again and again."""
        gone = [key for key, (agent, _) in self._waiting.items() if agent not in agents]
        gone += [key for key, agent in self._begun.items() if agent not in agents]
        for key in gone:
            await self._end(key)
        if self._launcher and not await self._try(self._launcher, wire.Beat()):
            await self._lose("it cannot be reached")

    async def close(self, reason: str) -> None:
        if self._launcher:
            await self._try(self._launcher, wire.Quit(reason=reason))

    async def _join(self, peer: bytes) -> None:
        if self._launcher:
            await self._lose("another one has come")
        self._launcher = peer
        await self._begin()

    async def _begin(self) -> None:
        while self._launcher and self._waiting:
            key, (agent, launch) = next(iter(self._waiting.items()))
            if not await self._try(self._launcher, launch):
                await self._lose("it cannot be reached")
                return
            del self._waiting[key]
            self._begun[key] = agent

    async def _end(self, key: _Key) -> None:
        self._waiting.pop(key, None)
        if self._begun.pop(key, b"") and self._launcher:
            node, worker, life = key
            await self._try(self._launcher, EndLaunch(node=node, worker=worker, life=life))

    async def _lose(self, reason: str) -> None:
        """Its steps end with it."""
        say(f"the launcher of steps is lost: {reason}")
        self._launcher = b""
        begun, self._begun = self._begun, {}
        for (node, worker, life), agent in begun.items():
            ended = LaunchEnded(node=node, worker=worker, life=life, reason="the launcher that had its step is lost")
            await self._try(agent, ended)

    async def _try(self, peer: bytes, body: wire.ToAgent) -> bool:
        """Who cannot be reached is lost, which others find out by themselves."""
        try:
            await self.send(peer, body)
        except ChannelBroken:
            return False
        return True
