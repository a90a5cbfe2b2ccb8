"""A watcher beside a core whose blocks change hands as a test says."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config import Config, load_files
from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.dag import Progress
from pipeline.core.events import Finish, Role, SegmentInfo
from pipeline.core.planner.bindings import Bindings
from pipeline.core.planner.planner import Candidate, Plan
from pipeline.core.planner.settings import PlannerSettings
from pipeline.core.snapshot import Snapshot
from pipeline.run_folder import RunFolder
from pipeline.watcher import Watcher
from pipeline.watching.book import read_book
from pipeline.wire_counts import Counts
from pipeline.wire_shift import Slept, Woken
from tests.fakes.blocks import FakeCore
from tests.fakes.plan import make_plan

ROOT = Path(__file__).parents[2]
NUM = 8
TICK = ev.TimerFired(name="none")
DONE, RUNNING = Progress.DONE, Progress.RUNNING


def config_of(*changes: str) -> Config:
    return load_files([ROOT / "configs/emulated.yaml"], list(changes))


def no_fault(error: Exception) -> None:
    raise error


class Run:
    """A watcher over a core of four blocks, of which the last trains; `now` is its clock."""

    def __init__(
        self,
        folder: Path,
        *changes: str,
        decide: Callable[[Snapshot, PlannerSettings, Bindings], Plan] | None = None,
        fault: Callable[[Exception], None] = no_fault,
        config: Config | None = None,
    ) -> None:
        plan = make_plan(sequences_per_step=NUM, total_steps=9, staleness=1, is_streaming=True)
        self.core = FakeCore(plan, 4, train=(3,))
        self.run = RunFolder(folder)
        self.run.create()
        self.posted: list[ev.Event] = []
        self.now = 100.0
        self.watcher = Watcher(
            self.core,
            config or config_of("placement.mode=shiftable", "cluster.slots_per_node=4", *changes),
            self.posted.append,
            self.run,
            clock=lambda: self.now,
            fault=fault,
            decide=decide,
        )
        self.core.bind(Role.ROLLOUT, 0, 1)
        self.core.bind(Role.REWARD, 2, 3)
        self.after(ev.RunRestored(version=0))

    def after(self, event: ev.Event = TICK, *decisions: de.Decision, at: float | None = None) -> None:
        self.now = self.now if at is None else at
        self.watcher.after(event, list(decisions), self.now)

    def give(self, worker: str, *ids: str) -> None:
        for id in ids:
            self.core.sequences.dispatch(id, f"task of {worker}")
        self.after(TICK, de.Dispatch(task=f"task of {worker}", worker=worker, ids=ids, turns=(1,) * len(ids)))

    def close(self, worker: str, id: str, num_tokens: int, finish: Finish, idx: int = 0) -> None:
        segment = SegmentInfo(id=id, idx=idx, num_tokens=num_tokens, version=0, finish=finish)
        self.core.sequences.close(f"task of {worker}", segment)
        self.after(ev.SegmentClosed(task=f"task of {worker}", segments=(segment,)))

    def count(self, worker: str, **what: Any) -> None:
        values = {"running": 1, "waiting": 0, "num_tokens": 0, "rss_bytes": 1} | what
        self.watcher.heard(Counts(worker=worker, **values))

    def snapshot(self) -> Snapshot:
        return self.watcher._snapshot(self.now)

    def ages(self, role: Role, step: int) -> float:
        """Tokens of those that have some, in sum."""
        view = self.snapshot().role(role)
        crowd = next(c for c in view.crowds if c.step == step)
        return sum(i * num for i, num in enumerate(crowd.ages)) * view.bin_tokens

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Once all is written."""
        self.watcher._thread.submit(lambda: None).result()
        return [line for line in read_book(self.run.decisions) if line["kind"] == kind]


def shift(run: Run, block: int, old: Role, new: Role, event: ev.Event = TICK) -> None:
    """Two seconds down, three up."""
    core, start = run.core, run.now
    core.blocks.all[block].wanted = new
    del core.blocks.held[block]
    run.after(event, de.ShiftDown(worker=f"{old}-{block}", following=(f"{new}-{block}",), version=0))
    run.now = start + 2.0
    run.watcher.heard(
        Slept(worker=f"{old}-{block}", held_bytes=10, num_aborted=5, seconds={"tasks": 1.5, "release": 0.4})
    )
    run.after(ev.WorkerSlept(worker=f"{old}-{block}"), de.ShiftUp(worker=f"{new}-{block}", version=0))
    run.now = start + 5.0
    run.watcher.heard(Woken(worker=f"{new}-{block}", version=0, held_bytes=99, seconds={"read": 2.0, "cache": 0.5}))
    core.bind(new, block)
    run.after(ev.WorkerWoken(worker=f"{new}-{block}", version=0))


def ask(run: Run, number: int = 1) -> ev.PlanMade:
    async def answered() -> ev.PlanMade:
        run.watcher.ask(number, "step 1 admitted")
        while True:
            await asyncio.sleep(0)
            for event in run.posted:
                if isinstance(event, ev.PlanMade) and event.number == number:
                    return event

    return asyncio.run(answered())


def foretell(seen: Snapshot, settings: PlannerSettings, bindings: Bindings) -> Plan:
    chosen = Candidate(num_rollout=1, num_reward=3, value_s=50.0, gain_s=6.0, penalty_s=1.0)
    return Plan(reason="foretold", moves={1: Role.REWARD}, candidates=(chosen,), chosen=0, cycle_s=20.0)


def live_through(run: Run) -> None:
    """Decision 9 at 100 s, which shifts; A is judged at 110 and published at 130, when B is judged, at 120, too."""
    run.core.admit(1)
    run.core.admit(2)
    run.after()
    made = ask(run, 9)
    shift(run, 1, Role.ROLLOUT, Role.REWARD, made)
    run.core.progress(1, 110.0, rollout=DONE, reward=DONE, batch=DONE, train=RUNNING)
    run.after(at=110.0)
    run.core.progress(2, 120.0, rollout=DONE, reward=DONE, batch=DONE)
    run.after(at=120.0)
    assert run.lines("worth") == []
    run.core.progress(1, 130.0, train=DONE)
    run.core.versions.write(1)
    run.core.versions.seal(1)
    run.after(at=130.0)
    run.after(at=140.0)
