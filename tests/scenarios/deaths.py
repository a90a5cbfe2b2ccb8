"""What dies in a run, at which moments, and how long until that is noticed and work goes on."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.scenarios.faults import LIMIT_S, SETTINGS, Account, Event, Run, account

NUM_STEPS, PER_STEP = 12, 16
PROGRESS = ("SegmentClosed", "VerdictGiven", "BatchTrained")
MOMENTS: dict[str, Callable[[Event], bool]] = {
    "rollout": lambda e: e["event"] == "SegmentClosed",
    "reward": lambda e: e["event"] == "VerdictGiven",
    "train": lambda e: e["event"] == "TaskStarted" and e["task"].startswith("train-"),
    "publish": lambda e: e["event"] == "TaskStarted" and e["task"].startswith("publish-"),
}
"""In the middle of which stage something dies."""


@dataclass(frozen=True)
class Felt:
    """One death: seconds until it was detected, and from then until work went on."""

    death: str
    moment: str
    detected_s: float
    back_s: float


Death = Callable[[Run, str, float], Felt]
"""Strikes at the first such moment after a time (wall clock), and waits until work goes on."""


def worked(event: Event) -> bool:
    return event["event"] in PROGRESS


def worker(name: str, sig: signal.Signals = signal.SIGKILL) -> Death:
    death = name if sig is signal.SIGKILL else f"{name} is silent"

    def die(run: Run, moment: str, after: float) -> Felt:
        run.until(moment, MOMENTS[moment], after)
        return _of_worker(run, name, death, moment, run.kill(f"{run.node_of(name)}-{name}", sig))

    return die


def _of_worker(run: Run, name: str, death: str, moment: str, killed: float) -> Felt:
    told = run.until("its death is known", lambda e: e["event"] == "WorkerDied" and e["worker"] == name, killed)
    ready = run.until("it is back", lambda e: e["event"] == "WorkerReady" and e["worker"] == name, told["wall"])
    went_on = run.until("work goes on", worked, ready["wall"])
    return Felt(death, moment, told["wall"] - killed, went_on["wall"] - told["wall"])


def node(process: str, sig: signal.Signals = signal.SIGKILL) -> Death:
    """By its agent or its zygote. A stopped agent is silent, and found by that."""
    death = process if sig is signal.SIGKILL else f"{process} is silent"

    def die(run: Run, moment: str, after: float) -> Felt:
        run.until(moment, MOMENTS[moment], after)
        killed = run.kill(f"{run.node_of('train-0')}-{process}", sig)
        told = run.until("its loss is known", lambda e: e["event"] == "NodeLost", killed)
        joined = run.until("it is back", lambda e: e["event"] == "NodeJoined", told["wall"])
        went_on = run.until("work goes on", worked, joined["wall"])
        return Felt(death, moment, told["wall"] - killed, went_on["wall"] - told["wall"])

    return die


def one_of_two(worker: str) -> Death:
    """The node, by its agent, on which the worker is; work may go on before it is back, and what follows does not wait
    for that."""

    def die(run: Run, moment: str, after: float) -> Felt:
        run.until(moment, MOMENTS[moment], after)
        name = run.node_of(worker)
        killed = run.kill(f"{name}-agent")
        told = run.until("its loss is known", lambda e: e["event"] == "NodeLost", killed)
        went_on = run.until("work goes on", worked, told["wall"])
        run.until("it is back", lambda e: e["event"] == "NodeJoined" and e["node"] == name, told["wall"])
        return Felt(f"node of {worker}", moment, told["wall"] - killed, went_on["wall"] - told["wall"])

    return die


def mover(worker: str, sig: signal.Signals = signal.SIGKILL) -> Death:
    """The mover on the worker's node, while a version is published. A stopped one is silent, and found by that."""
    death = f"mover of {worker}'s node" + ("" if sig is signal.SIGKILL else " is silent")

    def die(run: Run, moment: str, after: float) -> Felt:
        run.until(moment, MOMENTS[moment], after)
        killed = run.kill(f"{run.node_of(worker)}-mover", sig)
        first = run.until("a version is sealed", lambda e: e["event"] == "VersionSealed", killed)
        later = run.until(
            "the next one is", lambda e: e["event"] == "VersionSealed" and e["version"] > first["version"], killed
        )
        return Felt(death, moment, 0.0, later["wall"] - killed)

    return die


