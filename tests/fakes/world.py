"""A shell without processes: everything that the core's decisions reach, in memory, under a virtual clock.

Workers, agents and the queue do one thing at a time, in an order that the caller's randomness picks; what they say
lies in a channel until it is delivered, in the order in which each of them said it. A killed worker loses what it was
to do and the end of what it said; what the queue holds stays.
"""

import random
from collections import deque
from collections.abc import Callable

from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.core import Core, RunPlan
from pipeline.core.events import Finish, Role, SegmentInfo, VerdictInfo
from pipeline.queue.schema import sequence_id
from tests.fakes.durable import SERVED, Durable
from tests.fakes.memory import NodeMemory, dealt_to, piles_in
from tests.fakes.plan import Odds
from tests.fakes.process import Process, Work


class World:
    """`watch(event, decisions)` is called after each event, when its decisions are performed."""

    def __init__(
        self,
        plan: RunPlan,
        rng: random.Random | None = None,
        odds: Odds | None = None,
        durable: Durable | None = None,
    ) -> None:
        self.plan, self.rng, self.odds = plan, rng or random.Random(0), odds or Odds()
        self.durable = durable or Durable()
        self.watch: Callable[[ev.Event, list[de.Decision]], None] = lambda event, decisions: None
        self.group = 2
        self.replication, self.is_strict = 1, False
        """A sequence is put whole or not at all, and an unfinished step is begun again."""
        self.now = 0.0
        self._clear()

    def _clear(self) -> None:
        """What a controller has, and all that it started. What is durable is not here."""
        self.core = Core(self.plan)
        self.log: list[de.Decision] = []
        self.events: list[tuple[float, ev.Event]] = []
        self.processes: dict[str, Process] = {}
        self.channels: dict[str, deque[ev.Event]] = {}
        self.timers: dict[str, float] = {}
        self.num_slots: dict[str, int] = {}
        self.memories: dict[str, NodeMemory] = {}
        self.copies: list[de.CopyVersion] = []
        """Those that go on."""

    def start(self, *num_slots: int) -> "World":
        """A new attempt begins, with what is durable; a node joins for each of `num_slots` (3 on one node)."""
        self._clear()
        self.durable.attempts += 1
        restored = self.durable.restore(self.is_strict)
        self.give(restored)
        self.num_slots = {f"n{index}": num for index, num in enumerate(num_slots or (3,))}
        for node, num in self.num_slots.items():
            self._join(node, num, restored.version)
        return self

    # --- events ----------------------------------------------------------------------------------------------------

    def give(self, event: ev.Event, most: int | None = None) -> list[de.Decision]:
        """Have the core take the event and perform what it decides, at most the first `most` of it."""
        self.now += 1.0
        self.events.append((self.now, event))
        decisions = self.core.handle(event, self.now)
        self.log += decisions
        for decision in decisions[:most]:
            self._perform(decision)
        if most is None:
            self.watch(event, decisions)
        return decisions

    def say(self, who: str, event: ev.Event) -> None:
        self.channels.setdefault(who, deque()).append(event)

    def tick(self) -> bool:
        """One thing happens: a part of the world does something, or what it said is delivered. False: nothing can."""
        busy = [p for p in self.processes.values() if (p.orders or p.work) and not p.is_hung]
        talking = [channel for channel in self.channels.values() if channel]
        num_things = len(busy) + len(talking) + bool(self.copies)
        which = int(self.rng.random() * num_things)
        if which < len(busy):
            self._act(busy[which])
        elif which < len(busy) + len(talking):
            self.give(talking[which - len(busy)].popleft())
        elif self.copies:
            self._copy(self.copies.pop(int(self.rng.random() * len(self.copies))))
        return num_things > 0

    def run(self, limit: int = 10_000) -> "World":
        """To the end. What hangs is found by the timers alone."""
        for _ in range(limit):
            if self.core.ended:
                return self
            if not self.tick():
                self.let_time_pass()
        raise AssertionError(f"the run does not end: {self.core.steps}")

    def let_time_pass(self) -> None:
        """Nothing happens any more, until the first timer fires."""
        assert self.timers, f"the run waits for nothing: {self.core.steps}"
        name = min(self.timers, key=lambda n: self.timers[n])
        self.now = max(self.now, self.timers.pop(name))
        self.give(ev.TimerFired(name=name))

    def kill(self, worker: str) -> list[ev.Event]:
        """Returns what it had said that is lost."""
        self.processes.pop(worker)
        channel = self.channels.setdefault(worker, deque())
        lost = [channel.pop() for _ in range(int(self.rng.random() * (len(channel) + 1)))]
        channel.append(ev.WorkerDied(worker=worker, reason="killed"))
        return lost

    def lose_node(self, node: str) -> None:
        """All that ran there is gone, with its memory, and what it had said and was not heard."""
        self._end_node(node)
        self.give(ev.NodeLost(node=node, reason="silent"))

    def _end_node(self, node: str) -> None:
        for name in [name for name, process in self.processes.items() if process.node == node]:
            del self.processes[name]
        for worker in [w for w in self.core.fleet.workers.values() if w.node == node]:
            self.channels.pop(worker.name, None)
        self.channels.pop(node, None)
        self.memories.pop(node, None)
        self.copies = [copy for copy in self.copies if node not in (copy.node, copy.source)]

    def _start_node(self, node: str) -> None:
        self._end_node(node)
        if self.rng.random() < self.odds.node_fails:
            self.say(node, ev.NodeLost(node=node, reason="no room"))
            return
        version = self.durable.newest_checkpoint
        self._join(node, self.num_slots[node], version)

    def _join(self, node: str, num_slots: int, version: int) -> None:
        there = [name for name in self.num_slots if name == node or name not in self.core.crew.given_up]
        piles = dealt_to(node, list(self.num_slots), there, self.plan.num_piles, self.replication)
        self.memories[node] = NodeMemory.of(version, piles)
        told = piles if self.plan.num_piles > 1 else ()
        self.say(node, ev.NodeJoined(node=node, num_slots=num_slots, version=version, piles=told))

    # --- decisions -------------------------------------------------------------------------------------------------

    def _perform(self, decision: de.Decision) -> None:
        match decision:
            case de.SetTimer():
                self.timers.pop(decision.name, None)
                if decision.after_s > 0:
                    self.timers[decision.name] = self.now + decision.after_s
            case de.AskPlanner():
                self.say("planner", self._plan(decision.number))
            case de.ShiftUp() | de.ShiftDown():
                if decision.worker in self.processes:
                    self.processes[decision.worker].orders.append(decision)
            case de.StartTask() | de.Dispatch() | de.EndTask() | de.LoadVersion() | de.Abort():
                process = self.processes.get(decision.worker)
                if process is not None:
                    # the engine takes new weights while a task still claims what it was given
                    is_overtaking = isinstance(decision, de.LoadVersion) and self.rng.random() < 0.5
                    (process.orders.appendleft if is_overtaking else process.orders.append)(decision)
            case de.StartNode():
                self._start_node(decision.node)
            case de.EndNode():
                self._end_node(decision.node)
                self.say(decision.node, ev.NodeLost(node=decision.node, reason=decision.reason))
            case de.StartWorker():
                assert decision.worker not in self.processes, decision
                process = Process(decision.worker, decision.role, decision.node, decision.version)
                process.slots = decision.slots
                self._require_free(process)
                if decision.role is Role.TRAIN:
                    process.version = self.durable.newest_checkpoint
                    process.trained = self.durable.checkpoints[process.version]
                process.orders.append(decision)
                self.processes[decision.worker] = process
            case de.FenceReplica():
                if decision.worker in self.processes:
                    self.kill(decision.worker)
            case de.EndStray():
                self.say(decision.node, ev.StraysReported(node=decision.node, strays=()))
            case de.CommitBatch():
                self.durable.commit_batch(decision.step, decision.ids, decision.dropped)
                self.say("", ev.BatchCommitted(step=decision.step))
            case de.CommitTrained():
                trained, dropped = self.durable.commit_trained(decision.step)
                self.say("", ev.BatchTrained(step=decision.step, num_trained=trained, num_dropped=dropped))
            case de.RecordStep():
                spans, began, ended = self.core.window(decision.step)
                assert began <= ended and all(start <= end for _, start, end in spans), (decision, spans)
                self.durable.record_step(decision.step)
                self.say("", ev.StepRecorded(step=decision.step))
            case de.CopyVersion():
                assert all(copy.node != decision.node for copy in self.copies), (decision, self.copies)
                in_use = any(process.node == decision.node for process in self.processes.values())
                assert not (decision.is_first and in_use), decision
                self.memories[decision.node].begin(decision.version, is_first=decision.is_first)
                self.copies.append(decision)
            case de.EndCopy():
                ended = [copy for copy in self.copies if copy.node == decision.node]
                self.copies = [copy for copy in self.copies if copy.node != decision.node]
                for copy in ended:
                    self.say(copy.node, ev.CopyFailed(number=copy.number, node=copy.node, reason=decision.reason))
            case de.SealVersion():
                memory = self.memories[decision.node]
                if decision.version > self.core.versions.current:  # the others follow at once
                    assert all(self.memories[n].holds(decision.version) for n in self.core.fleet.nodes), self.memories
                memory.seal(decision.version, piles_in(decision, self.plan.num_piles))
                self.say(decision.node, ev.VersionSealed(version=decision.version, node=decision.node))
            case de.EndRun():
                pass

    def _copy(self, copy: de.CopyVersion) -> None:
        source = self.memories.get(copy.source)
        has = source is not None and piles_in(copy, self.plan.num_piles) <= source.has(copy.version)
        if not has or self.rng.random() < self.odds.copy_fails:
            self.say(copy.node, ev.CopyFailed(number=copy.number, node=copy.node, reason="closed by peer"))
        else:
            self.memories[copy.node].write(copy.version, piles_in(copy, self.plan.num_piles))
            self.say(copy.node, ev.VersionCopied(number=copy.number, node=copy.node))

    # --- what a worker does ----------------------------------------------------------------------------------------

    def _act(self, process: Process) -> None:
        """Obey the oldest order, or go on with one of the sequences."""
        num_work = len(process.work)
        if process.orders and (not num_work or self.rng.random() < 0.5):
            self._obey(process, process.orders.popleft())
        else:
            work = process.work.pop(int(self.rng.random() * num_work))
            (self._generate if process.role is Role.ROLLOUT else self._judge)(process, work)

    def _obey(self, process: Process, order: de.Decision) -> None:
        match order:
            case de.StartWorker():
                is_there = process.role is not Role.ROLLOUT or self.memories[process.node].shows(order.version)
                if not is_there or self.rng.random() < self.odds.start_fails:
                    self.kill(process.name)
                else:
                    process.is_awake = not order.is_shared
                    ready = ev.WorkerReady(worker=process.name, version=process.version, is_asleep=order.is_shared)
                    self.say(process.name, ready)
            case de.ShiftDown():
                self._leave(process, order)
            case de.ShiftUp():
                process.is_awake = True
                self._require_free(process)
                if process.role is Role.ROLLOUT:
                    assert self.memories[process.node].shows(order.version), (order, process, self.memories)
                    process.version = order.version
                if self.rng.random() < self.odds.wake_fails:
                    self.say(process.name, ev.WakeFailed(worker=process.name, reason="no memory"))
                else:
                    self.say(process.name, ev.WorkerWoken(worker=process.name, version=order.version))
            case de.LoadVersion():
                assert self.memories[process.node].shows(order.version), (order, process, self.memories)
                for work in process.work if not order.keep_kv else ():
                    work.aborted_at = process.version if work.aborted_at is None else work.aborted_at
                if self.rng.random() < self.odds.update_fails:
                    failed = ev.UpdateFailed(worker=process.name, version=order.version, reason="shapes")
                    self.say(process.name, failed)
                else:
                    process.version = order.version
                    self.say(process.name, ev.VersionLoaded(worker=process.name, version=order.version))
            case de.StartTask():
                assert process.is_awake or order.stage in ("prompts", "checkpoint"), (order, process)
                if self.rng.random() < self.odds.says_started:
                    self.say(process.name, ev.TaskStarted(task=order.task))
                if self.rng.random() < self.odds.stage_fails:
                    self.say(process.name, ev.TaskEnded(task=order.task, ok=False, error="ValueError: no"))
                elif order.stage in ("rollout", "reward"):
                    process.tasks[order.task] = order.stage
                    process.oldest[order.task] = order.version if order.stage == "rollout" else 0
                else:
                    self._run_task(process, order)
                    self.say(process.name, ev.TaskEnded(task=order.task, ok=True))
            case de.Dispatch() if order.task in process.tasks:
                assert process.version >= process.oldest[order.task] and process.is_awake, (order, process)
                for seq_id, turn in zip(order.ids, order.turns, strict=True):
                    self._claim(process, order.task, seq_id, (self.durable.attempts, turn))
            case de.Abort():
                for work in process.work:
                    if work.id in order.ids and work.aborted_at is None:
                        work.aborted_at = process.version
            case de.EndTask() if order.task in process.tasks:
                assert order.task not in {w.task for w in process.work}, "nothing is left when a task is told to end"
                del process.tasks[order.task]
                self.say(process.name, ev.TaskEnded(task=order.task, ok=True))

    def _leave(self, process: Process, order: de.ShiftDown) -> None:
        """What runs goes back first, one by one, then its tasks end, and then it sleeps."""
        for work in process.work:
            work.aborted_at = process.version if work.aborted_at is None else work.aborted_at
        if process.work:
            process.orders.appendleft(order)
            return
        for task in process.tasks:
            self.say(process.name, ev.TaskEnded(task=task, ok=True))
        process.tasks.clear()
        process.is_awake = False
        self.say(process.name, ev.WorkerSlept(worker=process.name))

    def _require_free(self, process: Process) -> None:
        """Nobody else is awake on its slots."""
        for other in self.processes.values():
            is_there = other is not process and other.node == process.node and other.is_awake
            assert not is_there or set(other.slots).isdisjoint(process.slots), (process, other)

    def _plan(self, number: int) -> ev.PlanMade:
        """Anything; also what cannot be done."""
        num = len(self.core.blocks.all) + 1
        moves = {self.rng.randrange(num): self.rng.choice(tuple(Role)) for _ in range(self.rng.randrange(3))}
        return ev.PlanMade(number=number, moves=tuple(moves.items()), again_s=self.rng.choice((20.0, 1e4)))

    def _run_task(self, process: Process, task: de.StartTask) -> None:
        match task.stage:
            case "prompts":
                num = self.plan.sequences_per_step
                ids = tuple(sequence_id(task.step, i // self.group, i % self.group) for i in range(num))
                self.durable.admit(task.step, ids)
                self.say(process.name, ev.SequenceAdmitted(step=task.step, ids=ids))
            case "train":
                assert process.version == task.step - 1 and task.step in self.durable.batches, (task, process)
                process.version = task.step
                process.trained = (*process.trained, task.step)
            case "publish":
                assert process.version == task.step == self.core.versions.current + 1, (task, process)
                if process.name == "train-0":
                    self.memories[process.node].write(task.step, range(self.plan.num_piles))
            case "checkpoint":
                assert process.version == task.step, (task, process)
                rows = list(range(0 if self.plan.evaluate_freq else 1, task.step + 1))
                assert self.durable.recorded[: len(rows)] == rows, "a checkpoint has the rows up to its step"
                if process.name == "train-0":
                    self.durable.save(process.trained)
            case "evaluate":
                assert process.version == task.version, (task, process)

    def _claim(self, process: Process, task: str, seq_id: str, owner: tuple[int, int]) -> None:
        """What is there already (put by a task that died before its report) is only reported."""
        row = self.durable.claim(seq_id, owner)
        if row.state == SERVED[process.role]:
            process.work.append(Work(task, seq_id, owner, len(row.segments)))
        elif process.role is Role.ROLLOUT:
            segment = SegmentInfo(
                id=seq_id, idx=len(row.segments), num_tokens=0, version=process.version, finish=Finish.STOP
            )
            self.say(process.name, ev.SegmentClosed(task=task, segments=(segment,)))
        else:
            verdict = VerdictInfo(id=seq_id, score=row.score, failure=row.failure)
            self.say(process.name, ev.VerdictGiven(task=task, verdicts=(verdict,)))

    def _generate(self, process: Process, work: Work) -> None:
        """Put the next segment, or several, then report."""
        segments = [self._next_segment(process, work)]
        while segments[-1].finish is Finish.FLUSH and self.rng.random() < 0.5:
            segments.append(self._next_segment(process, work))
        if segments[-1].finish is Finish.FLUSH:
            process.work.append(work)
        self.say(process.name, ev.SegmentClosed(task=work.task, segments=tuple(segments)))

    def _next_segment(self, process: Process, work: Work) -> SegmentInfo:
        draw = self.rng.random()
        version = process.version if work.aborted_at is None else work.aborted_at
        if work.aborted_at is not None:
            finish = Finish.ABORT
        elif draw < self.odds.flush and not self.is_strict:
            finish = Finish.FLUSH
        elif draw < self.odds.flush + self.odds.abort:
            finish = Finish.ABORT
        else:
            finish = Finish.STOP if draw < 0.9 else Finish.LENGTH
        num_tokens = 1 + int(draw * 100) % 3
        if finish is Finish.ABORT:
            num_tokens = 0 if self.is_strict else num_tokens - 1
        segment = SegmentInfo(id=work.id, idx=work.idx, num_tokens=num_tokens, version=version, finish=finish)
        if num_tokens:
            assert version >= self.plan.oldest_version(self.durable.rows[work.id].step), (segment, "is too old")
            self.durable.put_segment(segment, work.owner)
            work.idx += 1
        return segment

    def _judge(self, process: Process, work: Work) -> None:
        draw = self.rng.random()
        if draw < self.odds.abort or work.aborted_at is not None:
            back = SegmentInfo(id=work.id, idx=work.idx, num_tokens=0, version=process.version, finish=Finish.ABORT)
            self.say(process.name, ev.SegmentClosed(task=work.task, segments=(back,)))
            return
        failed = draw < self.odds.abort + self.odds.judge_fails
        verdict = VerdictInfo(id=work.id, score=None if failed else draw, failure="timeout" if failed else "")
        self.durable.put_verdict(verdict, work.owner)
        self.say(process.name, ev.VerdictGiven(task=work.task, verdicts=(verdict,)))
