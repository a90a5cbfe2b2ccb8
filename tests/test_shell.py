import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pipeline import wire, wire_gps
from pipeline.config import load_files
from pipeline.copies import Copies
from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.core import Core
from pipeline.core.events import Role
from pipeline.journal import Journal
from pipeline.shell import Node, Shell
from tests.fakes.plan import make_plan


class RecordedBefore:
    """A queue that has the row already: the answer to the first call was lost with its server."""

    endpoint = "grpc://nowhere"

    def record_step(self, step: int, row: dict[str, Any]) -> bool:
        return False

    def step_rows(self, above: int) -> list[tuple[int, dict[str, Any]]]:
        return [(above + 1, {"a": 1.0}), (above + 2, {"a": 2.0})]


Rows = list[tuple[int, dict[str, float | None]]]


class Deaf:
    """A watcher that is told and does nothing."""

    def heard(self, message: object) -> None: ...

    def after(self, event: object, decisions: object, now: float) -> None: ...

    def ask(self, number: int, cause: str) -> None: ...


@asynccontextmanager
async def new_shell(folder: Path, exported: Rows, sent: list[Any]) -> AsyncIterator[Shell]:
    async def send(peer: bytes, body: Any) -> None:
        sent.append(body)

    journal = Journal(folder / "journal")
    shell = Shell(
        core=Core(make_plan()),
        config=load_files(["configs/emulated.yaml"]),
        attempt=1,
        journal=journal,
        send=send,
        make_row=lambda step, parts: {"a": 9.0},
        export=lambda step, row: exported.append((step, row)),
        start_node=sent.append,
        end_node=lambda node, reason: sent.append(node),
        copies=Copies(folder, 1, 5.0),
    )
    shell.queue = RecordedBefore()  # type: ignore[assignment]
    shell.watcher = Deaf()
    try:
        yield shell
    finally:
        shell.close()
        journal.close()


def test_the_durable_row_is_exported_though_the_answer_to_its_recording_was_lost(tmp_path: Path) -> None:
    exported: Rows = []

    async def record() -> None:
        async with new_shell(tmp_path, exported, []) as shell:
            await shell._perform(de.RecordStep(step=3))

    asyncio.run(record())
    assert exported == [(3, {"a": 1.0})]


def test_nothing_is_said_to_a_node_that_is_lost_before_the_core_knows(tmp_path: Path) -> None:
    sent: list[Any] = []

    async def start() -> None:
        async with new_shell(tmp_path, [], sent) as shell:
            start = de.StartWorker(
                worker="rollout-0", role=Role.ROLLOUT, index=0, life=0, node="n0", slots=(0,), version=0
            )
            await shell._perform(start)
            assert not sent
            shell.nodes["n0"] = Node("n0", b"peer", 3)
            await shell._perform(start)

    asyncio.run(start())
    assert [type(message) for message in sent] == [wire.StartWorker]


def test_a_stray_is_killed_on_the_node_where_it_is(tmp_path: Path) -> None:
    sent: list[Any] = []

    async def end() -> None:
        async with new_shell(tmp_path, [], sent) as shell:
            shell.nodes["n1"] = Node("n1", b"peer", 3)
            for node in ("n0", "n1"):
                await shell._perform(de.EndStray(worker="rollout-0", node=node, reason=f"on {node}"))

    asyncio.run(end())
    assert sent == [wire.KillWorker(worker="rollout-0", reason="on n1")]


def copy(number: int, source: str, node: str) -> de.CopyVersion:
    return de.CopyVersion(number=number, version=1, source=source, node=node, is_first=False)


def test_a_copy_is_told_to_both_ends_and_ended_by_the_end_of_both_movers(tmp_path: Path) -> None:
    sent: list[Any] = []

    async def start() -> None:
        async with new_shell(tmp_path, [], sent) as shell:
            shell.nodes = {name: Node(name, name.encode(), 3) for name in ("n0", "n1", "n2")}
            await shell._perform(copy(1, "n0", "n1"))
            await shell._perform(de.EndCopy(node="n2", reason="none is on its way there"))
            await shell._perform(de.EndCopy(node="n1", reason="it took too long"))
            await shell._perform(de.SealVersion(version=1, node="n2"))

    asyncio.run(start())
    assert [(type(m), m.rank) for m in sent[:2]] == [(wire_gps.Move, 0), (wire_gps.Move, 1)]
    assert sent[2:] == [
        *[wire.KillWorker(worker=wire_gps.MOVER, reason="it took too long")] * 2,
        wire.SealVersion(version=1),
    ]


def test_a_copy_from_a_node_that_is_lost_before_the_core_knows_fails_when_it_does(tmp_path: Path) -> None:
    sent: list[Any] = []
    inbox: list[ev.Event] = []

    async def start() -> None:
        async with new_shell(tmp_path, [], sent) as shell:
            shell.nodes = {"n1": Node("n1", b"n1", 3)}
            await shell._perform(copy(1, "n0", "n1"))
            shell.post = inbox.append  # type: ignore[method-assign]
            await shell.take(ev.RunRestored(version=0, steps=(), recorded=()))
            await shell.take(ev.NodeLost(node="n0", reason="killed"))

    asyncio.run(start())
    assert [message.rank for message in sent if isinstance(message, wire_gps.Move)] == [1]
    assert inbox == [ev.CopyFailed(number=1, node="n1", reason="n0 is lost: killed")]
