"""Behaves to whoever follows it as a run's controller does. Argument: the run's folder; a mode."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from pipeline.run_folder import RunFolder, write_json

run, mode = RunFolder(Path(sys.argv[1])), sys.argv[2]
attempt = run.begin_attempt()
asked: list[int] = []


def write(status: str, **more: object) -> None:
    values = {"run": run.name, "status": status, "attempt": attempt, "step": 1, "total_steps": 2, "stage": "rollout"}
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    identity = {"pid": os.getpid(), "pid_start": started, "updated": time.time()}
    write_json(run.status, {**values, **identity, "sequences": {"scored": 3}, "workers": [], **more}, durable=False)


def log(step: int, **row: float) -> None:
    with open(run.metrics, "a") as file:
        file.write(json.dumps({"step": step, **{name.replace("__", "/"): value for name, value in row.items()}}) + "\n")


def on_signal(number: int, frame: object) -> None:
    asked.append(number)
    if mode == "stubborn" and len(asked) == 1:
        (run.path / "asked").touch()
        return
    write("cancelled")
    os._exit(130)


for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(sig, on_signal)
if mode == "mute":
    print("Traceback: it broke \x1b[2J", flush=True)
    os._exit(7)
write("running")
log(1, critic__score__mean=0.25, perf__throughput=1234.0)
if mode == "fail":
    error = {"reason": "worker reward-0 died", "role": "reward", "node": "local-0", "log_tail": "Killed"}
    write("failed", error=error)
    os._exit(1)
if mode == "done":
    log(2, critic__score__mean=0.5, val__acc=0.75)
    write("done")
    os._exit(0)
while True:
    signal.pause()
