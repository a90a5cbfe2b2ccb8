"""The launcher of steps, with commands of the tests' own in place of srun, and what the controller asks of it."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pipeline import wire
from pipeline.channel import AgentEnd, ControllerEnd, make_keys
from pipeline.core.errors import ChannelBroken
from pipeline.launches import Launches
from pipeline.processes import python_command, python_environment
from pipeline.run_folder import write_json
from pipeline.wire_launch import EndLaunch, Launch, LaunchAsked, LaunchEnded, LauncherJoined
from slurm.launcher import Launcher, Leave, cpus_per_slot, step_command
from slurm.names import contact
from tests.fakes.sbatch import make, write_client, write_clients
from tests.slurm.rig import is_gone, until

ASKED = {"gres": "gpu:a100", "cpus_per_slot": 4, "container": ""}
LAUNCH = Launch(node="n1", worker="rollout-0", life=3, num_slots=2, door="pivot-door")
END = EndLaunch(node="n1", worker="rollout-0", life=3)


def test_a_step_has_its_share_of_the_node_to_itself() -> None:
    words = step_command(ASKED, 4, LAUNCH)
    asked = " ".join(words)
    assert asked.startswith(
        "srun --job-name=rollout-0 -N1 -n1 -w n1 --exact --gres=gpu:a100:2 --cpus-per-task=8 --mem=0"
    )
    assert words[-3:] == ["pivot-door", "rollout-0", "3"]
    assert "--gres" not in " ".join(step_command(ASKED | {"gres": ""}, 4, LAUNCH))
    inside = step_command(ASKED | {"container": 'apptainer exec "my image.sif"'}, 4, LAUNCH)
    assert inside[inside.index("apptainer") :][:3] == ["apptainer", "exec", "my image.sif"]


@pytest.mark.parametrize(
    ("told", "cpus"), [("", 4), ("16(x2)", 4), ("128", 4), ("16(x2),6", 1), ("8,16(x3)", 2), ("1(x2)", 0)]
)
def test_a_step_takes_no_more_cpus_than_there_are(told: str, cpus: int) -> None:
    cluster = {"slots_per_node": 4, "slurm": ASKED}
    environment = {"SLURM_JOB_CPUS_PER_NODE": told} if told else {}
    assert cpus_per_slot(cluster, environment) == cpus
    assert bool(step_command(ASKED, cpus, LAUNCH)) is (cpus > 0)


# --- the launcher ---------------------------------------------------------------------------------------------------


class Controller:
    """Its end of the channel, and a launcher whose commands are `shell`."""

    def __init__(self, secrets: Path, shell: str, patience_s: float) -> None:
        make_keys(secrets)
        self.end = ControllerEnd(secrets, 1)
        self.channel = channel = AgentEnd(secrets, 1, self.end.endpoint, f"launcher-{os.getpid()}")
        self.serving = asyncio.create_task(
            Launcher(channel, lambda launch: ["/bin/sh", "-c", shell, launch.worker], patience_s).serve()
        )

    async def hear(self) -> Any:
        self.peer, frame = await self.end.recv()
        return frame.body

    async def say(self, body: wire.ToAgent) -> None:
        await self.end.send(self.peer, body)


def play(
    tmp_path: Path, shell: str, story: Callable[[Controller], Coroutine[Any, Any, None]], patience_s: float = 15.0
) -> None:
    async def main() -> None:
        controller = Controller(tmp_path, shell, patience_s)
        try:
            assert await controller.hear() == LauncherJoined(pid=os.getpid())
            await story(controller)
        finally:
            controller.serving.cancel()
            controller.channel.close()
            controller.end.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_what_a_step_said_last_is_told_with_its_end(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        await controller.say(LAUNCH)
        ended = await controller.hear()
        assert ended == LaunchEnded(node="n1", worker="rollout-0", life=3, reason=ended.reason)
        assert ended.reason.startswith("its step ended: srun, exit code 3\n")
        assert ended.reason.endswith("\nInvalid node rollout-0")

    waiting = "srun: Job 17 step creation temporarily disabled, retrying (Requested nodes are busy)"
    play(tmp_path, f"echo '{waiting}'; echo Invalid node $0 >&2; exit 3", story)


def test_a_step_that_is_not_wanted_any_more_is_ended_and_others_go_on(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        await controller.say(LAUNCH)
        await controller.say(Launch(node="n2", worker="rollout-1", life=3, num_slots=1, door="d"))
        while not (tmp_path / "began").exists() or (tmp_path / "began").read_text() != "xx":
            await asyncio.sleep(0.01)
        await controller.say(EndLaunch(node="n2", worker="rollout-0", life=3))  # none of that name there
        await controller.say(END)
        ended = await controller.hear()
        assert (ended.worker, ended.reason) == ("rollout-0", "its step ended: srun, killed by SIGTERM\n")
        await controller.say(END)
        await controller.say(EndLaunch(node="n2", worker="rollout-1", life=3))
        assert (await controller.hear()).worker == "rollout-1"

    play(tmp_path, f"printf x >> '{tmp_path}/began'; exec sleep 60", story)


def test_while_slurm_cannot_give_a_step_it_is_tried_again(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        await controller.say(LAUNCH)
        assert (await controller.hear()).reason == "its step ended: srun, exit code 3\nInvalid node"
        assert (tmp_path / "tries").read_text() == "xxxx"

    outages = (
        "srun: error: Unable to confirm allocation for job 17: Unable to contact slurm controller (connect failure)",
        "srun: error: Unable to create step for job 17: Memory required by task is not available",
        "srun: error: Unable to create step for job 17: Invalid generic resource (gres) specification",
    )
    said = "; ".join(
        f'[ $(cat tries) = {"x" * n} ] && {{ echo "{text}"; exit 1; }}' for n, text in enumerate(outages, 1)
    )
    shell = f"cd '{tmp_path}'; printf x >> tries; {said}; echo Invalid node; exit 3"
    play(tmp_path, shell, story)


def test_a_step_that_is_not_wanted_any_more_is_not_tried_again(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        await controller.say(LAUNCH)
        while not (tmp_path / "tried").exists():
            await asyncio.sleep(0.01)
        await controller.say(END)
        assert "Connection refused" in (await controller.hear()).reason

    play(
        tmp_path,
        f"cd '{tmp_path}'; [ -e tried ] && exit 3; : > tried; echo Unable to create step: Connection refused; exit 1",
        story,
    )


def test_one_that_ends_by_itself_is_not_killed(tmp_path: Path) -> None:
    async def story(controller: Controller) -> None:
        await controller.say(LAUNCH)
        while not (tmp_path / "began").exists():
            await asyncio.sleep(0.01)
        await controller.say(END)
        (tmp_path / "end").touch()
        assert (await controller.hear()).reason == "its step ended: srun, exit code 0\n"

    play(tmp_path, f"cd '{tmp_path}'; : > began; until [ -e end ]; do :; done", story)


@pytest.mark.parametrize("last_word", ["quit", "silence", "fenced"])
def test_when_it_leaves_no_step_is_left(tmp_path: Path, last_word: str) -> None:
    async def story(controller: Controller) -> None:
        await controller.say(LAUNCH)
        while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text().strip()):
            await asyncio.sleep(0.01)
        if last_word == "quit":
            await controller.say(wire.Quit(reason="done"))
        if last_word == "fenced":
            controller.end._attempt += 1
            await controller.say(wire.Beat())
        left: Leave = await controller.serving
        assert is_gone(int(pid))
        assert left.is_for_good is (last_word != "silence"), left

    play(tmp_path, f"echo $$ > '{tmp_path}/pid'; exec sleep 60", story, 1.0 if last_word == "silence" else 15.0)


@pytest.mark.parametrize(("command", "said"), [(["/no/srun"], "srun cannot be started"), ([], "fewer CPUs than slots")])
def test_where_nothing_can_be_started_it_says_so(tmp_path: Path, command: list[str], said: str) -> None:
    async def story(controller: Controller) -> None:
        channel = AgentEnd(tmp_path, 1, controller.end.endpoint, "another")
        other = asyncio.create_task(Launcher(channel, lambda _: command, 15.0).serve())
        await controller.hear()
        await controller.say(LAUNCH)
        assert said in (await controller.hear()).reason
        other.cancel()
        channel.close()

    play(tmp_path, "", story)


@pytest.mark.parametrize("end", ["killed", "quit"])
def test_its_sruns_end_with_the_launchers_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Then Slurm ends their steps."""
    write_clients(tmp_path / "bin", monkeypatch)
    write_client(tmp_path / "bin", "srun", f"echo $$ $* >> '{tmp_path}/calls'; exec sleep 60")
    run, _ = make(tmp_path, "cluster.slurm.launcher=step", "cluster.slurm.gres=''")
    make_keys(run.secrets)

    async def main() -> None:
        controller = ControllerEnd(run.secrets, 1)
        write_json(contact(run, "17.0"), {"attempt": 1, "endpoint": controller.endpoint})
        command = python_command("slurm.launcher", str(run.path), "--job", "17.0")
        launcher = await asyncio.create_subprocess_exec(*command, env=python_environment())
        peer, frame = await controller.recv()
        assert frame.body == LauncherJoined(pid=launcher.pid)
        await controller.send(peer, LAUNCH)
        while not (tmp_path / "calls").exists() or not (call := (tmp_path / "calls").read_text().split()):
            await asyncio.sleep(0.01)
        assert call[1:6] == ["--job-name=rollout-0", "-N1", "-n1", "-w", "n1"]
        if end == "quit":
            await controller.send(peer, wire.Quit(reason="done"))
            assert await launcher.wait() == 0
        else:
            launcher.kill()
            await launcher.wait()
        until(lambda: is_gone(int(call[0])), "the end of srun")
        controller.close()

    asyncio.run(asyncio.wait_for(main(), 20))


