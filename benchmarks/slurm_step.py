"""How soon a worker is there that is a Slurm step of its own: `python benchmarks/slurm_step.py [--samples 60]`.

A Slurm of its own on this machine, and on it two jobs of one node after the other, one with `cluster.slurm.launcher:
step` and one with `agent`, whose agent (and launcher) take orders from this process as from a controller. A worker of
one slot is ordered, awaited and killed, `--samples` times; then as often one with an emulated engine (half as often).
Keys (<launcher>: step, agent):

  step_ms/p50 /p99            from the controller's order until it has heard that the worker's process has come to the
                              agent: agent, controller, launcher, srun, Slurm, the process's start, and back
  fork_ms/p50 /p99            the same where the agent's zygote forks it
  ready_ms/<launcher>/p50     from the order until the worker has its emulated engine (a step's includes its imports)
  again_ms/p50                from the order to kill a step until the next one, ordered as soon as that was dead with
                              the same slots, has come
  samples                     how many steps
  load                        the machine's load average (1 min) at the begin and the end, the larger
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
from tests.cluster import SlurmCluster
from tests.cluster.steps import JobWatch

LAUNCHERS = ("step", "agent")
MUST = {"step_ms/p50": Must(at_most=300), "samples": Must(at_least=50)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    raw: dict[str, Any] = {"load": [os.getloadavg()[0]]}
    with (
        tempfile.TemporaryDirectory(prefix="pivot-step-") as name,
        SlurmCluster(Path(name) / "c", nodes=1, gpus=4, kill_wait_s=2) as cluster,
    ):
        os.environ.update(cluster.env)
        for launcher in LAUNCHERS:
            watch = JobWatch(Path(name) / launcher, cluster, launcher)
            raw[launcher] = measure_job(watch, args.samples)
            watch.close()
            cluster.reset()
    raw["load"].append(os.getloadavg()[0])
    return raw


def measure_job(watch: JobWatch, samples: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"there": [], "ready": [], "again": []}
    for number in range(samples):
        ordered = time.monotonic()
        life = watch.order("rollout-0", [number % 4], "tests.slurm.tasks:deaf")
        watch.arrived("rollout-0")
        found["there"].append(time.monotonic() - ordered)
        end(watch, life)
        settle(watch)
    for _ in range(samples // 2):
        ordered = time.monotonic()
        life = watch.order("rollout-0", [0, 1, 2, 3])
        watch.expect(wire.WorkerReady, worker="rollout-0")
        found["ready"].append(time.monotonic() - ordered)
        killed = time.monotonic()
        end(watch, life)
        life = watch.order("rollout-0", [0, 1, 2, 3], "tests.slurm.tasks:deaf")
        watch.arrived("rollout-0")
        found["again"].append(time.monotonic() - killed)
        end(watch, life)
        settle(watch)
    return found


def end(watch: JobWatch, life: int) -> None:
    watch.kill("rollout-0")
    watch.ended("rollout-0", life)
    watch.shell.posted.clear()


def settle(watch: JobWatch) -> None:
    """Slurm has taken back what the last step had."""
    watch.until(lambda: not watch.sruns())


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, launcher in (("step_ms", "step"), ("fork_ms", "agent")):
        found[f"{name}/p50"] = 1e3 * percentile(raw[launcher]["there"], 0.5)
        found[f"{name}/p99"] = 1e3 * percentile(raw[launcher]["there"], 0.99)
    for launcher in LAUNCHERS:
        found[f"ready_ms/{launcher}/p50"] = 1e3 * percentile(raw[launcher]["ready"], 0.5)
    found["again_ms/p50"] = 1e3 * percentile(raw["step"]["again"], 0.5)
    found["samples"] = float(len(raw["step"]["there"]))
    found["load"] = max(raw["load"])
    return found


if __name__ == "__main__":
    arguments = parser(__doc__ or "")
    arguments.add_argument("--samples", type=int, default=60)
    sys.exit(main("slurm_step", arguments.parse_args(), measure, figures, MUST))
