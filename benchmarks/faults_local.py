"""Everything that can die in a local run, killed: `python benchmarks/faults_local.py [--real] [--schedules 200]`.

Emulated engines with `limits.*` scaled down; each death at three moments (in the middle of a rollout, a judgement, a
training). A run that cannot outlive a death is resumed. Keys:

  deaths/kinds, deaths/cells       how many kinds of death there were, and how many deaths
  deaths/lost, deaths/doubled      what the queue had acknowledged and is missing or changed at the end; what is twice
  deaths/too_old                   segments of versions beyond the bound of staleness (1)
  deaths/left                      processes, shared memory, temporary and port files 10 s after an end
  detected_s/<death>, back_s/<death>   longest time until it was noticed, and from then until work went on
  real/...                         the same of six deaths with vLLM and the quickstart's models (`--real`)
  large/...                        the same of five deaths of runs on 128 emulated GPUs (`--large`)
  schedules/...                    `--schedules N`: random schedules of aborts, updates and kills, each a run of its own
"""

import argparse
import concurrent.futures
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import Must, main, parser

from tests.scenarios.chaos import schedule
from tests.scenarios.deaths import TABLE, Outcome, suffer_for_real
from tests.scenarios.large import large_deaths

NOTHING = Must(at_most=0)
MUST = {
    **{f"deaths/{what}": NOTHING for what in ("lost", "doubled", "too_old", "left")},
    "deaths/kinds": Must(at_least=12),
    "deaths/cells": Must(at_least=36),
}
REAL = {"real/cells": Must(at_least=6), **{f"real/{what}": NOTHING for what in ("lost", "doubled", "too_old", "left")}}
LARGE = {
    "large/cells": Must(at_least=5),
    **{f"large/{what}": NOTHING for what in ("lost", "doubled", "too_old", "left")},
}
SCHEDULES = {
    "schedules/runs": Must(at_least=200),
    **{f"schedules/{what}": NOTHING for what in ("failed", "lost", "doubled", "too_old")},
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pivot-faults-") as name:
        folder = Path(name)
        raw: dict[str, Any] = {"deaths": [], "real": [], "large": [], "schedules": []}
        for kind in args.kinds:
            (folder / kind).mkdir()
            raw["deaths"].append(_told(kind, TABLE[kind](folder / kind)))
        if args.real:
            raw["real"].append(_told("real", suffer_for_real(folder)))
        if args.large:
            raw["large"] = [_told(kind, outcome) for kind, outcome in large_deaths(folder / "large")]
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            raw["schedules"] = list(pool.map(lambda seed: _schedule(folder, seed), range(args.schedules)))
        return raw


def _told(kind: str, outcome: Outcome) -> dict[str, Any]:
    for felt in outcome.felt:
        print(f"{felt.death:24} {felt.moment:10} {felt.detected_s:8.3f} {felt.back_s:8.3f}", file=sys.stderr)
    return {"kind": kind, **asdict(outcome)}


def _schedule(folder: Path, seed: int) -> dict[str, Any]:
    """A run that does not come to its end is a sample, too."""
    try:
        counts, account = schedule(folder / f"schedule-{seed}", seed)
    except Exception as error:
        print(f"schedule {seed}: {error}", file=sys.stderr)
        return {"seed": seed, "failed": str(error)}
    if not account.is_right:
        print(f"schedule {seed}: {account}", file=sys.stderr)
    return {"seed": seed, "counts": counts, **asdict(account)}


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for table in ("deaths", "real", "large"):
        runs = raw.get(table, [])
        felt = [one for run in runs for one in run["felt"]]
        if not runs:
            continue
        if table == "deaths":
            found["deaths/kinds"] = len({one["death"] for one in felt})
        found[f"{table}/cells"] = len(felt)
        for what in ("lost", "doubled", "too_old"):
            found[f"{table}/{what}"] = sum(len(run["account"][what]) for run in runs)
        found[f"{table}/left"] = sum(len(run["left"]) for run in runs)
        prefix = "" if table == "deaths" else f"{table}/"
        for what in ("detected_s", "back_s"):
            for death in dict.fromkeys(one["death"] for one in felt):
                found[f"{prefix}{what}/{death}"] = max(one[what] for one in felt if one["death"] == death)
    if runs := raw["schedules"]:
        ended = [run for run in runs if "failed" not in run]
        found["schedules/runs"] = len(runs)
        found["schedules/failed"] = len(runs) - len(ended)
        for what in ("lost", "doubled", "too_old"):
            found[f"schedules/{what}"] = sum(len(run[what]) for run in ended)
        counts = sum((Counter(run["counts"]) for run in ended), Counter())
        found |= {f"schedules/num {what}": float(num) for what, num in sorted(counts.items())}
    return found


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--kinds", nargs="*", default=list(TABLE), choices=list(TABLE), help="which deaths")
    options.add_argument("--real", action="store_true", help="also six deaths with vLLM")
    options.add_argument("--large", action="store_true", help="also five deaths on 128 emulated GPUs")
    options.add_argument("--schedules", type=int, default=0, help="random schedules")
    options.add_argument("--jobs", type=int, default=2, help="schedules at once")
    args = options.parse_args()
    must = (MUST if args.kinds == list(TABLE) else {}) | (REAL if args.real else {})
    must |= (SCHEDULES if args.schedules else {}) | (LARGE if args.large else {})
    sys.exit(main("faults_local", args, measure, figures, must))