def queue(sig: signal.Signals = signal.SIGKILL) -> Death:
    death = "queue server" if sig is signal.SIGKILL else "queue server is silent"

    def die(run: Run, moment: str, after: float) -> Felt:
        run.until(moment, MOMENTS[moment], after)
        old = run.pid("queue")
        killed = run.kill("queue", sig)
        deadline = time.monotonic() + LIMIT_S
        while run.pid("queue") == old:
            assert time.monotonic() < deadline, "the queue server is not started again"
            time.sleep(0.002)
        told = time.time()
        went_on = run.until("work goes on", worked, told)
        return Felt(death, moment, told - killed, went_on["wall"] - told)

    return die


def whole(death: str, strike: Callable[[Run], float]) -> Death:
    """The run is over; its user resumes it."""

    def die(run: Run, moment: str, after: float) -> Felt:
        run.until(moment, MOMENTS[moment], after)
        struck = strike(run)
        assert run.end() == 1, run.out
        told = time.time()
        assert not (left := run.left()), left
        run.resume()
        went_on = run.until("work goes on", worked, told)
        return Felt(death, moment, told - struck, went_on["wall"] - told)

    return die


def kill_controller(run: Run) -> float:
    return run.kill("controller")


def _kill_group(run: Run) -> float:
    struck = time.time()
    os.killpg(os.getpgid(run.pid("controller")), signal.SIGKILL)
    return struck


