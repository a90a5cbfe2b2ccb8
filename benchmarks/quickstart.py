"""The quickstart, measured from outside: `python benchmarks/quickstart.py [--seeds 101 102 103] [--permuted]`.

For each seed one run of configs/quickstart.yaml by the command line. Keys (min/max over the seeds):

  wall_s/max             submit to exit
  first_token_s/max      submit to the first closed segment
  gain/min               held-out accuracy after minus before (points)
  reward_gain/min        judged reward, mean of the last 5 steps minus that of the first 5 (points)
  permuted_gain          the same with verdicts shuffled within each step, 1,024 samples at both ends (--permuted)
  pss_mb/max             proportional memory of all processes of the run, largest sample
  rss_growth_mb/max      growth of an engine's resident memory from step 10 to step 60
  logprob_diff/max       largest |trainer logprob - engine logprob| of any trained token
  unaccounted            steps in which trained + dropped is not what was submitted
  step_s/p50             time of a step
  share/<part>           part of the steps' time: engine, judge, train, publish, queue, control
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Must, main, parser, percentile

MUST = {
    "wall_s/max": Must(at_most=120),
    "first_token_s/max": Must(at_most=20),
    "gain/min": Must(at_least=30),
    "pss_mb/max": Must(at_most=3072),
    "rss_growth_mb/max": Must(at_most=50),
    "logprob_diff/max": Must(at_most=1e-4),
    "unaccounted": Must(at_most=0),
    "share/control": Must(at_most=0.10),
}
PERMUTED = {"permuted_gain": Must(at_most=5)}
ENTRY = [sys.executable, "-m", "pipeline.cli.main"]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    runs = [measure_run([f"run.seed={seed}"], sample=True) for seed in args.seeds]
    permuted = []
    if args.permuted:
        overrides = [f"run.seed={args.seeds[0]}", "reward.permute_verdicts=true", "evaluate.samples=4"]
        permuted = [measure_run(overrides, sample=False)]
    return {"runs": runs, "permuted": permuted}


def measure_run(overrides: list[str], sample: bool) -> dict[str, Any]:
    """One run; memory is sampled from /proc twice a second."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [*ENTRY, "submit", "configs/quickstart.yaml", *overrides, "--cluster", "local", "--wait"]
        started, wall = time.time(), time.monotonic()
        process = subprocess.Popen([*command, "--run-dir", str(run)], stdout=subprocess.DEVNULL)
        memory: list[dict[str, Any]] = []
        while process.poll() is None:
            if sample:
                memory.append({"step": newest_step(run), "processes": read_memory(process.pid)})
            time.sleep(0.5)
        wall = time.monotonic() - wall
        assert process.returncode == 0, f"exit code {process.returncode}: {' '.join(command)}"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return {
            "overrides": overrides,
            "wall_s": wall,
            "first_token_s": first_segment(run) - started,
            "summary": json.loads((run / "summary.json").read_text()),
            "rows": rows,
            "memory": memory,
        }


def newest_step(run: Path) -> int:
    try:
        return int(json.loads((run / "status.json").read_text())["step"])
    except (FileNotFoundError, json.JSONDecodeError):
        return 0


def first_segment(run: Path) -> float:
    for line in (run / "journal" / "attempt_1.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["event"] == "SegmentClosed" or (entry["event"] == "TaskEnded" and "val/acc" in entry["result"]):
            return float(entry["wall"])
    raise AssertionError("no segment was closed")


def read_memory(root: int) -> list[dict[str, Any]]:
    """PSS and RSS in MB of each process below `root`, with the log that names its role."""
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                todo += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
            sizes = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
            log = os.path.basename(os.readlink(f"/proc/{pid}/fd/1"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        found.append({"log": log, **{k: int(sizes[k].split()[0]) / 1024 for k in ("Pss", "Rss")}})
    return found


PARTS = {"engine": ["rollout"], "judge": ["reward"], "train": ["train"], "publish": ["publish", "load"]}
"""Which tasks' own time makes a part; what they wait for the queue is the queue's."""


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    runs = raw["runs"]
    steps = [row for run in runs for row in run["rows"] if row["step"] > 0]
    total = sum(row["timing_s/step"] for row in steps)

    def spent(kind: str, stages: list[str]) -> float:
        return sum(row.get(f"{kind}/{stage}") or 0.0 for row in steps for stage in stages)

    seconds = {part: spent("task_s", tasks) - spent("queue_s", tasks) for part, tasks in PARTS.items()}
    seconds["queue"] = spent("queue_s", ["prompts", "rollout", "reward", "train"]) + spent("timing_s", ["queue"])
    total -= spent("timing_s", ["evaluate"])
    seconds["control"] = total - sum(seconds.values())
    found: dict[str, float | None] = {
        "wall_s/max": max(run["wall_s"] for run in runs),
        "first_token_s/max": max(run["first_token_s"] for run in runs),
        "gain/min": min(gain(run) for run in runs),
        "reward_gain/min": min(100 * (r["summary"]["reward_last"] - r["summary"]["reward_first"]) for r in runs),
        "permuted_gain": gain(raw["permuted"][0]) if raw["permuted"] else None,
        "pss_mb/max": max(sum(p["Pss"] for p in sample["processes"]) for run in runs for sample in run["memory"]),
        "rss_growth_mb/max": max(growth(run["memory"], role) for run in runs for role in ("rollout-0", "reward-0")),
        "logprob_diff/max": max(row["mismatch/max_abs_logprob_diff"] or 0.0 for row in steps),
        "unaccounted": float(sum(row["queue/num_trained"] + row["queue/num_dropped"] != 128 for row in steps)),
        "step_s/p50": percentile([row["timing_s/step"] for row in steps], 0.5),
    }
    shares = {f"share/{part}": value / total for part, value in seconds.items()}
    seeds = {f"gain/{run['overrides'][0].split('=')[1]}": gain(run) for run in runs}
    return found | shares | seeds


def gain(run: dict[str, Any]) -> float:
    return 100 * (run["summary"]["eval_last"] - run["summary"]["eval_first"])


def growth(memory: list[dict[str, Any]], role: str) -> float:
    """Between the mean around step 10 and the mean of the last steps."""

    def mean(steps: range) -> float:
        sizes = [p["Rss"] for s in memory if s["step"] in steps for p in s["processes"] if role in p["log"]]
        return sum(sizes) / len(sizes)

    return mean(range(58, 62)) - mean(range(8, 13))


if __name__ == "__main__":
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    arguments.add_argument("--permuted", action="store_true")
    parsed = arguments.parse_args()
    bounds = MUST | (PERMUTED if parsed.permuted else {})
    sys.exit(main("quickstart", parsed, measure, figures, bounds))
