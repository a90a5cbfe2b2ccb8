"""Shares of a version find their way to all nodes: each once, one at a time at each node, and none twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.decisions import CopyVersion, SealVersion
from pipeline.core.memories import Memories
from pipeline.core.versions import Versions


def warm(num_nodes: int) -> tuple[Memories, Versions]:
    memories, versions = Memories(), Versions()
    for number in range(num_nodes):
        memories.join(f"n{number}", 2, 0)
    assert list(memories.warm_up(0)) == [f"n{number}" for number in range(num_nodes)]
    return memories, versions


def copies(orders: list[CopyVersion | SealVersion]) -> list[tuple[str, str, int]]:
    return [(order.source, order.node, order.share) for order in orders if isinstance(order, CopyVersion)]


def test_two_nodes_exchange_their_shares_one_after_the_other() -> None:
    """Not at the same time: both would wait for the slot that the other one holds."""
    memories, versions = warm(2)
    versions.write(1)
    memories.write(["n0", "n1"], 1)
    first = memories.orders(versions)
    assert copies(first) == [("n1", "n0", 1)] and memories.orders(versions) == []
    assert memories.copied("n0", first[0].number)
    second = memories.orders(versions)
    assert copies(second) == [("n0", "n1", 0)] or copies(second) == [("n0", "n1", 0)]
    assert memories.copied("n1", second[0].number)
    assert [order.node for order in memories.orders(versions) if isinstance(order, SealVersion)] == ["n0", "n1"]
    assert memories.holders(1) == ["n0", "n1"]


def test_a_share_whose_only_holder_is_lost_takes_the_version_with_it() -> None:
    memories, versions = warm(3)
    versions.write(1)
    memories.write(["n0", "n1"], 1)
    assert not memories.is_lost(1)
    (order, *_) = memories.orders(versions)
    memories.copied(order.node, order.number)
    memories.lose("n1" if order.node == "n0" else "n0")
    assert not memories.is_lost(1), "another one has both"
    memories.lose(order.node)
    assert memories.is_lost(1)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.data())
def test_all_nodes_get_the_whole_whatever_fails_and_in_whatever_order_copies_end(
    num_nodes: int, data: st.DataObject
) -> None:
    memories, versions = warm(num_nodes)
    writers = data.draw(st.lists(st.sampled_from(sorted(memories)), min_size=2, unique=True))
    versions.write(1)
    memories.write(writers, 1)
    had = {node: {writers.index(node)} if node in writers else set() for node in memories}
    under_way: list[CopyVersion] = []
    num_copies = 0
    while len(memories.holders(1)) < num_nodes:
        for order in memories.orders(versions):
            if not isinstance(order, CopyVersion):
                continue
            assert order.share >= 0 or len(had[order.source]) == len(writers)
            assert order.share < 0 or (order.share in had[order.source] and order.share not in had[order.node])
            under_way.append(order)
        sources = [order.source for order in under_way]
        assert len(set(sources)) == len(sources), "one at a time from each"
        shared = [order for order in under_way if order.share >= 0]
        assert not {order.node for order in under_way} & {order.source for order in shared}
        order = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
        num_copies += 1
        if num_copies < 30 and data.draw(st.booleans()):
            assert memories.failed(order.node, order.number)
        else:
            assert memories.copied(order.node, order.number)
            had[order.node] |= set(range(len(writers))) if order.share < 0 else {order.share}
    assert all(shares == set(range(len(writers))) for shares in had.values())


@pytest.mark.parametrize("num_nodes", [2, 5])
def test_one_writer_gives_the_whole(num_nodes: int) -> None:
    memories, versions = warm(num_nodes)
    versions.write(1)
    memories.write(["n1"], 1)
    assert memories.holders(1) == ["n1"]
    assert [share for _, _, share in copies(memories.orders(versions))] == [-1]
