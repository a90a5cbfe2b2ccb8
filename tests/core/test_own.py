"""The user's stages in the core: where they stand in the step, what they drop, and how they end with the run."""

import pytest

from pipeline.core.dag import Graph, Own, step_graph
from pipeline.core.events import Finish, SegmentInfo, VerdictInfo
from pipeline.core.sequences import Sequences, plan_batch


def own(name: str, after: tuple[str, ...] = ("reward",), before: tuple[str, ...] = ("batch",)) -> Own:
    return Own(name=name, after=after, before=before, timeout_s=1.0)


def test_each_stage_stands_after_those_that_it_waits_for() -> None:
    graph = step_graph(1, is_streaming=True, own=[own("b", after=("a",)), own("a"), own("c", ("record",), ())])
    names = [stage.name for stage in graph]
    for stage in graph:
        assert all(after.lag or names.index(after.stage) < names.index(stage.name) for after in stage.after)
    assert Graph(graph).leads_to("batch") == {"prompts", "rollout", "reward", "a", "b"}
    assert [s.name for s in step_graph(1, is_streaming=True)] == [n for n in names if n not in ("a", "b", "c")]


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([own("train")], "a stage 'train' already"),
        ([own("a"), own("a")], "a stage 'a' already"),
        ([own("a", before=("a",))], "would wait for itself: .*a"),
        ([own("a", before=("b",)), own("b", before=("a",))], "would wait for itself"),
        ([own("a", after=("publish",), before=("train",))], "would wait for itself"),
    ],
)
def test_what_cannot_be_is_refused(stages: list[Own], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        step_graph(own=stages)


def test_what_a_stage_refuses_is_dropped_and_so_is_what_is_left_alone_by_it() -> None:
    sequences = Sequences()
    ids = [f"000001-0000{group}-000{member}" for group in range(2) for member in range(2)]
    sequences.admit(1, ids)
    for id in ids:
        sequences.dispatch(id, "r")
        sequences.close("r", SegmentInfo(id=id, idx=0, num_tokens=1, version=0, finish=Finish.STOP))
        sequences.dispatch(id, "j")
        sequences.judge("j", VerdictInfo(id=id, score=1.0, failure=""))
    sequences.refuse(1, [(ids[0], "filter:long"), ("unknown", "x")])
    sequences.refuse(2, [(ids[2], "of another step")])
    batch, dropped = plan_batch(sequences.of_step(1))
    assert batch == tuple(ids[2:])
    assert dropped == ((ids[0], "filter:long"), (ids[1], "group_too_small"))
    sequences.batch(1, batch, dropped)
