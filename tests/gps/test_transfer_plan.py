"""Plans bring every layout into every other, bit for bit, evenly, and near to the bound."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import WeightsUnavailable
from pipeline.gps.engine_layout import vllm_layout
from pipeline.gps.layout import Box, Layout, Part, Shapes, stored
from pipeline.gps.loads import Ends, Rates
from pipeline.gps.placement import place, replicas_that_fit
from pipeline.gps.plan_cache import PlanCache
from pipeline.gps.trainer_layout import fsdp2
from pipeline.gps.transfer_plan import Copy, plan_transfer
from tests.gps.arrays import KINDS, any_layout, any_shapes, carried_out, equal, laid_out, numbered
from tests.gps.shapes import QWEN_7B, QWEN_30B_A3B, Model

SMALL = Model(layers=3, hidden=8, inner=12, heads=4, kv_heads=2, head_dim=2, vocab=70)
EXPERTS = Model(layers=2, hidden=4, inner=6, heads=2, kv_heads=2, head_dim=2, vocab=9, experts=4)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_layout_becomes_any_other(data: st.DataObject) -> None:
    shapes = data.draw(any_shapes())
    have, want = data.draw(any_layout(shapes)), data.draw(any_layout(shapes))
    nodes = st.integers(0, 3)
    ends = Ends(
        sources=tuple(data.draw(nodes) for _ in have.ranks),
        replicas=tuple(tuple(data.draw(nodes) for _ in want.ranks) for _ in range(data.draw(st.integers(1, 3)))),
    )
    plan = plan_transfer(shapes, 2, have, want, ends)
    model = numbered(shapes)
    held = [laid_out(have, rank, model) for rank in range(len(have.ranks))]
    expected = [laid_out(want, rank, model) for rank in range(len(want.ranks))]
    for ranks in carried_out(plan, have, held, want, len(ends.replicas)):
        assert equal(ranks, expected)
    assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)


@pytest.mark.parametrize("model", [SMALL, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(("kind", "num_ranks"), [("ddp", 2), ("fsdp2", 3), ("tensor_parallel", 2), ("flat_shards", 3)])
@pytest.mark.parametrize("engine_ranks", [1, 2])
def test_from_ranks_through_nodes_into_engines(model: Model, kind: str, num_ranks: int, engine_ranks: int) -> None:
    """A write to three nodes, each tensor on two, and reads by two replicas of which one is on a node of its own."""
    shapes = model.shapes()
    trained, between = KINDS[kind](shapes, num_ranks), place(shapes, 3, 2)
    wanted, numbers = vllm_layout(shapes, model.engine(engine_ranks)), numbered(shapes)
    write = plan_transfer(shapes, 2, trained, between, Ends(sources=(0,) * num_ranks, replicas=((0, 1, 2),)))
    ranks = [laid_out(trained, rank, numbers) for rank in range(num_ranks)]
    (nodes,) = carried_out(write, trained, ranks, between)
    ends = Ends(sources=(0, 1, 2), replicas=((1,) * engine_ranks, (3,) * engine_ranks))
    read = plan_transfer(shapes, 2, between, wanted, ends)
    expected = [laid_out(wanted, rank, numbers) for rank in range(engine_ranks)]
    for replica in carried_out(read, between, nodes, wanted, 2):
        assert equal(replica, expected)


def shifted(layout: Layout) -> Layout:
    """One box of its last rank, one row further."""
    *ranks, last = layout.ranks
    number = next(i for i, part in enumerate(last) if part.box.start[0] > 0)
    name, box, where = last[number]
    up = Box((box.start[0] - 1, *box.start[1:]), (box.stop[0] - 1, *box.stop[1:]))
    return Layout((*ranks, (*last[:number], Part(name, up, where), *last[number + 1 :])), layout.padded)


def test_a_box_that_is_shifted_by_a_row_is_seen() -> None:
    shapes = SMALL.shapes()
    have, want, model = fsdp2(shapes, 2), vllm_layout(shapes, SMALL.engine(2)), numbered(shapes)
    held = [laid_out(have, rank, model) for rank in range(2)]
    expected = [laid_out(want, rank, model) for rank in range(2)]
    plan = plan_transfer(shapes, 2, have, shifted(want), Ends(sources=(0, 0), replicas=((0, 0),)))
    (ranks,) = carried_out(plan, have, held, shifted(want))
    assert equal(ranks[:1], expected[:1]) and not equal(ranks, expected)


def test_of_equally_loaded_holders_the_nearest_gives() -> None:
    shapes = {"a": (8, 1024)}
    have = stored(shapes, [shapes] * 3)
    plan = plan_transfer(shapes, 2, have, stored(shapes, [shapes]), Ends(sources=(0, 1, 2), replicas=((2,), (0,))))
    assert [(share.replica, share.source) for share in plan.shares] == [(0, 2), (1, 0)]
    assert plan.into(0, 0) == [Copy(2, "a", Box((0, 0), (8, 1024)))]


def test_adjoining_slices_of_one_holder_come_as_one() -> None:
    """Rows are cut by another rank's wish, and belong together again."""
    shapes = {"a": (8, 4)}
    have, want = stored(shapes, [shapes]), Layout((fsdp2(shapes, 2).ranks[0], fsdp2(shapes, 1).ranks[0]), ({}, {}))
    plan = plan_transfer(shapes, 2, have, want, Ends(sources=(0,), replicas=((0, 0),)))
    assert len(plan.shares) == 3
    assert plan.into(0, 1) == [Copy(0, "a", Box((0, 0), (8, 4)))]


