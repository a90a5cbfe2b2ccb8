"""The first program of a worker's step: it comes to its node's agent at once, and becomes what that says.

    python -I -S slurm/stub.py DOOR WORKER LIFE

Only the standard library, and little of that: where a step is no more than this, Slurm has it there in the time in
which an interpreter starts. What native libraries read from the environment once must be there before the next one.

What the two ends say (see slurm.door) has 4 bytes of length before it.
"""

import json
import os
import socket
import struct
import sys
from typing import NoReturn

DEVICES = (
    *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "ZE_AFFINITY_MASK",
)
"""How Slurm says which devices a step has."""
CREDENTIALS = struct.Struct("3i")
HEAD_BYTES = 4
_PATIENCE_S = 30.0


def owner(sock: socket.socket) -> tuple[int, int]:
    """Pid and user of the process at the other end."""
    pid, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, uid


def read(sock: socket.socket, size: int) -> bytes:
    """Exactly so many bytes, and none of what follows."""
    data = b""
    while len(data) < size:
        if not (more := sock.recv(size - len(data))):
            sys.exit("the agent does not want this worker (any more)")
        data += more
    return data


def main(door: str, worker: str, life: str) -> NoReturn:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(_PATIENCE_S)
    try:
        sock.connect(f"\0{door}")
    except OSError as error:
        sys.exit(f"there is no agent at {door}: {error}")
    if owner(sock)[1] != os.getuid():
        sys.exit(f"{door} belongs to another user")
    who = json.dumps({"worker": worker, "life": int(life)}).encode()
    sock.sendall(len(who).to_bytes(HEAD_BYTES, "little") + who)
    head, fds, _, _ = socket.recv_fds(sock, HEAD_BYTES, 1)
    head += read(sock, HEAD_BYTES - len(head))
    told = json.loads(read(sock, int.from_bytes(head, "little")))
    devices = {name: os.environ[name] for name in DEVICES if name in os.environ}
    kept = {name: value for name, value in told["environment"].items() if name not in DEVICES}
    sock.settimeout(None)
    sock.set_inheritable(True)
    os.set_inheritable(fds[0], True)
    command = [*told["command"], str(sock.fileno()), str(fds[0])]
    os.execve(command[0], command, kept | devices)


if __name__ == "__main__":
    main(*sys.argv[1:])
