"""Kills in every phase of a shift: who dies there, and in which run."""

import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.run_folder import RunFolder
from tests.scenarios.faults import PATIENT, remains
from tests.scenarios.runs import STRICT, check_same, killed_run, pivot, submit, wait_for_end

COLOCATED = ("placement.mode=colocated", "cluster.slots_per_node=1", "tracking.uri=none")
"""One slot, three workers: each step has three shifts, and each replica sleeps while others work."""
SETTINGS = (*STRICT, *COLOCATED, *PATIENT, "trainer.total_training_steps=6", "checkpoint.save_freq=3")

ENGINE = ("down.begin", "down.aborted", "down.release", "up.begin", "up.weights", "up.cache", "up.done")
TRAINER = ("down.begin", "down.aborted", "down.offload", "up.begin", "up.restore", "up.done")
AT_START = ("down.release", "down.offload")
"""Passed once when the worker has started: it goes to sleep then."""
OF_WORKERS = [
    f"{point}@{role}:{4 if point in AT_START else 3}"
    for role, points in (("rollout", ENGINE), ("reward", ENGINE), ("train", TRAINER))
    for point in points
]
OF_AGENT = [f"agent.{point}:{nth}" for point, nth in (("sleep", 5), ("slept", 6), ("wake", 7), ("woken", 8))]
OF_CONTROLLER = ["shell.sleep_sent:7:run", "shell.wake_sent:8:run"]
OTHERS = ["agent.sleep:2", "agent.woken:3", *OF_CONTROLLER]
"""For one run: after each kill of an agent or a controller its counts begin anew."""
EARLY = [f"{kill.partition(':')[0]}:{2 if kill.startswith(AT_START) else 1}" for kill in OF_WORKERS]
"""The same at the first shift: one life after the other of each worker has one of them."""
EACH = [*OF_WORKERS, *OF_AGENT, *OF_CONTROLLER]
WHOLE_RUN = [f"{kill}:run" for kill in OF_WORKERS]
"""The same, and the whole run dies with it."""

LOST = ("rollout/num_tokens", "genrm/")
"""What a task had counted when it was killed is not in its step's row."""


def survive(run: Path, kill: str, reference: Path, *settings: str, config: str = "configs/emulated.yaml") -> int:
    """A run killed there, to its end: bit for bit the reference, with nothing left. Returns how many attempts it
    took."""
    attempts = killed_run(run, kill, *settings, config=config)
    check_same(run, reference, lost=() if kill.endswith(":run") else LOST)
    assert not (left := remains(RunFolder(run))), left
    return attempts


def survive_all(
    run: Path, kills: Sequence[str], reference: Path, *settings: str, config: str = "configs/emulated.yaml"
) -> int:
    """One run with all these kills, in whatever order they come; resumed as often as it takes. As `survive`."""
    marker = run.with_name(f"{run.name}.killed")
    told = {"kill": ",".join(kills), "marker": marker}
    ended = submit(run, *settings, "limits.restarts=30", config=config, **told)
    while ended.code:
        wait_for_end(run)
        assert len(RunFolder(run).attempts()) <= len(kills), ended.out
        ended = pivot("resume", str(run), **told)
    missed = [kill for kill in kills if not Path(f"{marker}.{kill.split(':')[0]}").exists()]
    assert not missed, f"nothing came to {missed}"
    check_same(run, reference, lost=LOST)
    assert not (left := remains(RunFolder(run))), left
    return len(RunFolder(run).attempts())


REAL_SETTINGS = (
    *(*STRICT, *COLOCATED, *PATIENT, "trainer.total_training_steps=4", "checkpoint.save_freq=2"),
    *("data.train_batch_size=4", "rollout.n=4", "evaluate.freq=2", "evaluate.num_prompts=8"),
)
REAL = (
    *("down.begin@rollout:2", "down.aborted@reward:2", "down.release@rollout:3", "up.begin@rollout:3"),
    *("up.weights@rollout:3", "up.cache@reward:2", "up.done@rollout:3", "up.weights@reward:2"),
    *("down.begin@train:2", "down.offload@train:60", "up.restore@train:30", "up.done@train:2"),
    *("agent.slept:6", "agent.wake:7", "shell.sleep_sent:6:run", "shell.wake_sent:7:run"),
)
"""Once in each phase with vLLM and the quickstart's models; tensors of a trainer are counted one by one."""
REAL_EARLY = (
    *("up.begin@rollout", "up.weights@rollout", "down.release@rollout:2", "up.cache@reward", "up.done@reward"),
    *("down.begin@reward", "down.aborted@rollout", "up.restore@train:9", "down.offload@train:60"),
)


# --- what goes wrong by itself ---------------------------------------------------------------------------------------

HELD_BYTES = 200 << 20
FAULTS = {"hang_in_wake": 1, "refuse_wake": 1, "hang_in_sleep": 2, "leak": 2}
"""In this order one life of an engine after the other has them: at its first waking, or at the sleep after that."""


def faults_of(folder: Path) -> tuple[str, ...]:
    """Both engines have each fault once, and the trainer refuses to wake once."""
    told = [
        f"{role}.options={json.dumps({**options, 'holds_bytes': HELD_BYTES, 'faults': _faults(folder, role)})}"
        for role, options in (
            ("rollout.engine", {"median_tokens": 16}),
            ("reward.genrm.engine", {"script": "judge"}),
        )
    ]
    trainer = {"fault": "refuse_wake", "once": str(folder / "trainer")}
    return (*told, f"trainer.options={json.dumps(trainer)}", "limits.shift_s=3", "limits.restarts=20")


def _faults(folder: Path, role: str) -> list[dict[str, object]]:
    return [{"kind": kind, "nth": nth, "once": str(folder / f"{role}-{kind}")} for kind, nth in FAULTS.items()]


def ends_of(run: Path, worker: str) -> list[str]:
    """How its lives ended, in their order: silent in a shift for too long, a wake that failed, a sleep that was not
    believed, or something else."""
    found, why, folder = [], "", RunFolder(run)
    for number in folder.attempts():
        for line in folder.journal(number).read_text().splitlines():
            match json.loads(line):
                case {"event": "TimerFired", "name": name} if name == f"worker:{worker}":
                    why = "silent"
                case {"event": "WakeFailed", "worker": name} if name == worker:
                    why = "refused"
                case {"event": "WorkerDied", "worker": name, "reason": reason} if name == worker:
                    found.append("not believed" if reason.startswith("it says that it sleeps") else why or reason)
                    why = ""
    return found
