"""One random schedule of what can happen to a run, and what must hold all the while.

A schedule kills workers, hangs them, loses and repeats what they said, lies, lets old timers fire, stops the run, ends
a node, and ends the controller between any two events and between any two of its decisions. Whatever ended an attempt,
the next one goes on from what is durable, until the run is done.
"""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.events import INFERENCE, Finish, Role
from pipeline.core.fleet import Capacity, Replicas
from pipeline.core.modes import ModeName, fill
from pipeline.core.sequences import SequenceChange
from pipeline.core.versions import VersionState
from pipeline.core.worker import WorkerChange, WorkerState
from tests.core.lives import Lives
from tests.core.tables import LIVES, Hits
from tests.fakes.plan import Odds, make_plan
from tests.fakes.world import World

MOST_ATTEMPTS = 3
"""In the last one nothing goes wrong."""
MOST_TICKS = 2_000
REPEATED = {
    ev.NodeJoined,
    ev.WorkerReady,
    ev.TaskStarted,
    ev.TaskEnded,
    ev.SequenceAdmitted,
    ev.SegmentClosed,
    ev.VerdictGiven,
    ev.VersionCopied,
    ev.CopyFailed,
    ev.VersionSealed,
    ev.WorkerSlept,
    ev.WorkerWoken,
    ev.WakeFailed,
    ev.PlanMade,
    ev.VersionLoaded,
    ev.UpdateFailed,
}


def _segment(task: str, seq_id: str, idx: int, finish: Finish) -> ev.Event:
    segment = ev.SegmentInfo(id=seq_id, idx=idx, num_tokens=1, version=99, finish=finish)
    return ev.SegmentClosed(task=task, segments=(segment,))


SEQUENCE_REPORTS: dict[SequenceChange, Callable[[str, str, int], ev.Event]] = {
    SequenceChange.FLUSHED: lambda task, seq_id, idx: _segment(task, seq_id, idx, Finish.FLUSH),
    SequenceChange.ABORTED: lambda task, seq_id, idx: _segment(task, seq_id, idx, Finish.ABORT),
    SequenceChange.GENERATED: lambda task, seq_id, idx: _segment(task, seq_id, idx, Finish.STOP),
    SequenceChange.JUDGED: lambda task, seq_id, idx: ev.VerdictGiven(
        task=task, verdicts=(ev.VerdictInfo(id=seq_id, score=1.0, failure=""),)
    ),
}
WORKER_REPORTS: dict[WorkerChange, Callable[[str, int], ev.Event]] = {
    WorkerChange.REPORTED: lambda worker, version: ev.WorkerReady(worker=worker, version=version),
    WorkerChange.SLEPT: lambda worker, version: ev.WorkerSlept(worker=worker),
    WorkerChange.WOKEN: lambda worker, version: ev.WorkerWoken(worker=worker, version=version),
    WorkerChange.LOADED: lambda worker, version: ev.VersionLoaded(worker=worker, version=version),
    WorkerChange.REFUSED: lambda worker, version: ev.UpdateFailed(worker=worker, version=version, reason="shapes"),
}


