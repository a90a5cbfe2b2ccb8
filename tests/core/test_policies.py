"""Policies: conservation and bound, on any input."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.scheduler import choose_dispatch
from pipeline.core.sequences import Sequence, SequenceState, plan_batch


@given(st.lists(st.integers(), unique=True, max_size=40), st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_dispatch_conserves_and_balances(waiting: list[int], loads: list[int]) -> None:
    ids = [str(i) for i in waiting]
    load = {f"t{i}": n for i, n in enumerate(loads)}
    chosen = choose_dispatch(ids, load)
    assert sorted(i for given in chosen.values() for i in given) == sorted(ids)
    after = {t: load[t] + len(chosen.get(t, ())) for t in load}
    fed = [after[t] for t in chosen]
    assert not fed or max(fed) - min(after.values()) <= 1
    assert all([i for i in ids if i in given] == given for given in chosen.values()), "order of waiting is kept"


def test_dispatch_without_tasks_chooses_nothing() -> None:
    assert choose_dispatch(["a"], {}) == {}


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None, 0.0, 1.0])), max_size=24))
def test_every_member_is_in_the_batch_or_dropped(members: list[tuple[int, float | None]]) -> None:
    seqs = [
        Sequence(id=f"000001-{g:05d}-{i:04d}", step=1, group=str(g), state=SequenceState.SCORED, score=score)
        for i, (g, score) in enumerate(members)
    ]
    ids, dropped = plan_batch(seqs)
    assert sorted([*ids, *(i for i, _ in dropped)]) == sorted(s.id for s in seqs)
    assert list(ids) == sorted(ids), "submission order"
    by_id = {s.id: s for s in seqs}
    groups = {by_id[i].group for i in ids}
    assert all(sum(by_id[i].group == g for i in ids) >= 2 for g in groups)
    assert all(by_id[i].score is not None for i in ids)
