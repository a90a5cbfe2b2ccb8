"""The controller's side of its nodes: the lives of their agents, and what they say.

    STARTED ─Join▶ JOINED ─NodeReady▶ SERVING ─▶ LOST (one NodeLost, once its process has ended)

A life ends with the end of its agent's process. An agent that says that it leaves, whose channel is broken, or that is
silent for too long is lost at once: nothing is sent to it, what it says is answered `Quit`, and it is killed.
"""

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pipeline import wire, wire_gps
from pipeline.begin import Cluster
from pipeline.channel import ControllerEnd
from pipeline.checkpoint import Newest, local_model
from pipeline.config import Config
from pipeline.copies import Copies
from pipeline.core import events as ev
from pipeline.core.errors import ChannelBroken, RunError
from pipeline.fetches import Fetches
from pipeline.gps.placement import deal_out
from pipeline.launches import Launches
from pipeline.preload import of_zygote
from pipeline.processes import beat_period_s, describe_exit, log_tail, say, when_ended
from pipeline.run_folder import RunFolder
from pipeline.shell import Node, Shell
from pipeline.wire_launch import LaunchAsked, LaunchEnded, LauncherJoined

_LEAVE_S = 5.0
"""How long an agent gets to leave by itself: it ends its workers and unlinks its shared memory."""
_DEATH_S = 10.0
"""How long a killed one may take to be dead; a process that waits for a broken disk cannot be killed."""
_LAST_WORDS_S = 0.3
_POLL_S = 0.005


@dataclass(eq=False)
class _Life:
    """One life of a node's agent. `process`: None where it came by itself, from another host; `logs`: how long they
    were before it; `heard`: when it was started or last spoke (monotonic); `version`: the weights that it was told to
    put into its memory, and `piles`: which tensors of them; `is_ready`: it has; `reason`: why it is over."""

    node: str
    pid: int
    process: "subprocess.Popen[bytes] | None"
    logs: dict[Path, int]
    is_first: bool
    heard: float
    peer: bytes = b""
    version: int = 0
    piles: tuple[int, ...] = ()
    is_ready: bool = False
    reason: str = ""
    is_reported: bool = False


