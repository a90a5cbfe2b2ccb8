"""Which address a run's controller gives to its agents."""

import socket

import pytest

from slurm import job


def test_the_address_is_one_that_other_nodes_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own name stands for a loopback address, as Debian has it; one node's name is unknown."""
    names = {"here": "127.0.1.1", "there": "192.0.2.7"}
    monkeypatch.setattr(socket, "gethostname", lambda: "here")

    def resolve(name: str) -> str:
        if name not in names:
            raise socket.gaierror(name)
        return names[name]

    monkeypatch.setattr(socket, "gethostbyname", resolve)

    class Probe:
        def __init__(self, *_: object) -> None:
            self._to = ""

        def __enter__(self) -> "Probe":
            return self

        def __exit__(self, *_: object) -> None: ...

        def connect(self, to: tuple[str, int]) -> None:
            self._to = to[0]

        def getsockname(self) -> tuple[str, int]:
            return ("127.0.0.1" if self._to.startswith("127.") else "192.0.2.3", 1)

    monkeypatch.setattr(socket, "socket", Probe)
    assert job._own_address(["unknown", "here", "there"]) == "192.0.2.3"
    assert job._own_address(["here"]) == "127.0.1.1", "alone it needs no other"
    assert job._own_address([]) == "127.0.1.1"
