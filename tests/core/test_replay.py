"""The journal: read back exactly, replayed to the same decisions, and cut anywhere without harm."""

import copy
import hashlib
import json
import math
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission

from pipeline.config import load_resolved
from pipeline.controller import make_plan
from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.core import Core
from pipeline.core.errors import RunError
from pipeline.core.iteration import IterationCost
from pipeline.journal import Journal, read_journal
from pipeline.run_folder import RunFolder
from pipeline.stage import StageSpec
from tests.cli.conftest import CHECKOUT, COMMAND, environment
from tests.core.storm import random_world
from tests.fakes.durable import Durable
from tests.fakes.plan import Odds
from tests.fakes.plan import make_plan as make_small_plan
from tests.fakes.world import World

EVERY_EVENT: tuple[ev.Event, ...] = (
    ev.RunRestored(
        version=2,
        recorded=(0, 1, 2, 3),
        steps=(
            ev.RestoredStep(
                step=3,
                batched=False,
                sequences=(
                    ev.RestoredSequence(id="000003-00000-0000", state="scored", num_tokens=7, score=0.1 + 0.2),
                    ev.RestoredSequence(id="000003-00000-0001", state="admitted", min_version=1, max_version=2),
                ),
            ),
        ),
    ),
    ev.NodeJoined(node="n0", num_slots=3, version=0),
    ev.NodeLost(node="n0", reason="line one\nline two \udcff \x1b[31m \u2028"),
    ev.WorkerReady(worker="rollout-0", version=0),
    ev.WorkerDied(worker="rollout-0", reason=""),
    ev.WorkerSlept(worker="rollout-0"),
    ev.WorkerWoken(worker="rollout-0", version=3),
    ev.WakeFailed(worker="rollout-0", reason="no such version"),
    ev.PlanMade(number=3, moves=((0, ev.Role.ROLLOUT), (2, ev.Role.REWARD)), reason="the gain exceeds the threshold"),
    ev.CostsMeasured(role=ev.Role.REWARD, cost=IterationCost(overhead_s=1e-3, kv_s=5e-324), rest_tokens=0.1 + 0.2),
    ev.StraysReported(node="n0", strays=(ev.Stray(worker="rollout-1", slots=(0, 1)),)),
    ev.TaskStarted(task="train-1-2"),
    ev.TaskEnded(task="train-1-2", ok=True, result={"a": math.nan, "b": -math.inf, "c": -0.0, "d": 5e-324, "e": 1e23}),
    ev.SequenceAdmitted(step=1, ids=("000001-00000-0000",)),
    ev.SegmentClosed(
        task="rollout-1-1",
        segments=(ev.SegmentInfo(id="000001-00000-0000", idx=0, num_tokens=1, version=0, finish=ev.Finish.FLUSH),),
    ),
    ev.VerdictGiven(
        task="reward-1-1",
        verdicts=(
            ev.VerdictInfo(id="000001-00000-0000", score=2 / 3, failure=""),
            ev.VerdictInfo(id="000001-00000-0001", score=None, failure="timeout"),
        ),
    ),
    ev.BatchCommitted(step=1),
    ev.BatchTrained(step=1, num_trained=3, num_dropped=1),
    ev.VersionCopied(number=1, node="n0"),
    ev.CopyFailed(number=2, node="n1", reason="closed by peer"),
    ev.VersionSealed(version=1, node="n0"),
    ev.VersionLoaded(worker="rollout-0", version=1),
    ev.UpdateFailed(worker="rollout-0", version=1, reason="shapes"),
    ev.StepRecorded(step=1),
    ev.TimerFired(name="task:train-1-2"),
    ev.CancelAsked(reason="stopped by SIGINT"),
)


def write_journal(path: Path, events: list[tuple[float, ev.Event]]) -> Path:
    journal = Journal(path)
    for at, event in events:
        journal.write(event, at)
    journal.close()
    return path


def replay(core: Core, path: Path) -> list[de.Decision]:
    return [decision for at, event in read_journal(path) for decision in core.handle(event, at)]


def exact(things: object) -> str:
    """Types and every bit of every float: 1 and 1.0, 0.0 and -0.0 are different."""
    return repr(things)


def test_every_event_is_read_back_exactly(tmp_path: Path) -> None:
    assert {type(event).__name__ for event in EVERY_EVENT} == set(ev.EVENTS), "each kind of event"
    events = [(0.1 * i + 1e9, event) for i, event in enumerate(EVERY_EVENT)]
    assert exact(list(read_journal(write_journal(tmp_path / "j", events)))) == exact(events)


@pytest.mark.parametrize("seed", range(40))
def test_a_replayed_journal_gives_the_same_decisions(seed: int, tmp_path: Path) -> None:
    world, slots = random_world(random.Random(seed))
    world.start(*slots).run()
    path = write_journal(tmp_path / "j", world.events)
    assert exact(replay(Core(world.plan), path)) == exact(world.log)


