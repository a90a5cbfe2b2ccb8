"""Kills in every phase of a shift: who dies there, and in which run."""

from pathlib import Path

from tests.scenarios.runs import STRICT, check_same, killed_run

COLOCATED = ("placement.mode=colocated", "cluster.slots_per_node=1", "tracking.uri=none")
"""One slot, three workers: each step has three shifts, and each replica sleeps while others work."""
SETTINGS = (*STRICT, *COLOCATED, "trainer.total_training_steps=6", "checkpoint.save_freq=3")

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
EACH = [*OF_WORKERS, *OF_AGENT, *OF_CONTROLLER]
WHOLE_RUN = [f"{kill}:run" for kill in OF_WORKERS]
"""The same, and the whole run dies with it."""

LOST = ("rollout/num_tokens", "genrm/")
"""What a task had counted when it was killed is not in its step's row."""


def survive(run: Path, kill: str, reference: Path, *settings: str, config: str = "configs/emulated.yaml") -> int:
    """A run killed there, to its end: bit for bit the reference. Returns how many attempts it took."""
    attempts = killed_run(run, kill, *settings, config=config)
    check_same(run, reference, lost=() if kill.endswith(":run") else LOST)
    return attempts


REAL_SETTINGS = (
    *(*STRICT, *COLOCATED, "trainer.total_training_steps=4", "checkpoint.save_freq=2"),
    *("data.train_batch_size=4", "rollout.n=4", "evaluate.freq=2", "evaluate.num_prompts=8"),
)
REAL = (
    *("down.begin@rollout:2", "down.aborted@reward:2", "down.release@rollout:3", "up.begin@rollout:3"),
    *("up.weights@rollout:3", "up.cache@reward:2", "up.done@rollout:3", "up.weights@reward:2"),
    *("down.begin@train:2", "down.offload@train:60", "up.restore@train:30", "up.done@train:2"),
    *("agent.slept:6", "agent.wake:7", "shell.sleep_sent:6:run", "shell.wake_sent:7:run"),
)
"""Once in each phase with vLLM and the quickstart's models; tensors of a trainer are counted one by one."""
