"""The live view of a run on a terminal."""

import time
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.cli.follow import MetricRow, describe_row
from pipeline.cli.runs import Status, how_it_stands
from pipeline.cli.show import judge_news
from pipeline.run_folder import RunFolder
from pipeline.wording import seconds, visible

_LAST_ROWS = 5


class LiveView:
    """State, progress and the last steps, redrawn in place; steps with an evaluation stay above it."""

    def __init__(self, run: RunFolder, out: TextIO) -> None:
        self._run, self._began = run, time.monotonic()
        self._rows: list[MetricRow] = []
        self._news: list[str] = []
        self._console = Console(file=out)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True, redirect_stdout=False)

    def show(self, status: Status | None, rows: list[MetricRow]) -> None:
        if not self._live.is_started:
            self._console.print(Text(f"run {visible(self._run.name)} in {visible(str(self._run.path))}"))
            self._live.start()
        if (news := judge_news(status)) != self._news:
            self._news = news
            self._console.print(Text("\n".join(news)))
        for row in rows:
            if row.get("val/acc") is not None:
                self._console.print(Text(f"step {row['step']}: {describe_row(row)}"))
        self._rows = [*self._rows, *rows][-_LAST_ROWS:]
        self._live.update(self._picture(status))

    def close(self) -> None:
        self._live.stop()

    def _picture(self, status: Status | None) -> Group:
        state = how_it_stands(status) if status else "starting"
        step, total = (status["step"], status["total_steps"]) if status else (0, 1)
        counts = ", ".join(f"{n} {name}" for name, n in (status or {}).get("sequences", {}).items())
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(state, style="bold"),
            ProgressBar(total=total, completed=max(0, step - 1), width=30),
            Text(f"step {step} of {total}" if status else ""),
            Text(seconds(time.monotonic() - self._began)),
        )
        stage = (status or {}).get("stage") or ""
        lines = [Text(visible(f"  {stage}{': ' if stage and counts else ''}{counts}"), style="dim")]
        lines += [Text(f"  {row['step']:>4}  {describe_row(row)}") for row in self._rows]
        return Group(head, *lines)
