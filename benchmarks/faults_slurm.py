"""What befalls a run in a job of a real Slurm: `python benchmarks/faults_slurm.py [--kinds nodes]`.

A Slurm of its own on this machine (four nodes of four fake GPUs), emulated engines, two nodes and two ranks per run,
`limits.heartbeat_s` 2, several faults per job, each injected for real. Afterwards the run is cancelled. Keys:

  faults                          how many there were
  lost, doubled, too_old          what the queue had acknowledged and is missing or changed at the end; what is twice;
                                  segments of versions beyond the bound of staleness (1)
  left                            processes, shared memory, temporary and port files 30 s after the end of a run
  detected_s/<fault>              until it was noticed; where the job was requeued, until the next attempt began
  back_s/<fault>                  from then until work went on
  loss_s/max                      longest time until a lost node was known
  again_s/<fault>                 where Slurm requeued the job, all nodes alive: from the fault until work went on,
                                  without Slurm's own delay and without the time that the run's first start took
  again_s/max                     the longest
  slurm_s                         Slurm's own delay: an empty job, from `scontrol requeue` until its script runs again
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import Must, main, parser

from tests.cluster import SlurmCluster
from tests.scenarios import jobs
from tests.scenarios.deaths import Death, full_disk, node, queue, small_disk, worked, worker
from tests.scenarios.faults import SETTINGS, account
from tests.scenarios.jobs import JobRun, lost_node, requeued, unnoticed
from tests.scenarios.runs import pivot, rows

NOTHING = Must(at_most=0)
MUST = {
    **dict.fromkeys(("lost", "doubled", "too_old", "left"), NOTHING),
    "faults": Must(at_least=22),
    "loss_s/max": Must(at_most=5),
    "again_s/max": Must(at_most=5),
}
LONG = ("trainer.total_training_steps=5000", "limits.heartbeat_s=2", "limits.engine_s=3")
REQUEUED = ("job", "preemption")
LOW = ("cluster.slurm.partition=low",)

KINDS: dict[str, tuple[tuple[str, ...], list[tuple[Death, str]]]] = {
    "processes": (
        (),
        [
            *((worker("train-1"), "train"), (worker("rollout-0"), "rollout"), (worker("reward-0"), "reward")),
            *((node("zygote"), "reward"), (node("agent"), "train"), (queue(), "rollout"), (jobs.stopped_agent, "")),
        ],
    ),
    "job": (
        (),
        [
            (requeued("controller killed", jobs.kill_controller), ""),
            (requeued("scontrol requeue", jobs.requeue), ""),
            (requeued("USR2", jobs.warn), ""),
        ],
    ),
    "preemption": (LOW, [(requeued("preempted, user signal", jobs.preempt), "")]),
    "preemption without signal": (LOW, [(requeued("preempted, TERM alone", jobs.preempt), "")]),
    "ends": ((), [(jobs.cancelled_by_slurm, "")]),
    "disk": ((), []),
    "slurm": (
        (),
        [
            (unnoticed("slurmctld killed, back after 4 s", jobs.restart_slurmctld), ""),
            (unnoticed("slurmd killed, back after 4 s", jobs.restart_slurmd), ""),
        ],
    ),
    "nodes": (
        (),
        [
            (lost_node("node set DOWN", jobs.down, jobs.up), ""),
            (lost_node("node crashes", jobs.crash_node, jobs.restart_node), ""),
            (lost_node("node dies bit by bit", jobs.half_crash_node, jobs.restart_node), ""),
            (requeued("batch host crashes", jobs.crash), ""),
            (requeued("batch host dies bit by bit", jobs.half_crash), ""),
            (requeued("batch host crashes, back after 8 s", jobs.crash_for_8_s), ""),
        ],
    ),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    raw: dict[str, Any] = {"runs": [], "slurm_s": slurm_delay()}
    for kind in args.kinds:
        folder = Path(tempfile.mkdtemp(prefix="pivot-slurm-"))
        try:
            warns = kind != "preemption without signal"
            with SlurmCluster(folder / "c", nodes=4, gpus=4, grace_s=3, kill_wait_s=2, user_signal=warns) as cluster:
                os.environ.update(cluster.env)
                if kind == "disk":
                    with small_disk(folder / "disk") as disk:
                        found = suffer(disk / "a run", cluster, kind, [(full_disk(disk), "train")])
                else:
                    found = suffer(folder / "a run", cluster, kind, KINDS[kind][1])
                raw["runs"].append({"kind": kind, **found})
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return raw


def slurm_delay() -> float:
    folder = Path(tempfile.mkdtemp(prefix="pivot-slurm-"))
    try:
        with SlurmCluster(folder / "c", nodes=4, gpus=4, grace_s=3, kill_wait_s=2) as cluster:
            starts = folder / "starts"
            job = cluster.submit("-N2", "--requeue", "--wrap", f"date +%s.%N >> {starts}; srun sleep 100")
            cluster.wait_until(
                lambda: len(cluster.client("squeue", "-h", "-s", "-j", job).splitlines()) >= 2, "it runs"
            )
            struck = time.time()
            cluster.client("scontrol", "requeue", job)
            cluster.wait_until(lambda: len(starts.read_text().split()) == 2, "it runs again", 60)
            return float(starts.read_text().split()[1]) - struck
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def suffer(path: Path, cluster: SlurmCluster, kind: str, deaths: list[tuple[Death, str]]) -> dict[str, Any]:
    begun = time.time()
    run = JobRun(path, cluster, *SETTINGS, *LONG, *KINDS[kind][0])
    felt, after = [], 0.0
    try:
        start_s = run.until("it works", worked)["wall"] - begun
        for death, moment in deaths:
            felt.append(death(run, moment, after))
            one = felt[-1]
            print(f"{one.death:36} {one.detected_s:8.2f} {one.back_s:8.2f}", file=sys.stderr, flush=True)
            after = time.time()
        run.until("a step is complete", lambda event: event["event"] == "StepRecorded", after)
        cancelled = pivot("cancel", str(path))
        assert cancelled.code == 0 and run.end() == 130, (cancelled.out, run.out)
    finally:
        run.process.kill()
        run.process.wait()
    found = account(path, int(rows(path)[-1]["step"]), 16, staleness=1)
    return {
        "felt": [asdict(one) for one in felt],
        **asdict(found),
        "left": run.left(),
        "attempts": run.attempt,
        "start_s": start_s,
    }


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    felt = [one for run in raw["runs"] for one in run["felt"]]
    found: dict[str, float | None] = {"faults": float(len(felt))}
    for what in ("lost", "doubled", "too_old", "left"):
        found[what] = float(sum(len(run[what]) for run in raw["runs"]))
    for one in felt:
        found[f"detected_s/{one['death']}"] = one["detected_s"]
        found[f"back_s/{one['death']}"] = one["back_s"]
    losses = [one["detected_s"] for one in felt if one["death"].startswith("node ") or "agent" in one["death"]]
    found["loss_s/max"] = max(losses, default=None)
    found["slurm_s"] = raw["slurm_s"]
    again = {
        f"again_s/{one['death']}": one["detected_s"] + one["back_s"] - raw["slurm_s"] - run["start_s"]
        for run in raw["runs"]
        for one in run["felt"]
        if run["kind"].startswith(REQUEUED)
    }
    found |= again | {"again_s/max": max(again.values(), default=None)}
    return found


if __name__ == "__main__":
    arguments = parser(__doc__ or "")
    arguments.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    sys.exit(main("faults_slurm", arguments.parse_args(), measure, figures, MUST))
