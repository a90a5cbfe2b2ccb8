"""Shifts in live runs: `python benchmarks/shift.py [--runs 3] [--smollm2 FOLDER] [--plot FILE]`.

Real controller, agents, workers and engines. configs/quickstart.yaml, shiftable on 4 slots, staleness 1; in the place
of the planner one that moves a block from rollout to reward, or back, every .4 s, whatever runs there. Then on 2 slots
with two training ranks (`ddp`), where all blocks change every second, while each worker's private memory is sampled
from outside every 50 ms (a look takes 10 ms of a core, so not where times are measured). With --smollm2, that of
SmolLM2-135M as policy, one rank, 256 MB of KV. What was measured before is kept, in
benchmarks/out/shift-parts. Keys (of the quickstart; `traced/...` and `smollm2/...` of those runs):

  num/between, num/train         shifts rollout to reward and back; to training and back
  down_s/p50 /p90                from the decision to the report that the slots are free; p50 is the best of the runs
  down_s/mid/p50                 the same of those that cut sequences short (num/mid)
  up_s/p50 /p90                  from the decision to the first token that the controller hears of, work waiting
  woken_s/p50                    the same to the report that it is awake
  both_s/p50                     from the decision to send one down to the first token of the one that follows
  train/down_s/p50 /up_s/p50     of the trainer; up to the start of its task
  part_s/<phase>/p50             by the workers' own clocks: tasks, release; read, cache; restore
  <figure>/worst                 of p50s, the largest over the runs
  costly/<counter>               graphs captured, communicators made, memory pinned: growth over all lives of workers
  pids/changed                   workers that had more than one process
  memory/falls, /rises           halves of shifts of engines whose memory was looked at
  memory/short                   those that fell or rose by less than half of the worker's context
  memory/train_fall              by how much the trainer fell, in shares of its state's bytes: the least (--smollm2)
  memory/train_file_mb           that state, in the node's shared memory
  load/max                       the machine's, over the runs
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from harness import OUT, Must, kept, main, parser, percentile

from benchmarks.recorder import Moves, run_recorded
from benchmarks.shift_samples import SETTLED_S, Change, Down, Shifts, Trace, Up, changes_of, shifts_of, traces_of
from pipeline.core.core import Core
from pipeline.core.events import INFERENCE, Role

EVERY_S = 0.4
PERIOD_S = 0.05
SHARED = (
    "placement.mode=shiftable",
    "algorithm.staleness=1",
    "evaluate.freq=0",
    "checkpoint.save_freq=1000",
    "tracking.uri=none",
)
QUICK = (*SHARED, "cluster.slots_per_node=4")
TWO_RANKS = (*SHARED, "cluster.slots_per_node=2", "trainer.strategy=ddp", "trainer.ranks=2")
TRACED_EVERY_S = 1.0
KV_BYTES = 256_000_000
MUST = {
    "num/between": Must(at_least=50),
    "num/mid": Must(at_least=10),
    "down_s/p50": Must(at_most=0.15),
    "down_s/mid/p50": Must(at_most=0.15),
    "up_s/p50": Must(at_most=0.2),
    "costly/graph_captures": Must(at_most=0),
    "costly/communicators": Must(at_most=0),
    "costly/pinnings": Must(at_most=0),
    "pids/changed": Must(at_most=0),
    "traced/num/between": Must(at_least=50),
    "memory/short": Must(at_most=0),
}
LARGE = {
    "smollm2/memory/short": Must(at_most=0),
    "smollm2/memory/train_fall": Must(at_least=0.8),
    "smollm2/pids/changed": Must(at_most=0),
}


class Flipper:
    """Every `every_s` one block changes between the inference roles, in turn; each role keeps at least one."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._at, self._turn = every_s, 0.0, 0

    def __call__(self, core: Core, now: float) -> tuple[Moves, float]:
        blocks = [b for b in core.blocks.all if not core.blocks.is_lost(b) and b.wanted is not Role.TRAIN]
        num = {role: sum(b.wanted is role for b in blocks) for role in INFERENCE}
        fewer = min(INFERENCE, key=lambda role: num[role])
        if idle := [b for b in blocks if b.wanted is None]:
            return {b.index: fewer for b in idle[:1]}, self._every_s
        if now - self._at < self._every_s:
            return {}, self._at + self._every_s - now + 0.01
        for _ in range(len(core.blocks.all)):
            self._turn += 1
            block = core.blocks.all[self._turn % len(core.blocks.all)]
            if block in blocks and num[block.wanted or fewer] > 1:
                self._at = now
                return {block.index: Role.REWARD if block.wanted is Role.ROLLOUT else Role.ROLLOUT}, self._every_s
        return self._when_alone(blocks, now)

    def _when_alone(self, blocks: list[Any], now: float) -> tuple[Moves, float]:
        """One block of each role: they change places."""
        self._at = now
        other = {Role.ROLLOUT: Role.REWARD, Role.REWARD: Role.ROLLOUT}
        moves = {b.index: other[b.wanted] for b in blocks} if len(blocks) > 1 else {}
        return moves, self._every_s


