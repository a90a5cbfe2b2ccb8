"""The quickstart on two nodes with two training ranks: `python benchmarks/nodes.py [--seeds 101 102 103] [--fsdp2]`.

Two local nodes with two slots each; rollout and reward on one, both ranks on the other, staleness 1. For each seed one
run; then one that is stopped half-way and resumed with one rank. Keys:

  gain/min, gain/<run>    held-out accuracy after minus before (points)
  logprob_diff/max        largest |trainer logprob - engine logprob| of a token of the trainer's own version: each
                          version went through another node's memory
  staleness/max           largest lag of a trained token
  unaccounted             steps in which trained + dropped is not what was submitted
  steps_wrong             rows of metrics.jsonl that are missing, twice or out of order
  wall_s/max              submit to exit
  step_s/p50, publish_s/p50   time of a step, and from the end of its training until its version is served everywhere
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Must, main, parser, percentile

from benchmarks.quickstart import ENTRY, gain, measure_run, newest_step

MUST = {
    "gain/min": Must(at_least=25),
    "logprob_diff/max": Must(at_most=1e-4),
    "staleness/max": Must(at_most=1),
    "unaccounted": Must(at_most=0),
    "steps_wrong": Must(at_most=0),
}
NODES = ["cluster.nodes=2", "cluster.slots_per_node=2", "trainer.ranks=2", "algorithm.staleness=1"]
SEQUENCES_PER_STEP = 128
NUM_STEPS = 60


def measure(args: argparse.Namespace) -> dict[str, Any]:
    runs = []
    for strategy in ("ddp", "fsdp2") if args.fsdp2 else ("ddp",):
        for seed in args.seeds:
            overrides = [f"run.seed={seed}", f"trainer.strategy={strategy}", *NODES]
            runs.append({"name": f"{strategy}/{seed}", **measure_run(overrides, sample=False)})
            print(f"{strategy}, seed {seed}: {runs[-1]['wall_s']:.1f} s", file=sys.stderr)
    runs.append(measure_resumed(args.seeds[0]))
    return {"runs": runs}


def measure_resumed(seed: int) -> dict[str, Any]:
    """Stopped with Ctrl-C half-way, and resumed with one rank on the same nodes."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        overrides = [f"run.seed={seed}", "trainer.strategy=ddp", *NODES]
        start = time.monotonic()
        command = [*ENTRY, "submit", "configs/quickstart.yaml", *overrides, "--wait", "--run-dir", str(run)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while newest_step(run) < NUM_STEPS // 2 and process.poll() is None:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130, process.returncode
        subprocess.run([*ENTRY, "resume", str(run), "trainer.ranks=1"], check=True, stdout=subprocess.DEVNULL)
        return {
            "name": "resumed with one rank",
            "wall_s": time.monotonic() - start,
            "summary": json.loads((run / "summary.json").read_text()),
            "rows": [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()],
        }


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    runs = raw["runs"]
    steps = [row for run in runs for row in run["rows"] if row["step"] > 0]
    return {
        "gain/min": min(gain(run) for run in runs),
        **{f"gain/{run['name']}": gain(run) for run in runs},
        "logprob_diff/max": max(row.get("mismatch/max_abs_logprob_diff") or 0.0 for row in steps),
        "staleness/max": max(row["staleness/max"] for row in steps),
        "unaccounted": float(
            sum(row["queue/num_trained"] + row["queue/num_dropped"] != SEQUENCES_PER_STEP for row in steps)
        ),
        "steps_wrong": float(sum([row["step"] for row in run["rows"]] != list(range(NUM_STEPS + 1)) for run in runs)),
        "wall_s/max": max(run["wall_s"] for run in runs),
        "step_s/p50": percentile([row["timing_s/step"] for row in steps], 0.5),
        "publish_s/p50": percentile([row["timing_s/publish"] for row in steps], 0.5),
    }


if __name__ == "__main__":
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    arguments.add_argument("--fsdp2", action="store_true")
    sys.exit(main("nodes", arguments.parse_args(), measure, figures, MUST))
