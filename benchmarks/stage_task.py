"""How long a stage task takes to run on a warm worker: `python benchmarks/stage_task.py [--samples 300] [--real]`.

A real agent, zygote and workers with the channel between; submitit's folder on the machine's temporary disk. <worker>
is emulated_rollout (an engine's worker: each task has a thread) and emulated_train (tasks run on its main thread); with
--real also vllm_rollout and hf_train, with the quickstart's policy. Keys:

  running_ms/<worker>/p50 /p99    from submit() to the first line of the stage, one task at a time
  heard_ms/<worker>/p50 /p99      to the controller having the report that it runs
  result_ms/<worker>/p50          to the controller having its result
  at_once_ms/<worker>/p50 /max    running, when all of --at-once (50) are submitted in one go; from its own submit()
  load                            the machine's load average (1 min)
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Must, main, parser, percentile

from pipeline import wire
from pipeline.stage import StageSpec, StageTask
from tests.gps.cycle import start_workers
from tests.slurm.rig import Rig

EMULATED = {"emulated_rollout": "rollout-0", "emulated_train": "train-0"}
REAL = {"vllm_rollout": "rollout-0", "hf_train": "train-0"}
REAL_SECTIONS: dict[str, Any] = {
    "model": {"policy": {"path": str(Path(__file__).parents[1] / "configs/quickstart/policy")}},
    "data": {"max_prompt_length": 32},
    "rollout": {"engine": {"name": "vllm"}},
    "trainer": {"strategy": "single"},
}
Sample = dict[str, float]


def must(workers: list[str]) -> dict[str, Must]:
    return {f"heard_ms/{worker}/p50": Must(at_most=10) for worker in workers}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    raw: dict[str, Any] = {"load": os.getloadavg()[0], "alone": {}, "at_once": {}}
    for sections, workers in [({}, EMULATED)] + ([(REAL_SECTIONS, REAL)] if args.real else []):
        with tempfile.TemporaryDirectory() as folder:
            rig = Rig(Path(folder) / "run", **sections)
            try:
                start_workers(rig)
                for name, worker in workers.items():
                    run(rig, worker, 10)  # what the first one imports
                    raw["alone"][name] = [sample for _ in range(args.samples) for sample in run(rig, worker, 1)]
                    raw["at_once"][name] = run(rig, worker, args.at_once)
            finally:
                rig.close()
    return raw


def run(rig: Rig, worker: str, num: int) -> list[Sample]:
    """Submit so many tasks in one go; seconds from each one's submit to running, heard and result."""
    submitted, jobs = [], []
    for number in range(num):
        submitted.append(time.monotonic())
        spec = StageSpec(task=f"t-{rig.num_tasks + 1}", stage="clock", step=number, version=0, attempt=rig.attempt)
        jobs.append(rig.submit(worker, StageTask("tests.slurm.tasks:clock", spec)))
    heard = []
    for job in jobs:
        rig.expect(wire.TaskStarted, task=job.job_id)
        heard.append(time.monotonic())
    samples = []
    for job, since, at in zip(jobs, submitted, heard, strict=True):
        running = rig.result(job)["at"]
        samples.append({"running": running - since, "heard": at - since, "result": time.monotonic() - since})
    return samples


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for worker, samples in raw["alone"].items():
        for key in ("running", "heard", "result"):
            found[f"{key}_ms/{worker}/p50"] = 1e3 * percentile([sample[key] for sample in samples], 0.5)
            if key != "result":
                found[f"{key}_ms/{worker}/p99"] = 1e3 * percentile([sample[key] for sample in samples], 0.99)
    for worker, samples in raw["at_once"].items():
        for name, q in (("p50", 0.5), ("max", 1.0)):
            found[f"at_once_ms/{worker}/{name}"] = 1e3 * percentile([sample["running"] for sample in samples], q)
    found["load"] = raw["load"]
    return found


if __name__ == "__main__":
    arguments = parser(__doc__ or "")
    arguments.add_argument("--samples", type=int, default=300, help="tasks one at a time, per worker")
    arguments.add_argument("--at-once", type=int, default=50)
    arguments.add_argument("--real", action="store_true", help="also a vLLM engine's worker and a torch trainer")
    parsed = arguments.parse_args()
    sys.exit(main("stage_task", parsed, measure, figures, must([*EMULATED, *(REAL if parsed.real else ())])))