def measure(args: argparse.Namespace) -> dict[str, Any]:
    raw: dict[str, Any] = {"runs": [], "traced": None, "smollm2": None}
    steps = f"trainer.total_training_steps={args.steps}"
    for number in range(args.runs):
        raw["runs"].append(kept("shift", f"quick-{number}", lambda: one("quick", [*QUICK, steps], EVERY_S)))
    raw["traced"] = kept("shift", "traced", lambda: one("traced", [*TWO_RANKS, steps], TRACED_EVERY_S, is_traced=True))
    if args.smollm2:
        settings = smollm2(args.smollm2.resolve())
        raw["smollm2"] = kept("shift", "smollm2", lambda: one("smollm2", settings, args.every, is_traced=True))
    return raw


def smollm2(model: Path) -> list[str]:
    """Short answers of a model that cannot sort, judged by the quickstart's judge: what is measured are shifts."""
    model_of = {"path": str(model), "dtype": "float32"}  # in bfloat16 trainer and engine differ too much
    return [
        *SHARED,
        "cluster.slots_per_node=2",
        f"model.policy={json.dumps(model_of)}",
        f"rollout.engine.kv_cache_bytes={KV_BYTES}",
        f"reward.genrm.engine.kv_cache_bytes={KV_BYTES}",
        "data.max_prompt_length=96",
        "data.train_batch_size=4",
        "rollout.n=2",
        "rollout.max_response_length=40",
        "reward.genrm.temperature=1.5",  # else all answers are alike to this judge, and nothing is learnt
        "trainer.updates_per_step=1",
        "trainer.total_training_steps=5",
        "algorithm.max_logprob_diff=10",
        "limits.engine_start_s=300",
        "limits.stage_s=600",
        "limits.shift_s=60",
    ]


def one(name: str, overrides: list[str], every_s: float, *, is_traced: bool = False) -> dict[str, Any]:
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="pivot-shift-") as folder, contextlib.ExitStack() as stack:
        out = Path(folder) / "trace.jsonl"
        if is_traced:
            stack.enter_context(tracing(out))
        started = time.monotonic()
        run = run_recorded(Path(folder) / "run", overrides, plan=Flipper(every_s))
        wall_s = time.monotonic() - started
        loads.append(os.getloadavg()[0])
        book = [json.loads(line) for line in run.run.decisions.read_text().splitlines()]
        shifts = [line for line in book if line["kind"] == "shift"]
        stack.close()
        samples = [json.loads(line) for line in out.read_text().splitlines()] if is_traced else []
    return {"name": name, "wall_s": wall_s, "load": max(loads), "lines": run.recorder.lines, "book": shifts} | (
        {"memory": samples} if is_traced else {}
    )


