"""What streaming and staleness give and cost: `python benchmarks/staleness.py [--seeds 101 102 103] [--steps 60]`.

For each seed three runs of configs/quickstart.yaml, one after the other: `barrier` (the judge waits for all of a
step's responses), `stream` (it does not), `stale` (besides, the next step's responses are generated while this one
trains: staleness 1). Keys:

  gain/min, gain/<mode>/<seed>  held-out accuracy after minus before (points); min: of `stale`
  accuracy/<mode>         right answers in training, by the exact checker, over the last 20 steps (percent, all seeds)
  accuracy_difference     |mean over the seeds of stale - barrier| of that (points)
  step_s/<mode>           time from the first evaluation to the last step's record, by the number of steps: what is
                          generated beside an evaluation or another step is then paid for in each mode
  ratio/stale, ratio/stream     that time, to that of `barrier`
  timing_s/<mode>/<stage>       part of that time in which the stage ran; stages overlap, control is when none ran
  logprob_diff/max        largest |trainer logprob - engine logprob| of a token of the trainer's own version
  staleness/max, staleness/mean/<mode>   largest and mean lag of a trained token
  tis_ess/min             smallest effective sample size of the importance weights in a step (share; `stale`)
  unaccounted             steps in which trained + dropped is not what was submitted
  load/<mode>             mean of the machine's 1-minute load average before and after the runs
"""

import argparse
import os
import sys
from typing import Any

from harness import Must, main, parser

from benchmarks.quickstart import gain, measure_run

MUST = {
    "gain/min": Must(at_least=25),
    "accuracy_difference": Must(at_most=5),
    "ratio/stale": Must(at_most=1),
    "logprob_diff/max": Must(at_most=1e-4),
    "staleness/max": Must(at_most=1),
    "unaccounted": Must(at_most=0),
}
MODES = {
    "barrier": ["placement.admission=barrier", "algorithm.staleness=0"],
    "stream": ["placement.admission=stream", "algorithm.staleness=0"],
    "stale": ["placement.admission=stream", "algorithm.staleness=1"],
}
SEQUENCES_PER_STEP = 128
LAST_STEPS = 20


def measure(args: argparse.Namespace) -> dict[str, Any]:
    return {"runs": [measure_one(mode, seed, args.steps) for seed in args.seeds for mode in MODES]}


def measure_one(mode: str, seed: int, steps: int) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    run = measure_run([f"run.seed={seed}", f"trainer.total_training_steps={steps}", *MODES[mode]], sample=False)
    print(f"seed {seed}, {mode}: {run['wall_s']:.1f} s", file=sys.stderr)
    return {"mode": mode, "seed": seed, "load": (load_before + os.getloadavg()[0]) / 2, **run}


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    runs = raw["runs"]
    of = {mode: [run for run in runs if run["mode"] == mode] for mode in MODES}
    every = [row for run in runs for row in steps_of(run)]
    stale = [row for run in of["stale"] for row in steps_of(run)]
    differences = [accuracy(c) - accuracy(a) for a, c in zip(of["barrier"], of["stale"], strict=True)]
    found: dict[str, float | None] = {
        "gain/min": min(gain(run) for run in of["stale"]),
        "accuracy_difference": abs(mean(differences)),
        "logprob_diff/max": max(row.get("mismatch/max_abs_logprob_diff") or 0.0 for row in every),
        "staleness/max": max(row["staleness/max"] for row in every),
        "tis_ess/min": min((row["actor/tis_ess"] for row in stale if row.get("actor/tis_ess")), default=None),
        "unaccounted": float(
            sum(row["queue/num_trained"] + row["queue/num_dropped"] != SEQUENCES_PER_STEP for row in every)
        ),
    }
    for mode in MODES:
        found |= of_mode(mode, of[mode])
    found["ratio/stream"], found["ratio/stale"] = (
        (found[f"step_s/{mode}"] or 0.0) / (found["step_s/barrier"] or 1.0) for mode in ("stream", "stale")
    )
    return found | {f"gain/{run['mode']}/{run['seed']}": gain(run) for run in runs}


def of_mode(mode: str, runs: list[dict[str, Any]]) -> dict[str, float | None]:
    rows = [row for run in runs for row in run["rows"]]
    steps = [row for row in rows if row["step"] > 0]
    stages = sorted({name for row in rows for name in row if name.startswith("timing_s/")} - {"timing_s/step"})

    def seconds(name: str) -> float:
        return sum(row.get(name) or 0.0 for row in rows) / len(steps)

    return {
        f"accuracy/{mode}": mean([accuracy(run) for run in runs]),
        f"step_s/{mode}": seconds("timing_s/step"),
        f"staleness/mean/{mode}": mean([row["staleness/mean"] for row in steps]),
        f"load/{mode}": mean([run["load"] for run in runs]),
        **{name.replace("/", f"/{mode}/"): seconds(name) for name in stages},
    }


def steps_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in run["rows"] if row["step"] > 0]


def accuracy(run: dict[str, Any]) -> float:
    """Percent, mean over the last steps."""
    last = steps_of(run)[-LAST_STEPS:]
    counts = [(row.get("genrm/num_correct", 0.0), row.get("genrm/num_wrong", 0.0)) for row in last]
    return 100 * mean([correct / (correct + wrong) for correct, wrong in counts])


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    arguments.add_argument("--steps", type=int, default=60)
    sys.exit(main("staleness", arguments.parse_args(), measure, figures, MUST))
