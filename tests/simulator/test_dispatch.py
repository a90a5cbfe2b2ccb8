"""Who gets what waits, and who leaves a crowded replica."""

from pipeline.core.iteration import IterationCost
from pipeline.simulator.dispatch import LeastLoaded, WaitingQueue, plan_migration
from pipeline.simulator.engine import Replica, Sequence
from tests.simulator.test_engine import replica, sequence

SLOW_PREFILL = IterationCost(overhead_s=0.01, prefill_s=0.004)  # 0.4 s per prompt of 100 tokens


def several(num: int, cost: IterationCost | None = None) -> list[Replica]:
    made = [replica(cost=cost) if cost else replica() for _ in range(num)]
    for index, each in enumerate(made):
        each.index = index
    return made


def queue_of(*sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue()
    queue.put(sequences)
    return queue


def give(replicas: list[Replica], queue: WaitingQueue, backlog_s: float = 10.0) -> list[tuple[int, float]]:
    """Returns who is busy with prefill until when."""
    dispatch, woken = LeastLoaded(backlog_s), []
    for each in replicas:
        dispatch.offer(each)
        dispatch.offer(each)  # twice is once
    dispatch.fill(queue, 0.0, lambda each, when: woken.append((each.index, when)))
    return woken


def test_the_oldest_step_and_the_longest_come_first() -> None:
    late, early, long = sequence(1), sequence(2), sequence(3)
    late.step, long.generated = 1, 20
    assert [s.id for s in queue_of(late, early, long).waiting()] == [3, 2, 1]


def test_each_goes_to_the_replica_that_runs_the_fewest() -> None:
    replicas = several(3)
    replicas[0].add(sequence(100), 0.0)
    give(replicas, queue_of(*(sequence(i) for i in range(6))))
    assert [r.num_running for r in replicas] == [3, 2, 2]


def test_what_finds_no_room_waits() -> None:
    replicas, queue = several(2), queue_of(*(sequence(i) for i in range(11)))
    give(replicas, queue)
    assert [r.num_running for r in replicas] == [4, 4] and len(queue) == 3


def test_a_replica_with_much_to_prefill_is_asked_again_later() -> None:
    replicas, queue = several(2, SLOW_PREFILL), queue_of(*(sequence(i) for i in range(8)))
    woken = give(replicas, queue, backlog_s=1.0)
    # Three prompts take 1.2 s, of which .2 s must pass before a fourth.
    assert [r.num_running for r in replicas] == [3, 3] and len(queue) == 2
    assert [(index, round(when, 6)) for index, when in woken] == [(0, 0.2), (1, 0.2)]


def test_a_dead_replica_gets_nothing() -> None:
    replicas = several(2)
    replicas[0].is_dead = True
    give(replicas, queue_of(sequence(1), sequence(2)))
    assert [r.num_running for r in replicas] == [0, 2]


def crowd(prefill_s: float) -> list[tuple[int, int]]:
    """One replica with 40 sequences whose reading dominates, and three that just came."""
    cost = IterationCost(overhead_s=0.001, per_sequence_s=0.001, prefill_s=prefill_s)
    replicas = several(4, cost)
    replicas[0].max_num_seqs = 64
    for i in range(40):
        replicas[0].add(sequence(i, 1000), 0.0)
    return [(r.index, num) for r, num in plan_migration(replicas, 1000)]


def test_a_crowd_spreads_when_replicas_come() -> None:
    assert crowd(prefill_s=1e-5) == [(0, 29)]  # its share is 10, and one more stays


def test_it_stays_where_prefill_costs_more_than_the_crowd() -> None:
    assert crowd(prefill_s=0.1) == []


def test_an_even_load_stays() -> None:
    replicas = several(3)
    give(replicas, queue_of(*(sequence(i) for i in range(9))))
    assert plan_migration(replicas, 1000) == [] == plan_migration(replicas[:1], 1000)
