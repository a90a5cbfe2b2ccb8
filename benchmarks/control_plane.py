"""What the control plane itself costs: `python benchmarks/control_plane.py [--seconds 120]`.

Live runs on emulated engines (pipeline.simulator.emulate): Qwen2.5-7B judged by Qwen3-30B-A3B on H800, shiftable. In
the cost model's time (scale 1) for --seconds, once both inference roles work; some steps much faster, with fewer and
with more sequences; and 200 short ones. Processor time and memory are read from /proc. Parts that were measured are
kept, in benchmarks/out/control_plane-parts. Keys:

  cpu/<slots>/<process>      share of one core at scale 1: controller, queue (its server), agents (all of them), workers
  cpu_per_slot_ms            of the controller, per slot and second: the larger of both sizes
  cpu_per_1000_s             of the controller, per 1,000 sequences: from steps of 2,048 and of 512 sequences
  cpu_per_step_s             the same per step, whatever is in it
  queue_per_1000_s           of the queue server, per 1,000 sequences
  full_slots                 slots at which one controller takes one core, with as many sequences per slot
  rss_mb/first /last         resident memory of the controller after 100 and 200 steps (median of 5 s)
  rss_growth_mb              between the two
  rss_mb/<slots>             its largest at scale 1
  snapshot_ms/<slots>        p50 of a question to the planner, as decisions.jsonl has it: tick_ms
  load/max                   the machine's, over the runs
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from harness import Must, kept, main, parser

from pipeline.cli.runs import Rows
from pipeline.run_folder import RunFolder, read_json
from pipeline.simulator.emulate import paper_emulation
from pipeline.simulator.modes import shiftable_schedule

TICK = os.sysconf("SC_CLK_TCK")
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6
SIZES = {"32": (32, 512), "128": (128, 2048)}
GROUP = 2
MUST = {
    "cpu/32/controller": Must(at_most=0.20),
    "cpu/128/controller": Must(at_most=0.60),
    "rss_mb/last": Must(at_most=300),
    "rss_growth_mb": Must(at_most=5),
}
KINDS = {"_controller": "controller", "pipeline.queue.server": "queue", "slurm.agent": "agents"}


@contextmanager
def run_of(num_slots: int, num_sequences: int, scale: float, grain: int, num_steps: int, train: int) -> Iterator[Any]:
    """A run that goes on in the background: its folder, and its submit process. It is cancelled at the end."""
    emulation = paper_emulation(
        GROUP, "h800", num_gpus=num_slots, num_sequences=num_sequences, time_scale=1 / scale, grain=grain
    )
    with tempfile.TemporaryDirectory(prefix="pivot-control-") as name:
        folder = Path(name)
        emulation.write(folder, shiftable_schedule(emulation.setup, train), num_steps)
        command = [sys.executable, "-P", "-m", "pipeline.cli.main", "submit", "config.yaml", "--run-dir", "run"]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        with (folder / "out.log").open("w") as out:
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out)
        try:
            yield RunFolder(folder / "run"), process
        finally:
            process.terminate()
            process.wait()


def processes(run: RunFolder) -> dict[str, list[int]]:
    """Pids by kind: those whose command line names the run, and zygotes with their workers, whose names an agent."""
    lines: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                lines[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    found: dict[str, list[int]] = defaultdict(list)
    for pid, words in lines.items():
        kind = next((KINDS[word] for word in words if word in KINDS), "")
        if kind and str(run.path) in words:
            found[kind].append(pid)
    agents = {str(pid) for pid in found["agents"]}
    found["workers"] = [pid for pid, words in lines.items() if "slurm.zygote" in words and agents & {*words}]
    return found


def cpu_s(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / TICK
    return total


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MB


def controller_of(run: RunFolder, process: "subprocess.Popen[bytes]") -> int:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        status = read_json(run.status) or {}
        if status.get("status") == "running" and status.get("pid"):
            return int(status["pid"])
        time.sleep(0.2)
    raise RuntimeError(f"the run did not start: {(run.path.parent / 'out.log').read_text()[-2000:]}")


def at_scale_1(num_slots: int, num_sequences: int, seconds: float) -> dict[str, Any]:
    with run_of(num_slots, num_sequences, 1.0, 16, 50, num_slots // 2) as (run, process):
        pid = controller_of(run, process)
        # Until something was judged: then both inference roles work, and blocks have been shifted.
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and not (read_json(run.status) or {}).get("sequences", {}).get("scored"):
            time.sleep(0.5)
        kinds = processes(run)
        before, began = {kind: cpu_s(pids) for kind, pids in kinds.items()}, time.monotonic()
        memory, loads = [], [os.getloadavg()[0]]
        while time.monotonic() < began + seconds:
            time.sleep(1.0)
            memory.append(rss_mb(pid))
        took = time.monotonic() - began
        loads.append(os.getloadavg()[0])
        used = {kind: (cpu_s(pids) - before[kind]) / took for kind, pids in kinds.items()}
        ticks = [row["planner/tick_ms"] for row in Rows(run).new() if row.get("planner/tick_ms")]
    return {"cpu": used, "rss_mb": memory, "tick_ms": ticks, "seconds": took, "load": max(loads)}


def some_steps(num_slots: int, num_sequences: int, scale: float, num_steps: int) -> dict[str, Any]:
    """Processor time of the steps but the first two."""
    with run_of(num_slots, num_sequences, scale, 32, num_steps + 2, num_slots // 2) as (run, process):
        pid = controller_of(run, process)
        queue = processes(run)["queue"]
        marks: list[tuple[int, float, float]] = []
        while process.poll() is None and len(marks) < num_steps + 1:
            step = max((int(row["step"] or 0) for row in Rows(run).new()), default=0)
            if step >= 2 + len(marks):
                marks.append((step, cpu_s([pid]), cpu_s(queue)))
            time.sleep(0.05)
        first, last = marks[0], marks[-1]
    num = last[0] - first[0]
    if not num:
        raise RuntimeError("the run ended too soon")
    return {
        "num_sequences": num_sequences,
        "controller_s": (last[1] - first[1]) / num,
        "queue_s": (last[2] - first[2]) / num,
        "load": os.getloadavg()[0],
    }


def many_steps(num_steps: int) -> dict[str, Any]:
    """Resident memory of the controller at each step."""
    memory: dict[int, list[float]] = defaultdict(list)
    with run_of(32, 64, 60.0, 64, num_steps, 16) as (run, process):
        pid = controller_of(run, process)
        rows, step = Rows(run), 0
        while process.poll() is None and step < num_steps - 1:
            step = max([step, *(int(row["step"] or 0) for row in rows.new())])
            memory[step].append(rss_mb(pid))
            time.sleep(0.25)
    return {"rss_mb": {str(step): median(found) for step, found in memory.items()}, "load": os.getloadavg()[0]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    raw: dict[str, Any] = {"scale_1": {}, "steps": {}}
    for name, (slots, sequences) in SIZES.items():
        part = partial(at_scale_1, slots, sequences, args.seconds)
        raw["scale_1"][name] = kept("control_plane", f"scale-1-{name}", part)
    for slots, sequences in ((32, 512), (32, 2048)):
        part = partial(some_steps, slots, sequences, 20.0, 4)
        raw["steps"][f"{slots}/{sequences}"] = kept("control_plane", f"steps-{slots}-{sequences}", part)
    raw["many"] = kept("control_plane", "many", partial(many_steps, args.many))
    return raw


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    per_slot = []
    for name, part in raw["scale_1"].items():
        found |= {f"cpu/{name}/{kind}": share for kind, share in part["cpu"].items()}
        found[f"rss_mb/{name}"] = max(part["rss_mb"])
        found[f"snapshot_ms/{name}"] = median(part["tick_ms"]) if part["tick_ms"] else None
        per_slot.append(part["cpu"]["controller"] / int(name))
    few, many = raw["steps"]["32/512"], raw["steps"]["32/2048"]
    more = (many["num_sequences"] - few["num_sequences"]) / 1000
    found |= {
        "cpu_per_slot_ms": 1e3 * max(per_slot),
        "cpu_per_1000_s": (many["controller_s"] - few["controller_s"]) / more,
        "cpu_per_step_s": few["controller_s"],
        "queue_per_1000_s": (many["queue_s"] - few["queue_s"]) / more,
        "full_slots": 1 / max(per_slot),
    }
    memory = {int(step): mb for step, mb in raw["many"]["rss_mb"].items()}
    last = max(memory)
    halfway = min(memory, key=lambda step: abs(step - last // 2))
    found |= {"rss_mb/first": memory[halfway], "rss_mb/last": memory[last]}
    found["rss_growth_mb"] = memory[last] - memory[halfway]
    loads = [part["load"] for part in (*raw["scale_1"].values(), *raw["steps"].values(), raw["many"])]
    return found | {"load/max": max(loads)}


if __name__ == "__main__":
    made = parser(__doc__ or "")
    made.add_argument("--seconds", type=float, default=120.0, help="of each run at scale 1")
    made.add_argument("--many", type=int, default=200, help="short steps, for memory")
    sys.exit(main("control_plane", made.parse_args(), measure, figures, MUST))
