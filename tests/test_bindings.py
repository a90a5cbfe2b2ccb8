"""What the controller makes of an agent's reports, whatever is on the way between them."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import wire
from pipeline.bindings import NodeBindings
from pipeline.core.events import Stray
from slurm.allocator import Allocator, SlotsTaken

NUM_SLOTS = 4


def order(worker: str, slots: list[int], life: int) -> wire.StartWorker:
    return wire.StartWorker(
        worker=worker, role="rollout", index=0, life=life, slots=slots, version=0, main="m:main", options={}
    )


def awake(*bindings: tuple[str, list[int], bool]) -> wire.Bindings:
    return wire.Bindings(bindings=[wire.Binding(worker, 0, slots, 7, is_awake) for worker, slots, is_awake in bindings])


def report(*bindings: tuple[str, int, list[int]]) -> wire.Bindings:
    return wire.Bindings(bindings=[wire.Binding(worker=w, life=n, slots=s, pid=7) for w, n, s in bindings])


def exited(worker: str, life: int) -> wire.WorkerExited:
    return wire.WorkerExited(worker=worker, life=life, reason="killed")


class Agent:
    """An obedient one, and the channel to and from it."""

    def __init__(self) -> None:
        self.allocator = Allocator(NUM_SLOTS)
        self.orders: deque[wire.StartWorker] = deque()
        self.said: deque[wire.WorkerExited | wire.Bindings] = deque()

    def report(self) -> None:
        self.said.append(report(*((w, b.life, list(b.slots)) for w, b in self.allocator.bindings.items())))

    def obey(self) -> None:
        start = self.orders.popleft()
        try:
            self.allocator.bind(start.worker, start.slots, start.life)
            self.report()
        except SlotsTaken:
            self.report()
            self.said.append(exited(start.worker, start.life))

    def lose(self, worker: str) -> None:
        life = self.allocator.bindings[worker].life
        self.allocator.release(worker)
        self.said.append(exited(worker, life))
        self.report()


@settings(deadline=None)
@given(st.data())
def test_an_obedient_agent_has_no_strays_whatever_is_on_the_way(data: st.DataObject) -> None:
    node, agent = NodeBindings(), Agent()
    for life in range(data.draw(st.integers(0, 30))):
        can = {
            "order": len(node.requested) < NUM_SLOTS,
            "obey": agent.orders,
            "lose": agent.allocator.bindings,
            "hear": agent.said,
        }
        match data.draw(st.sampled_from([name for name, is_possible in can.items() if is_possible])):
            case "order":
                worker = data.draw(st.sampled_from([w for w in "abcd" if w not in node.requested]))
                start = order(worker, data.draw(st.lists(st.integers(0, NUM_SLOTS - 1), max_size=2, unique=True)), life)
                node.request(start)
                agent.orders.append(start)
            case "obey":
                agent.obey()
            case "lose":
                agent.lose(data.draw(st.sampled_from(sorted(agent.allocator.bindings))))
            case "hear":
                hear(node, agent)
    while agent.orders:
        agent.obey()
    while agent.said:
        hear(node, agent)
    bound = {worker: (bound.life, list(bound.slots)) for worker, bound in agent.allocator.bindings.items()}
    assert node.requested == bound == {w: (b.life, b.slots) for w, b in node.observed.items()}


def hear(node: NodeBindings, agent: Agent) -> None:
    said = agent.said.popleft()
    if isinstance(said, wire.Bindings):
        assert not node.observe(said)
    else:
        assert node.end(said)


def test_what_was_not_ordered_so_is_a_stray() -> None:
    node = NodeBindings()
    node.request(order("a", [0, 1], life=3))
    assert not node.observe(report(("a", 3, [0, 1])))
    for wrong in (("a", 3, [0]), ("a", 2, [0, 1]), ("b", 3, [2])):
        assert node.observe(report(wrong)) and node.strays == (Stray(worker=wrong[0], slots=tuple(wrong[2])),)
        assert not node.observe(report(wrong)), "that is known"
    assert node.observe(report()) and node.strays == ()


def test_two_that_are_awake_on_one_slot_are_both_strays() -> None:
    node = NodeBindings()
    for worker, slots in (("a", [0]), ("b", [0, 1]), ("c", [1])):
        node.request(order(worker, slots, life=0))
    assert not node.observe(awake(("a", [0], False), ("b", [0, 1], True), ("c", [1], False)))
    assert [seen["awake"] for seen in node.describe().values()] == [False, True, False]
    assert not node.observe(awake(("a", [0], True), ("b", [0, 1], False), ("c", [1], True)))
    assert node.observe(awake(("a", [0], False), ("b", [0, 1], True), ("c", [1], True)))
    assert node.strays == (Stray(worker="b", slots=(0, 1)), Stray(worker="c", slots=(1,)))
    assert node.observe(awake(("a", [0], False), ("b", [0, 1], True))) and node.strays == ()


def test_the_end_of_a_stray_is_not_that_of_the_worker_of_its_name() -> None:
    node = NodeBindings()
    node.request(order("a", [0], life=3))
    assert not node.end(exited("a", 2)) and not node.end(exited("b", 3))
    assert node.end(exited("a", 3)) and not node.end(exited("a", 3))
