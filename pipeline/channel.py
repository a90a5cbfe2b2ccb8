"""The channel between the controller (ROUTER) and the agents (DEALER): ZeroMQ with CURVE keys of the run.

Only the run's own client key is let in. Frames are numbered from 1 per peer and direction, so a lost one is seen as
a gap. A frame of an older attempt is answered with `Quit` and not delivered; one of a newer attempt raises Fenced.
ZeroMQ keeps messages for a dead peer: who restarts takes a new identity and starts from nothing.
"""

import contextlib
import os
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from pipeline import wire
from pipeline.core.errors import ChannelBroken, Fenced

_LINGER_MS = 500  # what a leaving process has said last is still sent
_END_NAMES = ("server", "agent")


def make_keys(secrets: Path) -> None:
    """Write the run's CURVE key pairs, 0600. Existing ones stay: an older attempt's agent must still hear `Quit`."""
    secrets.mkdir(mode=0o700, exist_ok=True)
    for name in _END_NAMES:
        for suffix, key in zip(("public", "secret"), zmq.curve_keypair(), strict=True):
            if not (secrets / f"{name}.secret").exists():
                _write_private(secrets / f"{name}.{suffix}", key)


def _write_private(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)


def _key(secrets: Path, name: str, suffix: str) -> bytes:
    return (secrets / f"{name}.{suffix}").read_bytes()


class _AllowList:
    """The one client key that CURVE lets in (the shape is that of pyzmq's credentials provider)."""

    def __init__(self, public: bytes) -> None:
        self._public = public  # as Z85 text

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class _Numbers:
    """Frame numbers of one peer, both ways."""

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0

    def next_sent(self) -> int:
        self.sent += 1
        return self.sent

    def check(self, number: int, peer: bytes) -> None:
        expected, self.received = self.received + 1, number
        if number != expected:
            raise ChannelBroken(f"{_name(peer)}: frame {number} came where {expected} was due", peer)


class ControllerEnd:
    """The controller's end. Make it inside the running loop; `endpoint` is what agents connect to."""

    def __init__(self, secrets: Path, attempt: int, host: str = "127.0.0.1") -> None:
        self._attempt = attempt
        self._numbers: dict[bytes, _Numbers] = {}
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()  # before the socket: without it CURVE lets everybody in
        self._authenticator.configure_curve_callback(credentials_provider=_AllowList(_key(secrets, "agent", "public")))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey = _key(secrets, "server", "public")
        self._socket.curve_secretkey = _key(secrets, "server", "secret")
        _set_up(self._socket)
        self._socket.router_mandatory = True
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"

    async def recv(self) -> tuple[bytes, wire.Frame[wire.FromAgent]]:
        """The next frame and the identity of its sender.

        Raises ChannelBroken (`peer` says whose) on a gap or an undecodable frame: that agent is lost, the others
        are not, so go on receiving. Raises Fenced if a peer belongs to a newer attempt.
        """
        while True:
            peer, data = await self._socket.recv_multipart()
            try:
                frame = wire.decode_from_agent(data)
            except msgspec.MsgspecError as error:
                raise ChannelBroken(f"{_name(peer)}: undecodable frame: {error}", peer) from None
            if frame.attempt > self._attempt:
                raise Fenced(f"{_name(peer)} is of attempt {frame.attempt}, this is attempt {self._attempt}")
            if frame.attempt < self._attempt:
                await self._refuse(peer, frame.attempt)
                continue
            self._numbers.setdefault(peer, _Numbers()).check(frame.number, peer)
            return peer, frame

    async def send(self, peer: bytes, body: wire.ToAgent) -> None:
        """Never waits. Raises ChannelBroken if the peer is not connected (any more)."""
        numbers = self._numbers.setdefault(peer, _Numbers())
        data = wire.encode_frame(body, attempt=self._attempt, number=numbers.next_sent())
        try:
            await self._socket.send_multipart([peer, data])
        except zmq.ZMQError as error:
            raise ChannelBroken(f"{_name(peer)}: {error.strerror}", peer) from None

    async def _refuse(self, peer: bytes, attempt: int) -> None:
        with contextlib.suppress(ChannelBroken):  # it has left by itself
            await self.send(peer, wire.Quit(reason=f"attempt {attempt} is over, this is attempt {self._attempt}"))

    def close(self) -> None:
        """What was sent last is still delivered, for at most half a second."""
        self._authenticator.stop()
        self._context.destroy(linger=_LINGER_MS)


class AgentEnd:
    """An agent's end. `identity` must be new for each process. Make it inside the running loop."""

    def __init__(self, secrets: Path, attempt: int, endpoint: str, identity: str) -> None:
        self._attempt = attempt
        self._numbers = _Numbers()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.identity = identity.encode()
        self._socket.curve_publickey = _key(secrets, "agent", "public")
        self._socket.curve_secretkey = _key(secrets, "agent", "secret")
        self._socket.curve_serverkey = _key(secrets, "server", "public")
        _set_up(self._socket)
        self._socket.connect(endpoint)

    async def recv(self) -> wire.Frame[wire.ToAgent]:
        """The controller's next frame. Raises ChannelBroken on a gap or an undecodable frame, and Fenced if the
        controller is of a newer attempt. Frames of an older attempt are dropped."""
        while True:
            data = await self._socket.recv()
            try:
                frame = wire.decode_to_agent(data)
            except msgspec.MsgspecError as error:
                raise ChannelBroken(f"the controller: undecodable frame: {error}") from None
            if frame.attempt > self._attempt:
                raise Fenced(f"the controller is of attempt {frame.attempt}, this is attempt {self._attempt}")
            if frame.attempt == self._attempt:
                self._numbers.check(frame.number, b"the controller")
                return frame

    def send(self, body: wire.FromAgent) -> None:
        """Never waits: what is said to a controller that is away is kept for it."""
        self._socket.send(wire.encode_frame(body, attempt=self._attempt, number=self._numbers.next_sent()))

    def close(self) -> None:
        self._context.destroy(linger=_LINGER_MS)


def _set_up(socket: zmq.asyncio.Socket) -> None:
    """No high-water mark: a peer that stops reading is found by its heartbeat, and sending never waits for it."""
    socket.linger = _LINGER_MS
    socket.sndhwm = 0
    socket.rcvhwm = 0


def _name(peer: bytes) -> str:
    return peer.decode(errors="replace")
