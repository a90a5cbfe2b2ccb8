"""The controller's side of a node, with real agents: one NodeLost per life, whatever ends it."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import wire
from pipeline.channel import AgentEnd
from pipeline.core import events as ev
from pipeline.core.errors import RunError
from tests.slurm.rig import NODE, is_gone, shared_memory
from tests.slurm.watch import Watch


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    watch = Watch(tmp_path / "run", heartbeat_s=1.0)
    yield watch
    watch.close()


def test_each_life_of_a_node_is_lost_once_however_it_ends(watch: Watch) -> None:
    first = watch.serve()
    os.kill(first[2], signal.SIGKILL)  # NodeFailed comes before the agent's end
    lost = watch.next()
    assert isinstance(lost, ev.NodeLost) and lost.reason.startswith(
        "the zygote ended: killed by SIGKILL\nlast lines of"
    )
    assert watch.shell.nodes == {}
    watch.until(lambda: all(map(is_gone, first)))  # its workers have been killed by the kernel, or are about to be

    watch.start()
    second = watch.serve()
    assert not set(first) & set(second) and list(watch.shell.nodes) == [NODE]
    os.kill(second[0], signal.SIGSTOP)
    start = time.monotonic()
    lost = watch.next()
    assert lost.reason.startswith("its agent was silent for 1.") and "(limits.heartbeat_s)" in lost.reason
    assert 0.9 < time.monotonic() - start < 3
    assert "the zygote ended" not in lost.reason  # that was said in another life
    watch.start()
    watch.serve()
    assert watch.shell.posted == []


def test_what_a_lost_agent_still_says_is_answered_quit(watch: Watch) -> None:
    """Another process in its place, and one that nobody started."""
    watch.serve()
    for pid in (watch.life.process.pid, 1):
        stranger = watch.do(say_join(watch, pid))
        assert isinstance(stranger, wire.Quit)
    assert watch.shell.posted == []


def test_a_node_that_is_ended_is_lost_with_the_reason(watch: Watch) -> None:
    pids = watch.serve()

    async def end() -> None:
        for _ in range(2):
            watch.nodes.end(NODE, "its memory cannot be filled")

    watch.do(end())
    assert watch.next().reason.startswith("its memory cannot be filled")
    assert all(map(is_gone, pids[:1])) and watch.shell.posted == []


async def say_join(watch: Watch, pid: int) -> Any:
    end = AgentEnd(watch.run.secrets, watch.attempt, watch.nodes.channel.endpoint, f"stranger-{pid}")
    end.send(wire.Join(node=NODE, num_slots=1, pid=pid))
    frame = await end.recv()
    end.close()
    return frame.body


def test_an_agent_that_never_joins_is_lost_with_its_exit_and_its_log(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "run")
    watch.serve()
    code = "import sys; print('it broke', flush=True); sys.exit(7)"
    watch.cluster.agent_command = lambda *args: [sys.executable, "-c", code]  # type: ignore[method-assign]
    watch.start()
    lost = watch.next()
    assert lost.reason == "its agent ended: exit code 7\nlast lines of local-0-agent.log:\nit broke"

    def refuse(*args: Any) -> Any:
        raise RunError("processes of its old agent 7 are still there")

    watch.cluster.start_agent = refuse  # type: ignore[method-assign]
    watch.start()
    assert watch.next().reason == "its agent cannot be started: processes of its old agent 7 are still there"
    watch.close()
    assert shared_memory(watch.run, watch.attempt) == []


def test_an_agent_that_does_not_join_in_time_is_lost(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "run", engine_start_s=1.0, heartbeat_s=0.5)
    os.kill(watch.life.process.pid, signal.SIGSTOP)
    lost = watch.next()
    assert lost.reason.startswith("its agent was silent for 1.") and "(limits.engine_start_s)" in lost.reason
    watch.close()