def random_world(rng: random.Random) -> tuple[World, tuple[int, ...]]:
    """A small run, and the slots of its nodes."""
    num_rollout, num_reward = rng.choice((1, 1, 1, 1, 1, 2, 2, 3)), rng.choice((1, 1, 1, 2))
    num_ranks = rng.choice((1, 1, 1, 2, 3))
    num_slots = num_rollout + num_reward + num_ranks
    slots = random_slots(rng, num_slots)
    mode = rng.choice((*[ModeName.DISAGGREGATED] * 4, *ModeName))
    replicas = (
        Replicas(role=Role.ROLLOUT, replicas=num_rollout, slots=1),
        Replicas(role=Role.REWARD, replicas=num_reward, slots=1),
        Replicas(role=Role.TRAIN, replicas=num_ranks, slots=1),
    )
    block_slots = 1
    if mode is not ModeName.DISAGGREGATED:
        slots, block_slots, replicas = random_blocks(rng, mode)
        num_ranks = replicas[2].replicas
    staleness = 0 if mode is ModeName.COLOCATED else rng.choice((0, 0, 0, 0, 1))
    plan = make_plan(
        total_steps=rng.choice((2, 2, 3) if staleness else (*[1] * 14, 2, 2, 3)),
        sequences_per_step=rng.choice((2, 2, 2, 2, 4)),
        replicas=replicas,
        mode=mode,
        block_slots=block_slots,
        has_planner=rng.random() < 0.7,
        is_strict=rng.random() < 0.5,
        capacities={role: Capacity(max_num_seqs=rng.choice((1, 2, math.inf))) for role in INFERENCE},
        num_nodes=len(slots),
        min_nodes=rng.choice((len(slots), len(slots), -(-num_ranks // slots[0]) if block_slots > 1 else 1)),
        save_freq=rng.choice((1, 2, 3)),
        evaluate_freq=rng.choice((0, 0, 0, 0, 1, 2)),
        restarts=rng.choice((1, 50, 50, 50, 50)),
        staleness=staleness,
        is_streaming=rng.random() < 0.6,
        keep_kv=rng.random() < 0.2,
        num_piles=rng.choice((1, len(slots))),
    )
    odds = Odds(
        flush=rng.choice((0.0, 0.3)),
        abort=rng.choice((0.0, 0.1)),
        judge_fails=rng.choice((0.0, 0.3)),
        update_fails=rng.choice((0.0, 0.2)),
        wake_fails=rng.choice((0.0, 0.0, 0.1)),
        start_fails=rng.choice((0.0, 0.0, 0.05)),
        node_fails=rng.choice((0.0, 0.2)),
        copy_fails=rng.choice((0.0, 0.0, 0.2)),
        stage_fails=rng.choice((0.0, 0.0, 0.0, 0.0, 0.03)),
        says_started=rng.choice((0.0, 0.0, 0.0, 1.0)),
    )
    world = World(plan, rng, odds)
    world.replication = rng.choice((1, 2))
    world.is_strict = plan.staleness == 0 and not plan.is_streaming and rng.random() < 0.5
    return world, slots


def random_blocks(rng: random.Random, mode: ModeName) -> tuple[tuple[int, ...], int, tuple[Replicas, ...]]:
    """Nodes of so many slots, slots per block, and what lives on them."""
    rollout, reward = rng.choice(((1, 1), (1, 1), (1, 2), (2, 1)))
    block, num_nodes = max(rollout, reward), rng.choice((1, 1, 2))
    per_node = block * rng.choice((1, 2) if mode in (ModeName.COLOCATED, ModeName.SHIFTABLE) else (3,))
    slots = (per_node,) * num_nodes
    wanted = (
        Replicas(role=Role.ROLLOUT, replicas=1, slots=rollout),
        Replicas(role=Role.REWARD, replicas=1, slots=reward),
        Replicas(role=Role.TRAIN, replicas=rng.choice((1, 1, 2)), slots=block // rng.choice((1, block))),
    )
    if mode is not ModeName.COLOCATED and mode is not ModeName.SHIFTABLE:
        wanted = (*wanted[:2], Replicas(role=Role.TRAIN, replicas=1, slots=block))
    if wanted[2].replicas * wanted[2].slots > per_node:
        wanted = (*wanted[:2], replace(wanted[2], replicas=1))
    return slots, block, fill(mode, wanted, slots)


def random_slots(rng: random.Random, num_slots: int) -> tuple[int, ...]:
    """The slots of one to three nodes, sometimes more than are needed."""
    num_nodes = rng.choice((1, 1, 2, 3))
    cuts = sorted(rng.randint(1, num_slots - 1) for _ in range(num_nodes - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, num_slots], strict=True)]
    return tuple(size + rng.choice((0, 0, 1)) for size in sizes if size)


class Storm:
    """One schedule: a world, and what goes wrong in it."""

    def __init__(self, seed: int, hits: Hits, counts: Counter[str]) -> None:
        self.rng = rng = random.Random(seed)
        self.hits, self.counts = hits, counts
        self.world, self.slots = random_world(rng)
        rare = rng.choice((0.0, 0.0, 0.004))
        self.wrongs = (
            (rng.choice((0.0, 0.01, 0.05)), self._kill),
            (rng.choice((0.0, 0.05, 0.1)), self._say_again),
            (rng.choice((0.0, 0.0, 0.1)), self._lie),
            (rng.choice((0.0, 0.0, 0.01)), self._crash),
            (rare, self._hang),
            (rare, self._stop),
            (rare / 2, self._lose_node),
        )

    def run(self) -> None:
        self.world.watch = self._watch
        self._begin()
        for _ in range(MOST_TICKS):
            if self.world.core.ended is None:
                self._tick()
                continue
            self.counts[f"ended {self.world.core.ended.status}"] += 1
            self._check_end(self.world.core.ended)
            if self.world.core.ended.status == "done":
                self._check_run()
                return
            self._begin()
        raise AssertionError(f"no end: {self.world.core.steps}")

    def _begin(self) -> None:
        """A new attempt: the controller knows what is durable, and nothing else."""
        world = self.world
        self.lives = Lives(self.hits)
        self.said: list[ev.Event] = []
        self.lost: dict[str, list[ev.Event]] = {}
        """What killed workers had said; it may come late, but not before their death is known."""
        self.deaths: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()
        self.causes: list[str] = []
        """What may end this attempt before its time: the beginnings of reasons."""
        self.most = sum(odds for odds, _ in self.wrongs)
        if world.durable.attempts >= MOST_ATTEMPTS - 1:
            world.odds, self.most = Odds(), 0.0
        world.start(*self.slots)

    def _tick(self) -> None:
        world, draw = self.world, self.rng.random()
        if draw < self.most:
            for odds, wrong in self.wrongs:
                if draw < odds:
                    return wrong()
                draw -= odds
        if not world.tick():
            assert any(p.is_hung for p in world.processes.values()), f"the run waits for nothing: {world.core.steps}"
            num_before = len(world.log)
            world.let_time_pass()
            while not world.tick() and not [d for d in world.log[num_before:] if isinstance(d, de.FenceReplica)]:
                world.let_time_pass()  # the planner's time came first
            self.counts["hung worker found"] += 1

    # --- what goes wrong -------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        """Rather one that has something to do."""
        alive = list(self.world.processes)
        if alive:
            busy = [t.worker for t in self.lives.tasks.values() if t.worker in alive]
            worker = self.rng.choice(busy if busy and self.rng.random() < 0.8 else alive)
            stages = [t.stage for t in self.lives.tasks.values() if t.worker == worker]
            self.counts[f"killed in {stages[0]}" if stages else f"killed {self.lives.workers[worker]}"] += 1
            self.lost.setdefault(worker, []).extend(self.world.kill(worker))

    def _say_again(self) -> None:
        """What was lost or said before, or a timer that was cleared or set anew."""
        world = self.world
        if self.said and self.rng.random() < 0.8:
            event = self.rng.choice(self.said)
            if self._is_old(event):
                self.counts[f"repeated {type(event).__name__}"] += 1
                world.give(event)
        else:
            name = self.rng.choice([d.name for d in world.log if isinstance(d, de.SetTimer)] or ["worker:rollout-0"])
            if world.timers.get(name, 1e9) > world.now + 1:
                self.counts["repeated TimerFired"] += 1
                world.give(ev.TimerFired(name=name))

    def _lie(self) -> None:
        """A report that nobody can truthfully make: not by the table of the life that it is about."""
        event = self._untruth()
        if event is not None:
            self.world.give(event)
            self.said = [e for e in self.said if e is not event]  # it might be true later

    def _untruth(self) -> ev.Event | None:
        lives, rng = self.lives, self.rng
        kind = rng.choice(("sequence", "sequence", "worker", "version"))
        if kind == "sequence" and lives.sequences:
            seq_id = rng.choice(list(lives.sequences))
            seq = lives.sequences[seq_id]
            change = rng.choice(tuple(SEQUENCE_REPORTS))
            if (seq.place, change) not in LIVES["sequence"]:
                return SEQUENCE_REPORTS[change](seq.task or "rollout-1-1", seq_id, seq.num_segments)
        elif kind == "worker" and lives.workers:
            resting = [w for w, state in lives.workers.items() if state is not WorkerState.READY]
            worker = rng.choice(resting or list(lives.workers))
            change_ = rng.choice(tuple(WORKER_REPORTS))
            if (lives.workers[worker], change_) not in LIVES["worker"]:
                return WORKER_REPORTS[change_](worker, lives.asked.get(worker, -1))
        elif kind == "version":
            version = self.world.core.versions.current + rng.choice((-1, 0, 1))
            if self.world.core.versions.state(version) is not VersionState.WRITTEN:
                node = rng.choice(sorted(self.world.num_slots))
                if self.lives.seals.get(node) != version:
                    return ev.VersionSealed(version=version, node=node)
        return None

    def _is_old(self, event: ev.Event) -> bool:
        """Not what the core waits for at this moment: a worker's reports come in order, its death after them, so the
        report of an earlier life cannot come once the next one is asked for the same."""
        match event:
            case ev.NodeJoined():
                return event.node in self.lives.nodes
            case ev.VersionSealed():
                return self.lives.seals.get(event.node) != event.version
            case ev.VersionCopied() | ev.CopyFailed():
                copy = self.lives.copies.get(event.node)
                return copy is None or copy.number != event.number
            case ev.WorkerReady():
                return self.lives.workers.get(event.worker) is not WorkerState.STARTING
            case ev.WorkerSlept():
                return self.lives.workers.get(event.worker) is not WorkerState.LEAVING
            case ev.WorkerWoken() | ev.WakeFailed():
                return self.lives.workers.get(event.worker) is not WorkerState.WAKING
            case ev.VersionLoaded() | ev.UpdateFailed():
                is_awaited = self.lives.workers.get(event.worker) is WorkerState.LOADING
                return not (is_awaited and self.lives.asked[event.worker] == event.version)
            case ev.SegmentClosed(task=task, segments=segments):
                return not any(
                    s.finish is Finish.ABORT and not s.num_tokens and s.id in self.lives.sequences
                    and self.lives.sequences[s.id].task == task
                    for s in segments
                )  # fmt: skip
        return True

    def _crash(self) -> None:
        """The controller dies, with a part of what it has just decided performed."""
        world = self.world
        talking = [channel for channel in world.channels.values() if channel]
        if talking:
            world.give(self.rng.choice(talking).popleft(), self.rng.randint(0, 3))
        self.counts["controller killed"] += 1
        self.counts.update(f"lost {type(event).__name__}" for event in world.channels.get("", ()))
        self._begin()

    def _hang(self) -> None:
        if self.world.processes:
            self.world.processes[self.rng.choice(sorted(self.world.processes))].is_hung = True

    def _stop(self) -> None:
        self.causes.append("interrupted")
        self.world.give(ev.CancelAsked(reason="interrupted"))

    def _lose_node(self) -> None:
        nodes = sorted(self.lives.nodes)
        if nodes:
            node = self.rng.choice(nodes)
            self.counts["node lost"] += 1
            self.counts[f"one of {len(nodes)} nodes lost"] += 1
            for worker in self.world.core.fleet.workers.values():
                if worker.node == node:
                    self.lost.pop(worker.name, None)
            self.world.lose_node(node)

    # --- what must hold --------------------------------------------------------------------------------------------

    def _watch(self, event: ev.Event, decisions: list[de.Decision]) -> None:
        self.lives.take(self.world.core, event, decisions)
        if self.world.core.ended is None:
            timers = {name for name in self.world.timers if name != "plan" and not name.startswith("feed:")}
            assert timers == self.lives.timers, (self.world.timers, self.lives.timers)
        if isinstance(event, ev.StepRecorded):
            self.deaths.clear()
            self.losses.clear()
        elif isinstance(event, ev.NodeLost | ev.CopyFailed):
            self.losses[event.node] += 1
            if self.losses[event.node] > self.world.plan.restarts:
                self.causes += [f"node {event.node} ", "no node has slots left"]
        elif isinstance(event, ev.TaskEnded) and not event.ok:
            self.causes.append("stage ")
        elif isinstance(event, ev.WorkerDied):
            self.deaths[event.worker] += 1
            if self.deaths[event.worker] > self.world.plan.restarts:
                self.causes.append(f"{event.worker} on ")
            self.said += self.lost.pop(event.worker, [])
        if type(event) in REPEATED and self.rng.random() < 0.2:
            self.said.append(event)

    def _check_end(self, end: de.EndRun) -> None:
        assert end.status == "done" or any(end.reason.startswith(cause) for cause in self.causes), end
        match end.status:
            case "cancelled":
                trainer = self.world.processes.get("train-0")
                if trainer and self.world.core.fleet.ready(Role.TRAIN):
                    assert trainer.version == self.world.durable.newest_checkpoint, "the last training is saved"
            case "done":
                assert end.reason == "" and not self.lives.tasks, (end, self.lives.tasks)
                assert not self.world.channels.get(""), "each write to the index was answered"
                for process in self.world.processes.values():
                    is_ready = self.lives.workers[process.name] is WorkerState.READY
                    assert not process.work and not (is_ready and process.orders), process

    def _check_run(self) -> None:
        """Every sequence of every step was trained once or dropped, every row is there once, the last step is saved."""
        world, durable, total = self.world, self.world.durable, self.world.plan.total_steps
        assert durable.checkpoints[total] == tuple(range(1, total + 1))
        assert sorted(durable.batches) == list(range(1, total + 1))
        assert Counter(row.step for row in durable.rows.values()) == dict.fromkeys(
            range(1, total + 1), world.plan.sequences_per_step
        )
        assert {row.state for row in durable.rows.values()} <= {"trained", "dropped"}
        first = 0 if world.plan.evaluate_freq else 1
        assert durable.recorded == list(range(first, total + 1))
