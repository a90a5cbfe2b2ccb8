"""Whole runs on the virtual clock: by hand where a hand suffices, by what must hold elsewhere."""

import copy
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean

import pytest

from pipeline.core.errors import RunError
from pipeline.core.events import Role
from pipeline.core.modes import ModeName
from pipeline.core.scheduler import Abort, Scheduler
from pipeline.simulator.admission import Admission
from pipeline.simulator.cluster import LostNode, SlowGpu
from pipeline.simulator.engine import Replica, Sequence
from pipeline.simulator.lengths import lognormal_mixture, measured_lengths
from pipeline.simulator.modes import Schedule, static_schedules
from pipeline.simulator.result import Bounds, Result, measure, simulate, window
from pipeline.simulator.setup import Beliefs, Setup, Workload, paper_setup
from pipeline.simulator.simulation import Simulation

SMALL = Workload(
    num_prompts=8,
    num_each=8,
    rollout=lognormal_mixture([(1.0, 1500.0, 0.7)], 8192),
    verdict=lognormal_mixture([(1.0, 400.0, 0.5)], 2048),
)


def small(group: int = 2, num_gpus: int = 16, **changes: object) -> Setup:
    base = paper_setup(group, "h800", num_gpus=num_gpus)
    return replace(base, **{"workload": SMALL, **changes})  # type: ignore[arg-type]


def schedule(mode: str, rollout: int, reward: int, train: int, **more: object) -> Schedule:
    return Schedule(mode=ModeName(mode), rollout=rollout, reward=reward, train=train, **more)  # type: ignore[arg-type]


COLOCATED = schedule("colocated", 16, 0, 16, staleness=0)
DISAGGREGATED = schedule("disaggregated", 4, 4, 8)
SHARED = schedule("rollout_reward_colocated", 8, 0, 8)
POOL = schedule("trainer_pool", 4, 4, 8)
BARRIER = replace(DISAGGREGATED, admission=Admission.BARRIER)
ALL = [COLOCATED, DISAGGREGATED, BARRIER, SHARED, POOL]


def as_bytes(result: Result) -> str:
    return json.dumps(result.as_json())


def test_colocated_by_hand() -> None:
    """Equal lengths, one sequence per replica: each phase is one term."""
    work = Workload(
        num_prompts=4,
        num_each=4,
        rollout=measured_lengths([1000], 1000),
        verdict=measured_lengths([200], 200),
        shares_prefix=False,
    )
    setup = replace(paper_setup(1, "h800", num_gpus=16), workload=work)
    step = simulate(setup, COLOCATED, num_steps=6).steps[4]
    rollout, judge, train = setup.rollout, setup.reward, setup.train
    roll_s = 300 * rollout.iteration.prefill_s + rollout.iteration.iterations_s(1000, 1, 300)
    judge_s = 1700 * judge.iteration.prefill_s + judge.iteration.iterations_s(200, 1, 1700)
    assert step.rolled_out_s is not None and step.scored_s is not None and step.train_started_s is not None
    # From the end of training to rollout, from rollout to judging, and to training: a shift each.
    assert step.rolled_out_s - step.admitted_s == pytest.approx(train.sleep_s(16) + rollout.wake_s + roll_s)
    assert step.scored_s - step.rolled_out_s == pytest.approx(0.3 + judge.wake_s + judge_s)
    assert step.train_started_s - step.scored_s == pytest.approx(0.3 + train.wake_s(16))
    assert step.trained_s is not None
    assert step.trained_s - step.train_started_s == pytest.approx(setup.train_s(16))


