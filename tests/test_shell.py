import asyncio
from pathlib import Path
from typing import Any

from pipeline.config import load_files
from pipeline.core import decisions as de
from pipeline.core.core import Core
from pipeline.journal import Journal
from pipeline.shell import Shell
from tests.fakes.world import make_plan


class RecordedBefore:
    """A queue that has the row already: the answer to the first call was lost with its server."""

    def record_step(self, step: int, row: dict[str, Any]) -> bool:
        return False

    def step_rows(self, above: int) -> list[tuple[int, dict[str, Any]]]:
        return [(above + 1, {"a": 1.0}), (above + 2, {"a": 2.0})]


def test_the_durable_row_is_exported_though_the_answer_to_its_recording_was_lost(tmp_path: Path) -> None:
    exported: list[tuple[int, dict[str, float | None]]] = []

    async def record() -> None:
        journal = Journal(tmp_path / "journal")
        shell = Shell(
            core=Core(make_plan()),
            config=load_files(["configs/emulated.yaml"]),
            attempt=1,
            journal=journal,
            send=lambda peer, body: asyncio.sleep(0),
            make_row=lambda step, parts: {"a": 9.0},
            export=lambda step, row: exported.append((step, row)),
            newest_checkpoint=str,
            start_node=exported.clear,  # type: ignore[arg-type]
        )
        shell.queue = RecordedBefore()  # type: ignore[assignment]
        await shell._perform(de.RecordStep(step=3))
        shell.close()
        journal.close()

    asyncio.run(record())
    assert exported == [(3, {"a": 1.0})]
