"""What is said between a worker and a process of the user's code: frames of msgpack with their length before them.

To the process go pickles (data of any kind, made here); from it come only plain values, checked against these types, so
that nothing there can run anything here.
"""

import asyncio
from typing import Any

import msgspec

from pipeline.pickles import of_parent

MAX_BYTES = 64 << 20


class Call(msgspec.Struct, frozen=True, tag=True):
    """`arguments`: a pickled dict of keyword arguments."""

    id: str
    arguments: bytes


class Cancel(msgspec.Struct, frozen=True, tag=True):
    id: str


class Generated(msgspec.Struct, frozen=True, tag=True):
    """Answers Generate: the tokens of a turn, and how it ended (stop, length)."""

    id: str
    tokens: list[int]
    finish: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    is_async: bool


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The function cannot be imported."""

    reason: str


class Returned(msgspec.Struct, frozen=True, tag=True):
    """`figures`: what else of what it returned is a number."""

    id: str
    score: float
    figures: dict[str, float]


class Raised(msgspec.Struct, frozen=True, tag=True):
    """`kind`: error, memory, invalid (what it returned is no score), cancelled."""

    id: str
    kind: str
    text: str


class Generate(msgspec.Struct, frozen=True, tag=True):
    """The next turn of call `id`, after these tokens, which are all of its sequence so far."""

    id: str
    ids: list[int]
    stop_ids: list[int]


ToProcess = Call | Cancel | Generated
FromProcess = Ready | Broken | Returned | Raised | Generate

_encoder = msgspec.msgpack.Encoder()
_to_process = msgspec.msgpack.Decoder(ToProcess)
_from_process = msgspec.msgpack.Decoder(FromProcess)


def frame(message: ToProcess | FromProcess) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(4, "little") + data


async def next_frame(reader: asyncio.StreamReader) -> bytes:
    """b"" at the end. Raises ValueError for one that is too long."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "little")
        if size > MAX_BYTES:
            raise ValueError(f"a message of {size} bytes; valid are up to {MAX_BYTES}")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


def to_process(data: bytes) -> ToProcess:
    message: ToProcess = _to_process.decode(data)
    return message


def from_process(data: bytes) -> FromProcess:
    """Raises msgspec.MsgspecError for what is none."""
    message: FromProcess = _from_process.decode(data)
    return message


def kwargs_of(call: Call) -> dict[str, Any]:
    """In the process: they were pickled by its parent."""
    arguments: dict[str, Any] = of_parent(call.arguments)
    return arguments