@pytest.mark.parametrize("mode", ALL, ids=str)
def test_each_sequence_goes_its_way_once_and_in_bounds(mode: Schedule) -> None:
    setup = small()
    result = simulate(setup, mode, num_steps=6)
    assert [step.step for step in result.steps] == list(range(6))
    published = [0.0] * (mode.staleness + 1) + [step.trained_s or 0.0 for step in result.steps]
    for step in result.steps:
        assert step.num_rolled_out == step.num_scored == setup.workload.num_sequences
        times = [step.admitted_s, step.rolled_out_s, step.scored_s, step.train_started_s, step.trained_s]
        assert times == sorted(times)  # type: ignore[type-var]
        assert step.admitted_s >= published[step.step]
    assert 0 < sum(result.busy.values()) < 1
    # Lengths that are drawn differ from their mean; nothing else may beat the bound.
    tokens = [s.train_tokens for s in result.steps[1:]]
    luck = setup.workload.train_tokens * len(tokens) / sum(tokens)
    assert result.sequences_per_s < 1.05 * max(luck, 1) * result.work_bound


def test_a_barrier_waits_for_the_last_response() -> None:
    steps = simulate(small(), BARRIER, num_steps=6).steps
    assert all(b.admitted_s >= (a.rolled_out_s or 0) for a, b in itertools.pairwise(steps))
    steps = simulate(small(), DISAGGREGATED, num_steps=6).steps
    assert any(b.admitted_s < (a.rolled_out_s or 0) for a, b in itertools.pairwise(steps))


def test_judging_together_waits_for_the_whole_step() -> None:
    together = replace(DISAGGREGATED, judging=Admission.BARRIER, staleness=0)
    work = simulate(small(), together, num_steps=6, is_traced=True)
    stretches = [(w.start_s, w.end_s) for w in work.usage.trace if w.role is Role.REWARD and w.amount > 0]
    for step in work.steps:
        assert step.rolled_out_s is not None and step.num_scored == 64
        assert not [s for s in stretches if step.admitted_s <= s[0] < step.rolled_out_s - 1e-9]
    assert work.step_s > simulate(small(), replace(DISAGGREGATED, staleness=0), num_steps=6).step_s


def test_staleness_0_waits_for_the_new_version() -> None:
    steps = simulate(small(), replace(DISAGGREGATED, staleness=0), num_steps=6).steps
    assert all(b.admitted_s == a.trained_s for a, b in itertools.pairwise(steps))
    assert simulate(small(), DISAGGREGATED).step_s < simulate(small(), replace(DISAGGREGATED, staleness=0)).step_s


@pytest.mark.parametrize("mode", ALL, ids=str)
def test_the_same_seed_gives_the_same_bytes(mode: Schedule) -> None:
    first, again = (as_bytes(simulate(small(), mode, seed=5, num_steps=6)) for _ in range(2))
    assert first == again != as_bytes(simulate(small(), mode, seed=6, num_steps=6))


def test_another_process_gives_the_same_bytes() -> None:
    """With other hashes of text, and other addresses."""
    code = (
        "from tests.simulator.test_simulation import *; print(as_bytes(simulate(small(), POOL, seed=5, num_steps=6)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7", **_path()}
    )
    assert done.stdout.strip() == as_bytes(simulate(small(), POOL, seed=5, num_steps=6))


def _path() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(sys.path)}


def test_a_copy_of_a_running_simulation_goes_the_same_way() -> None:
    """What look-aheads are judged by: futures of one state."""
    sim = Simulation(small(), POOL.policy(small()), seed=1, num_steps=8)
    sim.run_until(4)
    copied = copy.deepcopy(sim)
    sim.run_until(8)
    assert copied.version == 4
    copied.run_until(8)
    assert [s.trained_s for s in copied.steps] == [s.trained_s for s in sim.steps]


def test_new_weights_are_loaded_by_engines_that_roll_out() -> None:
    prefilled = {}
    for recomputes in (True, False):
        setup = small(recomputes_on_update=recomputes)
        sim = Simulation(setup, BARRIER.policy(setup), seed=1, num_steps=4)
        sim.run_until(1)
        rollout = sim.replicas[Role.ROLLOUT]
        assert all(
            replica.num_running and replica.prefilled_at >= sim.now + setup.rollout.update_s for replica in rollout
        )
        prefilled[recomputes] = sum(replica.num_prefilled for replica in rollout)
    # Those of step 1 that run: their contexts once more.
    assert prefilled[True] > prefilled[False] + 1000


