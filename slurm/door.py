"""The agent's door: where workers come in that Slurm started as steps of their own.

    worker (slurm.stub)                   agent
    ─ worker, life ▶
                    ◀ environment, command, and the guardian's pipe ─      it becomes that program (slurm.step)
                    ◀ order, log ─                                         and then the worker

A name in the abstract namespace has no permissions, so each end looks whose process the other one is. Whoever is not
expected, or not any more, is turned away: it has touched nothing by then.
"""

import asyncio
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from pipeline.processes import python_command, say
from slurm.step import Birth, encode
from slurm.stub import HEAD_BYTES, owner

_MEET_S = 10.0
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Guest:
    """A process that is expected, and there. `pidfd` is the agent's to close, and so is `sock`."""

    birth: Birth
    pid: int
    pidfd: int
    sock: socket.socket


class Refused(Exception):
    """Says why."""


class Door:
    """`environment`: the workers'; `life`: what they hold to their end (see Guardian). Open from the start on."""

    def __init__(self, name: str, environment: Mapping[str, str], life: int) -> None:
        self.name = name
        self._program = json.dumps({"environment": dict(environment), "command": python_command("slurm.step")}).encode()
        self._life = life
        self._expected: dict[str, Birth] = {}
        self._meetings: set[asyncio.Task[None]] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{name}")
        self._listener.listen()

    def expect(self, birth: Birth) -> None:
        self._expected[birth.order.start.worker] = birth

    def forget(self, worker: str, life: int | None = None) -> bool:
        """It is not let in any more. False if it is not expected (in that life, if one is named)."""
        birth = self._expected.get(worker)
        if birth is None or life not in (None, birth.order.start.life):
            return False
        del self._expected[worker]
        return True

    async def serve(self, come: Callable[[Guest], Awaitable[None]]) -> NoReturn:
        """Endless. Who is let in is a guest until `come` has asked `forget`, which says whether it still may."""
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            task = asyncio.create_task(self._meet(sock, come))
            self._meetings.add(task)
            task.add_done_callback(self._meetings.discard)

    def close(self) -> None:
        self._listener.close()
        self._expected.clear()

    async def _meet(self, sock: socket.socket, come: Callable[[Guest], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(_MEET_S):
                guest = await self._let_in(sock)
        except (Refused, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            say(f"a process at the door is turned away: {type(error).__name__}: {error}")
            sock.close()
            return
        await come(guest)

    async def _let_in(self, sock: socket.socket) -> Guest:
        loop, (pid, uid) = asyncio.get_running_loop(), owner(sock)
        if uid != os.getuid():
            raise Refused(f"it is user {uid}'s")
        if not pid:
            raise Refused("it is in a PID namespace that is not seen from here")
        (size,) = struct.unpack("<I", await self._read(sock, HEAD_BYTES))
        if size > _MOST_BYTES:
            raise Refused(f"it says {size} bytes")
        who = json.loads(await self._read(sock, size))
        birth = self._expected.get(who["worker"])
        if birth is None or birth.order.start.life != who["life"]:
            raise Refused(f"{who['worker']}, life {who['life']}, is not expected")
        pidfd = os.pidfd_open(pid)
        try:
            socket.send_fds(sock, [len(self._program).to_bytes(HEAD_BYTES, "little")], [self._life])
            await loop.sock_sendall(sock, self._program + encode(birth))
            if not _is_there(sock):  # else its pid may be another process's by now
                raise Refused(f"{who['worker']} has ended")
        except BaseException:
            os.close(pidfd)
            raise
        return Guest(birth, pid, pidfd, sock)

    async def _read(self, sock: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (more := await asyncio.get_running_loop().sock_recv(sock, size - len(data))):
                raise Refused("it has ended")
            data += more
        return data


def _is_there(sock: socket.socket) -> bool:
    """Nothing has been said yet, and nobody has hung up."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
