"""docs/policies/scheduler.md: who gets what, who leaves, and that nothing is lost, doubled, overtaken or starved."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from pipeline.core.iteration import IterationCost
from pipeline.core.scheduler import Abort, CountedReplica, Scheduler, WaitingQueue, has_room, price
from tests.core.shifting import Response, Schedule

READING = IterationCost(weights_s=0.004, kv_s=1e-6, overhead_s=0.002)  # 6 ms, and 1 ms per 1,000 tokens of context
NUM_SCHEDULES = 10_000


def view(index: int, num: int, *, each: float = 1000.0, cost: IterationCost | None = READING) -> CountedReplica:
    return CountedReplica(index=index, num_running=num, context=num * each, held=num * each, cost=cost)


def give(
    replicas: list[CountedReplica], num: int, *, now: float = 0.0, backlog_s: float = 1.0, rest: float = 2000.0
) -> tuple[list[int], int, list[float]]:
    """Who gets how many of `num` new sequences, how many wait, and when it is to be tried again."""
    scheduler: Scheduler[Response, CountedReplica] = Scheduler(backlog_s, rest)
    for each in replicas:
        scheduler.offer(each)
        scheduler.offer(each)  # twice is once
    queue, got, asked = WaitingQueue(Response(i, 0, 100.0) for i in range(num)), [0] * len(replicas), list[float]()
    for _, replica in scheduler.dispatches(queue, now, asked.append):
        replica.num_running += 1
        replica.context += 1000.0
        got[replicas.index(replica)] += 1
    return got, len(queue), asked


# --- order


def test_the_oldest_step_and_the_longest_come_first() -> None:
    late, early, long, same = Response(1, 1, 9.0), Response(2, 0, 9.0), Response(3, 0, 9.0, 5.0), Response(0, 1, 9.0)
    queue = WaitingQueue([late, early, long])
    queue.put([same])
    assert [s.id for s in queue.waiting()] == [3, 2, 0, 1]


# --- where to


def test_equal_replicas_are_filled_evenly() -> None:
    assert give([view(0, 3), view(1, 0), view(2, 1)], 5)[0] == [0, 3, 2]


def test_of_those_of_which_nothing_is_known_the_fewest_come_first() -> None:
    assert give([view(0, 3, cost=None), view(1, 0, cost=None), view(2, 1, cost=None)], 5)[0] == [0, 3, 2]


def test_a_replica_of_unknown_cost_is_taken_for_one_of_the_role() -> None:
    scheduler: Scheduler[Response, CountedReplica] = Scheduler(assumed=READING)
    for each in (view(0, 2), view(1, 1, cost=None)):
        scheduler.offer(each)
    ((_, replica),) = scheduler.dispatches(WaitingQueue([Response(0, 0, 1.0)]), 0.0)
    assert replica.index == 1


def test_the_one_that_reads_less_comes_first() -> None:
    assert give([view(0, 4, each=5000.0), view(1, 4)], 3)[0] == [0, 3]


def test_a_slow_replica_gets_less_but_not_nothing() -> None:
    got, _, _ = give([view(0, 0), view(1, 0, cost=READING.slower(2.0))], 60)
    assert 5 < got[1] < 20 and sum(got) == 60


def test_a_larger_replica_gets_more() -> None:
    larger = replace(READING, weights_s=0.001, kv_s=2.5e-7)
    got, _, _ = give([view(0, 0), view(1, 0, cost=larger)], 60)
    assert got[1] > 2 * got[0] > 0


def test_the_price_is_what_all_lose() -> None:
    # 2 of 1,000 tokens: 8 ms per iteration, 3: 9 ms; 27 - 16 ms. Prefill: 1 s for each of 3, over 2,000 tokens.
    assert price(READING, 2, 2000.0, math.inf) == pytest.approx(0.011)
    assert price(replace(READING, prefill_s=1e-3), 2, 2000.0, 2000.0) == pytest.approx(0.011 + 0.0015)
    assert price(READING, 0, 0.0, 1.0) == pytest.approx(0.006)


@pytest.mark.parametrize("cost", [READING, IterationCost(compute_s=1e-4), IterationCost(per_sequence_s=1.0)])
def test_the_price_grows_with_the_crowd_and_with_its_context(cost: IterationCost) -> None:
    by_num = [price(cost, num, 1000.0 * num, 2000.0) for num in range(100)]
    assert all(a < b for a, b in pairwise(by_num))
    by_context = [price(cost, 10, 1000.0 * each, 2000.0) for each in range(100)]
    assert all(a <= b for a, b in pairwise(by_context))


def test_where_all_is_instant_numbers_decide() -> None:
    assert give([view(0, 1, cost=IterationCost()), view(1, 0, cost=IterationCost())], 3)[0] == [1, 2]


# --- room and waiting


def test_an_empty_replica_takes_even_what_is_larger_than_its_cache() -> None:
    assert has_room(replace(view(0, 0), kv_tokens=50.0), Response(0, 0, 1.0, 100.0))


@pytest.mark.parametrize(("kv", "most", "fits"), [(2500.0, 4, True), (2499.0, 4, False), (2500.0, 1, False)])
def test_room_ends_with_the_batch_and_with_the_cache(kv: float, most: int, fits: bool) -> None:
    # 1,000 are held, 100 come, and each of the two may go on for 700.
    assert has_room(replace(view(0, 1), kv_tokens=kv, max_num_seqs=most), Response(0, 0, 1.0, 100.0)) is fits


def test_what_finds_no_room_waits() -> None:
    full = [replace(view(i, 0), max_num_seqs=4) for i in range(2)]
    assert give(full, 11) == ([4, 4], 3, [])


def test_who_is_busy_with_prefill_is_waited_for() -> None:
    scheduler: Scheduler[Response, CountedReplica] = Scheduler(1.0, 2000.0)
    scheduler.offer(replace(view(0, 0), prefilled_at=5.0))
    queue, asked = WaitingQueue([Response(0, 0, 1.0)]), list[float]()
    assert list(scheduler.dispatches(queue, 3.0, asked.append)) == [] and asked == [4.0]
    assert list(scheduler.dispatches(queue, 3.5, asked.append)) == [] and asked == [4.0], "asked once"
    assert [s.id for s, _ in scheduler.dispatches(queue, 4.0, asked.append)] == [0]


def test_it_is_tried_again_when_the_first_of_the_busy_is_free() -> None:
    busy = [replace(view(i, 0), prefilled_at=5.0 - i) for i in range(2)]
    assert give(busy, 1)[2] == [3.0]


@pytest.mark.parametrize(("num", "gets"), [(4, [0, 1]), (5, [0, 0])])
def test_a_crowded_replica_gets_nothing_because_a_better_one_is_busy_for_a_moment(num: int, gets: list[int]) -> None:
    """Four seconds over 400 tokens are 10 ms per token, and 6 of its own: a fifth costs 15 elsewhere, a sixth 17."""
    busy = replace(view(0, 0), prefilled_at=5.0)
    assert give([busy, view(1, num)], 1, rest=400.0)[0] == gets


def test_a_replica_that_refused_is_asked_again_when_it_is_offered() -> None:
    scheduler: Scheduler[Response, CountedReplica] = Scheduler()
    only = replace(view(0, 1), max_num_seqs=1)
    scheduler.offer(only)
    queue = WaitingQueue([Response(0, 0, 1.0)])
    assert list(scheduler.dispatches(queue, 0.0)) == []
    only.num_running = 0
    scheduler.offer(only)
    assert [s.id for s, _ in scheduler.dispatches(queue, 0.0)] == [0]


def test_a_replica_that_is_gone_gets_nothing() -> None:
    scheduler: Scheduler[Response, CountedReplica] = Scheduler()
    gone, there = view(0, 0), view(1, 5)
    for each in (gone, there):
        scheduler.offer(each)
    assert [r.index for _, r in scheduler.dispatches(WaitingQueue([Response(0, 0, 1.0)]), 0.0)] == [0]
    scheduler.withdraw(gone)
    assert [r.index for _, r in scheduler.dispatches(WaitingQueue([Response(1, 0, 1.0)]), 0.0)] == [1]


def test_one_that_goes_while_it_is_given_work_gets_no_more() -> None:
    scheduler: Scheduler[Response, CountedReplica] = Scheduler()
    goes, stays = view(0, 0), view(1, 9)
    for each in (goes, stays):
        scheduler.offer(each)
    given = []
    for sequence, replica in scheduler.dispatches(WaitingQueue(Response(i, 0, 1.0) for i in range(3)), 0.0):
        given.append((sequence.id, replica.index))
        scheduler.withdraw(goes)
    assert given == [(0, 0), (1, 1), (2, 1)]


def test_what_changes_a_thousand_times_makes_nobody_forgotten() -> None:
    scheduler: Scheduler[Response, CountedReplica] = Scheduler()
    best, changing, still = view(0, 0), view(1, 1000), view(2, 2000)
    scheduler.offer(best)
    scheduler.offer(still)
    for number in range(999):
        changing.num_running -= 1
        scheduler.offer(changing)
        assert [r.index for _, r in scheduler.dispatches(WaitingQueue([Response(number, 0, 1.0)]), 0.0)] == [0]
    for gone, left in ((best, changing), (changing, still)):
        scheduler.withdraw(gone)
        assert [r for _, r in scheduler.dispatches(WaitingQueue([Response(999, 0, 1.0)]), 0.0)] == [left]


# --- who leaves

CROWD = replace(READING, prefill_s=1e-5)


def leave(replicas: list[CountedReplica], *, backlog_s: float = 100.0, rest: float = 2000.0) -> list[tuple[int, int]]:
    scheduler: Scheduler[Response, CountedReplica] = Scheduler(backlog_s, rest)
    return [(replica.index, num) for replica, num in scheduler.migrations(replicas, 0.0)]


@pytest.mark.parametrize("num", [3, 7, 12, 49])
def test_moves_come_to_an_end_where_all_prices_are_equal_but_for_their_last_bits(num: int) -> None:
    """Iterations that take the same time whatever runs, and prefill that takes none."""
    cost = IterationCost(overhead_s=0.1 / 3)
    replicas = [view(i, num + i, cost=cost) for i in range(3)] + [view(3, 0, cost=cost)]
    moved = leave(replicas, rest=12.8)
    assert sum(n for _, n in moved) <= sum(replica.num_running for replica in replicas)


def crowd(num_free: int = 3, **cost: float) -> list[CountedReplica]:
    """One with 40 sequences whose reading dominates, and some that just came."""
    made = replace(CROWD, **cost)
    return [view(0, 40, cost=made), *(view(1 + i, 0, cost=made) for i in range(num_free))]


def test_a_crowd_spreads_when_replicas_come() -> None:
    assert leave(crowd()) == [(0, 30)]


def test_it_stays_where_prefill_costs_more_than_the_crowd() -> None:
    assert leave(crowd(prefill_s=0.2)) == []
    few = leave(crowd(prefill_s=5e-3))
    assert few and few[0][1] < 30


def test_those_who_stand_still_meanwhile_are_reckoned_with() -> None:
    # After k it saves 156 - 8 k s; its prefill of 5 s stops k + 1 of them, and begins after that of the k before it.
    assert leave(crowd(1, prefill_s=5e-3)) == [(0, 9)]
    # The first saves 158 s, the second 148 s, and they would wait so long.
    for wait_s, left in ((157.0, [(0, 1)]), (159.0, [])):
        assert leave([view(0, 40), replace(view(1, 0), prefilled_at=wait_s)], backlog_s=200.0) == left


def test_it_stays_where_little_is_left_to_generate() -> None:
    assert leave(crowd(), rest=0.1) == []


def test_it_stays_where_a_crowd_costs_nothing() -> None:
    assert leave(crowd(kv_s=0.0)) == []


def test_no_more_leave_than_is_prefilled_soon() -> None:
    assert leave(crowd(1), backlog_s=0.045) == [(0, 5)]  # 10 ms each
    behind = [view(0, 40, cost=CROWD), replace(view(1, 0, cost=CROWD), prefilled_at=1.0)]
    assert leave(behind, backlog_s=0.5) == []


def test_no_more_leave_than_find_room() -> None:
    assert leave([view(0, 40, cost=CROWD), replace(view(1, 0, cost=CROWD), max_num_seqs=4)]) == [(0, 4)]
    assert leave([view(0, 40, cost=CROWD), replace(view(1, 0, cost=CROWD), kv_tokens=8500.0)]) == [(0, 5)]


def test_an_even_load_stays() -> None:
    assert leave([view(i, 10, cost=CROWD) for i in range(3)]) == [] == leave([view(0, 40, cost=CROWD)])


def test_a_straggler_leaves_a_slow_replica() -> None:
    slow = view(0, 1, cost=CROWD.slower(3.0))
    assert leave([slow, view(1, 0, cost=CROWD)]) == [(0, 1)]
    assert leave([view(0, 1, cost=CROWD), view(1, 0, cost=CROWD)]) == []


def test_where_costs_are_not_known_numbers_are_evened_out() -> None:
    assert leave([view(0, 9, cost=None), view(1, 0, cost=None), view(2, 0, cost=None)]) == [(0, 6)]


def test_who_left_is_not_sent_back() -> None:
    """What migration plans, dispatch does."""
    replicas = crowd()
    scheduler: Scheduler[Response, CountedReplica] = Scheduler(100.0, 2000.0)
    ((source, num),) = scheduler.migrations(replicas, 0.0)
    assert Abort(source, num) == (replicas[0], 30)
    source.num_running, source.context = source.num_running - num, source.context - 1000.0 * num
    assert give(replicas, num)[0] == [0, 10, 10, 10]


# --- all together


def test_random_schedules_lose_double_overtake_and_starve_nobody() -> None:
    aborted = 0
    for seed in range(NUM_SCHEDULES):
        schedule = Schedule(seed)
        schedule.play()
        aborted += schedule.num_aborted
    assert aborted > NUM_SCHEDULES / 10, "migrations are among them"
