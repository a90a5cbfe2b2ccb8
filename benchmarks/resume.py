"""Runs killed everywhere: `python benchmarks/resume.py [--real] [--tables kill] [--names train publish.half]`.

A strict run is killed at a named point, resumed (or, where only one process was killed, goes on), and compared with
one that nothing disturbed: prompts, tokens, scores and order of every step, weights and optimizer of every checkpoint,
every metric but times, each step once. Keys:

  <table>/cells, <table>/inexact   how many kills there were, and after how many something differed
  kill/points                      named points, each with three moments in `kill`
  resume_s/p50                     from `resume` to the end of the run (emulated engines)

Tables: kill (the whole run, a checkpoint every step), redo (the whole run, a checkpoint every third step: recorded
batches are trained again), survive (one process, which the run outlives), real and real_survive (`--real`: vLLM and
the quickstart's models).
"""

import argparse
import concurrent.futures
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from harness import Must, main, parser, percentile

from tests.scenarios.runs import check_same, killed_run, submit, succeed

MUST = {
    **{f"{table}/inexact": Must(at_most=0) for table in ("kill", "redo", "survive")},
    "kill/points": Must(at_least=12),
    "kill/cells": Must(at_least=36),
}
REAL = {"real/cells": Must(at_least=6), "real/inexact": Must(at_most=0), "real_survive/inexact": Must(at_most=0)}

POINTS: dict[str, tuple[int, int, int]] = {
    "queue.before_write": (2, 9, 16),
    "queue.after_write": (2, 9, 16),
    "queue.after_sync": (2, 9, 16),
    "queue.before_commit": (6, 28, 50),
    "queue.after_commit": (6, 28, 50),
    "queue.before_reply": (6, 28, 50),
    "rollout.mid": (5, 50, 90),
    "reward.mid": (5, 50, 90),
    "shell.batch_committed": (1, 3, 6),
    "train.before": (1, 3, 6),
    "train.between_updates": (1, 3, 6),
    "train.after": (1, 3, 6),
    "shell.trained_committed": (1, 3, 6),
    "publish.begin": (1, 3, 6),
    "publish.half": (1, 3, 6),
    "publish.written": (1, 3, 6),
    "seal.before": (1, 3, 6),
    "seal.after": (1, 3, 6),
    "shell.step_recorded": (1, 3, 6),
    "checkpoint.file": (1, 6, 11),
    "checkpoint.before_manifest": (1, 3, 6),
    "checkpoint.before_rename": (1, 3, 6),
    "checkpoint.after_rename": (1, 3, 6),
    "checkpoint.prune": (1, 2, 4),
}
REDO = (
    *("shell.batch_committed:5", "train.between_updates:5", "train.after:5"),
    *("publish.half:5", "shell.step_recorded:5"),
)
SURVIVED = (
    *("queue.before_write:9", "queue.after_write:9", "queue.after_sync:9"),
    *("queue.before_commit:28", "queue.after_commit:28", "queue.before_reply:28"),
    *("rollout.mid:50", "reward.mid:50", "train.before:5", "train.between_updates:5", "train.after:5"),
    *("publish.begin:5", "publish.half:5", "publish.written:5"),
    *("checkpoint.file:3", "checkpoint.before_manifest:2", "checkpoint.before_rename:2", "checkpoint.after_rename:1"),
)
REAL_KILLS = (
    *("queue.after_sync:14", "rollout.mid:40", "train.between_updates:5", "publish.half:60"),
    *("shell.batch_committed:5", "checkpoint.file:9"),
)
REAL_SURVIVED = ("train.between_updates:5", "rollout.mid:40")

STRICT = ("run.determinism=strict", "trainer.total_training_steps=6", "tracking.uri=none")
QUICKSTART = ("data.train_batch_size=4", "rollout.n=4", "evaluate.freq=3", "evaluate.num_prompts=16")
LOST = {"rollout": ("rollout/num_tokens",), "reward": ("genrm/",)}
"""What a task had counted when it was killed is not in its step's row."""


class Cell(NamedTuple):
    table: str
    kill: str
    config: str
    settings: tuple[str, ...]