def test_a_step_spreads_over_all_replicas() -> None:
    """Also over the one whose last response let it in."""
    sim = Simulation(small(), BARRIER.policy(small()), seed=1, num_steps=4)
    sim.run_until(1)
    assert sim.steps[1].admitted_s == sim.steps[0].rolled_out_s
    assert all(replica.num_prefilled > 3000 for replica in sim.replicas[Role.ROLLOUT])


def test_a_pool_rolls_out_on_gpus_that_do_not_train() -> None:
    result = simulate(small(), POOL, is_traced=True)
    assert {(s.old, s.new) for s in result.usage.shifts} == {(Role.ROLLOUT, Role.TRAIN), (Role.TRAIN, Role.ROLLOUT)}
    assert 0 < result.shifts_per_step <= 2
    training = [w for w in result.usage.trace if w.role is Role.TRAIN]
    assert all(w.num_gpus == 8 for w in training) and len(training) >= 12
    assert simulate(small(), DISAGGREGATED).moves_per_step == 0


def test_another_scheduler_may_be_plugged_in() -> None:
    """One that never moves what runs."""

    class Still(Scheduler[Sequence, Replica]):
        def migrations(self, replicas: Iterable[Replica], now: float) -> list[Abort[Replica]]:
            return []

    found = []
    for scheduler in (Scheduler, Still):
        sim = Simulation(small(1), POOL.policy(small(1)), seed=1, num_steps=8, scheduler=scheduler)
        sim.run_until(8)
        found.append(measure(sim))
    assert found[0].num_migrated > 0 == found[1].num_migrated


def test_the_trace_holds_all_tokens() -> None:
    setup = small()
    result = simulate(setup, DISAGGREGATED, num_steps=6, is_traced=True)
    rolled = sum(w.amount for w in result.usage.trace if w.role is Role.ROLLOUT)
    assert rolled == pytest.approx(result.usage.num_tokens[Role.ROLLOUT])
    assert all(w.end_s > w.start_s for w in result.usage.trace)
    counted = sum(s.train_tokens - 64 * setup.workload.prompt_tokens for s in result.steps)
    assert counted < rolled < 2 * counted  # steps that are not counted have begun


# --- what goes wrong


def test_a_lost_node_costs_time_and_no_sequence() -> None:
    setup = small(num_gpus=24)
    mode = schedule("disaggregated", 12, 4, 8)
    calm = simulate(setup, mode)
    for back_after_s in (30.0, None):
        lost = simulate(setup, mode, scenarios=[LostNode(node=0, at_s=50.0, back_after_s=back_after_s)])
        assert lost.steps[-1].trained_s > calm.steps[-1].trained_s  # type: ignore[operator]
        assert all(step.num_scored == 64 for step in lost.steps)


def test_a_training_that_loses_a_node_starts_again() -> None:
    setup = small(num_gpus=32)
    mode = schedule("disaggregated", 8, 8, 16)
    calm = simulate(setup, mode).steps[3]
    assert calm.train_started_s is not None and calm.trained_s is not None
    middle = (calm.train_started_s + calm.trained_s) / 2
    lost = simulate(setup, mode, scenarios=[LostNode(node=3, at_s=middle, back_after_s=30.0)]).steps[3]
    # 60 s to a warm engine on the new node.
    assert lost.train_started_s == pytest.approx(middle + 90)
    smaller = simulate(setup, mode, scenarios=[LostNode(node=3, at_s=middle)]).steps[3]
    assert smaller.train_started_s == pytest.approx(middle)
    whole_s = calm.trained_s - calm.train_started_s
    assert smaller.trained_s - middle == pytest.approx(2 * (whole_s - 4) + 4)  # type: ignore[operator]


def test_a_run_that_lost_all_its_judges_says_so() -> None:
    setup = small(num_gpus=24)
    with pytest.raises(RunError, match=r"nothing goes on.*'reward': 0"):
        simulate(setup, schedule("disaggregated", 8, 8, 8), scenarios=[LostNode(node=1, at_s=10.0)])


