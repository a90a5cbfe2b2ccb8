"""A node of a run, as its agent lives it: shared memory, zygote and workers, between Join and Quit.

    JOINING ─Welcome▶ PREPARING (shared memory and zygote, at once) ─NodeReady▶ SERVING ─▶ LEFT

Where there are other nodes it keeps a mover: a worker that is forked again whenever it ends.

It leaves on Quit, on TERM, when its zygote dies, when the controller is silent, or when one of a newer attempt
speaks. It then ends the workers and unlinks the shared memory, in that order.
"""

import asyncio
import os
import signal
import socket
import subprocess
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pipeline import wire, wire_gps
from pipeline.channel import AgentEnd
from pipeline.core.errors import Fenced, PivotError
from pipeline.gps.files import janitor
from pipeline.gps.store import Store, confine
from pipeline.kill_points import kill_point
from pipeline.memory import has_gpus
from pipeline.processes import beat_period_s
from pipeline.run_folder import RunFolder
from pipeline.wire_launch import EndLaunch, Launch, LaunchAsked, LaunchEnded
from pipeline.wire_shift import Prepare, Sleep, Slept, Wake, Woken
from slurm.allocator import Allocator, SlotsTaken
from slurm.door import Door
from slurm.guardian import remove_memory, sweep
from slurm.names import user_prefix
from slurm.residents import Residents
from slurm.workers import Workers

_COPY_END_S = 10.0
_PATIENCE_ON_TERM_S = 2.5
_MOVER_PERIOD_S = 1.0
"""A mover that ends at once is not forked again sooner."""