def emulated(table: str, kill: str, save_freq: int, keep: int = 100) -> Cell:
    return Cell(table, kill, "configs/emulated.yaml", (f"checkpoint.save_freq={save_freq}", f"checkpoint.keep={keep}"))


def real(table: str, kill: str) -> Cell:
    settings = ("checkpoint.save_freq=2", "checkpoint.keep=100", *QUICKSTART)
    return Cell(table, kill, "configs/quickstart.yaml", settings)


def cells(names: Iterable[str], tables: Iterable[str], with_real: bool) -> list[Cell]:
    found = [
        emulated("kill", f"{point}:{nth}:run", 1, keep=2 if point == "checkpoint.prune" else 100)
        for point, moments in POINTS.items()
        for nth in moments
    ]
    found += [emulated("redo", f"{kill}:run", 3) for kill in REDO]
    found += [emulated("survive", kill, 3) for kill in SURVIVED]
    if with_real:
        found += [real("real", f"{kill}:run") for kill in REAL_KILLS]
        found += [real("real_survive", kill) for kill in REAL_SURVIVED]
    return [c for c in found if (not names or c.kill.startswith(tuple(names))) and (not tables or c.table in tables)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pivot-resume-") as name:
        folder = Path(name)
        todo = cells(args.names, args.tables, args.real)
        undisturbed = {"emulated-1": emulated("", "", 1), "emulated-3": emulated("", "", 3)}
        undisturbed |= {"quickstart": real("", "")} if args.real else {}
        for run, cell in undisturbed.items():
            succeed(submit(folder / run, *STRICT, *cell.settings, config=cell.config))
        with concurrent.futures.ThreadPoolExecutor(2) as two:
            return {"cells": list(two.map(lambda item: run_cell(folder, *item), enumerate(todo)))}


def run_cell(folder: Path, number: int, cell: Cell) -> dict[str, Any]:
    undisturbed = "quickstart"
    if cell.config == "configs/emulated.yaml":
        undisturbed = f"emulated-{1 if cell.table == 'kill' else 3}"
    is_survived = "survive" in cell.table
    lost = LOST.get(cell.kill.partition(".")[0], ()) if is_survived else ()
    run, started = folder / f"cell-{number}", time.monotonic()
    fault = ""
    try:
        attempts = killed_run(run, cell.kill, *STRICT, *cell.settings, config=cell.config)
        assert attempts == (1 if is_survived else 2), f"{attempts} attempts"
        check_same(run, folder / undisturbed, lost)
    except AssertionError as error:
        fault = str(error) or "the runs differ"
    print(f"{cell.table:12} {cell.kill:32} {fault or 'exact'}", file=sys.stderr, flush=True)
    return {
        "table": cell.table,
        "kill": cell.kill,
        "fault": fault,
        "seconds": time.monotonic() - started,
        "resume_s": resume_seconds(run),
    }


def resume_seconds(run: Path) -> float | None:
    """From the second attempt's begin to the run's end."""
    begun, ended = run / "attempt_2", run / "ENDED"
    return ended.stat().st_mtime - begun.stat().st_mtime if begun.exists() and ended.exists() else None


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for table in dict.fromkeys(cell["table"] for cell in raw["cells"]):
        mine = [cell for cell in raw["cells"] if cell["table"] == table]
        found[f"{table}/cells"] = float(len(mine))
        found[f"{table}/inexact"] = float(sum(bool(cell["fault"]) for cell in mine))
    found["kill/points"] = float(len({c["kill"].partition(":")[0] for c in raw["cells"] if c["table"] == "kill"}))
    times = [c["resume_s"] for c in raw["cells"] if c["resume_s"] is not None and not c["table"].startswith("real")]
    found["resume_s/p50"] = percentile(times, 0.5) if times else None
    return found


if __name__ == "__main__":
    arguments = parser(__doc__ or "")
    arguments.add_argument("--real", action="store_true")
    arguments.add_argument("--names", nargs="+", default=[], help="only points that begin so")
    arguments.add_argument("--tables", nargs="+", default=[], help="only these tables")
    parsed = arguments.parse_args()
    sys.exit(main("resume", parsed, measure, figures, MUST | (REAL if parsed.real else {})))
