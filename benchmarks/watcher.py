"""What the watcher costs the controller's loop: `python benchmarks/watcher.py`. Of 128 blocks and so many sequences in
two steps; keys:

  <what>_us/<sequences>    p50 and p99 in microseconds: `dispatch` and `segment`, events of one sequence; `counts`, an
                           engine's report; `blocks`, an event of a worker, with which all blocks are looked at
  picture_ms/<sequences>   of the whole: what runs and waits, counted anew, and the planner's snapshot of it
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Must, main, parser, percentile

from pipeline.config import load_files
from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.events import Finish, Role, SegmentInfo
from pipeline.run_folder import RunFolder
from pipeline.watcher import Watcher
from pipeline.wire_counts import Counts
from tests.fakes.blocks import FakeCore
from tests.fakes.plan import make_plan

NUM_BLOCKS, NUM_ROLLOUT, PER_NODE = 128, 64, 8
SIZES = (2048, 4096)
CONFIG = Path(__file__).parents[1] / "configs/emulated.yaml"
STARTED = ev.TaskStarted(task="any")
MUST = {
    **{f"{what}_us/{num}/p50": Must(at_most=100) for what in ("dispatch", "segment", "counts") for num in SIZES},
    **{f"picture_ms/{num}/p50": Must(at_most=25) for num in SIZES},
}


class Watched:
    """All sequences run, a third of them at the judge."""

    def __init__(self, folder: Path, num_sequences: int) -> None:
        plan = make_plan(sequences_per_step=num_sequences // 2, total_steps=9, staleness=1, is_streaming=True)
        self.core = FakeCore(plan, NUM_BLOCKS, per_node=PER_NODE, train=tuple(range(96, NUM_BLOCKS)))
        run = RunFolder(folder)
        run.create()
        self.watcher = Watcher(
            self.core, load_files([CONFIG], ["placement.mode=shiftable"]), lambda event: None, run, fault=_raise
        )
        self.core.bind(Role.ROLLOUT, *range(NUM_ROLLOUT))
        self.core.bind(Role.REWARD, *range(NUM_ROLLOUT, NUM_BLOCKS))
        self.samples: dict[str, list[float]] = {}
        self.watcher.after(ev.RunRestored(version=0), [], time.monotonic())

    def time(self, what: str, call: Callable[..., Any], *args: Any) -> None:
        began = time.perf_counter()
        call(*args)
        self.samples.setdefault(what, []).append(time.perf_counter() - began)

    def after(self, what: str, event: ev.Event, *decisions: de.Decision) -> None:
        self.time(what, self.watcher.after, event, list(decisions), time.monotonic())

    def run(self) -> None:
        rng = random.Random(0)
        ids = [*self.core.admit(1), *self.core.admit(2)]
        for number, id in enumerate(ids):
            self._give(f"rollout-{number % NUM_ROLLOUT}", id)
        for number, id in enumerate(ids):
            worker = f"rollout-{number % NUM_ROLLOUT}"
            finish = Finish.STOP if number % 3 == 0 else Finish.FLUSH
            segment = SegmentInfo(id=id, idx=0, num_tokens=rng.randint(1, 40), version=0, finish=finish)
            self.core.sequences.close(worker, segment)
            self.after("segment", ev.SegmentClosed(task=worker, segments=(segment,)))
            if finish is Finish.STOP:
                self._give(f"reward-{NUM_ROLLOUT + number % NUM_ROLLOUT}", id)
        for number in range(4000):
            counts = Counts(
                worker=f"rollout-{number % NUM_ROLLOUT}",
                running=32,
                waiting=number % 2,
                num_tokens=0,
                rss_bytes=1,
                num_iterations=10,
                decode_s=0.1,
                batch=32,
                context=1e4,
                kv_tokens=1000,
            )
            self.time("counts", self.watcher.heard, counts)
        for _ in range(500):
            self.after("blocks", ev.WorkerWoken(worker="rollout-0", version=0))
        for _ in range(50):
            self.time("picture", self.watcher._snapshot, time.monotonic())
        self.watcher.close()

    def _give(self, worker: str, id: str) -> None:
        self.core.sequences.dispatch(id, worker)
        self.after("dispatch", STARTED, de.Dispatch(task=worker, worker=worker, ids=(id,), turns=(1,)))


def _raise(error: Exception) -> None:
    raise error


def measure(args: argparse.Namespace) -> dict[str, Any]:
    samples: dict[str, dict[str, list[float]]] = {}
    for num in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            watched = Watched(Path(folder) / "run", num)
            watched.run()
        samples[str(num)] = watched.samples
    return {"samples": samples}


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for num, by_what in raw["samples"].items():
        for what, samples in by_what.items():
            unit, scale = ("ms", 1e3) if what == "picture" else ("us", 1e6)
            for q in (0.5, 0.99):
                found[f"{what}_{unit}/{num}/p{100 * q:.0f}"] = scale * percentile(samples, q)
    return found


if __name__ == "__main__":
    sys.exit(main("watcher", parser(__doc__).parse_args(), measure, figures, MUST))