class Leave(Exception):
    """The node's life is over. `is_failure`: the controller must hear why; `is_alone`: there is none to hear it;
    `is_termed`: TERM came before; `comes_again`: another agent of the node should take its place."""

    def __init__(
        self,
        reason: str,
        *,
        is_failure: bool,
        is_alone: bool = False,
        is_termed: bool = False,
        comes_again: bool | None = None,
    ) -> None:
        super().__init__(reason)
        self.is_failure, self.is_alone, self.is_termed = is_failure, is_alone, is_termed
        self.comes_again = is_failure if comes_again is None else comes_again


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which node of which attempt this is, and how to reach its controller. `name` is that of this life of its agent,
    also in shared memory; `temporary` is its folder for temporary files; `host` is this node's own address; `job`:
    which life of which Slurm job, "" on a local run; `devices`: what its environment says that it may use; `door`:
    where workers come in that are steps of their own, for those have their devices from Slurm; `slot_memory`: the bytes
    of a slot, 0: not limited."""

    run: RunFolder
    node: str
    name: str
    temporary: Path
    num_slots: int
    attempt: int
    endpoint: str
    host: str
    job: str
    devices: list[str] | None
    door: Door | None
    patience_s: float
    heartbeat_s: float
    engine_s: float
    slot_memory: int


class Node:
    def __init__(self, place: Place, process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
        """`process`, `control`: the zygote and the socket to it. Make it inside the running loop."""
        self._place = place
        self._gps = place.name
        self._channel = AgentEnd(
            place.run.secrets, place.attempt, place.endpoint, f"{place.node}-{os.getpid()}-{time.time_ns()}"
        )
        self._workers = Workers(
            process,
            control,
            on_message=self._on_message,
            on_exit=self._on_exit,
            on_fork=self._on_fork,
            door=place.door,
        )
        self._allocator = Allocator(place.num_slots, place.devices)
        self._residents = Residents(
            self._allocator,
            place.slot_memory,
            has_gpus() and place.devices != [],
            say=self._channel.send,
            order=self._workers.send,
            kill=self._workers.kill,
            on_change=self._report_bindings,
        )
        self._mover_at = 0.0
        self._has_mover = False
        self._holders: wire_gps.Holders | None = None
        self._for_mover: list[wire_gps.Move | wire.KillWorker] = []
        self._reviving: set[asyncio.Task[None]] = set()
        self._heard = time.monotonic()
        self._patience_s = place.patience_s
        self._is_termed = False
        self._stores: list[Store] = []
        self._copying: asyncio.Future[float] | None = None
        self._welcome: asyncio.Future[wire.Welcome] = asyncio.get_running_loop().create_future()

    async def live(self) -> Leave:
        """Returns why the node's life ended: the first of its parts to end decides. Leaves nothing behind."""
        loop = asyncio.get_running_loop()
        asked: asyncio.Future[None] = loop.create_future()
        loop.add_signal_handler(signal.SIGTERM, self._on_term, asked)
        self._channel.send(wire.Join(node=self._place.node, num_slots=self._place.num_slots, pid=os.getpid()))
        parts = [self._obey, self._beat, self._watch_zygote, self._watch_silence, self._workers.receive, self._prepare]
        tasks = [asyncio.create_task(part(), name=part.__name__) for part in (*parts, self._residents.judge)]
        try:
            await asyncio.gather(*tasks, asked)
            raise AssertionError("unreachable: these parts never return")
        except Leave as leave:
            reason = leave
        except asyncio.CancelledError:
            reason = Leave("TERM", is_failure=False)
        except Fenced as fenced:
            reason = Leave(str(fenced), is_failure=False)
        except Exception as error:
            known = isinstance(error, PivotError | OSError | RuntimeError)
            reason = Leave(str(error) if known else traceback.format_exc(), is_failure=True)
        for task in (*tasks, *self._reviving):
            task.cancel()
        await self._clean_up(reason)
        return reason

    def _on_term(self, asked: "asyncio.Future[None]") -> None:
        """A local agent leaves. In a Slurm job TERM reaches every process, and the controller decides; only where there
        is none any more, the agent does."""
        if not self._place.job:
            asked.cancel()
        else:
            self._patience_s = min(self._patience_s, _PATIENCE_ON_TERM_S)
            self._is_termed = True

    async def _clean_up(self, leave: Leave) -> None:
        if leave.is_failure:
            self._channel.send(wire.NodeFailed(reason=str(leave)))
        await self._workers.close()
        if self._copying is not None:
            await asyncio.wait([self._copying], timeout=_COPY_END_S)  # else it is left to the guardian
        for store in self._stores:
            store.unlink()
        self._channel.close()

    async def _prepare(self) -> None:
        """The copy of the weights and the zygote's imports take seconds each, and go on at the same time."""
        start = time.monotonic()
        welcome = await self._welcome
        joined = time.monotonic()
        self._copying = asyncio.get_running_loop().run_in_executor(None, self._place_weights, welcome)
        zygote_s = await self._workers.preload(welcome.preload)
        if welcome.has_mover:
            await self._start_mover()
        gps_s = await self._copying
        seconds = {"join": joined - start, "gps": gps_s, "zygote": zygote_s, "prepare": time.monotonic() - joined}
        self._channel.send(wire.NodeReady(gps=self._gps, seconds=seconds))

    def _place_weights(self, welcome: wire.Welcome) -> float:
        start = time.monotonic()
        for name in (*janitor(user_prefix()), *sweep(self._place.temporary.parent, user_prefix())):
            print(f"removed {name}: its owner is dead")
        for kind, path, dtype, version, slots in (
            ("policy", welcome.policy, welcome.policy_dtype, welcome.version, 2),
            ("genrm", welcome.genrm, welcome.genrm_dtype, 0, 1),
        ):
            if path:
                name, own = f"{self._gps}-{kind}", (welcome.num_piles, welcome.piles or [0])
                self._stores.append(Store.create(name, path, dtype, version, slots, *own))
        return time.monotonic() - start

    async def _beat(self) -> NoReturn:
        """Tell the controller that the node lives, and notice when the controller does not."""
        while (silent := time.monotonic() - self._heard) < self._patience_s:
            self._channel.send(wire.Beat())
            await asyncio.sleep(min(beat_period_s(self._place.heartbeat_s), self._patience_s - silent))
        reason = f"the controller was silent for {silent:.1f} s"
        raise Leave(reason, is_failure=True, is_alone=True, is_termed=self._is_termed)

    async def _watch_zygote(self) -> NoReturn:
        raise Leave(await self._workers.serve(), is_failure=True)

    async def _watch_silence(self) -> NoReturn:
        raise Leave(await self._workers.watch(self._place.heartbeat_s, self._place.engine_s), is_failure=True)

    async def _obey(self) -> NoReturn:
        while True:
            body = (await self._channel.recv()).body
            self._heard = time.monotonic()
            await self._do(body)

    async def _do(self, body: wire.ToAgent) -> None:
        match body:
            case wire.Welcome():
                self._welcome.set_result(body)
            case wire.StartWorker():
                await self._start_worker(body)
            case wire_gps.Holders():
                self._holders = body
                if self._has_mover:
                    self._workers.send(body)
            case wire_gps.Move() | wire.KillWorker(worker=wire_gps.MOVER) if not self._has_mover:
                self._for_mover.append(body)
            case wire_gps.Move():
                kill_point("copy.asked")
                self._workers.send(body)
            case wire.KillWorker(worker=worker, reason=reason):
                print(f"killing {worker}: {reason}")
                self._workers.kill(worker)
            case LaunchEnded():
                self._workers.miss(body.worker, body.life, body.reason)
            case wire.SealVersion(version=version, piles=piles):
                kill_point("seal.before")
                self._stores[0].seal(version, piles)
                kill_point("seal.after")
                self._channel.send(wire.VersionSealed(version=version))
            case Sleep() | Prepare() | Wake():
                self._residents.obey(body)
            case wire.Beat() | Launch() | EndLaunch():
                pass
            case wire.Quit():
                raise Leave(
                    f"the controller said: {body.reason}",
                    is_failure=False,
                    is_termed=self._is_termed,
                    comes_again=body.is_welcome_again,
                )
            case _:
                self._workers.send(body)

    def _on_message(self, message: wire.FromWorker) -> None:
        match message:
            case Slept() | Woken() | wire.WorkerReady():
                self._residents.hear(message)
            case _:
                self._channel.send(message)

    def _on_fork(self, worker: str, pid: int) -> None:
        self._allocator.forked(worker, pid)
        self._report_bindings()

    def _on_exit(self, worker: str, reason: str) -> None:
        life = self._allocator.bindings[worker].life
        self._allocator.release(worker)
        remove_memory(f"{self._gps}-{worker}-")  # what the ranks of its engine shared, if it died while they started
        self._channel.send(wire.WorkerExited(worker=worker, life=life, reason=reason))
        self._report_bindings()
        if worker == wire_gps.MOVER:
            self._has_mover = False
            task = asyncio.create_task(self._revive_mover())
            self._reviving.add(task)
            task.add_done_callback(self._reviving.discard)

    def _report_bindings(self) -> None:
        bindings = [
            wire.Binding(worker, bound.life, list(bound.slots), bound.pid, bound.is_awake)
            for worker, bound in self._allocator.bindings.items()
            if bound.pid and worker != wire_gps.MOVER
        ]
        self._channel.send(wire.Bindings(bindings=bindings))

    async def _revive_mover(self) -> None:
        await asyncio.sleep(self._mover_at + _MOVER_PERIOD_S - time.monotonic())
        await self._start_mover()

    async def _start_mover(self) -> None:
        """What it was told while there was none reaches it now."""
        place, self._mover_at = self._place, time.monotonic()
        options = {"host": place.host, "alive_s": beat_period_s(place.engine_s), "node": place.node}
        main = "stages.weights.mover:main"
        await self._start_worker(
            wire.StartWorker(
                worker=wire_gps.MOVER, role="mover", index=0, life=0, slots=[], version=0, main=main, options=options
            )
        )
        self._has_mover = True
        if self._holders is not None:
            self._workers.send(self._holders)
        kept, self._for_mover = self._for_mover, []
        for body in kept:
            await self._do(body)

    async def _start_worker(self, start: wire.StartWorker) -> None:
        """Refused where its slots are not free: what holds them is said first, so that it can be ended."""
        place = self._place
        try:
            env = self._allocator.bind(start.worker, start.slots, start.life, is_shared=start.is_shared)
        except SlotsTaken as taken:
            self._report_bindings()
            self._channel.send(wire.WorkerExited(worker=start.worker, life=start.life, reason=f"refused: {taken}"))
            return
        order = wire.WorkerOrder(
            start=start,
            run=str(place.run.path),
            node=place.node,
            attempt=place.attempt,
            gps=self._gps,
            host=place.host,
            env=env,
        )
        log = place.run.process_log(place.attempt, place.node, start.worker)
        if place.door is None or not start.slots:
            await self._workers.fork(order, log)
        else:
            door = self._workers.expect(order, log)
            ask = LaunchAsked(worker=start.worker, life=start.life, num_slots=len(start.slots), door=door)
            self._channel.send(ask)


async def live(place: Place, process: "subprocess.Popen[bytes]", control: socket.socket) -> Leave:
    confine(f"{place.name}-")
    return await Node(place, process, control).live()