@pytest.mark.parametrize(("gpu", "what"), [(0, "rollout"), (15, "train")])
def test_a_slow_gpu_slows_what_it_is_part_of(gpu: int, what: str) -> None:
    calm = simulate(small(), DISAGGREGATED, is_traced=True)
    slow = simulate(small(), DISAGGREGATED, scenarios=[SlowGpu(gpu=gpu, factor=2.0)], is_traced=True)
    assert slow.steps[-1].trained_s > calm.steps[-1].trained_s  # type: ignore[operator]
    if what == "train":
        for a, b in zip(calm.steps, slow.steps, strict=True):
            assert b.trained_s - b.train_started_s == pytest.approx(2 * (a.trained_s - a.train_started_s))  # type: ignore[operator]


# --- what is measured


def test_an_even_number_of_cycles_is_counted() -> None:
    assert window(12, 3) == (3, 11)
    assert window(8, 3) == (3, 7)
    assert window(9, 3) == (4, 8)
    with pytest.raises(ValueError, match="no two cycles"):
        window(4, 3)


def test_the_bounds_order_themselves() -> None:
    for group in (1, 2, 3, 4):
        setup = paper_setup(group, "h800")
        late, early = Bounds.of(setup, 16, 1), Bounds.of(setup, 16, 0)
        assert early.tail < late.tail <= late.work == early.work


def test_the_bounds_hold_batches_of_one_where_replicas_run_one() -> None:
    one, two = (Bounds.of(replace(paper_setup(2, "h800"), max_num_seqs=n), 16, 1) for n in (1, 2))
    assert one.work < 0.6 * two.work and one.tail < two.tail


def test_steps_of_few_responses_are_not_faster_than_their_bound() -> None:
    """The longest of them is mostly far from the limit."""
    setup = paper_setup(1, "h800", num_gpus=4, num_sequences=16)
    setup = replace(setup, workload=replace(setup.workload, num_each=8))
    schedule = Schedule(mode=ModeName.DISAGGREGATED, rollout=1, reward=1, train=2)
    found = [simulate(setup, schedule, seed=seed) for seed in range(3)]
    assert fmean(result.sequences_per_s / result.tail_bound for result in found) < 1.0


def test_published_bounds_of_the_second_group() -> None:
    """The notes' oracles: 9.5 by work, 6.4 with the tail, at 16 training GPUs."""
    bounds = Bounds.of(paper_setup(2, "h800", plain=True), 16, 1)
    assert bounds.work == pytest.approx(9.5, rel=0.05) and bounds.tail == pytest.approx(6.4, rel=0.05)


def test_what_is_believed_is_wrong_by_the_drawn_factors() -> None:
    setup, beliefs = small(), Beliefs.draw(3)
    believed = setup.believed(beliefs)
    assert beliefs == Beliefs.draw(3) != Beliefs.draw(4)
    assert believed.rollout.iteration.iteration_s(8, 10_000) == pytest.approx(
        beliefs.rollout * setup.rollout.iteration.iteration_s(8, 10_000)
    )
    same_lengths = replace(believed, workload=setup.workload)
    assert same_lengths.train_s(8) == pytest.approx(beliefs.train * setup.train_s(8))
    assert simulate(believed, DISAGGREGATED).step_s != simulate(setup, DISAGGREGATED).step_s
    assert as_bytes(simulate(setup.believed(Beliefs()), DISAGGREGATED)) == as_bytes(simulate(setup, DISAGGREGATED))


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_every_static_schedule_is_one_that_runs(group: int) -> None:
    setup = replace(paper_setup(group, "h200"), workload=SMALL)
    schedules = static_schedules(setup)
    assert len({str(s) for s in schedules}) == len(schedules) >= 13
    assert {s.mode for s in schedules} == set(ModeName) - {ModeName.SHIFTABLE}
    for each in schedules[:: 4 if group < 4 else 1]:
        assert simulate(setup, each, num_steps=4, num_skipped=1).sequences_per_s > 0


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not divide 16 GPUs"):
        simulate(small(), schedule("disaggregated", 4, 8, 8))
    with pytest.raises(ValueError, match="hold no blocks"):
        paper_setup(4, "h800", num_gpus=20)
