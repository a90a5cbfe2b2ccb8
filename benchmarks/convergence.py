"""What the modes of placement do to learning: `python benchmarks/convergence.py [--seeds 101 .. 105] [--steps 60]`.

Runs of configs/quickstart.yaml on one node of four slots, evaluated after every step: `shiftable` (staleness 1) and
`colocated` (synchronous) with all seeds, the other modes with the first three. Runs that were measured before are kept
in benchmarks/out/convergence-parts; `--plot FILE` draws accuracy and reward per step and over time. Keys:

  gain/min, gain/<mode>/<seed>       held-out accuracy after minus before (points); min: of all modes, seed 101
  accuracy/<mode>, reward/<mode>     mean over the last 20 steps and the seeds of that mode (points)
  difference/<mode>                  |mean over the first three seeds of shiftable - mode| of that accuracy (points)
  difference_to_colocated/accuracy, ../reward    the same over all seeds, of accuracy and of the judged reward
  shifts_per_step/<mode>             blocks that changed hands; `inference`: of them, between rollout and reward
  step_s/<mode>                      median time of a step, its evaluation included
  logprob_diff/max                   largest |trainer logprob - engine logprob| of a token of the trainer's own version
  staleness/max                      largest lag of a trained token
  unaccounted                        steps in which trained + dropped is not what was submitted
  load                               mean of the machine's 1-minute load average before and after the runs
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from harness import Must, kept, main, parser, percentile

from benchmarks.quickstart import gain, measure_run

MUST = {
    "gain/min": Must(at_least=25),
    **{
        f"difference/{mode}": Must(at_most=5)
        for mode in ("colocated", "disaggregated", "rollout_reward_colocated", "trainer_pool")
    },
    "difference_to_colocated/accuracy": Must(at_most=4),
    "difference_to_colocated/reward": Must(at_most=4),
    "logprob_diff/max": Must(at_most=1e-4),
    "staleness/max": Must(at_most=1),
    "unaccounted": Must(at_most=0),
}
COMMON = [
    "cluster.slots_per_node=4",
    "evaluate.freq=1",
    "tracking.uri=none",
    "placement.planner.min_dwell_s=0.2",
    "placement.planner.tick_s=0.2",
]
"""A step takes a second here, so the planner's seconds are a tenth of what they are by default."""
MODES = {
    "shiftable": ["algorithm.staleness=1"],
    "colocated": ["algorithm.staleness=0"],
    "disaggregated": ["algorithm.staleness=1", "placement.roles.rollout.replicas=2"],
    "rollout_reward_colocated": ["algorithm.staleness=1"],
    "trainer_pool": ["algorithm.staleness=1"],
}
NUM_OF_OTHERS, LAST_STEPS, SEQUENCES_PER_STEP = 3, 20, 128

Run = dict[str, Any]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    asked = [
        (m, s) for s in args.seeds for m in MODES if m in ("shiftable", "colocated") or s in args.seeds[:NUM_OF_OTHERS]
    ]
    return {
        "runs": [kept("convergence", f"{m}-{s}-{args.steps}", lambda m=m, s=s: one(m, s, args.steps)) for m, s in asked]
    }


