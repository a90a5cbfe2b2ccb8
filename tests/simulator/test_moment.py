"""What the planner sees and would do: at a moment of a simulated run, and of one that was."""

import math
import random
from dataclasses import replace

import pytest

from pipeline.core.core import Core
from pipeline.core.events import INFERENCE, Role
from pipeline.core.planner.planner import decide
from pipeline.core.sequences import SequenceState
from pipeline.core.snapshot import Snapshot
from pipeline.simulator.modes import shiftable_schedule, static_schedules
from pipeline.simulator.moment import VERSION, look_at
from pipeline.simulator.replay import Replay
from pipeline.simulator.setup import Setup
from tests.fakes.plan import Odds
from tests.fakes.plan import make_plan as make_small_plan
from tests.fakes.world import World
from tests.simulator.test_guard import COARSE, small


def test_a_moment_shows_what_the_planner_saw_and_what_follows_from_it() -> None:
    setup = small()
    moment = look_at(setup, shiftable_schedule(setup, 8), settings=COARSE)
    assert moment.snapshot.version >= VERSION and moment.plan.candidates
    assert decide(moment.snapshot, COARSE) == moment.plan
    assert Snapshot.from_json(moment.snapshot.to_json()) == moment.snapshot
    assert 0 < len(moment.shifts) <= moment.num_asked
    for shift in moment.shifts:
        assert shift.before != shift.after and sum(shift.after) <= 16
        assert shift.gain_s is None or shift.gain_s > 0
    assert moment == look_at(setup, shiftable_schedule(setup, 8), settings=COARSE)


def test_a_shift_that_had_no_alternative_tells_no_gain() -> None:
    """All GPUs are one block, which serves one role or the other."""
    setup = replace(small(), num_gpus=8, rollout_gpus=8, reward_gpus=8)
    shifts = look_at(setup, shiftable_schedule(setup, 8), settings=COARSE).shifts
    assert any(shift.gain_s is None and shift.reason == "what waits has no block" for shift in shifts)
    assert all(shift.gain_s is None or shift.gain_s > 0 for shift in shifts)


def test_a_moment_is_found_by_its_time_or_its_version() -> None:
    setup, schedule = small(), shiftable_schedule(small(), 8)
    by_version = look_at(setup, schedule, settings=COARSE, version=2)
    assert by_version.snapshot.version == 2
    at = by_version.snapshot.at_s + 1.0
    by_time = look_at(setup, schedule, settings=COARSE, at_s=at)
    assert by_time.snapshot.at_s == at and by_time.snapshot.version == 2
    assert decide(by_time.snapshot, COARSE) == by_time.plan
    with pytest.raises(ValueError, match="has no planner"):
        look_at(setup, static_schedules(setup)[0])
    with pytest.raises(ValueError, match="valid: below"):
        look_at(setup, schedule, version=10_000)
    with pytest.raises(ValueError, match="later than version"):
        look_at(small(num_prompts=1), schedule, settings=COARSE, at_s=1e9)


# --- a run ------------------------------------------------------------------------------------------------------------


def three(num_prompts: int = 2) -> Setup:
    """A GPU for each role, and steps of 8 responses."""
    setup = small(num_prompts=num_prompts)
    work = replace(setup.workload, num_each=8 // num_prompts)
    return replace(setup, num_gpus=3, gpus_per_node=3, rollout_gpus=1, reward_gpus=1, workload=work)


@pytest.mark.parametrize(("staleness", "is_streaming"), [(0, False), (0, True), (1, True)])
def test_the_planner_sees_of_a_journal_each_sequence_where_the_run_had_it(staleness: int, is_streaming: bool) -> None:
    plan = make_small_plan(sequences_per_step=8, total_steps=4, staleness=staleness, is_streaming=is_streaming)
    world = World(plan, random.Random(3), Odds(flush=0.4, abort=0.2)).start().run()
    core = Core(plan)
    replay = Replay(core, three(), dict.fromkeys(Role, 1))
    versions, most_running = [], 0
    for at, event in world.events:
        replay.take(at, event)
        seen = replay.snapshot(at)
        versions.append(seen.version)
        assert Snapshot.from_json(seen.to_json()) == seen
        found = [s for step in core.steps for s in core.sequences.of_step(step) if step > seen.version]
        for role in INFERENCE:
            crowds = {crowd.step: crowd for crowd in seen.role(role).crowds}
            for step, crowd in crowds.items():
                there = [s for s in found if s.step == step + 1 and s.place.role is role]
                assert math.isclose(crowd.num_waiting + sum(crowd.ages), len(there))
            open_ = {s.step - 1 for s in found if s.place.role is role}
            assert open_ <= set(crowds)
            running = [s for s in found if s.place.role is role and s.state is SequenceState.RUNNING]
            assert sum(b.num_running for b in seen.blocks if b.role is role) == len(running)
            most_running = max(most_running, len(running))
        assert decide(seen, COARSE).reason
    assert versions[0] == 0 and versions[-1] == 4 and versions == sorted(versions)
    assert most_running > 1
    assert replay.num_closed == dict.fromkeys(range(1, 5), 8)


def test_gpus_that_do_not_fill_blocks_are_refused() -> None:
    setup = replace(small(), num_gpus=16)
    with pytest.raises(ValueError, match=r"4 at a time.*2 for rollout"):
        Replay(Core(make_small_plan()), setup, {Role.ROLLOUT: 2, Role.REWARD: 4, Role.TRAIN: 10})
