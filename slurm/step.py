"""A worker that is a step of its own: what slurm.stub becomes.

python -m slurm.step FD LIFE        FD: the socket to the agent, LIFE: a descriptor to be held to the end
"""

import gc
import os
import select
import socket
import sys
import threading
import traceback
from typing import NoReturn

import msgspec

from pipeline import wire
from slurm import zygote

_HEAD_BYTES = 4


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent says first. From then on the socket is the worker's, as a fork's is."""

    order: wire.WorkerOrder
    log: str


_decoder = msgspec.msgpack.Decoder(Birth)


def encode(birth: Birth) -> bytes:
    data = msgspec.msgpack.encode(birth)
    return len(data).to_bytes(_HEAD_BYTES, "little") + data


def _read(sock: socket.socket, size: int) -> bytes:
    data = sock.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        sys.exit("the agent has ended")
    return data


def _end_with(sock: socket.socket) -> NoReturn:
    """A thread: nothing else looks at the socket while the worker starts, which may take minutes."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def main(fd: int, life: int) -> NoReturn:
    for inherited in (fd, life):
        os.set_inheritable(inherited, False)  # programs that it starts do not have them
    os.umask(0o077)
    sock = socket.socket(fileno=fd)
    birth = _decoder.decode(_read(sock, int.from_bytes(_read(sock, _HEAD_BYTES), "little")))
    zygote.write_to(birth.log)
    threading.Thread(target=_end_with, args=(sock,), name="the agent's end", daemon=True).start()
    try:
        gc.disable()
        zygote.import_all([*zygote.COMMON, *birth.order.start.preload])
        zygote.keep_all()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    zygote.work(sock, birth.order)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
