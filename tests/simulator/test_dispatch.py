"""The core's scheduler on the simulator's engines: room, prefill and migration as they are there."""

from pipeline.core.iteration import IterationCost
from pipeline.core.scheduler import Scheduler, WaitingQueue
from pipeline.simulator.engine import Replica, Sequence
from tests.simulator.test_engine import replica, sequence

SLOW_PREFILL = IterationCost(overhead_s=0.01, prefill_s=0.004)  # 0.4 s per prompt of 100 tokens


def several(num: int, cost: IterationCost | None = None) -> list[Replica]:
    made = [replica(cost=cost) if cost else replica() for _ in range(num)]
    for index, each in enumerate(made):
        each.index = index
    return made


def queue_of(*sequences: Sequence) -> WaitingQueue[Sequence]:
    return WaitingQueue(sequences)


def give(replicas: list[Replica], queue: WaitingQueue[Sequence], backlog_s: float = 10.0) -> list[float]:
    """Returns when it is to be tried again."""
    scheduler: Scheduler[Sequence, Replica] = Scheduler(backlog_s, 30.0)
    asked: list[float] = []
    for each in replicas:
        scheduler.offer(each)
    for taken, to in scheduler.dispatches(queue, 0.0, asked.append):
        to.add(taken, 0.0)
    return asked


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
    # Three prompts take 1.2 s, of which .2 s must pass before a fourth.
    assert [round(when, 6) for when in give(replicas, queue, backlog_s=1.0)] == [0.2]
    assert [r.num_running for r in replicas] == [3, 3] and len(queue) == 2


def test_a_group_does_not_pile_up_on_the_last_one_that_is_not_busy() -> None:
    """Its prefix is prefilled once, so a replica that has it never gets busy with it: all others are, for .2 s."""
    quick = IterationCost(overhead_s=0.1, per_sequence_s=0.01, prefill_s=1e-6)
    replicas = [replica(cost=quick, shares=True) for _ in range(2)]
    for index, each in enumerate(replicas):
        each.index, each.max_num_seqs = index, 64
    for number in range(3):
        replicas[0].add(sequence(100 + number, group=1 + number), 0.0)
    replicas[0].prefilled_at = 1.2
    replicas[1].add(sequence(200, group=9), 0.0)
    give(replicas, queue_of(*(sequence(i, group=9) for i in range(40))), backlog_s=1.0)
    assert replicas[0].num_running == 3 and replicas[1].num_running <= 5


def test_those_that_leave_a_crowd_land_where_room_was_made_for_them() -> None:
    cost = IterationCost(overhead_s=0.001, per_sequence_s=0.001, prefill_s=1e-5)
    replicas = several(4, cost)
    for each in replicas:
        each.max_num_seqs = 64
    for i in range(40):
        replicas[0].add(sequence(i, 1000), 0.0)
    scheduler: Scheduler[Sequence, Replica] = Scheduler(1.0, 600.0)
    ((crowded, num),) = scheduler.migrations(replicas, 0.0)
    assert crowded is replicas[0] and num == 30
    give(replicas, queue_of(*crowded.abort(0.0, num)))
    assert [r.num_running for r in replicas] == [10, 10, 10, 10]
