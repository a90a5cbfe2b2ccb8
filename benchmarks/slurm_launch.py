"""How soon a run in a Slurm job works: `python benchmarks/slurm_launch.py [--runs 3] [--steps 6]`.

A Slurm of its own on this machine (four nodes of four fake GPUs, each with a /dev/shm of its own where that may be
mounted). The quickstart with its real engines, `--steps` steps, in three places by turns: `one` is a job of one node
with three slots, `two` a job of two nodes with two slots each (engines on one, the trainer on the other), `local` is
without Slurm. Keys (<place>: local, one, two):

  engine_start_s                    what an engine's start takes by itself, best of --runs: a Python process that
                                    imports vLLM and makes the quickstart's rollout engine, from its start until the
                                    engine can be used, without garbage collection meanwhile (a zygote has none
                                    either); nothing else of a run goes on
  submit_to_first_task_s/<place>    from the start of the `submit` command until the controller heard that the first
                                    stage task runs (its journal's first TaskStarted), best of --runs
  beyond_engine_start_s/<place>     that minus engine_start_s: sbatch, Slurm's scheduling, the job's script, agents, and
                                    all that three workers which start at once on the same cores take longer than one
  worst_s/<place>                   the longest submit_to_first_task_s of --runs
  to_local/<place>                  submit_to_first_task_s in the job to that on local
  parts_s/<place>/<part>            of the best run: `attempt` until the controller has begun its attempt, `nodes` from
                                    there until all nodes have joined (zygotes have imported vLLM, weights are in shared
                                    memory), `workers` until the first is ready, `task` until the first task runs
  task_ms/<place>/p50 /p99          a stage task of a warm worker (one that has run a task before): from its pickle
                                    being in place, which is what `submit()` does first, until the controller heard that
                                    it runs; all runs together
  task_to_local/<place>             task_ms/p50 in the job to that on local
  tasks/<place>                     how many these were
  load                              the machine's load average (1 min) at the begin and the end, the larger
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

from tests.cluster import SlurmCluster
from tests.cluster.machine import can_own_memory
from tests.scenarios.runs import ROOT, environment

JOB = (
    *("--cluster", "slurm", "cluster.slurm.partition=main", "cluster.slurm.mem=4000"),
    "cluster.slurm.cpus_per_slot=1",
)
PLACES: dict[str, tuple[str, ...]] = {
    "local": ("--cluster", "local"),
    "one": (*JOB, "cluster.nodes=1", "cluster.slots_per_node=3"),
    "two": (*JOB, "cluster.nodes=2", "cluster.slots_per_node=2"),
}
JOBS = ("one", "two")
MUST = {
    **{f"beyond_engine_start_s/{place}": Must(at_most=15) for place in JOBS},
    **{f"task_ms/{place}/p50": Must(at_most=20) for place in JOBS},
}
WORKERS = {"reward": "reward", "train": "train", "publish": "train", "checkpoint": "train"}
"""Which role's worker has a stage's tasks; all others are the rollout worker's. There is one of each."""

ENGINE = """
import gc
gc.disable()
import os, pathlib, sys
from tests.engines.tiny import Rig, load_vllm
load_vllm(pathlib.Path(sys.argv[1]))
from pipeline.config_engine import EngineOptions
from stages.engines.vllm import VllmEngine
rig = Rig.create("configs/quickstart/policy")
VllmEngine(rig.folder, "float32", EngineOptions(kv_cache_bytes=64 << 20), 128, rig.stored(), 0)
print("ready", flush=True)
rig.store.unlink()
os._exit(0)
"""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    raw: dict[str, Any] = {"load": [os.getloadavg()[0]], "engine_s": [], "runs": []}
    with (
        tempfile.TemporaryDirectory(prefix="pivot-launch-") as name,
        SlurmCluster(Path(name) / "c", nodes=4, gpus=4, own_memory=can_own_memory()) as cluster,
    ):
        os.environ.update(cluster.env)
        for number in range(args.runs):
            raw["engine_s"].append(start_engine(Path(name) / f"cache-{number}"))
            for place in PLACES:
                run = measure_run(Path(name) / f"{place}-{number}", place, args.steps)
                raw["runs"].append(run)
                print(f"{place:8} {run['first_task_s']:8.2f}", file=sys.stderr, flush=True)
            cluster.reset()
    raw["load"].append(os.getloadavg()[0])
    return raw


