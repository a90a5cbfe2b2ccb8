"""The channel between controller and agents, over real sockets."""

import asyncio
import stat
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from pipeline import wire
from pipeline.channel import AgentEnd, ControllerEnd, make_keys
from pipeline.core.errors import ChannelBroken, Fenced

JOIN = wire.Join(node="n0", num_slots=1, pid=1)


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    make_keys(tmp_path)
    return tmp_path


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


@asynccontextmanager
async def ends(
    secrets: Path, *identities: str, attempt: int = 1, agent_attempt: int = 1
) -> AsyncIterator[tuple[ControllerEnd, list[AgentEnd]]]:
    controller = ControllerEnd(secrets, attempt)
    agents = [AgentEnd(secrets, agent_attempt, controller.endpoint, identity) for identity in identities]
    try:
        yield controller, agents
    finally:
        for end in (*agents, controller):
            end.close()


def test_keys_are_private_and_stay(secrets: Path) -> None:
    before = {path.name: path.read_bytes() for path in secrets.iterdir()}
    assert before.keys() == {"server.public", "server.secret", "agent.public", "agent.secret"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets.iterdir()} == {0o600}
    make_keys(secrets)
    assert before == {path.name: path.read_bytes() for path in secrets.iterdir()}


def test_messages_go_both_ways_in_order(secrets: Path) -> None:
    async def talk() -> None:
        async with ends(secrets, "a", "b") as (controller, (a, b)):
            a.send(JOIN)
            b.send(JOIN)
            assert {(await controller.recv())[0] for _ in range(2)} == {b"a", b"b"}
            for version in range(200):
                await controller.send(b"a", wire.SealVersion(version=version))
            assert [(await a.recv()).body for _ in range(200)] == [wire.SealVersion(version=v) for v in range(200)]
            a.send(wire.VersionSealed(version=7))
            peer, frame = await controller.recv()
            assert (peer, frame.body, frame.number) == (b"a", wire.VersionSealed(version=7), 2)

    run(talk)


def stranger(context: zmq.asyncio.Context, kind: str, server_public: bytes) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.DEALER)
    if kind == "unknown key":
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = server_public
    return socket


@pytest.mark.parametrize("kind", ["unknown key", "no key"])
def test_strangers_are_refused(secrets: Path, kind: str) -> None:
    refusals = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED

    async def knock() -> None:
        async with ends(secrets, "known") as (controller, (known,)):
            context = zmq.asyncio.Context()
            socket = stranger(context, kind, (secrets / "server.public").read_bytes())
            monitor = socket.get_monitor_socket(refusals | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            socket.connect(controller.endpoint)
            await socket.send(wire.encode_frame(JOIN, attempt=1, number=1))
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            assert event & refusals
            context.destroy(linger=0)
            known.send(JOIN)
            assert (await controller.recv())[0] == b"known"

    run(knock)


def test_a_gap_breaks_one_peer_only(secrets: Path) -> None:
    async def lose() -> None:
        async with ends(secrets, "a", "b") as (controller, (a, b)):
            a._numbers.next_sent()  # a frame that never arrives
            a.send(JOIN)
            with pytest.raises(ChannelBroken, match="a: frame 2 came where 1 was due") as broken:
                await controller.recv()
            assert broken.value.peer == b"a"
            b.send(JOIN)
            assert (await controller.recv())[0] == b"b"
            controller._numbers[b"b"].next_sent()
            await controller.send(b"b", wire.Beat())
            with pytest.raises(ChannelBroken, match="frame 2 came where 1 was due"):
                await b.recv()

    run(lose)


def test_an_undecodable_frame_breaks_the_channel(secrets: Path) -> None:
    async def garble() -> None:
        async with ends(secrets, "a") as (controller, (a,)):
            await a._socket.send(b"\x93not a frame")
            with pytest.raises(ChannelBroken, match="undecodable") as broken:
                await controller.recv()
            assert broken.value.peer == b"a"

    run(garble)


def test_an_older_attempt_is_told_to_quit(secrets: Path) -> None:
    async def outlive() -> None:
        async with ends(secrets, "old", attempt=2) as (controller, (old,)):
            new = AgentEnd(secrets, 2, controller.endpoint, "new")
            old.send(wire.Beat())
            receiving = asyncio.create_task(controller.recv())
            with pytest.raises(Fenced, match="attempt 2"):
                await old.recv()
            new.send(JOIN)
            assert (await receiving)[0] == b"new"
            new.close()

    run(outlive)


def test_a_controller_of_an_older_attempt_is_fenced(secrets: Path) -> None:
    async def meet() -> None:
        async with ends(secrets, "new", agent_attempt=2) as (controller, (new,)):
            new.send(JOIN)
            with pytest.raises(Fenced, match="attempt 2"):
                await controller.recv()

    run(meet)


def test_sending_to_who_has_left_is_an_error_not_a_wait(secrets: Path) -> None:
    async def leave() -> None:
        async with ends(secrets, "a") as (controller, (a,)):
            a.send(JOIN)
            peer, _ = await controller.recv()
            a.close()
            with pytest.raises(ChannelBroken) as broken:
                while True:  # until the connection's end has arrived here
                    await controller.send(peer, wire.Beat())
                    await asyncio.sleep(0.001)
            assert broken.value.peer == b"a"

    run(leave)
