"""Shares of a version find their way to all nodes: each once, one at a time at each node, and none twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.decisions import CopyVersion, SealVersion
from pipeline.core.memories import Memories
from pipeline.core.versions import Versions
from pipeline.gps.placement import num_piles, piles_of


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


def dealt(num_nodes: int, replication: int) -> tuple[Memories, Versions]:
    memories, versions = Memories(num_piles(num_nodes, replication)), Versions()
    for number in range(num_nodes):
        piles = piles_of(number, num_piles(num_nodes, replication), replication)
        memories.join(f"n{number}", 2, 0, piles)
    assert len(list(memories.warm_up(0))) == num_nodes
    return memories, versions


def settle(memories: Memories, versions: Versions) -> list[CopyVersion | SealVersion]:
    """All that is ordered happens, in its order."""
    done: list[CopyVersion | SealVersion] = []
    while orders := memories.orders(versions):
        for order in orders:
            done.append(order)
            if isinstance(order, CopyVersion):
                assert memories.copied(order.node, order.number)
            else:
                assert memories.sealed(order.node, order.version)
    return done


def test_a_node_gets_its_piles_alone_and_a_writer_keeps_what_it_wrote() -> None:
    memories, versions = dealt(4, 2)
    versions.write(1)
    memories.write(["n1"], 1)
    done = settle(memories, versions)
    sent = sorted((o.node, pile) for o in done if isinstance(o, CopyVersion) for pile in o.piles)
    assert sent == [("n0", 0), ("n0", 3), ("n2", 1), ("n2", 2), ("n3", 2), ("n3", 3)]
    shown = {order.node: order.piles for order in done if isinstance(order, SealVersion)}
    assert shown == {"n0": (0, 3), "n1": (), "n2": (1, 2), "n3": (2, 3)}
    assert memories.is_shown(1)


def test_two_copies_of_each_pile_outlive_one_node_and_a_new_one_gets_its_own_from_several() -> None:
    memories, versions = dealt(4, 2)
    for version in (1, 2, 3):
        versions.write(version)
        memories.write(["n0"], version)
        settle(memories, versions)
        versions.seal(version)
    memories.lose("n0")  # the trainer's
    assert not memories.is_lost(3)
    memories.join("n4", 2, 0, piles_of(0, 4, 2))
    copies = [order for order in settle(memories, versions) if isinstance(order, CopyVersion)]
    assert {order.source: order.piles for order in copies} == {"n1": (0,), "n3": (3,)}
    assert [order.is_first for order in copies] == [True, False], "what came first stays"
    assert memories.is_whole("n4", 3) and list(memories.warm_up(3)) == ["n4"]
    memories.lose("n1")
    assert not memories.is_lost(3)
    memories.lose("n2")
    assert memories.is_lost(3), "both who had pile 1"


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.data())
def test_each_pile_of_each_share_is_where_it_is_to_be_whatever_fails(num_nodes: int, data: st.DataObject) -> None:
    memories, versions = dealt(num_nodes, data.draw(st.integers(1, num_nodes)))
    writers = data.draw(st.lists(st.sampled_from(sorted(memories)), min_size=1, unique=True))
    versions.write(1)
    memories.write(writers, 1)
    under_way: list[CopyVersion] = []
    for number in range(300):
        under_way += [order for order in memories.orders(versions) if isinstance(order, CopyVersion)]
        sources = [order.source for order in under_way]
        assert len(set(sources)) == len(sources), "one at a time from each"
        assert not {order.node for order in under_way} & set(sources), "nobody gives and takes"
        if not under_way:
            break
        order = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
        before = len(memories[order.node].has(1))
        if number < 20 and data.draw(st.booleans()):
            assert memories.failed(order.node, order.number)
        else:
            assert memories.copied(order.node, order.number)
            assert len(memories[order.node].has(1)) > before, "nothing comes twice"
    assert sorted(memories.holders(1)) == sorted(memories)
    for node, memory in memories.items():
        assert set(memory.piles) <= set(memories.piles(node, 1))


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
