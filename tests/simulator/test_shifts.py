"""The mechanism under a mode that shifts at will: whatever it does, no sequence is lost, doubled or shortened."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.events import INFERENCE, Role
from pipeline.simulator.cluster import LostNode
from pipeline.simulator.result import measure
from pipeline.simulator.simulation import Simulation
from tests.simulator.test_simulation import SMALL, small

TICK_S = 1.0


class Restless:
    """Every few seconds a block goes elsewhere; training takes its blocks when a step is judged."""

    staleness = 1
    judges_together = False

    def __init__(self, choices: list[int], check: Callable[[Simulation], None], num_steps: int) -> None:
        self.choices, self.check, self.num_steps, self.turn = choices, check, num_steps, 0

    def begin(self, sim: Simulation) -> None:
        sim.train_blocks = sim.blocks[2:]
        for block in sim.blocks:
            sim.bind(block, INFERENCE[block.index % 2], at_once=True)
        sim.at(TICK_S, self.tick, sim)

    def tick(self, sim: Simulation) -> None:
        sim.admit()
        if self.turn < len(self.choices):
            choice = self.choices[self.turn]
            block, role = sim.blocks[choice % len(sim.blocks)], INFERENCE[choice // len(sim.blocks) % 2]
            if sim.training is None and block.role is not role:
                sim.bind(block, role)
        elif self.turn == len(self.choices):
            self.settle(sim)
        self.turn += 1
        self.check(sim)
        sim.at(sim.now + TICK_S, self.tick, sim)

    def settle(self, sim: Simulation) -> None:
        """Both roles get something for good."""
        for block in sim.blocks:
            if sim.training is None or block not in sim.train_blocks:
                sim.bind(block, INFERENCE[block.index % 2])

    def may_admit(self, sim: Simulation, step: int) -> bool:
        return step < self.num_steps and (step == 0 or sim.steps[step - 1].num_rolled_out >= 32)

    def on_admitted(self, sim: Simulation, step: int) -> None: ...

    def on_rolled_out(self, sim: Simulation, step: int) -> None: ...

    def on_scored(self, sim: Simulation, step: int) -> None: ...

    def on_trained(self, sim: Simulation, step: int) -> None:
        for block in sim.train_blocks:
            sim.bind(block, INFERENCE[block.index % 2])


def check(sim: Simulation) -> None:
    """Each sequence that is admitted and not judged is in one queue or on one replica."""
    places: Counter[int] = Counter()
    for role in INFERENCE:
        for sequence in sim.queues[role].waiting():
            assert 0 <= sequence.generated <= 8192
            places[sequence.id] += 1
        for replica in sim.replicas[role]:
            places.update(entry[1] for entry in replica.running)
            assert not replica.is_dead and sim.blocks[replica.block].role is role
    assert set(places.values()) <= {1}
    assert len(places) == sum(step.num_sequences - step.num_scored for step in sim.steps)
    assert all(step.num_scored <= step.num_rolled_out for step in sim.steps)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=25), st.booleans(), st.booleans())
def test_random_shifts_lose_nothing(choices: list[int], shares: bool, loses_a_node: bool) -> None:
    setup = small(workload=replace(SMALL, shares_prefix=shares))
    scenarios = [LostNode(node=1, at_s=20.0, back_after_s=15.0)] if loses_a_node else []
    sim = Simulation(setup, Restless(choices, check, 3), seed=2, num_steps=3, scenarios=scenarios)
    sim.run_until(3)
    check(sim)
    assert [step.num_scored for step in sim.steps] == [64] * 3
    for replica in [r for replicas in sim.replicas.values() for r in replicas]:
        sim.usage.add(replica)
    tokens = sum(step.train_tokens - 64 * SMALL.prompt_tokens for step in sim.steps)
    # Each token of a response is made once; only what a lost node had not saved is made again.
    made = sim.usage.num_tokens[Role.ROLLOUT]
    assert made == pytest.approx(tokens, rel=1e-6) or (loses_a_node and tokens < made < 1.1 * tokens)


def test_gpus_that_train_are_locked() -> None:
    refused = []

    def take(sim: Simulation) -> None:
        if sim.train_end_s is not None:
            with pytest.raises(ValueError, match="trains until"):
                sim.bind(sim.train_blocks[0], Role.ROLLOUT)
            refused.append(sim.now)

    sim = Simulation(small(), Restless([], take, 2), seed=0, num_steps=2)
    sim.run_until(2)
    assert refused


def test_shifts_that_cost_more_are_slower() -> None:
    calm = small()
    times = []
    for scale in (1.0, 4.0):
        sim = Simulation(replace(calm, shift_scale=scale), Restless([1, 4, 0, 5] * 3, check, 6), seed=1, num_steps=6)
        sim.run_until(6)
        result = measure(sim, 1)
        times.append(result.step_s)
        assert result.moves_per_step > result.shifts_per_step > 0
    assert times[1] > times[0]
