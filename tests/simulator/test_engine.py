"""One replica, by hand and under random handling."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.events import Role
from pipeline.core.iteration import IterationCost
from pipeline.core.scheduler import has_room
from pipeline.simulator.engine import Replica, Sequence

COST = IterationCost(overhead_s=0.01, prefill_s=0.001)  # 10 ms per iteration, 1 ms per token of a prompt


def replica(role: Role = Role.ROLLOUT, *, cost: IterationCost = COST, kv: float = 1e6, shares: bool = False) -> Replica:
    return Replica(
        index=0,
        role=role,
        block=0,
        num_gpus=1,
        cost=cost,
        kv_tokens=kv,
        max_num_seqs=4,
        prefix_tokens=100,
        shares_prefix=shares,
        at=0.0,
    )


def sequence(id: int, num_response: float = 50.0, *, group: int = 0, num_verdict: float = 10.0) -> Sequence:
    return Sequence(id=id, step=0, group=group, num_response=num_response, num_verdict=num_verdict)


def test_prefill_comes_first_and_then_a_token_per_iteration() -> None:
    engine = replica()
    engine.add(sequence(1, 50), 0.0)
    engine.add(sequence(2, 20), 0.0)
    assert engine.next_event(0.0) == pytest.approx(0.2 + 20 * 0.01)
    engine.advance(0.4)
    assert [s.id for s in engine.finished()] == [2]
    assert engine.next_event(0.4) == pytest.approx(0.2 + 50 * 0.01)
    # Another prompt stops those that run.
    engine.add(sequence(3, 20), 0.4)
    assert engine.next_event(0.4) == pytest.approx(0.4 + 0.1 + 20 * 0.01)


def test_an_aborted_sequence_keeps_its_tokens_and_is_prefilled_elsewhere() -> None:
    first, second = replica(), replica()
    first.add(sequence(1, 50), 0.0)
    (taken,) = first.abort(0.1 + 0.3)
    assert taken.generated == pytest.approx(30) and first.num_running == 0 and first.context == 0
    second.add(taken, 1.0)
    assert second.next_event(1.0) == pytest.approx(1.0 + 130 * 0.001 + 20 * 0.01)


def test_those_with_the_fewest_tokens_are_aborted_first() -> None:
    engine = replica()
    for id, at in ((1, 0.0), (2, 0.5), (3, 1.0)):
        engine.add(sequence(id, 1000), at)
    assert [s.id for s in engine.abort(2.0, 2)] == [3, 2] and engine.num_running == 1


def test_a_judge_reads_the_response() -> None:
    engine = replica(Role.REWARD)
    engine.add(sequence(1, 5000, num_verdict=10), 0.0)
    assert engine.next_event(0.0) == pytest.approx(5.1 + 10 * 0.01)


def test_a_group_on_one_replica_shares_its_prefix() -> None:
    engine = replica(shares=True)
    for id, group in ((1, 0), (2, 0), (3, 1)):
        engine.add(sequence(id, 50, group=group), 0.0)
    assert engine.prefilled_at == pytest.approx(0.2)  # two groups, three sequences
    assert engine.context == 300 and engine.held == 200  # each reads its own, the cache holds two
    engine.advance(10.0)
    assert len(engine.finished()) == 3 and engine.held == 0


def test_a_full_cache_preempts_the_last_to_come() -> None:
    engine = replica(kv=1000)
    for id in (1, 2, 3):
        engine.add(sequence(id, 5000), 0.0)
    full_at = engine.next_event(0.0)
    assert full_at == pytest.approx(0.3 + (1000 - 300) / 3 * 0.01)
    engine.advance(full_at)
    out = engine.preempted()
    assert [s.id for s in out] == [3] and engine.num_running == 2
    assert out[0].generated == pytest.approx(700 / 3)
    assert engine.num_preempted == 1 and not engine.preempted()


def test_new_weights_stop_the_engine() -> None:
    keeps, recomputes = replica(), replica()
    for engine, again in ((keeps, False), (recomputes, True)):
        engine.add(sequence(1, 50), 0.0)
        engine.reload(0.1 + 0.3, 2.0, again)
    assert keeps.next_event(0.4) == pytest.approx(0.4 + 2.0 + 20 * 0.01)
    assert recomputes.next_event(0.4) == pytest.approx(0.4 + 2.0 + 0.130 + 20 * 0.01)


STEPS = st.lists(st.tuples(st.sampled_from(["add", "wait", "abort", "reload"]), st.integers(1, 400)), max_size=40)


@settings(max_examples=60)
@given(STEPS, st.booleans())
def test_tokens_are_neither_lost_nor_made_up(steps: list[tuple[str, int]], shares: bool) -> None:
    cost = IterationCost(weights_s=0.003, kv_s=1e-6, compute_s=0.002, overhead_s=0.001, prefill_s=1e-4)
    engine, now, ids, out = replica(cost=cost, kv=3000, shares=shares), 0.0, 0, []
    for what, number in steps:
        if what == "add" and has_room(engine, waiting := sequence(ids, number, group=number % 3)):
            ids += 1
            engine.add(waiting, now)
        elif what == "wait":
            until = now + number / 100
            while (when := engine.next_event(now)) is not None and when <= until:
                assert when >= now
                now = when
                engine.advance(now)
                ended = engine.finished()
                assert all(s.generated == 0 for s in ended)
                out += [(s.num_response) for s in ended] + [s.generated for s in engine.preempted()]
            now = until
            engine.advance(now)
        elif what == "abort":
            out += [s.generated for s in engine.abort(now, number % 4)]
        elif what == "reload":
            engine.reload(now, 0.1, number % 2 == 0)
        running = [entry[2] for entry in engine.running]
        made = sum(engine.generated(s) for s in running)
        assert engine.num_tokens == pytest.approx(made + sum(out), abs=0.01)
        assert engine.context == pytest.approx(100 * len(running) + made, abs=0.01)
        groups = len({s.group for s in running}) if shares else len(running)
        assert engine.held == pytest.approx(100 * groups + made, abs=0.01)
        assert engine.held <= 3000.01 or len(running) < 2
