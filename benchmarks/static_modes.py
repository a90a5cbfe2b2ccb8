"""The static modes at their best: `python benchmarks/static_modes.py [--groups 1 2] [--gpus h800] [--seeds 0 1]`.

Every static schedule (mode, split, training size) of each model group on each GPU is simulated with each seed: 12
steps, 8 counted, 32 GPUs, 1,024 sequences per step, responses of up to 16,384 tokens. Resumable: results go line by
line to benchmarks/out/static_modes.jsonl, and what is there is not run again (--fresh removes it first). A few minutes
for all on one core. --product simulates what the product does instead of what the reference did: responses to one
prompt that resemble each other and share its prefix, caches computed again after an update. --png FOLDER draws each
GPU's modes by model group. Keys:

  best/<gpu>/<group>      sequences per second of the best schedule, mean over the seeds
  <mode>/<gpu>/<group>    the same of the best of one mode (barrier apart from stream)
  differ/<gpu>/<group>    the best here over the best of the reference
  worst_s                 seconds of the slowest simulation

The reference is an earlier, independent simulator of the same cost model, with its own random numbers.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import OUT, Must, main, parser

from pipeline.simulator.modes import Schedule, static_schedules
from pipeline.simulator.plots import as_png, throughput_figure
from pipeline.simulator.result import simulate
from pipeline.simulator.setup import paper_setup

PROFILES, GROUPS = ("h800", "h20", "h200"), (1, 2, 3, 4)
REFERENCE: dict[str, float] = {
    "h800/1": 10.108,
    "h800/2": 4.847,
    "h800/3": 2.036,
    "h800/4": 1.355,
    "h20/1": 4.408,
    "h20/2": 1.943,
    "h20/3": 0.673,
    "h20/4": 0.320,
    "h200/1": 12.221,
    "h200/2": 5.889,
    "h200/3": 2.672,
    "h200/4": 1.372,
}
"""Best static schedule of the reference, sequences per second, mean of two seeds."""
MUST = {f"differ/{cell}": Must(at_least=0.9, at_most=1.1) for cell in REFERENCE}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    path = OUT / f"static_modes{'_product' if args.product else ''}.jsonl"
    OUT.mkdir(exist_ok=True)
    if args.fresh:
        path.unlink(missing_ok=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {row["key"] for row in rows}
    with path.open("a") as file:
        for key, gpu, group, schedule, seed in wanted(args):
            if key in done:
                continue
            row = {"key": key, "gpu": gpu, "group": group, "seed": seed, **run(args, gpu, group, schedule, seed)}
            file.write(json.dumps(row) + "\n")
            file.flush()
            rows.append(row)
            print(f"{key}: {row['sequences_per_s']:.3f}", file=sys.stderr)
    asked = {key for key, *_ in wanted(args)}
    rows = [row for row in rows if row["key"] in asked]
    if args.png:
        draw(rows, args.png)
    return {"rows": rows}


def wanted(args: argparse.Namespace) -> Iterator[tuple[str, str, int, Schedule, int]]:
    for seed in args.seeds:
        for gpu in args.gpus:
            for group in args.groups:
                setup = paper_setup(group, gpu, num_gpus=args.num_gpus, num_sequences=args.sequences)
                for schedule in static_schedules(setup):
                    key = f"{gpu}/{group} {args.num_gpus}x{args.sequences} seed {seed} {schedule}"
                    yield key, gpu, group, schedule, seed


def run(args: argparse.Namespace, gpu: str, group: int, schedule: Schedule, seed: int) -> dict[str, Any]:
    setup = paper_setup(group, gpu, num_gpus=args.num_gpus, num_sequences=args.sequences, plain=not args.product)
    started = time.process_time()
    result = simulate(setup, schedule, seed=seed)
    return {
        "schedule": str(schedule),
        "sequences_per_s": result.sequences_per_s,
        "of_tail_bound": result.sequences_per_s / result.tail_bound,
        "shifts_per_step": result.shifts_per_step,
        "preempted": result.num_preempted,
        "seconds": time.process_time() - started,
    }


def means(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By cell and schedule, over the seeds."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[f"{row['gpu']}/{row['group']}"][row["schedule"]].append(row["sequences_per_s"])
    return {cell: {name: sum(v) / len(v) for name, v in by.items()} for cell, by in found.items()}


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for cell, by_schedule in means(raw["rows"]).items():
        best = max(by_schedule, key=lambda name: by_schedule[name])
        print(f"{cell}: {best} {by_schedule[best]:.3f}", file=sys.stderr)
        found[f"best/{cell}"] = by_schedule[best]
        for mode in dict.fromkeys(name.rpartition(" ")[0] for name in by_schedule):
            found[f"{mode}/{cell}"] = max(v for name, v in by_schedule.items() if name.rpartition(" ")[0] == mode)
        if cell in REFERENCE:
            found[f"differ/{cell}"] = by_schedule[best] / REFERENCE[cell]
    found["worst_s"] = max((row["seconds"] for row in raw["rows"]), default=None)
    return found


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    by_gpu: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for cell, by_schedule in means(rows).items():
        gpu, group = cell.split("/")
        best: dict[str, float] = {}
        for name, rate in by_schedule.items():
            mode = name.rpartition(" ")[0]
            best[mode] = max(rate, best.get(mode, 0.0))
        by_gpu[gpu][f"group {group}"] = best
    for gpu, groups in by_gpu.items():
        figure = throughput_figure(groups, shares_scale=False)
        (folder / f"static_modes-{gpu}.png").write_bytes(as_png(figure))


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--gpus", nargs="+", default=PROFILES, choices=PROFILES)
    made.add_argument("--groups", nargs="+", type=int, default=GROUPS, choices=GROUPS)
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    made.add_argument("--num-gpus", type=int, default=32)
    made.add_argument("--sequences", type=int, default=1024)
    made.add_argument("--product", action="store_true", help="what the product does, not what the reference did")
    made.add_argument("--png", type=Path, help="a folder for plots")
    made.add_argument("--fresh", action="store_true", help="run everything again")
    parsed = made.parse_args()
    sys.exit(main("static_modes", parsed, measure, figures, MUST))
