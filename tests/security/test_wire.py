"""What stands on the wire, and who is let in. (Unknown CURVE keys and peers without the secret: tests/test_channel.py
and tests/queue/test_server.py.)"""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as fl
import pytest

from pipeline import wire
from pipeline.channel import AgentEnd, ControllerEnd, make_keys
from pipeline.core.errors import Fenced
from pipeline.queue.channel import ClientHandshake, ServerHandshake, told
from pipeline.queue.client import QueueClient
from pipeline.queue.schema import SEQUENCES
from tests.queue.processes import Server, make_run, prompts
from tests.security.eavesdropper import eavesdropping
from tests.security.seen import forms

NEEDLE = "what was really said"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(make_run(tmp_path_factory.mktemp("queue") / "run"))
    yield server
    server.kill()


def test_the_queues_secret_is_never_on_the_wire(server: Server) -> None:
    secret = (server.run.secrets / "queue.key").read_bytes()
    with eavesdropping(server.endpoint) as (ear, endpoint):
        queue = QueueClient(endpoint, secret, 1, 10)
        queue.admit(prompts(1, text=NEEDLE))
        assert [row.text for row in queue.get([row.id for row in prompts(1)])] == [NEEDLE] * 4
        queue.close()
        heard = ear.heard
    assert heard.count(NEEDLE.encode()) >= 2  # it listened to both directions
    digest = hashlib.sha256(secret).digest()
    assert [form for form in (*forms(secret), *forms(digest)) if form in heard] == []


def test_what_was_heard_opens_nothing(server: Server) -> None:
    """A handshake that is said again does not fit the next nonce, and a proof of one side is none of the other."""
    secret = (server.run.secrets / "queue.key").read_bytes()
    said: list[bytes] = []

    class Recorded(ClientHandshake):
        def authenticate(self, outgoing, incoming) -> None:
            class Keeping:
                def write(self, data: bytes) -> None:
                    said.append(data)
                    outgoing.write(data)

            super().authenticate(Keeping(), incoming)

    class Repeated(fl.ClientAuthHandler):
        def authenticate(self, outgoing, incoming) -> None:
            incoming.read()
            outgoing.write(said[0])
            incoming.read()

        def get_token(self) -> bytes:
            return b""

    class Mirrored(fl.ClientAuthHandler):
        def authenticate(self, outgoing, incoming) -> None:
            theirs = incoming.read()
            outgoing.write(theirs + said[0][32:])
            incoming.read()

        def get_token(self) -> bytes:
            return b""

    connection = fl.connect(server.endpoint)
    connection.authenticate(Recorded(secret), fl.FlightCallOptions(timeout=5))
    for stranger in (Repeated(), Mirrored()):
        with pytest.raises(fl.FlightUnauthenticatedError, match="wrong secret"):
            fl.connect(server.endpoint).authenticate(stranger, fl.FlightCallOptions(timeout=5))
    with pytest.raises(fl.FlightUnauthenticatedError):
        ServerHandshake(secret).is_valid(b"\0" * 32)


class _LetsAnyoneIn(fl.ServerAuthHandler):
    def authenticate(self, outgoing, incoming) -> None:
        outgoing.write(b"n" * 32)
        incoming.read()
        outgoing.write(b"p" * 64)

    def is_valid(self, token: bytes) -> bytes:
        return b"peer"


class Thief(fl.FlightServerBase):
    """Answers at the server's place: acknowledges all, knows all, and says that all is over."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, auth_handler=_LetsAnyoneIn())
        self.calls: list[str] = []

    def do_put(self, context, descriptor, reader, writer) -> None:
        reader.read_all()
        self.calls.append("put")
        writer.write(b"ok")

    def do_get(self, context, ticket):
        self.calls.append("get")
        return fl.RecordBatchStream(pa.Table.from_pylist([], schema=SEQUENCES))

    def do_action(self, context, action):
        self.calls.append(action.type)
        if action.type == "commit_trained":
            raise told(Fenced("go home"))
        return [fl.Result(b"{}")]


def test_who_takes_the_servers_port_while_it_is_down_is_not_believed(tmp_path: Path) -> None:
    """A connected client is connected again by gRPC itself, without a handshake."""
    server = Server(make_run(tmp_path / "run"))
    calls: list[Callable[[QueueClient], object]] = [
        lambda queue: queue.admit(prompts(1)),
        lambda queue: queue.get([row.id for row in prompts(1)]),
        lambda queue: queue.stats(),
        lambda queue: queue.commit_trained(1),
    ]
    clients = [server.client(deadline_s=5) for _ in calls]
    for queue in clients:
        queue.stats()
    server.kill()
    thief = Thief(server.endpoint)
    try:
        for queue, call in zip(clients, calls, strict=True):
            with pytest.raises(PermissionError, match="does not know the secret"):
                call(queue)
        assert thief.calls  # it was asked: not each time, some clients see the end of the old connection first
    finally:
        thief.shutdown()
    server.restart()
    clients[0].admit(prompts(1))
    assert clients[0].stats()["admitted"] == 4
    server.kill()


def test_the_channel_is_encrypted_and_its_keys_stay_at_home(tmp_path: Path) -> None:
    make_keys(tmp_path)

    async def talk() -> bytes:
        controller = ControllerEnd(tmp_path, 1)
        with eavesdropping(controller.endpoint) as (ear, endpoint):
            agent = AgentEnd(tmp_path, 1, endpoint, "agent")
            agent.send(wire.Join(node=NEEDLE, num_slots=1, pid=1))
            peer, frame = await controller.recv()
            assert frame.body.node == NEEDLE
            await controller.send(peer, wire.Quit(reason=NEEDLE))
            assert (await agent.recv()).body.reason == NEEDLE
            agent.close()
            controller.close()
            return ear.heard

    heard = asyncio.run(asyncio.wait_for(talk(), 20))
    assert b"CURVE" in heard and NEEDLE.encode() not in heard
    secrets = [(tmp_path / f"{end}.secret").read_bytes() for end in ("server", "agent")]
    assert [form for secret in secrets for form in forms(secret) if form in heard] == []