def start_engine(cache: Path) -> float:
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-P", "-c", ENGINE, str(cache)], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        taken = time.monotonic() - started
    assert said == "ready\n" and process.returncode == 0, (said, process.returncode)
    return taken


def measure_run(path: Path, place: str, num_steps: int) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "pipeline.cli.main", "submit", "configs/quickstart.yaml", *PLACES[place]]
    steps = f"trainer.total_training_steps={num_steps}"
    started = time.time()
    subprocess.run(
        [*command, "--wait", "--run-dir", str(path), steps],
        cwd=ROOT,
        env=environment(),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    events = [json.loads(line) for line in (path / "journal/attempt_1.jsonl").read_text().splitlines()]
    at = {name: [event["wall"] - started for event in events if event["event"] == name] for name in PARTS}
    first = at["TaskStarted"][0]
    marks = [(path / "attempt_1").stat().st_mtime - started, max(t for t in at["NodeJoined"] if t < first)]
    marks += [at["WorkerReady"][0], first]
    parts = dict(zip(("attempt", "nodes", "workers", "task"), map(float.__sub__, marks, [0.0, *marks]), strict=False))
    return {"place": place, "first_task_s": first, "parts": parts, "tasks": list(warm_tasks(path, events))}


PARTS = ("NodeJoined", "WorkerReady", "TaskStarted")


def warm_tasks(path: Path, events: list[dict[str, Any]]) -> list[float]:
    """Seconds from a task's pickle to its start being heard, without the first task of each worker."""
    warm, found = set(), []
    for event in events:
        if event["event"] == "TaskStarted":
            worker = WORKERS.get(event["task"].partition("-")[0], "rollout")
            if worker in warm:
                pickled = path / "tasks/attempt_1" / f"{event['task']}_submitted.pkl"
                found.append(event["wall"] - pickled.stat().st_mtime)
            warm.add(worker)
    return found


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    engine_s = min(raw["engine_s"])
    found: dict[str, float | None] = {"engine_start_s": engine_s}
    runs = {place: [run for run in raw["runs"] if run["place"] == place] for place in PLACES}
    best = {place: min(mine, key=lambda run: run["first_task_s"]) for place, mine in runs.items()}
    tasks = {place: [s for run in mine for s in run["tasks"]] for place, mine in runs.items()}
    for place, run in best.items():
        found[f"submit_to_first_task_s/{place}"] = run["first_task_s"]
        found[f"beyond_engine_start_s/{place}"] = run["first_task_s"] - engine_s
        found[f"worst_s/{place}"] = max(one["first_task_s"] for one in runs[place])
        found |= {f"parts_s/{place}/{part}": seconds for part, seconds in run["parts"].items()}
        found[f"task_ms/{place}/p50"] = 1e3 * percentile(tasks[place], 0.5)
        found[f"task_ms/{place}/p99"] = 1e3 * percentile(tasks[place], 0.99)
        found[f"tasks/{place}"] = float(len(tasks[place]))
    for place in JOBS:
        found[f"to_local/{place}"] = best[place]["first_task_s"] / best["local"]["first_task_s"]
        found[f"task_to_local/{place}"] = percentile(tasks[place], 0.5) / percentile(tasks["local"], 0.5)
    found["load"] = max(raw["load"])
    return found


if __name__ == "__main__":
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=3, help="of each place")
    arguments.add_argument("--steps", type=int, default=6, help="of each run")
    sys.exit(main("slurm_launch", arguments.parse_args(), measure, figures, MUST))
