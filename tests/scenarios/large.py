"""Deaths of runs on 128 emulated GPUs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.core.modes import ModeName
from pipeline.simulator.admission import Admission
from pipeline.simulator.emulate import paper_emulation
from pipeline.simulator.modes import Schedule
from tests.scenarios.deaths import Death, Outcome, kill_controller, one_of_two, suffer, whole, worker

LARGE = ("checkpoint.save_freq=2", "checkpoint.keep=100", "limits.restarts=9")


def suffer_at_large(folder: Path, schedule: Schedule, deaths: Sequence[tuple[Death, str]]) -> Outcome:
    """Deaths of a run on 128 emulated GPUs, ten times as fast as these would be."""
    num_sequences, num_steps = 512, 8
    emulation = paper_emulation(2, "h800", num_gpus=128, num_sequences=num_sequences, time_scale=0.1, grain=32)
    config = emulation.write(folder, schedule, num_steps)
    return suffer(
        folder / "run",
        deaths,
        config=str(config),
        settings=LARGE,
        num_steps=num_steps,
        per_step=num_sequences,
        limit_s=300.0,
    )


def large_deaths(folder: Path) -> Iterator[tuple[str, Outcome]]:
    """Of workers where each role has its own slots; of a node and of the controller where slots change hands."""
    own = Schedule(mode=ModeName.DISAGGREGATED, rollout=48, reward=48, train=32)
    shifting = Schedule(mode=ModeName.SHIFTABLE, rollout=128, train=64, admission=Admission.PAIRS)
    workers = [(worker("rollout-5"), "rollout"), (worker("reward-1"), "reward"), (worker("train-0"), "train")]
    others = [(one_of_two("rollout-40"), "rollout"), (whole("controller", kill_controller), "reward")]
    for name, schedule, deaths in (("own", own, workers), ("shifting", shifting, others)):
        (folder / name).mkdir(parents=True)
        yield name, suffer_at_large(folder / name, schedule, deaths)
