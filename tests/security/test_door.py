"""The door of an agent: whoever comes in there is the same user's, and so is the agent."""

import json
import os
import subprocess
import sys

import pytest

from pipeline import wire
from tests.slurm.rig import Rig
from tests.slurm.test_door import Come, order
from tests.slurm.test_door import come as come  # the fixtures
from tests.slurm.test_door import step_rig as step_rig


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_turned_away_at_either_end(step_rig: Rig, come: Come) -> None:
    rig = step_rig
    door = order(rig, "rollout-0", 11, [0])
    code = f"""
import os, socket, sys
os.setuid(65534)
knocking = socket.socket(socket.AF_UNIX)
knocking.connect(chr(0) + sys.argv[1])
try:
    knocking.sendall({_hello("rollout-0", 11)!r})
    print(knocking.recv(1))
except ConnectionError:
    print(b"")
"""
    seen = subprocess.run([sys.executable, "-c", code, door], capture_output=True, text=True, check=False)
    assert seen.stdout == "b''\n", seen
    assert come(door, "rollout-0", 11).poll() is None
    rig.ready("rollout-0")
    rig.send(wire.KillWorker(worker="rollout-0", reason="enough"))
    rig.expect(wire.WorkerExited, worker="rollout-0", life=11)

    listener = (
        "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.bind('\\0pivot-stolen'); s.listen();"
        "print(flush=True); print(s.accept()[0].recv(1))"
    )
    with subprocess.Popen([sys.executable, "-c", listener], stdout=subprocess.PIPE, text=True) as thief:
        assert thief.stdout is not None and thief.stdout.readline() == "\n"
        assert "belongs to another user" in come("pivot-stolen", "rollout-0", 11).communicate()[0]
        assert thief.stdout.read() == "b''\n", "it has not even learned who came"


def _hello(worker: str, life: int) -> bytes:
    who = json.dumps({"worker": worker, "life": life}).encode()
    return len(who).to_bytes(4, "little") + who