# --- the controller's side ------------------------------------------------------------------------------------------

AGENT, LAUNCHER, OTHER = b"agent", b"launcher", b"another launcher"
ASK = LaunchAsked(worker="rollout-0", life=3, num_slots=2, door="pivot-door")
ENDED = LaunchEnded(node="n1", worker="rollout-0", life=3, reason="no such node")


class Peers:
    """Who was told what; who is in `away` cannot be reached."""

    def __init__(self) -> None:
        self.told: list[tuple[bytes, Any]] = []
        self.away: set[bytes] = set()
        self.launches = Launches(self.send)

    async def send(self, peer: bytes, body: wire.ToAgent) -> None:
        if peer in self.away:
            raise ChannelBroken("it is away", peer)
        self.told.append((peer, body))

    def do(self, *work: Awaitable[Any]) -> list[tuple[bytes, Any]]:
        """What they were told meanwhile."""

        async def one_by_one() -> None:
            for one in work:
                await one

        asyncio.run(one_by_one())
        told, self.told = self.told, []
        return told

    def join(self, peer: bytes = LAUNCHER) -> list[tuple[bytes, Any]]:
        return self.do(self.launches.hear(peer, LauncherJoined(pid=1)))

    def ask(self) -> list[tuple[bytes, Any]]:
        return self.do(self.launches.note("n1", AGENT, ASK))


