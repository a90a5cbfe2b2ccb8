"""GPUs that move between roles while nodes come and go, in one job of a real Slurm."""

import re
import shutil
from pathlib import Path

import pytest

from pipeline.run_folder import RunFolder
from tests.cluster import SlurmCluster
from tests.cluster.test_runs import end_well
from tests.scenarios.awake import Look, compare, shifts
from tests.scenarios.faults import Event, account, own_remains
from tests.scenarios.jobs import JOB, JobRun, crash_node, losses, other_node, requeue
from tests.scenarios.runs import STRICT, check_same, checkpoints, sequences, submit, succeed

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

STEPS, PER_STEP = 10, 16
ENGINE = "engine.options={median_tokens: 24, step_s: 0.05, holds_bytes: 8000000"
SHIFTABLE = (
    *("placement.mode=shiftable", "cluster.nodes=2", "cluster.slots_per_node=4", "cluster.min_nodes=1"),
    *("placement.planner.min_dwell_s=0.3", "placement.planner.tick_s=0.2", "algorithm.staleness=1"),
    *("data.train_batch_size=4", "rollout.n=4", "rollout.flush_s=0.2", "trainer.ranks=1"),
    *(f"rollout.{ENGINE}}}", f"reward.genrm.{ENGINE}, script: judge}}"),
    *("rollout.engine.max_num_seqs=2", "reward.genrm.engine.max_num_seqs=2"),
    "trainer.options={step_seconds: 1.0, holds_bytes: 8000000}",
    *("checkpoint.save_freq=3", "checkpoint.keep=100", "tracking.uri=none"),
    *("limits.heartbeat_s=3", "limits.engine_s=10", "limits.engine_start_s=60", "limits.restarts=9"),
)
"""One half of the work is rollout, one is reward; a block of one GPU changes hands in tens of milliseconds."""


def recorded(run: JobRun, step: int) -> None:
    """Wait until the steps up to this one are complete, each in its time."""
    for number in range(1, step + 1):

        def has_come(event: Event, number: int = number) -> bool:
            return event["event"] == "StepRecorded" and event["step"] == number

        run.until(f"step {number} is complete", has_come)


def check_shifts(run: RunFolder) -> None:
    """Of each kind, in both directions; and those that a plan can ask for were asked for by one."""
    made = [(line["old"], line["new"], line["decision"] is not None) for line in shifts(run)]
    changes = {(old, new) for old, new, _ in made}
    assert {("rollout", "reward"), ("reward", "rollout")} <= changes, made
    assert any(new == "train" and old for old, new in changes) and any(old == "train" for old, _ in changes), made
    assert any(planned and {old, new} == {"rollout", "reward"} for old, new, planned in made), made
    assert any(planned and old == "train" for old, _, planned in made), made


def check(run: JobRun, look: Look) -> None:
    """Of a run that has ended."""
    found = compare(run.folder, look)
    print(found)
    assert found.faults == []
    assert found.num_instants >= 100 and found.num_told >= 100
    assert set(found.num_awake) == {"rollout", "reward", "train"} and found.num_asleep > 0
    check_shifts(run.folder)


def lose_power(run: JobRun, node: str) -> None:
    """The node crashes and does not come back, so its memory is gone: here it is the host's, and nothing that runs on
    the node is left to empty it."""
    agent = next(found[1] for name in own_remains(run.folder) if (found := re.search(rf"-{node}-(\d+)-", name)))
    crash_node(run, node)
    for path in map(Path, own_remains(run.folder)):
        if f"-{agent}-" in path.name:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
def test_a_node_is_lost_for_good_between_shifts(cluster: SlurmCluster, folder: Path) -> None:
    run = JobRun(folder / "r", cluster, *SHIFTABLE, f"trainer.total_training_steps={STEPS}")
    with Look(run.folder, cluster) as look:
        recorded(run, 4)
        job, node = run.job, other_node(run)
        lose_power(run, node)
        recorded(run, STEPS)
    assert run.end() == 0, run.out
    assert (run.job, run.attempt) == (job, 1)
    assert {event["node"] for event in losses(run)} == {node}
    counted = account(run.path, STEPS, PER_STEP, staleness=1)
    assert counted.is_right, counted
    assert not (left := run.left()), left
    check(run, look)


@pytest.mark.slow
def test_a_node_comes_back_and_the_job_is_requeued_between_shifts(cluster: SlurmCluster, folder: Path) -> None:
    run = JobRun(folder / "r", cluster, *SHIFTABLE, "trainer.total_training_steps=5000")
    with Look(run.folder, cluster) as look:
        recorded(run, 2)
        job, node = run.job, other_node(run)
        struck = run.kill(f"{node}-agent")
        lost = run.until("its loss is known", lambda e: e["event"] == "NodeLost" and e["node"] == node, struck)
        back = run.until("it is back", lambda e: e["event"] == "NodeJoined" and e["node"] == node, lost["wall"])

        def serves(event: Event) -> bool:
            return event["event"] == "WorkerWoken" and run.node_of(event["worker"]) == node

        woken = run.until("it serves", serves, back["wall"])
        run.until("a step is complete", lambda e: e["event"] == "StepRecorded", woken["wall"])
        assert (run.job, run.attempt) == (job, 1)
        struck = requeue(run)
        restored = run.until("it goes on", lambda e: e["event"] == "RunRestored", struck)
        trained = run.until("it trains", lambda e: e["event"] == "BatchTrained", restored["wall"])
        run.until("a step is complete", lambda e: e["event"] == "StepRecorded", trained["wall"])
        assert (run.job, run.attempt) == (job, 2)
        end_well(run)
    check(run, look)


def test_colocated_in_a_job_trains_what_it_trains_here_bit_for_bit(cluster: SlurmCluster, folder: Path) -> None:
    strict = (*STRICT, "placement.mode=colocated", "checkpoint.save_freq=2", "tracking.uri=none")
    strict += ("trainer.total_training_steps=4", "cluster.nodes=1", "cluster.slots_per_node=1")
    here, there, apart = folder / "here", folder / "there", folder / "apart"
    succeed(submit(here, *strict))
    succeed(submit(there, *JOB, *strict, "trainer.ranks=1"))
    check_same(there, here, lost=("shift/", "planner/", "role/"))
    assert checkpoints(there) == checkpoints(here)

    succeed(submit(apart, *strict, "placement.mode=disaggregated", "cluster.slots_per_node=3"))
    assert sequences(apart) == sequences(here) and checkpoints(apart) == checkpoints(here)


@pytest.mark.slow
def test_one_that_sleeps_and_keeps_its_gpu_is_seen(cluster: SlurmCluster, folder: Path) -> None:
    """It holds less than its agent can tell from chance."""
    leak = "rollout.engine.options.faults=[{kind: leak}]"
    run = JobRun(folder / "r", cluster, *SHIFTABLE, leak, "trainer.total_training_steps=2", "cluster.nodes=1")
    with Look(run.folder, cluster) as look:
        recorded(run, 2)
    assert run.end() == 0, run.out
    faults = compare(run.folder, look).faults
    assert any(fault.startswith("rollout-0 is asleep") for fault in faults)
    assert any(" and reward-0 are awake on GPUs of " in fault for fault in faults)
    assert any(fault.startswith("its agent says") for fault in faults)
