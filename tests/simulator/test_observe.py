"""The monitor against the simulator's engines, whose truth is known."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from pipeline.core.events import INFERENCE, Role
from pipeline.core.length_model import count_ages
from pipeline.core.modes import ModeName
from pipeline.core.snapshot import Snapshot
from pipeline.simulator.admission import Admission
from pipeline.simulator.cluster import LostNode
from pipeline.simulator.engine import Replica
from pipeline.simulator.lengths import lognormal_mixture
from pipeline.simulator.modes import Schedule
from pipeline.simulator.observe import Observer
from pipeline.simulator.priors import monitor_of
from pipeline.simulator.result import measure
from pipeline.simulator.setup import Beliefs, Setup, Workload, paper_setup
from pipeline.simulator.simulation import Simulation

SMALL = Workload(
    num_prompts=16,
    num_each=8,
    rollout=lognormal_mixture([(1.0, 1500.0, 0.7)], 8192),
    verdict=lognormal_mixture([(1.0, 400.0, 0.5)], 2048),
)
TRAIN = tuple(range(8, 16))
POOL = Schedule(mode=ModeName.TRAINER_POOL, rollout=4, reward=4, train=8)
BARRIER = Schedule(mode=ModeName.DISAGGREGATED, rollout=4, reward=4, train=8, judging=Admission.BARRIER)
COLOCATED = Schedule(mode=ModeName.COLOCATED, rollout=16, train=16, staleness=0)


def setup_of(group: int = 1) -> Setup:
    return replace(paper_setup(group, "h800", num_gpus=16), workload=SMALL)


class Watched:
    """A simulation that is looked at every `every_s`, and what was seen."""

    def __init__(
        self,
        schedule: Schedule = POOL,
        *,
        setup: Setup | None = None,
        beliefs: Beliefs | None = None,
        every_s: float = 3.0,
        num_steps: int = 4,
        scenarios: Sequence[LostNode] = (),
    ) -> None:
        self.setup = setup or setup_of()
        self.sim = Simulation(self.setup, schedule.policy(self.setup), seed=0, num_steps=num_steps, scenarios=scenarios)
        first = (self.setup.num_gpus - schedule.train) // self.setup.block
        self.monitor = monitor_of(
            self.setup.believed(beliefs or Beliefs()),
            train_blocks=range(first, self.setup.num_blocks),
            staleness=schedule.staleness,
            num_steps=num_steps,
        )
        self.observer, self.every_s = Observer(self.monitor), every_s
        self.seen: list[Snapshot] = []
        self.checks: list[Callable[[Snapshot], None]] = []
        self.sim.at(0.0, self._look)

    def run(self, version: int | None = None) -> "Watched":
        self.sim.run_until(version or self.sim.num_steps)
        return self

    def _look(self) -> None:
        self.seen.append(self.observer.snapshot(self.sim))
        for check in self.checks:
            check(self.seen[-1])
        self.sim.at(self.sim.now + self.every_s, self._look)


@pytest.mark.parametrize("schedule", [POOL, BARRIER, COLOCATED], ids=str)
def test_looking_changes_nothing(schedule: Schedule) -> None:
    unseen = Simulation(setup_of(), schedule.policy(setup_of()), seed=0, num_steps=6)
    unseen.run_until(6)
    watched = Watched(schedule, num_steps=6).run()
    assert len(watched.seen) > 10
    assert json.dumps(measure(unseen).as_json()) == json.dumps(measure(watched.sim).as_json())


@pytest.mark.parametrize(
    ("schedule", "scenarios"),
    [(POOL, []), (POOL, [LostNode(node=0, at_s=15.0, back_after_s=10.0)]), (BARRIER, []), (COLOCATED, [])],
    ids=["pool", "pool, judges lost", "barrier", "colocated"],
)
def test_each_sequence_is_counted_once_at_each_moment(schedule: Schedule, scenarios: list[LostNode]) -> None:
    watched = Watched(schedule, scenarios=scenarios)
    sim, num_aged, num_aborted = watched.sim, 0.0, 0

    def check(seen: Snapshot) -> None:
        nonlocal num_aged, num_aborted
        num_aborted += sum(s.generated > 0 for queue in sim.queues.values() for s in queue.waiting())
        steps = [step for step in sim.steps if step.scored_s is None]
        for step, rollout, reward in zip(steps, seen.rollout.crowds, seen.reward.crowds, strict=True):
            assert (rollout.step, reward.step) == (step.step, step.step)
            rolled_out, judged = (crowd.num_waiting + sum(crowd.ages) for crowd in (rollout, reward))
            assert rolled_out == pytest.approx(step.num_sequences - step.num_rolled_out)
            assert judged == pytest.approx(step.num_rolled_out - step.num_scored)
            num_aged += sum(rollout.ages[1:]) + sum(reward.ages[1:])
        for block, view in zip(sim.blocks, seen.blocks, strict=True):
            assert (view.index, view.node, view.role) == (block.index, block.node, block.role)
            assert view.num_running == sum(replica.num_running for replica in block.replicas)
            assert (view.ready_in_s > 0) == (block.ready_at > sim.now and not block.is_lost)
            assert view.is_silent == block.is_lost
        assert (seen.version, seen.num_admitted) == (sim.version, len(sim.steps))
        assert (seen.train.left_s is not None) == (sim.training is not None)

    watched.checks.append(check)
    watched.run()
    assert num_aged > 1000 and (num_aborted > 0 or not scenarios), "without judges, what they began waits"


def test_ages_are_those_of_the_engines() -> None:
    watched = Watched()

    def exact(replica: Replica) -> Counter[tuple[int, int]]:
        found: Counter[tuple[int, int]] = Counter()
        for step in {entry[2].step for entry in replica.running}:
            ages = [replica.generated(entry[2]) for entry in replica.running if entry[2].step == step]
            view = watched.monitor.believed.role(replica.role)
            for i, count in enumerate(count_ages(ages, view.bin_tokens, len(view.survival) - 1)):
                found[step, i] += count  # type: ignore[assignment]
        return found

    watched.run(2)
    seen = watched.observer.snapshot(watched.sim)
    for role in INFERENCE:
        replicas = watched.sim.replicas[role]
        held = sum(block.num_tokens for block in seen.blocks if block.role is role)
        for replica in replicas:
            replica.advance(watched.sim.now)
        assert held == pytest.approx(sum(replica.held for replica in replicas))
        total = sum((exact(replica) for replica in replicas), Counter())
        crowds = {(c.step, i): num for c in seen.role(role).crowds for i, num in enumerate(c.ages) if num}
        assert crowds == pytest.approx({key: num for key, num in total.items() if num})
        assert total, role


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_wrong_costs_are_right_within_3_percent_before_the_first_version(group: int, factor: float) -> None:
    wrong = Beliefs(rollout=factor, reward=factor, train=factor)
    watched = Watched(setup=setup_of(group), beliefs=wrong, num_steps=3).run()
    setup, sim = watched.setup, watched.sim
    assert watched.seen[0].rollout.cost.weights_s == pytest.approx(factor * setup.rollout.iteration.weights_s)
    judged_s, published_s = sim.steps[0].scored_s, sim.steps[0].trained_s
    assert judged_s is not None and published_s is not None
    late = [seen for seen in watched.seen if seen.at_s > judged_s / 2]
    assert len(late) > 10
    for seen in late:
        for role in INFERENCE:
            cost, truth = seen.role(role).cost, setup.role(role).iteration
            assert cost.iteration_s(32, 1e5) == pytest.approx(truth.iteration_s(32, 1e5), rel=0.03)
            assert cost.prefill_s == pytest.approx(truth.prefill_s, rel=0.03)
    assert watched.seen[-1].train.step_s == pytest.approx(setup.train_s(8), rel=0.15), "trainings differ by tokens"
    shifts = watched.seen[-1].shift_s
    assert shifts[Role.TRAIN] == pytest.approx(setup.shift_s(Role.ROLLOUT, Role.TRAIN, 8))


def test_an_engine_that_slows_down_is_followed_within_3_percent() -> None:
    watched = Watched(replace(POOL, mode=ModeName.DISAGGREGATED), num_steps=12).run(2)
    slowed_s = watched.sim.now
    for role in INFERENCE:
        for replica in watched.sim.replicas[role]:
            replica.advance(slowed_s)
            replica.cost = replica.cost.slower(1.4)
    watched.run()
    after = [seen for seen in watched.seen if seen.at_s > slowed_s + 240]
    assert after
    for role in INFERENCE:
        truth = watched.setup.role(role).iteration.slower(1.4)
        for seen in after:
            assert seen.role(role).cost.iteration_s(16, 5e4) == pytest.approx(truth.iteration_s(16, 5e4), rel=0.03)


def test_wrong_shift_times_are_right_also_if_one_looked_only_at_the_end() -> None:
    setup = setup_of()
    sim = Simulation(setup, COLOCATED.policy(setup), seed=0, num_steps=4)
    wrong = replace(setup, shift_scale=3.0)
    monitor = monitor_of(wrong, train_blocks=range(16), staleness=0, num_steps=4)
    sim.run_until(4)
    seen = Observer(monitor).snapshot(sim)
    for old, new in ((Role.ROLLOUT, Role.REWARD), (Role.REWARD, Role.TRAIN)):
        assert wrong.shift_s(old, new, 16) > 2 * setup.shift_s(old, new, 16)
        assert seen.shift_s[new] == pytest.approx(setup.shift_s(old, new, 16), rel=0.02)
    released_s = seen.shift_s[Role.ROLLOUT] + seen.release_s
    assert seen.version == 4 and released_s >= 0


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_wrong_lengths_are_right_after_a_step(factor: float) -> None:
    watched = Watched(beliefs=Beliefs(rollout_lengths=factor, verdict_lengths=1 / factor)).run()
    for role in INFERENCE:
        view = watched.seen[0].role(role)
        truth = watched.setup.workload.lengths(role).survival(
            view.bin_tokens * np.arange(len(view.survival), dtype=float)
        )
        truth[-1] = 0.0
        wrong = np.abs(np.array(view.survival) - truth).max()
        found = np.abs(np.array(watched.seen[-1].role(role).survival) - truth).max()
        assert wrong > 0.15 and found < 0.08, "four steps of 128 sequences, alike within a prompt"


def test_prompts_and_prefill_are_those_of_the_engines() -> None:
    watched = Watched().run()
    seen, work = watched.seen[-1], watched.setup.workload
    assert seen.rollout.prompt_tokens == pytest.approx(work.prompt_tokens)
    assert seen.reward.prompt_tokens == pytest.approx(work.mean_prompt_tokens(Role.REWARD), rel=0.15)
    assert seen.rollout.prefill_tokens < seen.rollout.prompt_tokens, "groups share their prompts"


def test_a_lost_node_is_silent_until_it_is_back() -> None:
    watched = Watched(scenarios=[LostNode(node=0, at_s=10.0, back_after_s=30.0)])
    watched.run()
    silent = [seen.at_s for seen in watched.seen if seen.blocks[0].is_silent]
    assert silent and min(silent) >= 10.0 and max(silent) < 40.0
    back = next(seen for seen in watched.seen if seen.at_s > 40.0)
    assert back.blocks[0].ready_in_s > 0, "its engines start"
    assert watched.seen[-1].shift_s == watched.seen[0].shift_s | {Role.TRAIN: watched.seen[-1].shift_s[Role.TRAIN]}


def test_the_planner_sees_what_went_through_json() -> None:
    watched = Watched().run()
    for seen in watched.seen:
        assert Snapshot.from_json(seen.to_json()) == seen
