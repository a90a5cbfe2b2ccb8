"""Thousands of random schedules: nothing is lost, nothing is done twice, and the run ends."""

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from pipeline.core import events as ev
from pipeline.core.dag import STAGES
from pipeline.core.sequences import RESTORED_TO
from pipeline.core.versions import VersionChange
from pipeline.core.worker import WorkerState
from tests.core.storm import REPEATED, SEQUENCE_REPORTS, WORKER_REPORTS, Storm
from tests.core.tables import CHANGES, LIVES, STATES, Hits, name

NUM_PROCESSES = 2


def run_seeds(seeds: range) -> tuple[Hits, Counter[str]]:
    hits, counts = Hits(), Counter[str]()
    for seed in seeds:
        try:
            Storm(seed, hits, counts).run()
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error!r}") from error
    return hits, counts


def report(hits: Hits) -> str:
    """Every pair that was met: how often it was taken, and how often such a report was refused."""
    lines = [f"{'life':<10}{'state':<20}{'what happens':<14}{'taken':>8}{'refused':>9}"]
    for life in LIVES:
        for state in STATES[life]:
            for change in CHANGES[life]:
                taken, refused = hits.taken[life][(state, change)], hits.refused[life][(state, change)]
                if taken or refused:
                    lines.append(f"{life:<10}{name(state):<20}{change:<14}{taken:>8}{refused:>9}")
    return "\n".join(lines)


def illegal_reports(life: str) -> list[tuple[object, object]]:
    """What a process could say, in states that last, and must not be believed."""
    reports: dict[str, tuple[object, ...]] = {
        "sequence": tuple(SEQUENCE_REPORTS),
        "worker": tuple(WORKER_REPORTS),
        "version": (VersionChange.SEALED,),
    }
    passing = (WorkerState.PLANNED, WorkerState.DEAD)
    pairs = [(state, change) for state in STATES[life] if state not in passing for change in reports[life]]
    return [pair for pair in pairs if pair not in LIVES[life]]


@pytest.mark.timeout(400)  # eight milliseconds each
@pytest.mark.parametrize("num_schedules", [3_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_schedules_take_every_legal_change_and_no_other(num_schedules: int) -> None:
    """That an illegal one is refused is required after each event, by `Lives`; here, that it was tried."""
    parts = [range(i, num_schedules, NUM_PROCESSES) for i in range(NUM_PROCESSES)]
    hits, counts = Hits(), Counter[str]()
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        for some_hits, some_counts in pool.map(run_seeds, parts):
            hits.add(some_hits)
            counts += some_counts
    print(report(hits))
    print(*(f"{what}: {num}" for what, num in sorted(counts.items())), sep="\n")
    assert {life: [pair for pair in LIVES[life] if not hits.taken[life][pair]] for life in LIVES} == {
        life: [] for life in LIVES
    }, "legal, and never taken"
    assert {life: [p for p in illegal_reports(life) if not hits.refused[life][p]] for life in LIVES} == {
        life: [] for life in LIVES
    }, "illegal, and never tried"
    assert hits.restored.keys() == RESTORED_TO.keys()
    met = {
        *(f"killed in {stage.name}" for stage in STAGES if stage.role),
        *(f"killed {state}" for state in (WorkerState.STARTING, WorkerState.READY, WorkerState.LOADING)),
        *(f"lost {event.__name__}" for event in (ev.BatchCommitted, ev.BatchTrained, ev.StepRecorded)),
        *(f"repeated {event.__name__}" for event in (*REPEATED, ev.TimerFired)),
        *("ended done", "ended failed", "ended cancelled", "hung worker found", "controller killed", "node lost"),
    }
    assert not met - counts.keys(), "what was to go wrong"
