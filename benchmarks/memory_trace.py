"""Private memory of a run's workers, sampled from outside: `python memory_trace.py PARENT OUT [--period 0.05]`.

Every process below PARENT whose log is a worker's is looked at, each once per period. OUT gets one JSON line per look:
worker, pid, when the look began and ended (monotonic clock), Private_Dirty, bytes of a trainer's file in /dev/shm.
Ends when PARENT has, or its own standard input is closed.
"""

import argparse
import contextlib
import json
import os
import re
import select
import sys
import time
from pathlib import Path

import harness  # noqa: F401  (the checkout goes before this folder)

from pipeline.memory import private_bytes

LOG = re.compile(r"(local-\d+)-((?:rollout|reward|train)-\d+)\.log")
FIND_EVERY_S = 0.5
_BLOCK = 512


def find_workers(root: int) -> dict[int, str]:
    """By pid, the workers below `root`."""
    found, todo = {}, [root]
    while todo:
        pid = todo.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                todo += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
            named = LOG.fullmatch(os.path.basename(os.readlink(f"/proc/{pid}/fd/1")))
            if named:
                found[pid] = named[2]
    return found


def files_of(pid: int) -> list[Path]:
    """Those of its open files that are a sleeper's."""
    found = []
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{number}")
                if re.fullmatch(r"/dev/shm/.*-train-\d+\.0", target):
                    found.append(Path(target))
    return found


def shared_bytes(files: list[Path]) -> int:
    total = 0
    for path in files:
        with contextlib.suppress(OSError):
            total += path.stat().st_blocks * _BLOCK
    return total


def trace(parent: int, out: Path, period_s: float) -> None:
    workers: dict[int, str] = {}
    files: dict[int, list[Path]] = {}
    find_at = 0.0
    with out.open("w") as file:
        while os.path.exists(f"/proc/{parent}"):
            began = time.monotonic()
            if began >= find_at:
                find_at, workers = began + FIND_EVERY_S, find_workers(parent)
                files = {pid: files_of(pid) for pid, name in workers.items() if name.startswith("train")}
            for pid, name in workers.items():
                at = time.monotonic()
                with contextlib.suppress(OSError):
                    held = private_bytes(pid)
                    shared = shared_bytes(files.get(pid, []))
                    file.write(json.dumps([name, pid, at, time.monotonic(), held, shared]) + "\n")
            file.flush()
            rest = max(0.0, began + period_s - time.monotonic())
            if select.select([sys.stdin], [], [], rest)[0]:
                return


if __name__ == "__main__":
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("parent", type=int)
    made.add_argument("out", type=Path)
    made.add_argument("--period", type=float, default=0.05)
    given = made.parse_args()
    trace(given.parent, given.out, given.period)
