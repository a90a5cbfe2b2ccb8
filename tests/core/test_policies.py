"""Policies: conservation and bound, on any input."""

from collections.abc import Iterable, Mapping

from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.scheduler import CountedReplica, Scheduler, WaitingQueue
from pipeline.core.sequences import SCORED, Sequence, plan_batch


def choose_dispatch(waiting: Iterable[Sequence], load: Mapping[str, int]) -> dict[str, list[Sequence]]:
    """Who gets what where only numbers are known."""
    scheduler: Scheduler[Sequence, CountedReplica] = Scheduler()
    for index, num in enumerate(load.values()):
        scheduler.offer(CountedReplica(index=index, num_running=num))
    chosen: dict[str, list[Sequence]] = {}
    for sequence, replica in scheduler.dispatches(WaitingQueue(waiting), now=0.0):
        replica.num_running += 1
        chosen.setdefault(list(load)[replica.index], []).append(sequence)
    return chosen


@given(st.lists(st.integers(0, 5), max_size=40), st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_dispatch_by_numbers_keeps_what_its_page_promises(tokens: list[int], loads: list[int]) -> None:
    """docs/policies/scheduler.md: conservation, order, balance, no smaller peak, repeatability."""
    waiting = [Sequence(id=f"{i:02d}", step=1, group="", num_tokens=n) for i, n in enumerate(tokens)]
    load = {f"t{i}": n for i, n in enumerate(loads)}
    chosen = choose_dispatch(waiting, load)
    ids = [s.id for s in sorted(waiting, key=lambda s: (-s.num_tokens, s.id))]
    given_to = {task: [s.id for s in given] for task, given in chosen.items()}
    assert sorted(i for given in given_to.values() for i in given) == sorted(ids)
    assert all([i for i in ids if i in given] == given for given in given_to.values()), "longest first"
    after = {t: load[t] + len(chosen.get(t, ())) for t in load}
    assert all(after[s] <= after[t] + 1 for s in chosen for t in load)
    mean = -(-(sum(loads) + len(ids)) // len(loads))
    assert max(after.values()) == max(*loads, mean)
    assert choose_dispatch(iter(waiting), load) == chosen and load == {f"t{i}": n for i, n in enumerate(loads)}


def test_dispatch_without_tasks_chooses_nothing() -> None:
    assert choose_dispatch([Sequence(id="a", step=1, group="")], {}) == {}


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None, 0.0, 1.0])), max_size=24))
def test_every_member_is_in_the_batch_or_dropped(members: list[tuple[int, float | None]]) -> None:
    seqs = [
        Sequence(id=f"000001-{g:05d}-{i:04d}", step=1, group=str(g), place=SCORED, score=score)
        for i, (g, score) in enumerate(members)
    ]
    ids, dropped = plan_batch(seqs)
    assert sorted([*ids, *(i for i, _ in dropped)]) == sorted(s.id for s in seqs)
    assert list(ids) == sorted(ids), "submission order"
    by_id = {s.id: s for s in seqs}
    groups = {by_id[i].group for i in ids}
    assert all(sum(by_id[i].group == g for i in ids) >= 2 for g in groups)
    assert all(by_id[i].score is not None for i in ids)
