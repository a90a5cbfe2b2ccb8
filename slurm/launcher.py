"""Starts workers as steps of their job (`cluster.slurm.launcher: step`).

    python -m slurm.launcher RUN_FOLDER --job ID.RESTARTS

A child of the job's batch script, for inside a step nothing runs srun. It is told by the controller what to start and
to end, and tells what has ended. An srun is there for as long as its step, which ends with it: the launcher's death
ends them all, and the script starts another one.
"""

import argparse
import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pipeline import wire
from pipeline.channel import AgentEnd
from pipeline.compose import read_tree
from pipeline.core.errors import Fenced, PivotError
from pipeline.processes import SHIELD, beat_period_s, describe_exit, dying_with
from pipeline.run_folder import RunFolder
from pipeline.wire_launch import EndLaunch, Launch, LaunchEnded, LauncherJoined
from slurm import stub
from slurm.agent import PATIENCE_S, wait_for_controller
from slurm.commands import OUTAGE

_LAST_BYTES = 4096
_BY_ITSELF_S = 0.5
"""So long may an srun take whose worker has ended. One that waits for slots, or whose step goes on, is ended."""
_TERM_S = 3.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 2.0
_NO_MEMORY = "Memory required by task is not available"
"""What Slurm (22.05) says of every step for some seconds after its controller has started again; ours ask for none."""
_NO_DEVICES = "Invalid generic resource"
"""What it says where some of a node's devices are free, but too few. It only waits where none is."""
_NOT_NOW = re.compile(
    rf"Unable to (create step|confirm allocation).*({OUTAGE.pattern}|{_NO_MEMORY}|{_NO_DEVICES})", re.IGNORECASE
)
"""No step has begun, and one may later."""

_CPUS = "SLURM_JOB_CPUS_PER_NODE"

_Key = tuple[str, str, int]


class Leave(Exception):
    """Why the launcher leaves. `is_for_good`: no other one is wanted in this life of the job."""

    def __init__(self, reason: str, *, is_for_good: bool) -> None:
        super().__init__(reason)
        self.is_for_good = is_for_good