@contextlib.contextmanager
def tracing(out: Path) -> Any:
    command = [sys.executable, str(Path(__file__).with_name("memory_trace.py")), str(os.getpid()), str(out)]
    process = subprocess.Popen([*command, "--period", str(PERIOD_S)], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    runs = [shifts_of(run["lines"]) for run in raw["runs"]]
    traced = shifts_of(raw["traced"]["lines"])
    found = over_runs([times_of(run) for run in runs])
    found |= counts_of([*runs, traced])
    found |= {"traced/num/between": float(traced.num_between), "traced/num/train": float(traced.num_train)}
    found |= {k: v for k, v in memory_of(traced, raw["traced"]["memory"]).items() if not k.startswith("memory/train")}
    if raw["smollm2"]:
        large = shifts_of(raw["smollm2"]["lines"])
        of_large = times_of(large) | counts_of([large]) | memory_of(large, raw["smollm2"]["memory"])
        found |= {f"smollm2/{key}": value for key, value in of_large.items()}
    loads = [run["load"] for run in [*raw["runs"], raw["traced"], *([raw["smollm2"]] if raw["smollm2"] else [])]]
    return found | {"load/max": max(loads)}


def times_of(shifts: Shifts) -> dict[str, float | None]:
    downs = [d for d in shifts.downs if not is_train(d)]
    ups = [u for u in shifts.ups if not is_train(u)]
    mid = [d.down_s for d in downs if d.num_aborted]
    waited = [u for u in ups if u.work_waited and u.token_s is not None and u.asleep_s >= SETTLED_S]
    tokens = [u.token_s for u in waited if u.token_s is not None]
    trains = [u.token_s for u in shifts.ups if is_train(u) and u.token_s is not None]
    found: dict[str, float | None] = {
        "num/between": float(shifts.num_between),
        "num/train": float(shifts.num_train),
        "num/mid": float(len(mid)),
        "num/up": float(len(tokens)),
        "down_s/p50": rank([d.down_s for d in downs], 0.5),
        "down_s/p90": rank([d.down_s for d in downs], 0.9),
        "down_s/mid/p50": rank(mid, 0.5),
        "up_s/p50": rank(tokens, 0.5),
        "up_s/p90": rank(tokens, 0.9),
        "woken_s/p50": rank([u.woken_s for u in ups], 0.5),
        "both_s/p50": rank([u.both_s for u in waited if u.both_s is not None], 0.5),
        "train/down_s/p50": rank([d.down_s for d in shifts.downs if is_train(d)], 0.5),
        "train/up_s/p50": rank(trains, 0.5),
    }
    phases: dict[str, list[float]] = {}
    for half in [*shifts.downs, *shifts.ups]:
        for phase, seconds in half.phases.items():
            whose = "train_" if is_train(half) and phase != "restore" else ""
            phases.setdefault(whose + phase, []).append(seconds)
    return found | {f"part_s/{phase}/p50": rank(seconds, 0.5) for phase, seconds in phases.items()}


def over_runs(runs: list[dict[str, float | None]]) -> dict[str, float | None]:
    """Counts in sum, seconds of the best run, and of p50s those of the worst."""
    found: dict[str, float | None] = {}
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [value for run in runs if (value := run.get(key)) is not None]
        if not values:
            found[key] = None
        elif key.startswith("num/"):
            found[key] = sum(values)
        else:
            found[key] = min(values)
            if key.endswith("p50") and len(values) > 1:
                found[f"{key}/worst"] = max(values)
    return found


def counts_of(runs: list[Shifts]) -> dict[str, float | None]:
    grown = [counts for run in runs for counts in run.costly.values()]
    names = sorted({name for counts in grown for name in counts})
    found: dict[str, float | None] = {f"costly/{name}": float(sum(c[name] for c in grown)) for name in names}
    found["pids/changed"] = float(sum(len(set(pids)) > 1 for run in runs for pids in run.lives.values()))
    return found


def memory_of(shifts: Shifts, samples: list[Any]) -> dict[str, float | None]:
    falls, rises = changes_of(shifts, traces_of(samples))
    of_engines = [change for change in [*falls, *rises] if not change.worker.startswith("train")]
    short = [change for change in of_engines if change.by < change.context / 2]
    for change in short:
        print(f"memory: {change}", file=sys.stderr)
    trained = [c for c in falls if c.worker.startswith("train") and c.shared][1:]  # at first there are no moments yet
    return {
        "memory/falls": float(sum(not c.worker.startswith("train") for c in falls)),
        "memory/rises": float(sum(not c.worker.startswith("train") for c in rises)),
        "memory/short": float(len(short)),
        "memory/context_mb": rank([c.context / 1e6 for c in of_engines], 0.5),
        "memory/looked_s/p50": rank([c.late_s for c in [*falls, *rises]], 0.5),
        "memory/train_fall": min((c.by / c.shared for c in trained), default=None),
        "memory/train_file_mb": rank([c.shared / 1e6 for c in trained], 0.5),
    }


def is_train(half: Down | Up | Change) -> bool:
    return half.worker.startswith("train")


def rank(values: list[float], q: float) -> float | None:
    return percentile(values, q) if values else None


def draw(raw: dict[str, Any], path: Path) -> None:
    """The last block's workers, in the run of the quickstart and in that of SmolLM2, if there is one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(raw["traced"], "the quickstart's models, 64 MiB of KV cache, one of two training ranks")]
    if raw["smollm2"]:
        shown.append((raw["smollm2"], "SmolLM2-135M, 256 MB of KV cache"))
    figure, panels = pyplot.subplots(len(shown), 1, figsize=(9, 3.1 * len(shown)), layout="constrained", squeeze=False)
    colours = {"rollout": "#0072b2", "reward": "#e69f00", "train": "#009e73"}
    for (run, title), panel in zip(shown, panels[:, 0], strict=True):
        traces, start, end = traces_of(run["memory"]), *stretch(run["lines"])
        workers = block_of(list(traces))
        for worker in workers:
            trace = within(traces[worker], start, end)
            role = worker.partition("-")[0]
            panel.plot(
                [at - start for at in trace.at], [held / 1e6 for held in trace.held], color=colours[role], lw=1.1
            )
            panel.plot([], [], color=colours[role], label=f"{worker}: private memory")
            if any(trace.shared):
                panel.plot(
                    [at - start for at in trace.at], [n / 1e6 for n in trace.shared], "--", color="#555555", lw=1
                )
                panel.plot([], [], "--", color="#555555", label="the trainer's file in shared memory")
        for at, kind, worker, _ in run["lines"]:
            if kind == "down" and worker in workers and start <= at <= end:
                panel.axvline(at - start, color="#bbbbbb", lw=0.6, zorder=0)
        panel.set_title(f"Workers of one slot: {title}", fontsize=10, fontweight="bold", loc="left")
        panel.set_ylabel("MB")
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=8, frameon=False, loc="upper left", ncols=4)
        panel.margins(x=0)
        low, high = panel.get_ylim()
        panel.set_ylim(low, 1.18 * high)
    panels[-1, 0].set_xlabel("seconds (grey: a shift begins)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def stretch(lines: Any) -> tuple[float, float]:
    """A part of the run with about a dozen shifts in it, before and after the first time that somebody trained."""
    downs = [at for at, kind, *_ in lines if kind == "down"]
    length = max(16.0, 16 * median(intervals(downs)))
    trained = next((at for at, kind, worker, _ in lines if kind == "up" and worker.startswith("train")), downs[0])
    start = max(downs[0] - 0.5, trained - length / 4)
    return start, min(downs[-1] + 0.5, start + length)


def intervals(times: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def block_of(workers: list[str]) -> list[str]:
    """Those of the last slot: the trainer's."""
    last = max(int(w.rpartition("-")[2]) for w in workers if w.startswith("rollout"))
    ranks = sorted(w for w in workers if w.startswith("train"))
    return [f"rollout-{last}", f"reward-{last}", ranks[0 if len(ranks) == 1 else -1]]


def within(trace: Trace, start: float, end: float) -> Trace:
    kept = [i for i, at in enumerate(trace.at) if start <= at <= end]
    return Trace(*([values[i] for i in kept] for values in (trace.at, trace.ended, trace.held, trace.shared)))


if __name__ == "__main__":
    made = parser(__doc__ or "")
    made.add_argument("--runs", type=int, default=3, help="of the quickstart, for times")
    made.add_argument("--steps", type=int, default=20, help="of each")
    made.add_argument("--smollm2", type=Path, help="the folder of SmolLM2-135M")
    made.add_argument("--every", type=float, default=4.0, help="seconds between shifts of SmolLM2")
    made.add_argument("--plot", type=Path, help="where to draw the memory of one slot's workers")
    parsed = made.parse_args()
    bounds = MUST | (LARGE if parsed.smollm2 else {})
    code = main("shift", parsed, measure, figures, bounds)
    if parsed.plot:
        draw(json.loads((parsed.from_raw or OUT / "shift.json").read_text()), parsed.plot)
    sys.exit(code)