def test_a_journal_replays_alike_in_another_process(tmp_path: Path) -> None:
    """The order of a set, which differs from process to process, decides nothing."""
    world = World(make_small_plan(sequences_per_step=8), random.Random(1)).start().run()
    path = write_journal(tmp_path / "j", world.events)
    script = (
        "import sys, hashlib; from pathlib import Path; from tests.core.test_replay import *; "
        "log = replay(Core(make_small_plan(sequences_per_step=8)), Path(sys.argv[1])); "
        "print(hashlib.sha256(exact(log).encode()).hexdigest())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hashlib.sha256(exact(world.log).encode()).hexdigest()


@pytest.mark.parametrize("seed", range(3))
def test_a_journal_cut_after_any_event_leads_to_a_run_that_goes_on(seed: int, tmp_path: Path) -> None:
    """With a torn last line. What the cut run left durable is all that the next attempt has."""
    odds = Odds(flush=0.3, abort=0.1, judge_fails=0.2, update_fails=0.1)
    world = World(make_small_plan(total_steps=2), random.Random(seed), odds)
    left: list[tuple[int, Durable]] = []
    world.watch = lambda event, decisions: left.append((len(world.log), copy.deepcopy(world.durable)))
    world.start().run()
    lines = write_journal(tmp_path / "whole", world.events).read_bytes().splitlines(keepends=True)
    assert len(lines) == len(left) > 30
    for cut in range(1, len(lines)):
        torn = lines[cut][: 1 + cut * 7 % (len(lines[cut]) - 1)]
        path = tmp_path / "cut"
        path.write_bytes(b"".join(lines[:cut]) + torn)
        assert [event for _, event in read_journal(path)] == [event for _, event in world.events[:cut]]
        num_decisions, durable = left[cut - 1]
        assert exact(replay(Core(world.plan), path)) == exact(world.log[:num_decisions])
        recorded = dict(durable.batches)
        after = World(world.plan, random.Random(cut), durable=durable).start().run()
        assert after.core.ended == de.EndRun(status="done"), cut
        assert durable.batches.keys() == world.durable.batches.keys() and durable.recorded == world.durable.recorded
        assert all(after.durable.batches[step] == ids for step, ids in recorded.items()), "a batch is made once"


def test_a_line_that_is_damaged_in_the_middle_is_named(tmp_path: Path) -> None:
    path = write_journal(tmp_path / "j", [(float(i), event) for i, event in enumerate(EVERY_EVENT)])
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged in (b"{}\n", lines[4][:9] + b"\n", lines[4].replace(b"WorkerDied", b"WorkerLeft")):
        path.write_bytes(b"".join([*lines[:4], damaged, *lines[5:]]))
        with pytest.raises(RunError, match="j, line 5: "):
            list(read_journal(path))


# --- a real run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulated_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("replay")
    command = [*COMMAND, "submit", "configs/emulated.yaml", "--cluster", "local", "--wait", "--run-dir", "run"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    return RunFolder(folder / "run")


def test_the_journal_of_a_real_run_replays_to_what_the_run_did(emulated_run: RunFolder) -> None:
    """The decisions are not written anywhere: each of them is compared with what its performance left behind."""
    run = emulated_run
    plan = make_plan(load_resolved(run.config))
    events = list(read_journal(run.journal(1)))
    log = replay(Core(plan), run.journal(1))
    starts = [d for d in log if isinstance(d, de.StartTask)]

    pickles = run.tasks(1).glob("*_submitted.pkl")
    specs = {spec.task: spec for spec in (DelayedSubmission.load(p).function.spec for p in pickles)}
    assert specs == {
        d.task: StageSpec(task=d.task, stage=d.stage, step=d.step, version=d.version, attempt=1) for d in starts
    }

    worker_of = {d.task: d.worker for d in starts}
    decided, happened = defaultdict(list), defaultdict(list)
    for start in starts:
        decided[start.worker].append(start.task)
    for _, event in events:
        if isinstance(event, ev.TaskStarted):
            happened[worker_of[event.task]].append(event.task)
    assert happened == decided

    turns = {
        i: (d.worker, turn) for d in log if isinstance(d, de.Dispatch) for i, turn in zip(d.ids, d.turns, strict=True)
    }
    with read_index(run) as index:
        owners = dict(index.execute("SELECT id, turn FROM seq").fetchall())
        batches = dict(index.execute("SELECT step, ids FROM batch").fetchall())
        rows = [step for (step,) in index.execute("SELECT step FROM step ORDER BY step")]
        replicas = {worker for (worker,) in index.execute("SELECT DISTINCT replica FROM seg")}
    assert owners == {seq_id: turn for seq_id, (_, turn) in turns.items()}
    assert replicas == {d.worker for d in log if isinstance(d, de.Dispatch) and d.task.startswith("rollout")}
    assert {step: tuple(json.loads(ids)) for step, ids in batches.items()} == {
        d.step: d.ids for d in log if isinstance(d, de.CommitBatch)
    }
    assert rows == [d.step for d in log if isinstance(d, de.RecordStep)]
    assert log[-1] == de.EndRun(status=json.loads(run.ended.read_text())["status"])


def read_index(run: RunFolder) -> sqlite3.Connection:
    """A copy of the queue's index: opening it would write to it."""
    copied = run.path.parent / "index"
    shutil.copytree(run.path / "queue", copied)
    return sqlite3.connect(copied / "index.db")
