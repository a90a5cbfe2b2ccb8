"""What every engine promises of its sleep: memory goes and comes, and nothing else changes."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from pipeline.core.errors import UpdateRefused
from pipeline.memory import held_bytes
from stages.engines import counters
from stages.engines.base import Engine
from stages.engines.counters import Costly
from tests.contracts.engine_case import KV_BYTES, MAX_NUM_SEQS, Case, a_request
from tests.engines.tiny import collect, drain, run

SLACK_BYTES = 4 << 20


@contextmanager
def without_collections() -> Iterator[None]:
    """But for those that are asked for, which look at nothing that was there before. A sleep must not count on Python's
    garbage collector; what tests before this one left must not count either."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def questions() -> list:
    return [a_request(f"r{n}", seed=n, temperature=n / 3, max_tokens=12 + n) for n in range(MAX_NUM_SEQS + 2)]


def test_awake_again_it_is_what_it_was(case: Case, engine: Engine) -> None:
    before, counts = run(engine, questions()), engine.counts()
    assert not engine.is_asleep
    engine.sleep()
    assert engine.is_asleep and engine.counts() == counts
    seconds = case.wake()
    assert not engine.is_asleep and engine.counts() == counts
    assert seconds.keys() == {"read", "cache"} and min(seconds.values()) >= 0
    assert run(engine, questions()) == before


def test_with_another_version_it_is_as_an_engine_that_began_with_it(case: Case, engine: Engine) -> None:
    old = run(engine, questions())
    engine.sleep()
    version = case.new_version()
    case.wake()
    said = run(engine, questions())
    assert engine.version == version and {output.version for output in said.values()} == {version}
    assert all(not set(said[id].logprobs) & set(old[id].logprobs) for id in said)
    assert said == run(case.start(), questions())
    case.update()  # updates work as before
    assert run(engine, questions()) == run(case.start(), questions())


def test_asleep_it_does_nothing(case: Case, engine: Engine) -> None:
    engine.sleep()
    load = partial(engine.load, case.rig.stored())
    for ask in (lambda: engine.add(a_request()), engine.step, engine.sleep, load):
        with pytest.raises(RuntimeError, match="sleeps"):
            ask()
    assert not engine.has_unfinished() and engine.abort() == [] and engine.abort(["a"]) == []
    case.wake()
    assert run(engine, [a_request()])["a"].finish == "length"


def test_awake_it_cannot_be_woken(case: Case, engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="awake"):
        case.wake()
    assert run(engine, [a_request()])["a"].finish == "length"


def test_it_does_not_sleep_under_requests_and_they_go_on(case: Case, engine: Engine) -> None:
    wanted = run(engine, questions())
    for question in questions():
        engine.add(question)
    said: dict = {}
    collect(said, engine.step())
    with pytest.raises(RuntimeError, match=f"under {MAX_NUM_SEQS + 2} unfinished"):
        engine.sleep()
    assert not engine.is_asleep
    collect(said, list(drain(engine).values()))
    assert said == wanted


def test_one_that_was_not_started_to_sleep_does_not(case: Case, engine: Engine) -> None:
    other = case.start(can_sleep=False)
    with pytest.raises(RuntimeError, match="not started to sleep"):
        other.sleep()
    assert run(other, [a_request()])["a"].finish == "length"


def test_a_version_that_does_not_fit_leaves_it_asleep(case: Case, engine: Engine) -> None:
    before = run(engine, questions())
    engine.sleep()
    with pytest.raises(UpdateRefused, match="does not fit the engine"):
        engine.wake(case.unfit.stored())
    assert engine.is_asleep
    case.wake()
    assert run(engine, questions()) == before


def test_the_probe_is_asked_when_it_wakes(case: Case, engine: Engine) -> None:
    engine.sleep()
    case.new_version()
    probe = case.probe()
    engine.wake(case.rig.stored(), probe)
    assert not engine.has_unfinished()
    engine.sleep()
    case.new_version()
    with pytest.raises(RuntimeError, match="is not the trainer's"):
        engine.wake(case.rig.stored(), probe)


def test_memory_goes_with_each_sleep_and_no_cycle_costs_any(case: Case, engine: Engine) -> None:
    """And none captures a graph, sets up a communicator or pins memory."""
    run(engine, questions())
    asleep, awake = [], []
    costly, in_shifts = counters.so_far(), counters.in_shifts()
    with without_collections():
        for number in range(30):
            engine.sleep()
            asleep.append(held_bytes(os.getpid()))
            if number % 2:
                case.new_version()
            case.wake()
            awake.append(held_bytes(os.getpid()))
            assert all(output.finish == "length" for output in run(engine, questions()).values())
            gc.collect()
    falls = [high - low for high, low in zip(awake, asleep[1:], strict=False)]
    shared = SLACK_BYTES if case.has_ranks else 0  # ranks hand each other pages, which are of who touched them last
    assert min(falls) > KV_BYTES * 0.98 - shared, falls
    assert max(asleep[5:]) < asleep[4] + SLACK_BYTES, asleep
    assert max(awake[5:]) < awake[4] + SLACK_BYTES, awake
    assert counters.so_far() == costly and counters.in_shifts() == in_shifts == Costly()
    assert case.is_emulated or costly.communicators > 0  # those of the engine's start: they are counted


def test_it_says_how_much_its_cache_holds(case: Case, engine: Engine) -> None:
    assert engine.kv_tokens > MAX_NUM_SEQS * 100 and engine.counts().held_tokens == 0
    for question in questions():
        engine.add(question)
    engine.step()
    engine.step()
    running = MAX_NUM_SEQS
    prompt = len(a_request().prompt_ids)
    # The newest token of each is not in the cache yet, or it is: engines differ.
    assert running * (prompt + 1) <= engine.counts().held_tokens <= running * (prompt + 2)
    work = engine.work()
    assert (work.batch, work.prefill_tokens) == (running, 0)
    assert running * (prompt + 1) <= work.context <= running * (prompt + 2)
    engine.abort()
    assert engine.counts().held_tokens == 0


def test_it_says_what_a_step_computed(engine: Engine) -> None:
    engine.add(a_request("a", prompt_ids=[5] * 40, max_tokens=3))
    engine.step()
    assert (engine.work().batch, engine.work().prefill_tokens) == (1, 40)
    engine.add(a_request("b", prompt_ids=[6] * 30, max_tokens=3))
    engine.step()
    assert (engine.work().batch, engine.work().prefill_tokens) == (2, 30)
    engine.step()
    assert (engine.work().batch, engine.work().prefill_tokens) == (2, 0)