def test_a_tensor_that_nobody_holds_is_named() -> None:
    shapes = {"a": (1,), "b": (2,)}
    with pytest.raises(WeightsUnavailable, match="nobody holds b, which rank 0 wants"):
        plan_transfer(
            shapes, 2, stored(shapes, [["a"]]), stored(shapes, [shapes]), Ends(sources=(0,), replicas=((0,),))
        )


# --- balance ----------------------------------------------------------------------------------------------------------


def replicas(nodes: tuple[int, ...], ranks: int) -> tuple[tuple[int, ...], ...]:
    return tuple((node,) * ranks for node in nodes)


SITUATIONS = {
    "all": ((0, 1, 2, 3), (0, 0, 1, 1, 2, 2, 3, 3)),
    "one is new, on a node that holds": ((0, 1, 2, 3), (3,)),
    "one is new, on a node that does not": ((0, 1, 2, 3), (4,)),
    "a holder is dead": ((1, 2, 3), (0, 0, 1, 1, 2, 2, 3, 3)),
    "a holder is dead, one is new": ((1, 2, 3), (0,)),
    "more on one node than on others": ((0, 1, 2, 3), (0, 0, 0, 1, 2)),
    "two nodes new": ((0, 1), (2, 3, 2)),
}


@pytest.mark.parametrize("replication", [2, 4])
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("case", ["7B on one", "7B on four", "experts on four"])
def test_loads_are_even_and_near_to_the_bound(case: str, situation: str, replication: int) -> None:
    model = QWEN_7B
    if case.startswith("experts"):
        model = Model(**{**QWEN_30B_A3B.__dict__, "layers": 12, "experts": 32})
    ranks = 1 if case.endswith("one") else 4
    shapes = model.shapes()
    alive, receivers = SITUATIONS[situation]
    everywhere = place(shapes, 4, replication)
    have = Layout(tuple(everywhere.ranks[node] for node in alive), ({},) * len(alive))
    if replication == 2 and len(alive) == 2:
        pytest.skip("what both lost nodes held is lost")
    want = vllm_layout(shapes, model.engine(ranks, has_expert_parallel=bool(model.experts)))
    plan = plan_transfer(shapes, 2, have, want, Ends(sources=alive, replicas=replicas(receivers, ranks)))
    assert plan.makespan_s <= 1.25 * plan.lower_bound_s
    assert plan.balance <= 1.10


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_bound_bounds_and_plans_are_near_to_it(data: st.DataObject) -> None:
    """Many tensors of the same shapes, as models have them; links and places as they come."""
    shapes = {f"{layer}.{kind}": (size,) for layer in range(24) for kind, size in (("a", 4096), ("b", 1024))}
    num_nodes = data.draw(st.integers(1, 4))
    have = place(shapes, num_nodes, data.draw(st.integers(1, num_nodes)))
    nodes = data.draw(st.lists(st.integers(0, num_nodes), min_size=1, max_size=4))
    rates = Rates(
        latency_s=0, network=data.draw(st.sampled_from([5e9, 20e9, 40e9])), nic=data.draw(st.sampled_from([4e10, 8e11]))
    )
    ends = Ends(sources=tuple(range(num_nodes)), replicas=replicas(tuple(nodes), 1))
    plan = plan_transfer(shapes, 2, have, stored(shapes, [shapes]), ends, rates)
    assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)
    assert plan.makespan_s <= 1.25 * plan.lower_bound_s


