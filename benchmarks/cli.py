"""The command line's patience: `python benchmarks/cli.py [--helps 5] [--runs 3]`. Keys:

help_s/best            `pivot-pipeline --help`, from start to exit
help_s/p50
help_heavy             modules of torch, vllm, transformers, mlflow, pyarrow and submitit that it imports
first_task_s/best      an all-emulated run (configs/emulated.yaml): from the start of `submit` to its first stage task
                       running, as the journal has it
first_task_s/worst
run_s/best             the same run, to the exit of `submit`
run_heavy              processes of the run that ever had a library of torch or vllm in memory
load                   the machine's load average (1 min)
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
    "help_s/best": Must(at_most=0.3),
    "help_heavy": Must(at_most=0),
    "first_task_s/best": Must(at_most=1.5),
    "run_heavy": Must(at_most=0),
}
ROOT = Path(__file__).parents[1]
ENTRY = [sys.executable, "-m", "pipeline.cli.main"]
HEAVY = ("torch", "vllm", "transformers", "mlflow", "pyarrow", "submitit")
COUNT_MODULES = f"""
import sys
from pipeline.cli.main import run
assert run(["--help"]) == 0
print(sum(name.partition(".")[0] in {HEAVY} for name in sys.modules))
"""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    load = os.getloadavg()[0]
    heavy = subprocess.run([sys.executable, "-c", COUNT_MODULES], cwd=ROOT, check=True, capture_output=True, text=True)
    return {
        "load": load,
        "help_s": [time_help() for _ in range(args.helps)],
        "help_heavy": int(heavy.stdout.splitlines()[-1]),
        "runs": [measure_run(look=False) for _ in range(args.runs)],
        "watched": measure_run(look=True),  # one more: looking takes the run's time
    }


def time_help() -> float:
    started = time.monotonic()
    subprocess.run([*ENTRY, "--help"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def measure_run(look: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [*ENTRY, "submit", "configs/emulated.yaml", "--cluster", "local", "--wait", "--run-dir", str(run)]
        started, wall = time.time(), time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        heavy: set[int] = set()
        while process.poll() is None:
            if look:
                heavy |= heavy_processes(process.pid)
            time.sleep(0.05)
        wall = time.monotonic() - wall
        assert process.returncode == 0, f"exit code {process.returncode}: {' '.join(command)}"
        return {"first_task_s": first_task(run) - started, "run_s": wall, "heavy": sorted(heavy)}


def first_task(run: Path) -> float:
    """When the controller heard that the first stage task runs, on the wall clock."""
    for line in (run / "journal" / "attempt_1.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["event"] == "TaskStarted":
            return float(entry["wall"])
    raise AssertionError("no stage task was started")


def heavy_processes(root: int) -> set[int]:
    """Those below `root` that have a file of torch or vllm mapped."""
    found, todo = set(), [root]
    while todo:
        pid = todo.pop()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                todo += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
            maps = Path(f"/proc/{pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "/libtorch" in maps or "/vllm/" in maps:
            found.add(pid)
    return found


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    firsts = [run["first_task_s"] for run in raw["runs"]]
    return {
        "help_s/best": min(raw["help_s"]),
        "help_s/p50": percentile(raw["help_s"], 0.5),
        "help_heavy": raw["help_heavy"],
        "first_task_s/best": min(firsts),
        "first_task_s/worst": max(firsts),
        "run_s/best": min(run["run_s"] for run in raw["runs"]),
        "run_heavy": len(raw["watched"]["heavy"]),
        "load": raw["load"],
    }


if __name__ == "__main__":
    arguments = parser(__doc__ or "")
    arguments.add_argument("--helps", type=int, default=5)
    arguments.add_argument("--runs", type=int, default=3)
    sys.exit(main("cli", arguments.parse_args(), measure, figures, MUST))