def one(mode: str, seed: int, steps: int) -> Run:
    before = os.getloadavg()[0]
    overrides = [f"run.seed={seed}", f"trainer.total_training_steps={steps}", f"placement.mode={mode}"]
    run = measure_run([*overrides, *COMMON, *MODES[mode]], sample=False)
    return {"mode": mode, "seed": seed, "load": (before + os.getloadavg()[0]) / 2, **run}


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    runs: list[Run] = raw["runs"]
    of = {mode: sorted((r for r in runs if r["mode"] == mode), key=lambda r: int(r["seed"])) for mode in MODES}
    every = [row for run in runs for row in steps_of(run)]
    first = min(run["seed"] for run in runs)
    found: dict[str, float | None] = {
        "gain/min": min(gain(run) for run in runs if run["seed"] == first),
        "logprob_diff/max": max(row.get("mismatch/max_abs_logprob_diff") or 0.0 for row in every),
        "staleness/max": max(row["staleness/max"] for row in every),
        "unaccounted": float(
            sum(row["queue/num_trained"] + row["queue/num_dropped"] != SEQUENCES_PER_STEP for row in every)
        ),
        "load": statistics.mean(run["load"] for run in runs),
    }
    for name, key in (("accuracy", "val/acc"), ("reward", "critic/score/mean")):
        found[f"difference_to_colocated/{name}"] = difference(of["shiftable"], of["colocated"], key)
    for mode, mine in of.items():
        rows = [row for run in mine for row in steps_of(run)]
        found |= {
            f"accuracy/{mode}": statistics.mean(last(run, "val/acc") for run in mine),
            f"reward/{mode}": statistics.mean(last(run, "critic/score/mean") for run in mine),
            f"step_s/{mode}": percentile([row["timing_s/step"] for row in rows], 0.5),
            f"shifts_per_step/{mode}": statistics.mean(row.get("shift/num") or 0.0 for row in rows),
            f"shifts_per_step/{mode}/inference": statistics.mean(
                row.get("shift/num_rollout_reward") or 0.0 for row in rows
            ),
        }
        if mode != "shiftable":
            found[f"difference/{mode}"] = difference(of["shiftable"][:NUM_OF_OTHERS], mine[:NUM_OF_OTHERS], "val/acc")
    return found | {f"gain/{run['mode']}/{run['seed']}": gain(run) for run in runs}


def difference(ours: list[Run], theirs: list[Run], key: str) -> float:
    """Points, of runs with the same seeds."""
    assert [run["seed"] for run in ours] == [run["seed"] for run in theirs]
    return abs(statistics.mean(last(a, key) - last(b, key) for a, b in zip(ours, theirs, strict=True)))


def last(run: Run, key: str) -> float:
    """Percent, mean over the last steps."""
    return 100 * statistics.mean(row[key] for row in steps_of(run)[-LAST_STEPS:])


def steps_of(run: Run) -> list[dict[str, Any]]:
    return [row for row in run["rows"] if row["step"] > 0]


def plot(raw: dict[str, Any], path: Path) -> None:
    """Accuracy and reward of the two modes that all seeds ran: per step, and over the time of training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 5.6), sharey="row", layout="constrained")
    styles = {"shiftable": ("#0072b2", "-"), "colocated": ("#d55e00", "--")}
    for mode, (colour, line) in styles.items():
        runs = [run for run in raw["runs"] if run["mode"] == mode]
        for row, (key, label) in enumerate((("val/acc", "held-out accuracy"), ("critic/score/mean", "judged reward"))):
            values = [[100 * r[key] for r in steps_of(run)] for run in runs]
            times = [
                [sum(r["timing_s/step"] for r in steps_of(run)[: i + 1]) for i in range(len(steps_of(run)))]
                for run in runs
            ]
            for mine, at in zip(values, times, strict=True):
                axes[row][0].plot(range(1, len(mine) + 1), mine, color=colour, alpha=0.25, lw=0.8, ls=line)
                axes[row][1].plot(at, mine, color=colour, alpha=0.25, lw=0.8, ls=line)
            means = [statistics.mean(points) for points in zip(*values, strict=True)]
            when = [statistics.mean(points) for points in zip(*times, strict=True)]
            axes[row][0].plot(range(1, len(means) + 1), means, color=colour, lw=2, ls=line, label=mode)
            axes[row][1].plot(when, means, color=colour, lw=2, ls=line, label=mode)
            axes[row][0].set_ylabel(f"{label} (%)")
    axes[1][0].set_xlabel("step")
    axes[1][1].set_xlabel("seconds of steps, evaluations included")
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103, 104, 105])
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--plot", type=Path)
    parsed = arguments.parse_args()
    code = main("convergence", parsed, measure, figures, MUST)
    if parsed.plot:
        import json

        source = parsed.from_raw or Path(__file__).parent / "out" / "convergence.json"
        plot(json.loads(source.read_text()), parsed.plot)
    sys.exit(code)