@dataclass
class Nodes:
    """`restored` is the checkpoint that the run started from, `newest()` (it may block) the newest one of now."""

    run: RunFolder
    config: Config
    attempt: int
    cluster: Cluster
    channel: ControllerEnd
    shell: Shell = field(init=False)
    restored: Newest = field(init=False)
    newest: Callable[[], Newest]

    def __post_init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        self._numbers: dict[str, int] = {}
        self._is_over = False
        self._welcomes: set[asyncio.Task[None]] = set()
        limits = self.config.limits
        self._beat_s = beat_period_s(limits.heartbeat_s)
        # As long as the trainer waits for a slot: a replica that is being started may hold it.
        self.copies = Copies(self.run.rendezvous, self.attempt, limits.publish_s + limits.engine_start_s)
        self.fetches = Fetches(self.run.rendezvous, self.attempt, limits.publish_s)
        self.launches = Launches(self.channel.send)

    def adopt(self, agents: dict[str, "subprocess.Popen[bytes]"]) -> None:
        """These have just been started, as the first of their nodes."""
        for node, process in agents.items():
            logs = dict.fromkeys(self._logs(node), 0)
            self._live(_Life(node, process.pid, process, logs, is_first=True, heard=time.monotonic()))

    def start(self, node: str) -> None:
        """Start the node's agent again. Ends in NodeJoined or NodeLost. Main thread only."""
        old = self._lives.get(node)
        if old is not None:  # who asks for a new life has given up the old one
            self._lose(old, "it is started again")
            old.is_reported = True
        logs = self._sizes(node)
        try:
            process = self.cluster.start_agent(node, self.attempt, self.channel.endpoint)
        except (OSError, RunError) as error:
            self.shell.post(ev.NodeLost(node=node, reason=f"its agent cannot be started: {error}"))
            return
        if process is not None:
            self._live(_Life(node, process.pid, process, logs, is_first=False, heard=time.monotonic()))

    def end(self, node: str, reason: str) -> None:
        """Kill the node's agent, whatever it does. Ends in NodeLost."""
        self._lose(self._lives[node], reason)

    def gone(self, node: str, reason: str) -> None:
        """The node is taken from the run, with all that is on it."""
        life = self._lives.get(node)
        if life is not None:
            self._lose(life, reason)
            life.is_reported = True
        say(f"node {node} is gone: {reason}")
        self.shell.post(ev.NodeLost(node=node, reason=reason, is_gone=True))

    def _live(self, life: _Life) -> None:
        self._lives[life.node] = life
        if life.process is not None:
            when_ended(life.process, lambda code: self._ended(life, code))

    def _logs(self, node: str) -> list[Path]:
        return [self.run.process_log(self.attempt, node, name) for name in ("agent", "zygote")]

    def _sizes(self, node: str) -> dict[Path, int]:
        return {log: log.stat().st_size if log.exists() else 0 for log in self._logs(node)}

    # --- endless: what agents say, and whether they live -------------------------------------------------------------

    async def listen(self) -> None:
        """Consumes frames of agents, produces events; endless. Waits for the channel."""
        while True:
            try:
                peer, frame = await self.channel.recv()
            except ChannelBroken as error:
                self._lose_peer(error.peer, str(error))
                continue
            if await self.launches.hear(peer, frame.body):
                continue
            life = self._of_peer(peer)
            if isinstance(frame.body, wire.Join):
                life = self._join(peer, frame.body)
            if life is None:
                await self.send(
                    peer, wire.Quit(reason="this agent is none of the run's (any more)", is_welcome_again=True)
                )
                continue
            life.heard = time.monotonic()
            await self.launches.note(life.node, peer, frame.body)
            self._take(life, frame.body)

    async def beat(self) -> None:
        """Tells each agent that the controller lives; declares silent ones lost; endless."""
        before = time.monotonic()
        while True:
            now = time.monotonic()
            is_awake = now - before < 2 * self._beat_s  # else what they said meanwhile has not been heard yet
            before = now
            for life in list(self._lives.values()):
                limit, name = self.config.limits.heartbeat_s, "heartbeat_s"
                if not life.peer:
                    limit, name = self.config.limits.engine_start_s, "engine_start_s"
                if is_awake and now - life.heard > limit:
                    self._lose(life, f"its agent was silent for {now - life.heard:.1f} s (limits.{name})")
                elif life.peer and not life.reason:
                    await self.send(life.peer, wire.Beat())
            await self.launches.beat({life.peer for life in self._lives.values() if not life.reason})
            for node in self.copies.overdue(now, self.config.limits.heartbeat_s):
                if node in self.shell.nodes:
                    kill = wire.KillWorker(worker=wire_gps.MOVER, reason="it goes on with a copy that is over")
                    await self.send(self.shell.nodes[node].peer, kill)
            await asyncio.sleep(self._beat_s)

    async def send(self, peer: bytes, body: wire.ToAgent) -> None:
        """To an agent; one that cannot be reached is lost."""
        life = self._of_peer(peer)
        if life is not None and isinstance(body, wire.StartWorker):
            self.shell.nodes[life.node].bindings.request(body)
        try:
            await self.channel.send(peer, body)
        except ChannelBroken as error:
            self._lose_peer(peer, str(error))

    async def close(self, reason: str) -> None:
        """End all agents in order, as far as they do; then what is left of them."""
        self._is_over = True
        await self.launches.close(reason)
        for life in self._lives.values():
            if life.peer:
                await self.send(life.peer, wire.Quit(reason=reason))
            elif life.process is not None and life.process.poll() is None:
                life.process.terminate()
        deadline = time.monotonic() + _LEAVE_S
        processes = [life.process for life in self._lives.values() if life.process is not None]
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        self.cluster.stop()

    # --- what they say -----------------------------------------------------------------------------------------------

    def _join(self, peer: bytes, join: wire.Join) -> _Life | None:
        """The life that this agent is: the one that was started last on its node, or one that came by itself."""
        life = self._lives.get(join.node)
        if self.cluster.agents_come:
            life = self._came(join)
        elif life is None or life.pid != join.pid or life.peer or life.reason:
            return None
        life.peer = peer
        self.shell.nodes[life.node] = Node(life.node, peer, join.num_slots)
        task = asyncio.create_task(self._welcome(life), name=f"welcome {life.node}")
        self._welcomes.add(task)
        task.add_done_callback(self._welcomes.discard)
        return life

    def _came(self, join: wire.Join) -> _Life:
        """Its coming says that the life before it on the node is over."""
        old = self._lives.get(join.node)
        if old is not None:
            self._lose(old, "its agent ended, and another one has come")
            self._report(old)
        logs, now = self._sizes(join.node), time.monotonic()
        life = _Life(join.node, join.pid, None, logs, is_first=old is None, heard=now)
        self._live(life)
        return life

    async def _welcome(self, life: _Life) -> None:
        """What the node is to put into its memory: the newest checkpoint, at the run's start and at any later time."""
        life.piles = self._piles_of(life.node)
        try:
            newest = self.restored if life.is_first else await asyncio.to_thread(self.newest)
            life.version = newest.step
            model, judge, copies = self.config.model, self.config.judge_model, str(self.run.cache)
            path = await asyncio.to_thread(local_model, newest.path, copies) if newest.step else model.policy.path
        except Exception as error:  # whatever a remote file system raises
            self._lose(life, f"there are no weights for it: {type(error).__name__}: {error}")
            return
        welcome = wire.Welcome(
            policy=path,
            policy_dtype=model.policy.dtype,
            version=newest.step,
            genrm=judge.path if judge else "",
            genrm_dtype=judge.dtype if judge else "",
            preload=of_zygote(self.config),
            has_mover=self.config.cluster.nodes > 1,
            num_piles=self.config.num_piles,
            piles=list(life.piles),
        )
        if not life.reason:
            await self.send(life.peer, welcome)

    def _piles_of(self, node: str) -> tuple[int, ...]:
        """A node has its number whenever it comes again; one that is new gets that of one that is away."""
        if self.config.num_piles == 1:
            return (0,)
        if node not in self._numbers:
            away = [name for name, life in self._lives.items() if life.reason and name in self._numbers]
            self._numbers[node] = self._numbers.pop(away[0]) if away else len(self._numbers)
        given_up = self.shell.core.crew.given_up - {node}
        numbers = {name: number for name, number in self._numbers.items() if name not in given_up}
        numbers |= {f"node {i}": i for i in range(len(self._numbers), self.config.num_piles)}  # yet to come
        return deal_out(numbers, self.config.num_piles, self.config.gps.replication)[node]

    def _take(self, life: _Life, body: wire.FromAgent) -> None:
        node = self.shell.nodes[life.node]
        match body:
            case wire.Join() | wire.Beat() | LaunchAsked() | LauncherJoined() | LaunchEnded():
                pass
            case wire.NodeReady():
                life.is_ready = True
                self._tell_holders()
                self.shell.post(
                    ev.NodeJoined(
                        node=node.name,
                        num_slots=node.num_slots,
                        version=life.version,
                        piles=life.piles if self.config.num_piles > 1 else (),
                    )
                )
            case wire.NodeFailed():
                self._lose(life, body.reason, grace_s=_LEAVE_S)
            case wire.VersionSealed():
                self.shell.post(ev.VersionSealed(version=body.version, node=node.name))
            case wire_gps.FetchAsked():
                source = self.shell.nodes.get(body.source)
                self._tell(self.fetches.begin(node.name, body, (source.peer if source else b"", node.peer)))
            case wire_gps.Moved(number=number) if number < 0:
                self.fetches.moved(node.name, body)
            case wire_gps.MoveFailed(number=number) if number < 0:
                self._tell(self.fetches.move_failed(node.name, number, body.reason))
            case wire_gps.Moved():
                self._post(self.copies.moved(node.name, body))
            case wire_gps.MoveFailed():
                self._post(self.copies.move_failed(node.name, body.number, body.reason))
            case wire.WorkerExited(worker=wire_gps.MOVER):
                say(f"the mover of {node.name} ended: {body.reason}")
                self._post(self.copies.mover_ended(node.name, body.reason))
                self._tell(self.fetches.node_failed(node.name, f"its mover ended: {body.reason}"))
            case wire.Bindings():
                if node.bindings.observe(body):
                    self._tell_strays(node)
            case wire.WorkerExited() if not node.bindings.end(body):
                say(f"{body.worker} on {node.name}, which nobody ordered there, ended: {body.reason}")
            case _ if not isinstance(body, wire.WorkerExited) and body.worker not in node.bindings.requested:
                pass  # a stray
            case _:
                self.shell.on_worker(body)

    def _tell_strays(self, node: Node) -> None:
        for stray in node.bindings.strays:
            say(f"{stray.worker} runs on {node.name}, slots {list(stray.slots)}, and nobody ordered it there")
        self.shell.post(ev.StraysReported(node=node.name, strays=node.bindings.strays))

    def _tell(self, orders: Iterable[tuple[str, wire.ToAgent]]) -> None:
        """Without waiting, and in this order."""
        for name, body in orders:
            if name in self.shell.nodes:
                task = asyncio.create_task(self.send(self.shell.nodes[name].peer, body))
                self._welcomes.add(task)
                task.add_done_callback(self._welcomes.discard)

    def _tell_holders(self) -> None:
        """To each node, where tensors are that it does not hold."""
        if self.config.num_piles > 1 and not self._is_over:
            piles = {life.node: list(life.piles) for life in self._lives.values() if life.is_ready and not life.reason}
            for name in piles:
                others = {node: own for node, own in piles.items() if node != name}
                self._tell([(name, wire_gps.Holders(worker=wire_gps.MOVER, piles=others))])

    def _post(self, events: list[ev.Event]) -> None:
        for event in events:
            self.shell.post(event)

    # --- the end of a life -------------------------------------------------------------------------------------------

    def _of_peer(self, peer: bytes) -> _Life | None:
        return next((life for life in self._lives.values() if peer and life.peer == peer and not life.reason), None)

    def _lose_peer(self, peer: bytes, reason: str) -> None:
        life = self._of_peer(peer)
        if life is not None:
            self._lose(life, reason)

    def _ended(self, life: _Life, returncode: int) -> None:
        """One that left by itself has said why: that may take a moment longer than its end."""

        def give_up() -> None:
            self._lose(life, f"its agent ended: {describe_exit(returncode)}")
            self._report(life)

        is_told = bool(life.reason) or not life.peer or returncode < 0
        asyncio.get_running_loop().call_later(0.0 if is_told else _LAST_WORDS_S, give_up)

    def _lose(self, life: _Life, reason: str, grace_s: float = 0.0) -> None:
        """Nothing of this life counts any more. It is reported when its process has ended."""
        if life.reason:
            return
        life.reason = reason
        self.shell.nodes.pop(life.node, None)
        self._tell(self.fetches.node_failed(life.node, f"it is lost: {reason}"))
        self._tell_holders()
        asyncio.get_running_loop().call_later(grace_s, self._kill, life)

    def _kill(self, life: _Life) -> None:
        """One on another host is out of reach: it is told to quit at its next word, and waits for none for long."""
        if life.process is None:
            self._report(life)
        elif not life.is_reported and life.process.poll() is None:
            life.process.kill()
            asyncio.get_running_loop().call_later(_DEATH_S, self._report, life)

    def _report(self, life: _Life) -> None:
        """Once per life, with the last lines of what it and its zygote wrote."""
        if life.is_reported or self._is_over:
            return
        life.is_reported = True
        tails = ((log, log_tail(log, since=size)) for log, size in life.logs.items())
        said = [f"last lines of {log.name}:\n{tail}" for log, tail in tails if tail]
        say(f"node {life.node} is lost: {life.reason}")
        self.shell.post(ev.NodeLost(node=life.node, reason="\n".join([life.reason, *said])))
