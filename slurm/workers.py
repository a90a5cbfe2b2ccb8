"""The agent's side of its zygote and of the workers' sockets: start, fork, speak, kill, and learn of every end.

With a door there are also workers that are no forks: Slurm starts them, and they come in there.
"""

import asyncio
import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from pipeline import wire
from pipeline.processes import beat_period_s, describe_exit, log_tail
from slurm import zygote
from slurm.door import Door, Guest
from slurm.step import Birth

_LAST_WORDS_S = 1.0  # what a dead worker had written is read for at most this long
_DEATH_S = 5.0  # a killed process that takes longer waits for a broken disk or driver


class Workers:
    """The workers of one node. `on_fork(worker, pid)` tells that one is there, `on_message` gets what they say,
    `on_exit(worker, reason)` follows the last of it."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        control: socket.socket,
        on_message: Callable[[wire.FromWorker], None],
        on_exit: Callable[[str, str], None],
        on_fork: Callable[[str, int], None],
        door: Door | None = None,
    ) -> None:
        self._process = process
        self._control = control
        self._on_message = on_message
        self._on_exit = on_exit
        self._on_fork = on_fork
        self._door = door
        self._is_over = False
        self._links: dict[str, _Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._zygote_heard = math.inf
        self._decoder = msgspec.msgpack.Decoder(zygote.FromZygote)
        control.setblocking(False)

    async def preload(self, modules: list[str]) -> float:
        """Returns when the zygote can fork: the seconds since its start. Raises RuntimeError if it cannot."""
        self._tell(zygote.Preload(modules=modules))
        return await self._ready

    async def fork(self, order: wire.WorkerOrder, log: Path) -> None:
        """The worker's end comes by `on_exit`. What is sent to it from now on reaches it."""
        mine, its = socket.socketpair()
        with its:
            mine.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=mine)
            link = _Link(order.start.worker, writer, log)
            link.listening = asyncio.create_task(self._listen(link, reader), name=f"listen to {link.worker}")
            self._links[link.worker] = link  # first: its end may be the next thing that is heard of it
            self._tell(zygote.Fork(order=order, log=str(log)), its.fileno())

    def expect(self, order: wire.WorkerOrder, log: Path) -> str:
        """As `fork`, of one that comes to the door, whose name is returned. Until then nothing reaches it."""
        assert self._door is not None
        self._door.expect(Birth(order=order, log=str(log)))
        return self._door.name

    async def receive(self) -> NoReturn:
        """Those who come to the door; endless."""
        if self._door is not None:
            await self._door.serve(self._take_in)
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable: nobody sets it")

    def miss(self, worker: str, life: int, reason: str) -> None:
        """Its step has ended. If it still lives it is to end too: the slots are Slurm's again."""
        link = self._links.get(worker)
        if self._door is not None and self._door.forget(worker, life):
            self._on_exit(worker, reason)
        elif link is not None and link.life == life:
            link.fault = reason
            self.kill(worker)

    def send(self, message: wire.ToWorker) -> None:
        """To the worker that the message names. A dead worker gets nothing: its end was or will be reported."""
        link = self._links.get(message.worker)
        if link is not None:
            link.writer.write(wire.encode_message(message))

    def kill(self, worker: str, fault: str = "") -> None:
        """Ends in `on_exit`, which says the fault if there is one; of one that is still expected at once."""
        link = self._links.get(worker)
        if link is not None and fault:
            link.fault = fault
        if link is not None and link.pidfd is not None:
            _kill(link.pidfd)
        elif self._door is not None and self._door.forget(worker):
            self._on_exit(worker, "ended before Slurm had begun its step (logs/slurm-launcher.log says more)")
        else:
            self._tell(zygote.Kill(worker=worker))

    async def serve(self) -> str:
        """Serve until the zygote ends; returns why. No zygote, no node: its workers have died with it."""
        while data := await self._hear():
            self._zygote_heard = time.monotonic()
            match self._decoder.decode(data):
                case zygote.Alive():
                    pass
                case zygote.Ready(seconds=seconds):
                    self._ready.set_result(seconds)
                case zygote.Failed(reason=reason):
                    self._ready.set_exception(RuntimeError(f"the zygote cannot fork workers: {reason}"))
                case zygote.Forked(worker=worker, pid=pid):
                    self._on_fork(worker, pid)
                case zygote.Exited(worker=worker, code=code):
                    self._part_from(self._links.pop(worker), describe_exit(code))
        code = await asyncio.to_thread(self._process.wait)
        return f"the zygote ended: {describe_exit(code)}"

    async def _hear(self) -> bytes:
        """The zygote's next message; none when it is dead, also with an unread one of ours."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._control, zygote.MAX_MESSAGE_BYTES)
        except ConnectionResetError:
            return b""

    async def watch(self, heartbeat_s: float, engine_s: float) -> str:
        """Kill workers that are silent: stopped, or stuck as a whole. Ends when the zygote is, and says so.

        Nobody is judged when this process itself stood still.
        """
        await self._ready
        period_s = beat_period_s(min(heartbeat_s, engine_s))
        before = time.monotonic()
        while True:
            self._tell(zygote.Ping())
            await asyncio.sleep(period_s)
            now = time.monotonic()
            is_awake, before = now - before < 2 * period_s, now
            if not is_awake:
                self._zygote_heard = now
                for link in self._links.values():
                    link.heard = max(link.heard, now)
            if (silent := now - self._zygote_heard) > heartbeat_s:
                return f"the zygote was silent for {silent:.1f} s (limits.heartbeat_s)"
            for link in self._links.values():
                if (silent := now - link.heard) > engine_s:
                    link.fault, link.heard = f"it was silent for {silent:.1f} s (limits.engine_s)", math.inf
                    self.kill(link.worker)

    async def close(self) -> None:
        """End the zygote and with it all workers, and those that are no forks."""
        self._is_over = True
        pidfds = [os.dup(link.pidfd) for link in self._links.values() if link.pidfd is not None]
        for pidfd in pidfds:
            _kill(pidfd)
        if self._door is not None:
            self._door.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._wait, pidfds)
        self._control.close()

    def _wait(self, pidfds: list[int]) -> None:
        """Until they are dead, and the zygote."""
        self._process.wait()
        deadline = time.monotonic() + _DEATH_S
        for pidfd in pidfds:
            select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
            os.close(pidfd)

    async def _take_in(self, guest: Guest) -> None:
        start = guest.birth.order.start
        reader, writer = await asyncio.open_connection(sock=guest.sock)
        assert self._door is not None
        if self._is_over or not self._door.forget(start.worker, start.life):
            _kill(guest.pidfd)
            os.close(guest.pidfd)
            writer.close()
            return
        link = _Link(start.worker, writer, Path(guest.birth.log), start.life, guest.pidfd)
        link.listening = asyncio.create_task(self._listen(link, reader), name=f"listen to {link.worker}")
        self._links[link.worker] = link
        asyncio.get_running_loop().add_reader(guest.pidfd, self._bury, link)
        self._on_fork(link.worker, guest.pid)

    def _bury(self, link: "_Link") -> None:
        """Its exit code is Slurm's to know."""
        assert link.pidfd is not None
        asyncio.get_running_loop().remove_reader(link.pidfd)
        os.close(link.pidfd)
        if not self._is_over:  # else nobody is to hear of it any more
            self._part_from(self._links.pop(link.worker), "its step has ended (logs/slurm-launcher.log says more)")

    def _tell(self, message: zygote.ToZygote, *fds: int) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is dead: `serve` says so
            socket.send_fds(self._control, [msgspec.msgpack.encode(message)], fds)

    async def _listen(self, link: "_Link", reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                data = await reader.readexactly(size)
                link.heard = time.monotonic()
                try:
                    message = wire.decode_from_worker(data)
                    if not isinstance(message, wire.Alive):
                        self._on_message(message)
                except Exception as error:
                    link.fault = f"what it said could not be passed on: {type(error).__name__}: {error}"
                    self.kill(link.worker)
                    return

    def _part_from(self, link: "_Link", how: str) -> None:
        task = asyncio.create_task(self._hear_out(link, how))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hear_out(self, link: "_Link", how: str) -> None:
        """Everything the worker said is passed on before its end is."""
        await asyncio.wait([link.listening], timeout=_LAST_WORDS_S)
        link.listening.cancel()
        link.writer.close()
        self._on_exit(link.worker, f"{link.fault or how}\n{log_tail(link.log)}")


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


class _Link:
    """The agent's end of one worker's socket. `pidfd`: of one that is no fork, in this `life`."""

    listening: "asyncio.Task[None]"

    def __init__(
        self, worker: str, writer: asyncio.StreamWriter, log: Path, life: int = -1, pidfd: int | None = None
    ) -> None:
        self.worker = worker
        self.writer = writer
        self.log = log
        self.life = life
        self.pidfd = pidfd
        self.fault = ""
        self.heard = math.inf  # while it starts it says nothing
