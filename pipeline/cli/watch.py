"""`watch`: a run on one screen, drawn again while it goes on, from status.json and metrics.jsonl.

Who stops watching stops nothing.
"""

import time

from rich.console import Console
from rich.live import Live

from pipeline.cli.runs import Rows, find_run, how_it_stands, read_status
from pipeline.cli.watch_screen import screen

_PERIOD_S = 0.5
_OVER = ("done", "failed", "cancelled", "died")


def watch(name: str) -> int:
    """On a terminal until the run ends, then its last screen; elsewhere one plain screen."""
    run, console = find_run(name), Console(highlight=False)
    found = Rows(run)
    rows = found.new()
    status = read_status(run)
    if console.is_terminal:
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while how_it_stands(status) not in _OVER:
                    live.update(screen(run.name, status, rows, console.size, time.time()), refresh=True)
                    time.sleep(_PERIOD_S)
                    rows += found.new()
                    status = read_status(run)
        except KeyboardInterrupt:
            pass
        rows += found.new()
    console.print(screen(run.name, status, rows, console.size if console.is_terminal else None, time.time()))
    return 0
