"""A relay between a client and a server that keeps every byte of both directions."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Eavesdropper:
    """`port`: where it listens; `heard`: what went through, whichever way."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self._chunks: list[bytes] = []
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def heard(self) -> bytes:
        return b"".join(self._chunks)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:  # closed
                return
            far = socket.create_connection(self._to)
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self._chunks.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # one of the two has left
            return

    def close(self) -> None:
        for end in (self._door, *self._sockets):
            with contextlib.suppress(OSError):  # it was closed from the other side
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def eavesdropping(endpoint: str) -> Iterator[tuple[Eavesdropper, str]]:
    """A relay to `endpoint` (`scheme://127.0.0.1:port`), and the endpoint to connect to instead."""
    address, _, port = endpoint.rpartition(":")
    ear = Eavesdropper(int(port))
    try:
        yield ear, f"{address}:{ear.port}"
    finally:
        ear.close()
