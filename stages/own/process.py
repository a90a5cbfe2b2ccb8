"""A process of the user's code: one function, called as its parent says.

    python -m stages.own.process FD PARENT JSON    JSON: {path, kind, code_path, memory_bytes}

A plain function runs on the main thread, one call at a time (its parent sends no more); an async one runs as often at
once as its parent asks. It dies with its parent, whatever it is doing. What the code prints goes to the worker's log.
"""

import asyncio
import inspect
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from pipeline.processes import die_with_parent
from stages.own.client import Client
from stages.own.code import load_function, score_of
from stages.own.messages import (
    Broken,
    Call,
    Cancel,
    FromProcess,
    Generated,
    Raised,
    Ready,
    Returned,
    frame,
    kwargs_of,
    next_frame,
    to_process,
)

_MOST_TEXT = 4000


class Caller:
    """Consumes calls, produces what they return; ends when the parent does."""

    def __init__(self, function: Callable[..., Any], kind: str, writer: asyncio.StreamWriter) -> None:
        self._function = function
        self._is_rollout = kind == "rollout"
        self._writer = writer
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._clients: dict[str, Client] = {}

    def say(self, message: FromProcess) -> None:
        self._writer.write(frame(message))

    async def serve(self, reader: asyncio.StreamReader) -> None:
        self.say(Ready(is_async=inspect.iscoroutinefunction(self._function)))
        while data := await next_frame(reader):
            match to_process(data):
                case Call() as call if inspect.iscoroutinefunction(self._function):
                    self._tasks[call.id] = asyncio.create_task(self._run_async(call))
                case Call() as call:
                    self._end(call.id, lambda call=call: self._function(**kwargs_of(call)))
                    await self._writer.drain()
                case Cancel(id=id) if id in self._tasks:
                    self._tasks[id].cancel()
                case Generated() as turn if turn.id in self._clients:
                    self._clients[turn.id].take(turn)

    async def _run_async(self, call: Call) -> None:
        try:
            found = await self._awaited(call)
        except asyncio.CancelledError:
            self.say(Raised(call.id, "cancelled", ""))
        except BaseException as error:
            self._end(call.id, lambda error=error: _again(error))
        else:
            self._end(call.id, lambda: found)
        finally:
            self._tasks.pop(call.id, None)
            self._clients.pop(call.id, None)

    def _awaited(self, call: Call) -> Awaitable[Any]:
        arguments = kwargs_of(call)
        if not self._is_rollout:
            found: Awaitable[Any] = self._function(**arguments)
            return found
        client = self._clients[call.id] = Client(call.id, self.say, **arguments.pop("client"))
        started: Awaitable[Any] = self._function(client, **arguments)
        return started

    def _end(self, id: str, call: Callable[[], Any]) -> None:
        """The border to the user's code: whatever it raises is said."""
        try:
            value = call()
            score, figures = (0.0, {}) if self._is_rollout else score_of(value)
        except MemoryError:
            self.say(Raised(id, "memory", "it allocated more than its limit"))
        except ValueError as error:
            kind = "invalid" if str(error).startswith("it returned ") else "error"
            self.say(Raised(id, kind, _text()))
        except BaseException:
            self.say(Raised(id, "error", _text()))
        else:
            self.say(Returned(id, score, figures))


def _again(error: BaseException) -> None:
    raise error


def _text() -> str:
    return traceback.format_exc()[-_MOST_TEXT:]


def _limit_memory(more_bytes: int) -> None:
    """On top of what the process has by now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        has = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + more_bytes, has + more_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


async def _main(sock: socket.socket, function: Callable[..., Any], kind: str) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)
    await Caller(function, kind, writer).serve(reader)


def main(fd: int, parent: int, told: dict[str, Any]) -> None:
    die_with_parent(signal.SIGKILL, parent)
    os.dup2(2, 1)
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    sys.path.extend(told["code_path"])  # at the end: nothing of the user's may hide ours
    try:
        _limit_memory(told["memory_bytes"])
        function = load_function(told["path"])
    except BaseException:
        sock.sendall(frame(Broken(_text())))
        return
    asyncio.run(_main(sock, function, told["kind"]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
