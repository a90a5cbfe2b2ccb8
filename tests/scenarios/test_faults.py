"""Each death at three moments of a run of emulated engines: it goes on, or its user resumes it, and nothing is lost,
doubled or left behind."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.chaos import schedule
from tests.scenarios.deaths import TABLE, suffer_for_real
from tests.scenarios.runs import asked_of

SEEDS = range(4)
SLOW = ("movers", "nodes", "silence", "stopped")
"""Deaths that `make test-all` has beside the others."""
DEATHS = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in TABLE]
SCHEDULES = [pytest.param(seed, marks=pytest.mark.slow) if seed > 1 else seed for seed in SEEDS]


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[object, Future[Any]]]:
    """All that are asked for, two at once: most of their time they wait, for limits and for processes to start."""
    folder = tmp_path_factory.mktemp("faults")
    asked = asked_of(request)
    with ThreadPoolExecutor(2) as pool:
        begun: dict[object, Future[Any]] = {}
        for name in TABLE.keys() & asked:
            (folder / name).mkdir()
            begun[name] = pool.submit(TABLE[name], folder / name)
        for seed in asked.intersection(SEEDS):
            begun[seed] = pool.submit(schedule, folder / f"schedule-{seed}", seed)
        yield begun
        for future in begun.values():
            future.cancel()


@pytest.mark.parametrize("name", DEATHS)
@pytest.mark.timeout(300)
def test_r09_r22_r26_r27_a_run_outlives_every_death(name: str, runs: dict[object, Future[Any]]) -> None:
    try:
        outcome = runs[name].result()
    except PermissionError as error:
        pytest.skip(str(error))
    for one in outcome.felt:
        print(
            f"{one.death:24} in {one.moment:10} detected after {one.detected_s:.3f} s, at work after {one.back_s:.3f}"
        )
    assert len(outcome.felt) >= 3
    assert outcome.account.is_right, outcome.account
    assert not outcome.left


@pytest.mark.parametrize("seed", SCHEDULES)
@pytest.mark.timeout(300)
def test_random_schedules_on_real_processes(seed: int, runs: dict[object, Future[Any]]) -> None:
    """`benchmarks/faults_local.py --schedules 200` has more of them."""
    counts, account = runs[seed].result()
    assert counts["aborts"] and counts["updates"]
    assert account.is_right, account


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_real_engines_outlive_every_death(tmp_path: Path) -> None:
    outcome = suffer_for_real(tmp_path)
    assert len(outcome.felt) == 6
    assert outcome.account.is_right, outcome.account
    assert not outcome.left
