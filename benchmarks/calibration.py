"""A prediction from a real run: `python benchmarks/calibration.py [--runs RUN RUN_WITH_TWICE_N]`. About five minutes.

The quickstart, with vLLM and barriers, with its `rollout.n` of 8 and with twice that; the simulator is calibrated from
the first run and predicts the second. Both runs share the machine with whatever else runs there. Keys:

  step_s/measured /predicted   median time of a step with twice n
  predicted_of_measured        their ratio
  fitted_of_measured           the same of the run that was calibrated from
  twice_of_once                measured: a step with twice n over one with n
  load                         the machine's load average (1 min) before each run
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from harness import Must, main, parser

from pipeline.config import load_resolved
from pipeline.run_folder import RunFolder
from pipeline.simulator.calibrate import SCHEDULE, calibrated
from pipeline.simulator.of_run import plain_setup
from pipeline.simulator.result import simulate
from pipeline.simulator.setup import Setup

ROOT = Path(__file__).parents[1]
N = 8  # of the quickstart
MUST = {"predicted_of_measured": Must(at_least=0.8, at_most=1.2)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        loads = []
        runs = args.runs or [Path(folder) / "once", Path(folder) / "twice"]
        for run, n in zip(runs, (N, 2 * N), strict=True):
            loads.append(os.getloadavg()[0])
            if not args.runs:
                quickstart(run, n)
        once = calibrated(plain_setup(runs[0], load_resolved(RunFolder(runs[0]).config)), runs[0])
        twice = replace(once, workload=replace(once.workload, num_each=2 * N))
        return {
            "loads": loads,
            "measured": [step_times(run) for run in runs],
            "predicted": [[s for seed in range(5) for s in predicted(setup, seed)] for setup in (once, twice)],
        }


def quickstart(run: Path, n: int) -> None:
    settings = ["placement.admission=barrier", "evaluate.freq=0", "checkpoint.save_freq=60", f"rollout.n={n}"]
    command = [sys.executable, "-m", "pipeline.cli.main", "submit", "configs/quickstart.yaml", *settings]
    subprocess.run([*command, "--wait", "--run-dir", str(run)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def rows(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["step"] > 0]


def step_times(run: Path) -> list[float]:
    return [row["timing_s/step"] for row in rows(run)]


def predicted(setup: Setup, seed: int) -> list[float]:
    return [(s.trained_s or 0.0) - s.admitted_s for s in simulate(setup, SCHEDULE, seed=seed).steps]


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    once, twice = (median(times) for times in raw["measured"])
    fitted, guess = (median(times) for times in raw["predicted"])
    return {
        "step_s/measured": twice,
        "step_s/predicted": guess,
        "predicted_of_measured": guess / twice,
        "fitted_of_measured": fitted / once,
        "twice_of_once": twice / once,
        **{f"load/{name}": load for name, load in zip(("once", "twice"), raw["loads"], strict=True)},
    }


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--runs", nargs=2, type=Path, help="folders of two such runs that are there already")
    sys.exit(main("calibration", made.parse_args(), measure, figures, MUST))