def test_an_order_waits_for_a_launcher() -> None:
    peers = Peers()
    assert peers.ask() == []
    assert peers.join() == [(LAUNCHER, LAUNCH)]
    assert peers.do(peers.launches.hear(LAUNCHER, ENDED)) == [(AGENT, ENDED)]
    assert peers.do(peers.launches.hear(LAUNCHER, ENDED)) == [], "once"


def test_what_has_ended_is_ended_by_the_launcher_too() -> None:
    peers = Peers()
    peers.join()
    peers.ask()
    exited = wire.WorkerExited(worker="rollout-0", life=3, reason="killed")
    assert peers.do(peers.launches.note("n2", AGENT, exited)) == [], "another node's"
    assert peers.do(peers.launches.note("n1", AGENT, exited)) == [(LAUNCHER, END)]
    assert peers.do(peers.launches.hear(LAUNCHER, ENDED)) == [], "its agent knows"


def test_an_order_that_nobody_heard_is_taken_back() -> None:
    peers = Peers()
    peers.ask()
    peers.do(peers.launches.note("n1", AGENT, wire.WorkerExited(worker="rollout-0", life=3, reason="killed")))
    assert peers.join() == []


def test_nothing_is_launched_for_an_agent_that_is_lost() -> None:
    peers = Peers()
    peers.join()
    peers.ask()
    assert peers.do(peers.launches.beat({AGENT})) == [(LAUNCHER, wire.Beat())]
    assert peers.do(peers.launches.beat({b"its next life"})) == [(LAUNCHER, END), (LAUNCHER, wire.Beat())]


def test_the_steps_of_a_launcher_that_is_lost_have_ended() -> None:
    lost = LaunchEnded(node="n1", worker="rollout-0", life=3, reason="the launcher that had its step is lost")
    for notice in ("it is away", "another one comes"):
        peers = Peers()
        peers.join()
        peers.ask()
        if notice == "it is away":
            peers.away.add(LAUNCHER)
            assert peers.do(peers.launches.beat({AGENT})) == [(AGENT, lost)]
            assert peers.ask() == []
            assert peers.join(OTHER) == [(OTHER, LAUNCH)]
        else:
            assert peers.join(OTHER) == [(AGENT, lost)]


def test_what_agents_say_is_not_taken_for_the_launchers_word() -> None:
    peers = Peers()
    peers.join()
    peers.ask()
    assert not asyncio.run(peers.launches.hear(AGENT, ENDED)) and peers.told == []
