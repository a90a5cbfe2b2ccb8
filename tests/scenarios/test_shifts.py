"""Shifts, and everything that can go wrong in one: the run goes on, and nothing is lost, doubled, changed or left."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load_resolved
from pipeline.run_folder import RunFolder
from tests.scenarios import shift_kills as sk
from tests.scenarios.faults import SETTINGS, account, remains
from tests.scenarios.oracle import contradictions
from tests.scenarios.runs import asked_of, check_same, rows, submit, succeed
from tests.scenarios.shifts import Outcome, shift_schedule

SEEDS = range(6)
SCHEDULES = [pytest.param(seed, marks=pytest.mark.slow) if seed > 2 else seed for seed in SEEDS]
SHIFTABLE = (
    *("placement.mode=shiftable", "cluster.slots_per_node=3", "placement.planner.tick_s=0.2"),
    *("placement.planner.min_dwell_s=0", "placement.planner.dwell_share=0"),
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    succeed(submit(run, *sk.SETTINGS))
    return run


@pytest.fixture(scope="module")
def begun(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: Path, request: pytest.FixtureRequest
) -> Iterator[dict[object, Future[Any]]]:
    """What `make test` runs, two at once: much of the time they wait for processes to start."""
    folder = tmp_path_factory.mktemp("shifts")
    work: dict[object, Callable[[], Any]] = {
        "workers": partial(sk.survive_all, folder / "workers", sk.EARLY, undisturbed, *sk.SETTINGS),
        "others": partial(sk.survive_all, folder / "others", sk.OTHERS, undisturbed, *sk.SETTINGS),
        "faults": partial(_with_faults, folder),
        "update": partial(_with_a_failed_update, folder),
    } | {
        seed: partial(shift_schedule, folder / f"schedule-{seed}", seed)
        for seed in asked_of(request).intersection(SEEDS)
    }
    with ThreadPoolExecutor(2) as pool:
        futures = {name: pool.submit(call) for name, call in work.items()}
        yield futures
        for future in futures.values():
            future.cancel()


def _with_faults(folder: Path) -> Path:
    (folder / "told").mkdir()
    run = folder / "faults"
    succeed(submit(run, *sk.SETTINGS, *sk.faults_of(folder / "told")))
    return run


def _with_a_failed_update(folder: Path) -> Path:
    """Three replicas of rollout live; one of them refuses version 2, whether it wakes with it or is awake."""
    run = folder / "update"
    fault = f'{{kind: refuse, version: 2, once: "{folder / "refused"}"}}'
    options = f"rollout.engine.options={{median_tokens: 16, step_s: 0.01, faults: [{fault}]}}"
    succeed(submit(run, *SETTINGS, *SHIFTABLE, options, "trainer.total_training_steps=4", "checkpoint.save_freq=1"))
    return run


# --- at random -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SCHEDULES)
@pytest.mark.timeout(300)
def test_r22_random_schedules_of_shifts_aborts_updates_and_deaths(
    seed: int, begun: dict[object, Future[Outcome]]
) -> None:
    """`benchmarks/faults_shifts.py --schedules 200` has more of them."""
    outcome = begun[seed].result()
    assert outcome.counts["ups"] and outcome.counts["downs"] and outcome.counts["aborts"]
    assert outcome.is_right, outcome


# --- in each phase ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_a_run_outlives_the_death_of_each_worker_in_each_phase_bit_for_bit(begun: dict[object, Future[int]]) -> None:
    assert begun["workers"].result() == 1


@pytest.mark.timeout(300)
def test_a_run_outlives_the_agents_and_the_controllers_death_in_a_shift_bit_for_bit(
    begun: dict[object, Future[int]],
) -> None:
    """The agent's is the loss of the node, the controller's an attempt."""
    assert begun["others"].result() == 3


@pytest.mark.slow
@pytest.mark.parametrize("kill", [*sk.EACH, *sk.WHOLE_RUN])
def test_each_kill_in_each_phase(kill: str, undisturbed: Path, tmp_path: Path) -> None:
    assert sk.survive(tmp_path / "run", kill, undisturbed, *sk.SETTINGS) == (2 if kill.endswith(":run") else 1)


# --- what fails by itself --------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_a_run_outlives_leaks_hangs_and_refusals_in_shifts_bit_for_bit(
    begun: dict[object, Future[Path]], undisturbed: Path
) -> None:
    run = begun["faults"].result()
    for worker in ("rollout-0", "reward-0"):
        assert sk.ends_of(run, worker) == ["silent", "refused", "silent", "not believed"]
    assert sk.ends_of(run, "train-0") == ["refused"]
    check_same(run, undisturbed, lost=sk.LOST)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["leak", "hang_in_sleep", "hang_in_wake", "die_in_sleep", "die_in_wake"])
def test_a_run_outlives_what_its_trainer_does_wrong_in_a_shift(fault: str, undisturbed: Path, tmp_path: Path) -> None:
    """A trainer's fault may come at its start: then it is the start that fails."""
    told = f"{{fault: {fault}, once: {tmp_path / 'once'}, holds_bytes: {sk.HELD_BYTES}}}"
    run = tmp_path / "run"
    succeed(submit(run, *sk.SETTINGS, f"trainer.options={told}", "limits.shift_s=5", "limits.engine_start_s=10"))
    check_same(run, undisturbed, lost=sk.LOST)


