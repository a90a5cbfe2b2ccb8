"""What came out of a simulated run, and two bounds to hold it against."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.events import INFERENCE, Role
from pipeline.simulator.cluster import LOST, SHIFT, LostNode, SlowGpu, StepTimes, Usage
from pipeline.simulator.modes import Schedule
from pipeline.simulator.setup import RIGHT, Beliefs, Setup
from pipeline.simulator.simulation import Mode, Simulation

NUM_STEPS, NUM_SKIPPED = 12, 3
"""Of a run that is measured: the first are filling up."""


@dataclass(frozen=True, kw_only=True)
class Result:
    sequences_per_s: float
    step_s: float
    busy: dict[str, float]
    """Share of all GPU-seconds that decode, prefill and train."""
    idle: dict[str, float]
    """Share of all GPU-seconds in which nothing is computed, by the role that the GPUs are ready for; `shift`: on the
    way to one, `lost`: of dead nodes. With `busy` it makes 1."""
    shifts_per_step: float
    """Moves of one time count as one."""
    moves_per_step: float
    """Of blocks."""
    num_preempted: int
    num_migrated: int
    work_bound: float
    """Sequences per second if no GPU ever idled and all batches were full: work conservation."""
    least_gpu_s: dict[Role, float]
    """Of a sequence in each role where the role is at its most efficient: `work_bound` has all of them."""
    tail_bound: float
    """The same if also the longest response of each step must be waited for."""
    steps: tuple[StepTimes, ...]
    usage: Usage

    def as_json(self) -> dict[str, object]:
        return {
            "sequences_per_s": self.sequences_per_s,
            "step_s": self.step_s,
            "of_work_bound": self.sequences_per_s / self.work_bound,
            "of_tail_bound": self.sequences_per_s / self.tail_bound,
            "busy": self.busy,
            "idle": self.idle,
            "shifts_per_step": self.shifts_per_step,
            "moves_per_step": self.moves_per_step,
            "preempted": self.num_preempted,
            "migrated": self.num_migrated,
            "steps": [
                {
                    "step": s.step,
                    "admitted_s": s.admitted_s,
                    "rolled_out_s": s.rolled_out_s,
                    "scored_s": s.scored_s,
                    "train_started_s": s.train_started_s,
                    "trained_s": s.trained_s,
                }
                for s in self.steps
            ],
        }


def simulate(
    setup: Setup,
    schedule: Schedule | Mode,
    *,
    seed: int = 0,
    num_steps: int = NUM_STEPS,
    num_skipped: int = NUM_SKIPPED,
    scenarios: Sequence[LostNode | SlowGpu] = (),
    beliefs: Beliefs = RIGHT,
    is_traced: bool = False,
) -> Result:
    """`beliefs`: how wrong a planner is about the setup; static modes have none."""
    mode = schedule.policy(setup.believed(beliefs)) if isinstance(schedule, Schedule) else schedule
    sim = Simulation(setup, mode, seed=seed, num_steps=num_steps, scenarios=scenarios, is_traced=is_traced)
    sim.run_until(num_steps)
    return measure(sim, num_skipped)


def window(num_steps: int, num_skipped: int) -> tuple[int, int]:
    """First and last step of an even number of cycles.

    With staleness 1 long and short steps alternate, so an odd number is off by up to 19 %.
    """
    last = num_steps - 1
    first = num_skipped + (last - num_skipped) % 2
    if first >= last:
        raise ValueError(f"{num_steps} steps, of which {num_skipped} are skipped, leave no two cycles to measure")
    return first, last


def measure(sim: Simulation, num_skipped: int = NUM_SKIPPED) -> Result:
    for replicas in sim.replicas.values():
        for replica in replicas:
            replica.advance(sim.now)
            sim.usage.add(replica)
    ends = [step.trained_s for step in sim.steps if step.trained_s is not None]
    first, last = window(len(ends), num_skipped)
    seconds = (ends[last] - ends[first]) / (last - first)
    all_s, usage, setup = sim.now * sim.setup.num_gpus, sim.usage, sim.setup
    ahead_s = 0.0 if sim.train_end_s is None else sim.train_end_s - sim.now  # of a training that has just begun
    train_gpu_s = usage.train_gpu_s - ahead_s * sim.num_train_gpus
    busy = {
        **{f"decode/{role.value}": usage.decode_gpu_s[role] / all_s for role in INFERENCE},
        **{f"prefill/{role.value}": usage.prefill_gpu_s[role] / all_s for role in INFERENCE},
        "train": train_gpu_s / all_s,
    }
    bounds = Bounds.of(setup, sim.num_train_gpus, sim.mode.staleness)
    return Result(
        sequences_per_s=setup.workload.num_sequences / seconds,
        step_s=seconds,
        busy=busy,
        idle=_idle(sim, busy),
        shifts_per_step=len({shift.at_s for shift in usage.shifts}) / len(ends),
        moves_per_step=len(usage.shifts) / len(ends),
        num_preempted=usage.num_preempted,
        num_migrated=usage.num_migrated,
        work_bound=bounds.work,
        tail_bound=bounds.tail,
        least_gpu_s=bounds.least_gpu_s,
        steps=tuple(step for step in sim.steps if step.trained_s is not None),
        usage=usage,
    )


def _idle(sim: Simulation, busy: dict[str, float]) -> dict[str, float]:
    found = dict.fromkeys([*(role.value for role in (*INFERENCE, Role.TRAIN)), SHIFT, LOST], 0.0)
    for stay in sim.usage.stays(sim.now):
        found[stay.state] += (stay.end_s - stay.start_s) * sim.setup.block / (sim.now * sim.setup.num_gpus)
    for work, share in busy.items():
        found[work.rpartition("/")[2]] -= share
    return found if found[LOST] else {state: share for state, share in found.items() if state != LOST}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Sequences per second that no schedule exceeds (`work`), and that one hardly exceeds (`tail`).

    `tail` holds the batch of a role constant, where a real one drains to smaller and faster batches: a reference, not
    a strict bound. Both let GPUs be divided at will.
    """

    work: float
    tail: float
    least_gpu_s: dict[Role, float]

    @staticmethod
    def of(setup: Setup, train_gpus: int, staleness: int) -> "Bounds":
        work = setup.workload
        train_s = setup.train_s(train_gpus)
        train_gpu_s = train_s * train_gpus / work.num_sequences
        points = {role: _operating_points(setup, role) for role in INFERENCE}
        rollout, reward = points[Role.ROLLOUT], points[Role.REWARD]
        all_gpu_s = train_gpu_s + rollout.gpu_s[:, None] + reward.gpu_s[None, :]
        num_tokens = work.rollout.mean_longest(work.num_sequences)
        longest = num_tokens * rollout.iteration_s[:, None] + work.verdict.mean * reward.iteration_s[None, :]
        mean = rollout.latency_s[:, None] + reward.latency_s[None, :]
        in_flight = (staleness + 1) * work.num_sequences
        tail = np.minimum(setup.num_gpus / all_gpu_s, in_flight / (np.maximum(mean, longest) + train_s))
        least = {
            Role.ROLLOUT: float(rollout.gpu_s.min()),
            Role.REWARD: float(reward.gpu_s.min()),
            Role.TRAIN: train_gpu_s,
        }
        return Bounds(work=setup.num_gpus / sum(least.values()), tail=float(tail.max()), least_gpu_s=least)


@dataclass(frozen=True, kw_only=True)
class _Points:
    """[num_batches] of one role, by sequences that a replica runs at once."""

    iteration_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    latency_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    gpu_s: np.ndarray[tuple[int], np.dtype[np.float64]]


def _operating_points(setup: Setup, role: Role) -> _Points:
    cost, work = setup.role(role), setup.workload
    lengths, prompt = work.lengths(role), work.mean_prompt_tokens(role)
    context = prompt + lengths.mean_context
    prefix = work.prefix_tokens(role) * (1 - 1 / work.num_each) if work.shares_prefix else 0.0
    prefill_s = (prompt - prefix) * cost.iteration.prefill_s
    sizes = np.geomspace(min(2, setup.max_num_seqs), setup.max_num_seqs, 40).tolist()
    batches = [b for b in sizes if b * context <= cost.kv_tokens] or [1.0]
    iteration = np.array([cost.iteration.iteration_s(b, b * context) for b in batches])
    latency = np.array([i * lengths.mean + prefill_s * b for i, b in zip(iteration, batches, strict=True)])
    return _Points(iteration_s=iteration, latency_s=latency, gpu_s=latency * cost.num_gpus / np.array(batches))