def cpus_per_slot(cluster: dict[str, Any], environment: Mapping[str, str]) -> int:
    """What was asked for, or less in an allocation that its user holds and that has less. 0: not even one for each, and
    steps share none."""
    given = [int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?", environment.get(_CPUS, ""))]
    asked, num_slots = int(cluster["slurm"]["cpus_per_slot"]), int(cluster["slots_per_node"])
    return min([asked, *(count // num_slots for count in given)])


def step_command(asked: dict[str, Any], cpus: int, launch: Launch) -> list[str]:
    """`asked`: the configuration's `cluster.slurm`; `cpus`: for each slot. The step has its share of its node's devices
    and CPUs to itself, and waits for them where they are not free yet. Nothing where it could never have them."""
    if not cpus:
        return []
    gres = [f"--gres={asked['gres']}:{launch.num_slots}"] if asked["gres"] else []
    return [
        *("srun", f"--job-name={launch.worker}", "-N1", "-n1", "-w", launch.node, "--exact", *gres),
        *(f"--cpus-per-task={cpus * launch.num_slots}", "--mem=0", "--cpu-bind=none"),
        *shlex.split(asked["container"]),
        *SHIELD,
        *(sys.executable, "-I", "-S", stub.__file__, launch.door, launch.worker, str(launch.life)),
    ]


class Launcher:
    """`command(launch)` is what runs it. Make it inside the running loop."""

    def __init__(self, channel: AgentEnd, command: Callable[[Launch], Sequence[str]], patience_s: float) -> None:
        self._channel, self._command, self._patience_s = channel, command, patience_s
        self._steps: dict[_Key, asyncio.Task[None]] = {}
        self._unwanted: dict[_Key, asyncio.Event] = {}
        self._heard = time.monotonic()

    async def serve(self) -> Leave:
        """Until the controller says so or is silent. Then no step is left."""
        self._channel.send(LauncherJoined(pid=os.getpid()))
        parts = [asyncio.create_task(part) for part in (self._obey(), self._watch_silence())]
        try:
            await asyncio.gather(*parts)
            raise AssertionError("unreachable: these parts never return")
        except Leave as left:
            leave = left
        except PivotError as error:
            leave = Leave(str(error), is_for_good=isinstance(error, Fenced))
        for part in parts:
            part.cancel()
        for unwanted in self._unwanted.values():
            unwanted.set()
        if self._steps:
            await asyncio.wait(self._steps.values())
        return leave

    async def _obey(self) -> NoReturn:
        while True:
            body = (await self._channel.recv()).body
            self._heard = time.monotonic()
            match body:
                case Launch(node=node, worker=worker, life=life):
                    key = (node, worker, life)
                    self._unwanted[key] = asyncio.Event()
                    self._steps[key] = asyncio.create_task(self._launch(key, self._command(body)))
                case EndLaunch(node=node, worker=worker, life=life):
                    if unwanted := self._unwanted.get((node, worker, life)):
                        unwanted.set()
                case wire.Quit(reason=reason):
                    raise Leave(f"the controller said: {reason}", is_for_good=True)

    async def _watch_silence(self) -> NoReturn:
        while (silent := time.monotonic() - self._heard) < self._patience_s:
            await asyncio.sleep(min(beat_period_s(self._patience_s), self._patience_s - silent))
        raise Leave(f"the controller was silent for {silent:.1f} s", is_for_good=False)

    async def _launch(self, key: _Key, command: Sequence[str]) -> None:
        """One step, from srun's start to its end. Tried again while Slurm cannot give it: who waits for it has a
        limit."""
        (node, worker, life), unwanted = key, self._unwanted[key]
        pause_s, reason = _PAUSE_S, "it is not wanted any more"
        try:
            if not command:
                unwanted.set()
                reason = "the allocation has fewer CPUs than slots on a node (salloc --cpus-per-task)"
            while not unwanted.is_set():
                reason = await self._run(f"{worker} on {node}, life {life}", command, unwanted)
                if not _NOT_NOW.search(reason):
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(unwanted.wait(), pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except OSError as error:
            reason = f"srun cannot be started: {error}"
        del self._steps[key], self._unwanted[key]
        self._channel.send(LaunchEnded(node=node, worker=worker, life=life, reason=reason))

    async def _run(self, name: str, command: Sequence[str], unwanted: asyncio.Event) -> str:
        """Returns how it ended, with the last of what srun said."""
        srun = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=dying_with(signal.SIGKILL),
        )
        assert srun.stdout is not None
        said = b""
        ending = asyncio.create_task(self._end(srun, unwanted))
        while more := await srun.stdout.read(_LAST_BYTES):
            said = (said + more)[-_LAST_BYTES:]
            print(f"{name}: {more.decode(errors='replace').rstrip()}", flush=True)
        how = f"its step ended: srun, {describe_exit(await srun.wait())}"
        ending.cancel()
        print(f"{name}: {how}", flush=True)
        return f"{how}\n{said.decode(errors='replace').rstrip()}"

    async def _end(self, srun: asyncio.subprocess.Process, unwanted: asyncio.Event) -> None:
        await unwanted.wait()
        for pause_s, sig in ((_BY_ITSELF_S, signal.SIGTERM), (_TERM_S, signal.SIGKILL)):
            await asyncio.sleep(pause_s)
            with contextlib.suppress(ProcessLookupError):
                srun.send_signal(sig)


async def _main(run: RunFolder, attempt: int, endpoint: str, cluster: dict[str, Any], cpus: int) -> Leave:
    identity = f"launcher-{os.getpid()}-{time.time_ns()}"
    channel = AgentEnd(run.secrets, attempt, endpoint, identity)
    leave = await Launcher(channel, lambda launch: step_command(cluster["slurm"], cpus, launch), PATIENCE_S).serve()
    channel.close()
    return leave


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="slurm.launcher")
    parser.add_argument("run", type=Path)
    parser.add_argument("--job", required=True)
    args = parser.parse_args(argv)
    os.umask(0o077)
    run = RunFolder(args.run)
    config = read_tree(run.config)
    attempt, endpoint = wait_for_controller(run, args.job, config["limits"]["engine_start_s"])
    cpus = cpus_per_slot(config["cluster"], os.environ)
    leave = asyncio.run(_main(run, attempt, endpoint, config["cluster"], cpus))
    print(f"the launcher of job {args.job} leaves: {leave}", flush=True)
    sys.exit(not leave.is_for_good)


if __name__ == "__main__":
    main()