def test_who_takes_more_than_its_slot_has_ends_the_run_and_is_named(tmp_path: Path) -> None:
    held = f"rollout.engine.options={{median_tokens: 16, holds_bytes: {sk.HELD_BYTES}}}"
    run = tmp_path / "run"
    ended = submit(run, *sk.SETTINGS, held, "cluster.slot_memory=104857600", "limits.restarts=1")
    assert ended.code == 1 and not remains(RunFolder(run))
    assert "rollout-0 on local-0 died 2 times without progress: it holds 2" in ended.out
    assert "cluster.slot_memory is 100 MiB for each of its 1 slots" in ended.out


# --- with which weights ----------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_r18_r21_r25_who_fails_to_update_answers_nothing_and_every_token_is_of_the_version_it_bears(
    begun: dict[object, Future[Path]],
) -> None:
    run = begun["update"].result()
    assert (run.parent / "refused").exists()
    events = RunFolder(run).journal(1).read_text()
    assert ("UpdateFailed" in events) != ("WakeFailed" in events) and '"event":"WorkerDied"' in events
    found = account(run, 4, 16, staleness=1)
    assert found.is_right, found
    assert not (wrong := contradictions(run, load_resolved(RunFolder(run).config))), wrong


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_r18_r25_real_engines_that_sleep_and_wake_say_what_the_trainer_says(tmp_path: Path) -> None:
    """No version is older than the one that is trained, prefix caches are on: whatever an engine kept of the weights
    that it had before it slept would show as a difference to the trainer's own logprobs."""
    run = tmp_path / "run"
    settings = (
        *(*SHIFTABLE, "rollout.temperature=0.6", "algorithm.max_logprob_diff=1e-4", "tracking.uri=none"),
        *("trainer.total_training_steps=8", "data.train_batch_size=8", "evaluate.freq=4", "evaluate.num_prompts=16"),
    )
    succeed(submit(run, *settings, config="configs/quickstart.yaml"))
    found = rows(run)
    first, *found = found
    assert first["step"] == 0 and [row["step"] for row in found] == list(range(1, 9))
    assert 0 < max(row["mismatch/max_abs_logprob_diff"] for row in found) < 1e-4
    assert sum(row["shift/num"] for row in found) >= 8, "nobody slept: the test shows nothing"
    events = [json.loads(line) for line in RunFolder(run).journal(1).read_text().splitlines()]
    woken = [e["version"] for e in events if e["event"] == "WorkerWoken" and e["worker"].startswith("rollout")]
    assert max(woken) > 0, "nobody was woken with another version"


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_real_engines_outlive_a_kill_in_each_phase_bit_for_bit(tmp_path: Path) -> None:
    """All in one run; `benchmarks/faults_shifts.py --real` has a run for each."""
    reference = tmp_path / "undisturbed"
    quickstart = "configs/quickstart.yaml"
    succeed(submit(reference, *sk.REAL_SETTINGS, config=quickstart))
    sk.survive_all(tmp_path / "run", sk.REAL_EARLY, reference, *sk.REAL_SETTINGS, config=quickstart)