def test_no_assignment_of_few_slices_is_below_the_bound() -> None:
    """All of them are tried."""
    shapes = {"a": (600,), "b": (500,), "c": (300,)}
    have, want = place(shapes, 2, 2), stored(shapes, [shapes])
    ends, rates = Ends(sources=(0, 1), replicas=((0,),)), Rates(latency_s=0, lanes=1)
    plan = plan_transfer(shapes, 2, have, want, ends, rates)
    seconds = [(2 * size / rates.local, 2 * size / rates.network) for (size,) in shapes.values()]
    taken = sum(near for near, _ in seconds)
    best = min(
        max(taken, *(sum(cost[node] for cost, h in zip(seconds, holders, strict=True) if h == node) for node in (0, 1)))
        for holders in itertools.product((0, 1), repeat=3)
    )
    assert plan.lower_bound_s <= best <= plan.makespan_s <= 1.25 * best


# --- placement and cache ----------------------------------------------------------------------------------------------


def num_bytes(shapes: Shapes, layout: Layout, node: int) -> int:
    return 2 * sum(part.box.size for part in layout.ranks[node])


@pytest.mark.parametrize(("num_nodes", "replication"), [(1, 1), (3, 1), (3, 2), (4, 2), (3, 3)])
def test_each_tensor_is_on_as_many_nodes_as_asked_and_nodes_are_even(num_nodes: int, replication: int) -> None:
    shapes = Model(**{**QWEN_30B_A3B.__dict__, "layers": 4}).shapes()
    layout = place(shapes, num_nodes, replication)
    assert all(len(pattern) == replication for pattern in layout.patterns.values())
    assert layout.patterns.keys() == shapes.keys()
    sizes = [num_bytes(shapes, layout, node) for node in range(num_nodes)]
    assert max(sizes) <= 1.02 * min(sizes)


def test_a_tensor_is_not_on_more_nodes_than_there_are() -> None:
    with pytest.raises(ValueError, match="cannot be on 3 of 2 nodes"):
        place({"a": (1,)}, 2, 3)


@pytest.mark.parametrize(("budget", "expected"), [(100, 4), (40, 4), (39, 3), (20, 2), (10, 1), (9, 0)])
def test_copies_that_fit(budget: int, expected: int) -> None:
    assert replicas_that_fit(20, budget, num_nodes=4, slots=2) == expected


def test_a_situation_that_differs_in_numbers_only_is_known() -> None:
    shapes = SMALL.shapes()
    have, want = place(shapes, 4, 4), vllm_layout(shapes, SMALL.engine(2))
    cache, model = PlanCache(shapes, 2), numbered(shapes)
    held = [laid_out(have, rank, model) for rank in range(4)]
    expected = [laid_out(want, rank, model) for rank in range(2)]
    for nodes in ((3,), (1,), (0, 1), (2, 0), (1, 1), (3, 3), (0, 0, 2), (3, 1, 1), (4,), (9,)):
        ends = Ends(sources=(0, 1, 2, 3), replicas=replicas(nodes, 2))
        plan, fresh = cache.plan(have, want, ends), plan_transfer(shapes, 2, have, want, ends)
        assert (plan.makespan_s, plan.lower_bound_s) == (fresh.makespan_s, fresh.lower_bound_s)
        assert sorted(plan.given_s.values()) == pytest.approx(sorted(fresh.given_s.values()), rel=1e-3)
        for replica, node in enumerate(nodes):
            near = sum(share.source == node for share in plan.shares if share.replica == replica)
            assert near or node > 3, "who is near gives, under the new numbers, too"
        assert all(equal(ranks, expected) for ranks in carried_out(plan, have, held, want, len(nodes)))
    assert cache.hits == 5


def test_other_holders_are_another_situation() -> None:
    shapes = SMALL.shapes()
    want, cache = vllm_layout(shapes, SMALL.engine(1)), PlanCache(shapes, 2)
    halves = place(shapes, 2, 1)
    cache.plan(halves, want, Ends(sources=(0, 1), replicas=((0,),)))
    cache.plan(halves, want, Ends(sources=(0, 1), replicas=((1,),)))  # the nodes hold different things
    cache.plan(place(shapes, 2, 2), want, Ends(sources=(0, 1), replicas=((0,),)))
    cache.plan(halves, vllm_layout(shapes, SMALL.engine(2)), Ends(sources=(0, 1), replicas=((0, 0),)))
    assert cache.hits == 0
    cache.plan(halves, want, Ends(sources=(5, 7), replicas=((7,),)))
    assert cache.hits == 1
