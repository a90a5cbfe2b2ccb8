"""Calls of one function of the user's, in processes of their own: what hangs there is killed, what dies there is
started again, and nothing of it can hurt who asked.

All of it happens on one event loop, in a thread that lives as long as the process: a child dies with the *thread* that
started it.
"""

import asyncio
import contextlib
import json
import os
import pickle
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from pipeline.core.errors import StageFailed
from pipeline.processes import describe_exit, python_command, python_environment
from stages.own.messages import (
    Broken,
    Call,
    Cancel,
    Generate,
    Generated,
    Raised,
    Ready,
    Returned,
    ToProcess,
    frame,
    from_process,
    next_frame,
)

_START_S = 120.0
_CANCEL_S = 2.0
"""An async call that was cancelled has so long to say that it ended."""
_TRIES = 2
"""Of a call whose process dies: another call may have been the reason."""

Answerer = Callable[[Generate], Awaitable[Generated]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFunction:
    """`where`: the key of the configuration that names it. `kind`: score or rollout."""

    where: str
    path: str
    kind: str
    code_path: tuple[str, ...]
    memory_bytes: int
    processes: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind`: what Raised says, or timeout, crashed."""

    kind: str
    text: str = ""


_making = threading.Lock()
"""Tasks of two steps may ask for the same at once, and `lru_cache` would make it for both of them."""


def own_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process. Made at the first call: after the last fork."""
    with _making:
        return _loop()


def pool_of(function: OwnFunction) -> "Pool":
    """Kept by the process from step to step."""
    with _making:
        return _pool(function)


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="own code", daemon=True).start()
    return loop


@lru_cache(maxsize=16)
def _pool(function: OwnFunction) -> "Pool":
    return Pool(function)


class Pool:
    """Use it on `own_loop()`."""

    def __init__(self, function: OwnFunction) -> None:
        self._function = function
        self._processes = [_Process(function) for _ in range(function.processes)]
        self._is_async: bool | None = None
        self._free: asyncio.Queue[_Process] = asyncio.Queue()
        self._opening = asyncio.Lock()

    async def call(
        self, id: str, arguments: dict[str, Any], timeout_s: float | None, answer: Answerer | None = None
    ) -> Returned | Fault:
        """What it returned, or what went wrong; the time counts from when it is its turn. Raises StageFailed if the
        function cannot be imported. Cancelled, the call ends there too."""
        await self._open()
        call = Call(id, pickle.dumps(arguments))
        for _ in range(_TRIES):
            process = await self._free.get()
            try:
                found = await process.run(call, timeout_s, answer)
            finally:
                self._free.put_nowait(process)
            if not isinstance(found, Fault) or found.kind != "crashed":
                break
        return found

    async def _open(self) -> None:
        """The first call learns whether the function is async: how much each process is given depends on it."""
        async with self._opening:
            if self._is_async is None:
                self._is_async = await self._processes[0].start()
                width = self._function.concurrency if self._is_async else 1
                for _ in range(width):
                    for process in self._processes:
                        self._free.put_nowait(process)


class _Process:
    """One life after another of a process."""

    def __init__(self, function: OwnFunction) -> None:
        self._function = function
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[str, asyncio.Future[Returned | Raised]] = {}
        self._answerers: dict[str, Answerer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_async = False

    async def start(self) -> bool:
        """Whether the function is async. Raises StageFailed if it cannot be imported."""
        async with self._starting:
            if self._process is None:
                await self._start()
        return self._is_async

    async def run(self, call: Call, timeout_s: float | None, answer: Answerer | None) -> Returned | Fault:
        await self.start()
        ended = self._waiting[call.id] = asyncio.get_running_loop().create_future()
        if answer is not None:
            self._answerers[call.id] = answer
        self._send(call)
        try:
            return _outcome(await asyncio.wait_for(asyncio.shield(ended), timeout_s))
        except TimeoutError:
            await self._stop(call.id, ended)
            return Fault("timeout", f"it took longer than {timeout_s:g} s")
        except asyncio.CancelledError:
            if not ended.done():
                await asyncio.shield(self._stop(call.id, ended))
            raise
        finally:
            self._waiting.pop(call.id, None)
            self._answerers.pop(call.id, None)

    async def _stop(self, id: str, ended: "asyncio.Future[Returned | Raised]") -> None:
        """End one call: with the process, unless it is async and lets itself be cancelled."""
        if self._is_async:
            self._send(Cancel(id))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ended), _CANCEL_S)
        if not ended.done():
            self._kill()

    def _send(self, message: ToProcess) -> None:
        if self._writer is not None:
            self._writer.write(frame(message))

    def _kill(self) -> None:
        """The next call starts another at once."""
        if self._process is not None:
            self._process.kill()
            self._lose(self._process, "it was killed, because another call took too long")

    def _lose(self, process: "subprocess.Popen[bytes]", how: str) -> None:
        """Its calls have crashed."""
        if self._process is process:
            self._process = self._writer = None
            for id, waiting in self._waiting.items():
                if not waiting.done():
                    waiting.set_result(Raised(id, "crashed", f"its process ended: {how}"))

    async def _start(self) -> None:
        mine, its = socket.socketpair()
        told = {
            "path": self._function.path,
            "kind": self._function.kind,
            "code_path": self._function.code_path,
            "memory_bytes": self._function.memory_bytes,
        }
        with its:
            process = subprocess.Popen(
                python_command("stages.own.process", str(its.fileno()), str(os.getpid()), json.dumps(told)),
                env=python_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
            )
        reader, writer = await asyncio.open_connection(sock=mine)
        try:
            data = await asyncio.wait_for(next_frame(reader), _START_S)
            first = from_process(data) if data else None
        except (TimeoutError, ValueError, msgspec.MsgspecError) as error:
            process.kill()
            first = Broken(f"{type(error).__name__}: {error}")
        if not isinstance(first, Ready):
            writer.close()
            code = await asyncio.to_thread(process.wait)
            reason = first.reason if isinstance(first, Broken) else describe_exit(code)
            raise StageFailed(f"{self._function.where} {self._function.path} cannot be imported: {reason.strip()}")
        self._process, self._writer, self._is_async = process, writer, first.is_async
        self._keep(self._listen(process, reader, writer))

    async def _listen(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Until its end."""
        try:
            while data := await next_frame(reader):
                match from_process(data):
                    case Returned() | Raised() as end:
                        waiting = self._waiting.get(end.id)
                        if waiting is not None and not waiting.done():
                            waiting.set_result(end)
                    case Generate(id=id) as asked if id in self._answerers:
                        self._keep(self._answer(asked, self._answerers[id], writer))
        except (ValueError, msgspec.MsgspecError) as error:
            print(f"{self._function.where}: its process said what is no message: {error}")
        process.kill()
        writer.close()
        self._lose(process, describe_exit(await asyncio.to_thread(process.wait)))

    async def _answer(self, asked: Generate, answerer: Answerer, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(await answerer(asked)))

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _outcome(end: Returned | Raised) -> Returned | Fault:
    return end if isinstance(end, Returned) else Fault(end.kind, end.text)
