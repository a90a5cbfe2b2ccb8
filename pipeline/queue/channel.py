"""What both ends of the Flight channel share: how they prove to each other who they are, and how errors travel.

Handshake (the secret itself never travels):

    server ▶ client   nonce S
    client ▶ server   nonce C, HMAC-SHA256(secret, "client" S C)
    server ▶ client   HMAC-SHA256(secret, "server" C S), token

Each call then carries the token, which dies with the server. gRPC mends a broken connection by itself, without a
handshake, and by then another process may have the port: so each call also carries a nonce, and its answer counts only
with HMAC-SHA256(secret, "answer" nonce).
"""

import hashlib
import hmac
import json
import secrets
import threading
from typing import Any

import pyarrow.flight as fl

from pipeline.core.errors import Fenced, NotOwner, QueueDamaged, RunError

_NONCE = 32
_NONCE_HEADER, _PROOF_HEADER = "x-nonce", "x-proof"
ERRORS: dict[str, type[Exception]] = {
    cls.__name__: cls for cls in (Fenced, NotOwner, QueueDamaged, RunError, ValueError)
}


def _proof(secret: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, who + first + second, hashlib.sha256)


class ServerHandshake(fl.ServerAuthHandler):  # type: ignore[misc]
    """Lets in who knows the secret of the run; anyone else's call is refused as unauthenticated."""

    def __init__(self, secret: bytes) -> None:
        super().__init__()
        self._secret = secret
        self._token = secrets.token_bytes(_NONCE)

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        mine = secrets.token_bytes(_NONCE)
        outgoing.write(mine)
        answer: bytes = incoming.read()
        theirs, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", mine, theirs)):
            raise fl.FlightUnauthenticatedError("wrong secret")
        outgoing.write(_proof(self._secret, b"server", theirs, mine) + self._token)

    def is_valid(self, token: bytes) -> bytes:
        if not hmac.compare_digest(token, self._token):
            raise fl.FlightUnauthenticatedError("unknown token")
        return b"peer"


class ClientHandshake(fl.ClientAuthHandler):  # type: ignore[misc]
    """Proves that we know the secret; raises PermissionError if the server does not."""

    def __init__(self, secret: bytes) -> None:
        super().__init__()
        self._secret = secret
        self._token = b""

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        theirs: bytes = incoming.read()
        mine = secrets.token_bytes(_NONCE)
        outgoing.write(mine + _proof(self._secret, b"client", theirs, mine))
        answer: bytes = incoming.read()
        proof, self._token = answer[: hashlib.sha256().digest_size], answer[hashlib.sha256().digest_size :]
        if not hmac.compare_digest(proof, _proof(self._secret, b"server", mine, theirs)):
            raise PermissionError("the server does not know the secret of this run")

    def get_token(self) -> bytes:
        return self._token


def _answer_proof(secret: bytes, nonce: str) -> str:
    return _proof(secret, b"answer", nonce.encode(), b"").hex()


class AnswerProofs(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Has the server put its proof before each answer."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def start_call(self, info: fl.CallInfo, headers: dict[str, list[str]]) -> "_ProvingAnswer":
        (nonce,) = headers.get(_NONCE_HEADER, [""])
        return _ProvingAnswer(_answer_proof(self._secret, nonce))


class _ProvingAnswer(fl.ServerMiddleware):  # type: ignore[misc]
    def __init__(self, proof: str) -> None:
        self._proof = proof

    def sending_headers(self) -> dict[str, str]:
        return {_PROOF_HEADER: self._proof}


class ProvenCalls(fl.ClientMiddlewareFactory):  # type: ignore[misc]
    """Has the client ask for the proof; afterwards `is_proven` says whether this thread's last call was answered by
    one who knows the secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._of_thread = threading.local()

    def start_call(self, info: fl.CallInfo) -> "_ProvenCall":
        call = _ProvenCall(self._secret)
        self._of_thread.call = call
        return call

    def is_proven(self) -> bool:
        call: _ProvenCall | None = getattr(self._of_thread, "call", None)
        return call is not None and call.is_proven


class _ProvenCall(fl.ClientMiddleware):  # type: ignore[misc]
    def __init__(self, secret: bytes) -> None:
        self._nonce = secrets.token_hex(_NONCE)
        self._secret = secret
        self.is_proven = False

    def sending_headers(self) -> dict[str, str]:
        return {_NONCE_HEADER: self._nonce}

    def received_headers(self, headers: dict[str, list[str]]) -> None:
        for proof in headers.get(_PROOF_HEADER, []):
            self.is_proven |= hmac.compare_digest(proof, _answer_proof(self._secret, self._nonce))


def told(error: Exception) -> fl.FlightServerError:
    """The error as it travels to the client; what the client has no type for becomes a RunError."""
    name = next((name for name, cls in ERRORS.items() if isinstance(error, cls)), RunError.__name__)
    text = str(error) if isinstance(error, ERRORS[name]) else f"queue server: {type(error).__name__}: {error}"
    return fl.FlightServerError(text, extra_info=json.dumps({"type": name, "message": text}).encode())


def heard(error: fl.FlightServerError) -> Exception | None:
    """The error that the server told, or None if this one is not from our code but from a broken connection."""
    if not error.extra_info:
        return None
    message = json.loads(error.extra_info)
    return ERRORS[message["type"]](message["message"])
