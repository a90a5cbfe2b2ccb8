"""What another user of the machine could see of a run, and the forms in which a secret could stand there."""

import base64
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
from zmq.utils import z85

_LISTENING = {"tcp": "0A", "udp": "07"}
_ACCEPTS = 0x10000
"""The flag of a listening Unix socket."""


def tree(pid: int) -> list[int]:
    """The process and all below it."""
    root = psutil.Process(pid)
    return [pid, *(child.pid for child in root.children(recursive=True))]


def arguments(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def listening(pids: Iterable[int]) -> list[tuple[int, str]]:
    """(pid, address) of everything that takes connections or datagrams: `127.0.0.1`, `::`, `unix:@name`."""
    addresses = dict(_listening_sockets())
    found = []
    for pid in pids:
        for link in _links(pid):
            if link.startswith("socket:[") and (address := addresses.get(link[8:-1])):
                found.append((pid, address))
    return found


def _links(pid: int) -> Iterator[str]:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            yield os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:  # closed meanwhile
            continue


def _listening_sockets() -> Iterator[tuple[str, str]]:
    """(inode, address) of this machine's."""
    for kind, state in _LISTENING.items():
        for family in ("", "6"):
            for line in Path(f"/proc/net/{kind}{family}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == state:
                    yield fields[9], _address(fields[1].partition(":")[0])
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & _ACCEPTS:
            yield fields[6], f"unix:{' '.join(fields[7:])}"


def _address(text: str) -> str:
    """The kernel writes each 32-bit word in the machine's order."""
    import ipaddress

    raw = b"".join(int(text[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(text), 8))
    address = ipaddress.ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def forms(secret: bytes) -> list[bytes]:
    """The bytes of a 32-byte secret, or of its Z85 text, and how they would look in hex and in base64, wherever in a
    longer text they stand."""
    raw = z85.decode(secret) if len(secret) == 40 else secret
    found = [secret, raw, raw.hex().encode(), raw.hex().upper().encode()]
    for before in range(3):  # base64 depends on what precedes, in bytes modulo 3; its ends also on what is beside
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            found.append(encode(b"\0" * before + raw)[4:40])
    return found