def _fill_up(folder: Path) -> None:
    """To the last byte."""
    with open(folder / "filler", "ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def full_disk(folder: Path) -> Death:
    """The file system of the run's folder, `folder`, is filled, and freed when the run has ended."""

    def die(run: Run, moment: str, after: float) -> Felt:
        run.until(moment, MOMENTS[moment], after)
        struck = time.time()
        _fill_up(folder)
        code = run.end()
        told = time.time()
        assert code == 1 and "no space left" in run.out.lower() and "resume" in run.out, run.out
        (folder / "filler").unlink()
        assert not (left := run.left()), left
        run.resume()
        went_on = run.until("work goes on", worked, told)
        return Felt("disk is full", moment, told - struck, went_on["wall"] - told)

    return die


SMALL_MEMORY = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m pivot /dev/shm && exec "$@"', "sh")
"""Runs a command with a small /dev/shm of its own; another command has another one, which is empty."""


def full_memory(run: Run, moment: str, after: float) -> Felt:
    """Shared memory is full. That harms nobody until an agent must be started again: then the run cannot go on."""
    run.until(moment, MOMENTS[moment], after)
    memory = Path("/proc", str(run.pid("controller")), "root", "dev", "shm")
    _fill_up(memory)
    filled = time.time()
    run.until("work goes on as before", worked, filled)
    struck = run.kill("local-0-agent")
    with contextlib.suppress(OSError):  # the run has ended, and its small memory with it
        while run.process.poll() is None:  # what the dead agent held is taken, too
            _fill_up(memory)
            time.sleep(0.005)
    assert run.end() == 1 and "/dev/shm has" in run.out, run.out
    told = time.time()
    assert not (left := run.left()), left
    run.resume()
    went_on = run.until("work goes on", worked, told)
    return Felt("shared memory is full", moment, told - struck, went_on["wall"] - told)


@contextmanager
def small_disk(folder: Path, size: str = "48m") -> Iterator[Path]:
    """A file system of its own. Raises PermissionError where this user may not mount one."""
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "pivot", folder], capture_output=True, check=False
    ).returncode:
        raise PermissionError("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def hanging(role: str, folder: Path) -> tuple[str, Death]:
    """An override by which the role's engine hangs three times, and the death that waits for the next time."""
    markers = [folder / f"hang-{role}-{n}" for n in range(3)]
    faults = [{"kind": "hang", "step": n, "once": str(m)} for n, m in zip((15, 40, 70), markers, strict=True)]
    where = "rollout.engine" if role == "rollout" else "reward.genrm.engine"
    name = f"{role}-0"

    def die(run: Run, moment: str, after: float) -> Felt:
        marker = markers.pop(0)
        deadline = time.monotonic() + LIMIT_S
        while not marker.exists():
            assert run.process.poll() is None and time.monotonic() < deadline, f"{name} did not hang"
            time.sleep(0.005)
        engine = "engine hangs" if role == "rollout" else "judge hangs"
        return _of_worker(run, name, engine, f"step {15 + 25 * (2 - len(markers))}", marker.stat().st_mtime - 0.001)

    return f"{where}.options.faults={json.dumps(faults)}", die


@dataclass(frozen=True)
class Outcome:
    """Of one run: its deaths, what is wrong with its queue, and what is left of it."""

    felt: list[Felt]
    account: Account
    left: list[str]


def suffer(
    path: Path,
    deaths: Sequence[tuple[Death, str]],
    *overrides: str,
    config: str = "configs/emulated.yaml",
    under: Sequence[str] = (),
    settings: Sequence[str] = SETTINGS,
    num_steps: int = NUM_STEPS,
    per_step: int = PER_STEP,
    limit_s: float = LIMIT_S,
) -> Outcome:
    """A run with these deaths, each at its moment, one after the other, to its end. `limit_s`: see Run."""
    steps = f"trainer.total_training_steps={num_steps}"
    run = Run(path, *settings, steps, *overrides, config=config, under=under)
    run.limit_s = limit_s
    felt, after = [], 0.0
    try:
        for death, moment in deaths:
            felt.append(death(run, moment, after))
            after = time.time()
        assert run.end() == 0, run.out
    finally:
        run.process.kill()
        run.process.wait()
    outcome = Outcome(felt, account(path, num_steps, per_step, staleness=1), run.left())
    shutil.rmtree(path)
    return outcome


def everywhere(*deaths: Death, moments: Sequence[str] = ("rollout", "reward", "train")) -> list[tuple[Death, str]]:
    return [(death, moment) for death in deaths for moment in moments]


TWO_NODES = ("cluster.nodes=2", "cluster.slots_per_node=3", "trainer.ranks=2")
"""One rank is alone on its node."""


STOP = signal.SIGSTOP
TABLE: dict[str, Callable[[Path], Outcome]] = {
    "workers": lambda folder: suffer(
        folder / "run", everywhere(worker("rollout-0"), worker("reward-0"), worker("train-0"))
    ),
    "node": lambda folder: suffer(folder / "run", everywhere(node("zygote"), node("agent"))),
    "silence": lambda folder: suffer(folder / "run", everywhere(node("agent", STOP), queue(STOP))),
    "stopped": lambda folder: suffer(
        folder / "run",
        everywhere(worker("rollout-0", STOP), worker("train-0", STOP), node("zygote", STOP)),
        num_steps=3 * NUM_STEPS,  # nobody misses a zygote at once
    ),
    "queue": lambda folder: suffer(folder / "run", everywhere(queue())),
    "controller": lambda folder: suffer(folder / "run", everywhere(whole("controller", kill_controller))),
    "group": lambda folder: suffer(folder / "run", everywhere(whole("whole group", _kill_group))),
    "engine": lambda folder: _hang("rollout", folder),
    "judge": lambda folder: _hang("reward", folder),
    "disk": lambda folder: _fill(folder),
    "memory": lambda folder: _without_memory(folder),
    "nodes": lambda folder: suffer(
        folder / "run",
        [*everywhere(one_of_two("train-0"), moments=tuple(MOMENTS)), (one_of_two("train-1"), "train")],
        *TWO_NODES,
    ),
    "ranks": lambda folder: suffer(
        folder / "run", everywhere(worker("train-0"), worker("train-1")), *TWO_NODES, num_steps=2 * NUM_STEPS
    ),
    "movers": lambda folder: suffer(
        folder / "run",
        everywhere(mover("train-0"), mover("train-1"), mover("train-1", STOP), moments=("publish",)),
        *TWO_NODES,
        num_steps=4 * NUM_STEPS,
    ),
}
"""Some deaths of one run each, at three or four moments (a mover's: while it is needed); what is written there lies in
the folder given."""


def _hang(role: str, folder: Path) -> Outcome:
    override, death = hanging(role, folder)
    return suffer(folder / "run", everywhere(death), override)


def _fill(folder: Path) -> Outcome:
    with small_disk(folder / "small") as small:
        return suffer(small / "run", everywhere(full_disk(small)))


def _without_memory(folder: Path) -> Outcome:
    if subprocess.run([*SMALL_MEMORY, "true"], capture_output=True, check=False).returncode:
        raise PermissionError("this user may not mount a file system")
    return suffer(folder / "run", everywhere(full_memory), "limits.restarts=1", under=SMALL_MEMORY)


REAL = (
    *("algorithm.staleness=1", "checkpoint.save_freq=3", "checkpoint.keep=100"),
    *("data.train_batch_size=8", "rollout.n=8", "evaluate.freq=0", "tracking.uri=none", "limits.restarts=9"),
)


def suffer_for_real(folder: Path) -> Outcome:
    """Six deaths of a run with vLLM and the quickstart's models."""
    deaths = [
        *((worker("rollout-0"), "rollout"), (worker("reward-0"), "reward"), (worker("train-0"), "train")),
        *((queue(), "rollout"), (node("zygote"), "reward"), (node("agent"), "train")),
    ]
    return suffer(folder / "run", deaths, config="configs/quickstart.yaml", settings=REAL, num_steps=10, per_step=64)
