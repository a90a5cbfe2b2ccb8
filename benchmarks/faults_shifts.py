"""Shifts under random deaths: `python benchmarks/faults_shifts.py --schedules 200 [--jobs 2]`.

Each schedule is a run of its own with real processes and emulated engines: a planner that moves blocks at random (or a
random schedule by hand, or a mode that shifts by itself), sequences taken back at random, weight updates, and workers,
agents, zygotes, movers, queue servers and controllers killed. What was measured is kept in
benchmarks/out/faults_shifts-parts/ and not measured again. Keys:

  schedules/runs, schedules/failed       how many there were, and how many did not come to their end
  schedules/lost, .../doubled, .../too_old    what the queue had acknowledged and is missing or changed at the end; what
                                         is there twice; tokens of versions beyond the bound
  schedules/changed                      sequences that the queue held in the middle of the run, whose tokens, logprobs,
                                         versions or scores are not the beginning of what it holds at the end
  schedules/untrue                       logprobs that are not bit for bit those of the version they bear; lengths and
                                         stops against the rules; checkpoints that are not what the batches make
  schedules/unexplained                  deaths that nobody ordered, pids that changed without one
  schedules/left                         processes, shared memory, temporary files 10 s after an end
  schedules/num ...                      how often what happened
  real/cells, real/inexact               `--real`: kills in each phase of strict runs with vLLM and the quickstart's
                                         models, and after how many of them something differed from an undisturbed run
"""

import argparse
import concurrent.futures
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import Must, kept, main, parser

from tests.scenarios.runs import submit, succeed
from tests.scenarios.shift_kills import REAL, REAL_SETTINGS, survive
from tests.scenarios.shifts import shift_schedule

WRONG = ("failed", "lost", "doubled", "too_old", "changed", "untrue", "unexplained", "left")
MUST = {"schedules/runs": Must(at_least=200), **{f"schedules/{what}": Must(at_most=0) for what in WRONG}}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="pivot-shifts-") as name,
        concurrent.futures.ThreadPoolExecutor(args.jobs) as pool,
    ):
        seeds = range(args.first, args.first + args.schedules)
        run = pool.map(lambda s: kept("faults_shifts", f"schedule-{s}", lambda: _schedule(Path(name), s)), seeds)
        return {"schedules": list(run), "real": _real(Path(name)) if args.real else {}}


def _real(folder: Path) -> dict[str, str]:
    """What was wrong, by kill."""
    config = "configs/quickstart.yaml"
    succeed(submit(folder / "undisturbed", *REAL_SETTINGS, config=config))
    found = {}
    for kill in REAL:
        try:
            survive(folder / kill.replace(":", "-"), kill, folder / "undisturbed", *REAL_SETTINGS, config=config)
        except Exception as error:
            found[kill] = str(error) or type(error).__name__
        else:
            found[kill] = ""
        print(f"{kill:28} {found[kill] or 'bit for bit'}", file=sys.stderr, flush=True)
    return found


def _schedule(folder: Path, seed: int) -> dict[str, Any]:
    """A run that does not come to its end is a sample, too; its folder is kept."""
    path = folder / f"schedule-{seed}"
    try:
        outcome = shift_schedule(path, seed)
    except Exception as error:
        print(f"schedule {seed}: {error}", file=sys.stderr)
        return {"seed": seed, "failed": str(error), "kept": _keep(path)}
    if outcome.is_right:
        shutil.rmtree(path)
        return {"seed": seed, **asdict(outcome)}
    print(f"schedule {seed}: {outcome}", file=sys.stderr)
    return {"seed": seed, **asdict(outcome), "kept": _keep(path)}


def _keep(path: Path) -> str:
    """Where it can be looked at."""
    return shutil.move(path, tempfile.mkdtemp(prefix=f"pivot-{path.name}-"))


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    runs = raw["schedules"]
    ended = [run for run in runs if "failed" not in run]
    found: dict[str, float | None] = {"schedules/runs": len(runs), "schedules/failed": len(runs) - len(ended)}
    for what in ("lost", "doubled", "too_old"):
        found[f"schedules/{what}"] = sum(len(run["account"][what]) for run in ended)
    for what in ("changed", "untrue", "unexplained", "left"):
        found[f"schedules/{what}"] = sum(len(run[what]) for run in ended)
    if real := raw.get("real"):
        found |= {"real/cells": len(real), "real/inexact": sum(bool(wrong) for wrong in real.values())}
    counts = sum((Counter(run["counts"]) for run in ended), Counter())
    return found | {f"schedules/num {what}": float(num) for what, num in sorted(counts.items())}


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--schedules", type=int, default=200, help="random schedules")
    options.add_argument("--first", type=int, default=0, help="the seed of the first one")
    options.add_argument("--jobs", type=int, default=2, help="schedules at once")
    options.add_argument("--real", action="store_true", help="also kills in each phase with vLLM")
    args = options.parse_args()
    real = {"real/cells": Must(at_least=len(REAL)), "real/inexact": Must(at_most=0)} if args.real else {}
    sys.exit(main("faults_shifts", args, measure, figures, MUST | real))
