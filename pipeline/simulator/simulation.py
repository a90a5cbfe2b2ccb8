"""The virtual cluster: clock, blocks of GPUs, queues, steps and training. Mechanism only; a mode says what goes where.

A step: `num_sequences` are admitted, rolled out, judged as they finish, and trained together when all are judged. Step
k may be admitted when version k - staleness is published, and is trained at version k, so no token is more than
`staleness` versions old. Events of one time are taken in the order in which they were made: the same seed gives the
same result, byte for byte.
"""

import heapq
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Listed
from functools import partial
from typing import Protocol

import numpy as np

from pipeline.core.errors import RunError
from pipeline.core.events import INFERENCE, Role
from pipeline.core.scheduler import Scheduler, WaitingQueue
from pipeline.simulator.cluster import Block, LostNode, SlowGpu, StepTimes, Usage, make_blocks
from pipeline.simulator.engine import Replica, Sequence
from pipeline.simulator.setup import Setup

NUM_AHEAD = 3
"""Steps admitted beyond the last one counted, so that the end looks like the middle."""
_REMAINING = 0.6
"""Of a mean length: what a running sequence has before it, on average (assumed)."""


class Mode(Protocol):
    """Who gets which GPUs when. Called back by the simulation; acts through `bind` and `train`."""

    staleness: int
    judges_together: bool
    """Responses go to the judge when all of their step are there, not one by one."""

    def begin(self, sim: "Simulation") -> None:
        """At time 0: bind the blocks, name those that train (`sim.train_blocks`)."""

    def may_admit(self, sim: "Simulation", step: int) -> bool:
        """Beyond the staleness bound."""

    def on_admitted(self, sim: "Simulation", step: int) -> None: ...

    def on_rolled_out(self, sim: "Simulation", step: int) -> None: ...

    def on_scored(self, sim: "Simulation", step: int) -> None:
        """All of the step is judged; if it is its turn, `sim.train()` was called already."""

    def on_trained(self, sim: "Simulation", step: int) -> None: ...


class Simulation:
    def __init__(
        self,
        setup: Setup,
        mode: Mode,
        *,
        seed: int,
        num_steps: int,
        scenarios: Listed[LostNode | SlowGpu] = (),
        scheduler: Callable[[float, float], Scheduler[Sequence, Replica]] = Scheduler,
        is_traced: bool = False,
    ) -> None:
        """`scheduler` makes that of a role from the prefill that may wait at a replica, in seconds, and the tokens that
        a running sequence has before it."""
        self.setup, self.mode, self.seed, self.num_steps = setup, mode, seed, num_steps
        self.now, self.version = 0.0, 0
        self.blocks = make_blocks(setup, [s for s in scenarios if isinstance(s, SlowGpu)])
        self.train_blocks: list[Block] = []
        self.queues: dict[Role, WaitingQueue[Sequence]] = {role: WaitingQueue() for role in INFERENCE}
        self.replicas: dict[Role, list[Replica]] = {role: [] for role in INFERENCE}
        self.steps: list[StepTimes] = []
        self.training: int | None = None
        """The step that trains, or waits for its GPUs."""
        self.train_end_s: float | None = None
        """When the running training ends; None: none runs."""
        self.usage = Usage(is_traced=is_traced)
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = itertools.count()
        self._ids, self._indices = itertools.count(), itertools.count()
        self._schedulers = {
            role: scheduler(setup.max_prefill_backlog_s, _REMAINING * setup.workload.lengths(role).mean)
            for role in INFERENCE
        }
        self._ask_again = {role: partial(self._fill_at, role) for role in INFERENCE}
        self._is_begun = False
        self._train_alarm = 0
        self.held_back: list[Sequence] = []
        """Responses that wait for the rest of their step."""
        self.finishes: list[tuple[Role, int, float]] | None = None
        """Role, step and length of what ended since an observer looked; None: there is none."""
        self._settling: set[Role] = set()
        self._uneven: set[Role] = set()  # replicas came, and the queue has not been empty since
        for scenario in scenarios:
            if isinstance(scenario, LostNode):
                self.at(scenario.at_s, self._lose, scenario)

    def run_until(self, version: int) -> None:
        """Go on until the version is published. Raises RunError if nothing happens any more before that."""
        if not self._is_begun:
            self._is_begun = True
            self.mode.begin(self)
            self.admit()
        while self.version < version:
            if not self._events:
                raise RunError(f"nothing goes on after {self.now:.0f} s: {self._where()}")
            self.now, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)

    # --- what modes use

    def at(self, when: float, call: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._order), call, arguments))

    def bind(self, block: Block, role: Role, *, at_once: bool = False) -> None:
        """Down: what runs there goes back to the front of its queue. Up: after the time of a shift. GPUs of a running
        training are locked: ValueError."""
        if self.train_end_s is not None and block in self.train_blocks:
            raise ValueError(f"block {block.index} trains until {self.train_end_s:.0f} s")
        old, block.role = block.role, role
        if block.is_lost:
            return
        for replica in block.replicas:
            self.queues[replica.role].put(self._end(replica))
        block.replicas = []
        delay = 0.0 if at_once else self.setup.shift_s(old, role, self.num_train_gpus)
        if old is not role and not at_once:
            self.usage.note_shift(self.now, block, old, role, delay)
        self._wake(block, delay)
        if old in INFERENCE:
            self._fill(old)

    @property
    def num_train_gpus(self) -> int:
        return max(1, len(self.train_blocks)) * self.setup.block

    @property
    def is_over(self) -> bool:
        """Nothing is to happen any more, but what a mode asks for."""
        return not self._events

    def train(self) -> None:
        """Train the next step as soon as it is judged and all training blocks are there."""
        if self.training is None and self.is_scored(self.version):
            self.training = self.version
            for block in self.train_blocks:
                if block.role is not Role.TRAIN:
                    self.bind(block, Role.TRAIN)
        self._start_training()

    def is_rolled_out(self, step: int) -> bool:
        return step < len(self.steps) and self.steps[step].rolled_out_s is not None

    def is_scored(self, step: int) -> bool:
        return step < len(self.steps) and self.steps[step].scored_s is not None

    # --- admission and dispatch

    def admit(self) -> None:
        """All steps that staleness and mode allow. Asked again when a rollout ends or a version is published; a mode
        that waits for a time asks itself."""
        while (
            len(self.steps) < self.num_steps + NUM_AHEAD
            and self.version >= len(self.steps) - self.mode.staleness
            and self.mode.may_admit(self, len(self.steps))
        ):
            step, work = len(self.steps), self.setup.workload
            rng = np.random.default_rng([self.seed, step])
            responses = work.rollout.draw(rng, work.num_prompts, work.num_each, work.correlation)
            verdicts = work.verdict.draw(rng, work.num_prompts, work.num_each)
            self.steps.append(StepTimes.of(step, self.now, responses, work.num_sequences, work.prompt_tokens))
            self.queues[Role.ROLLOUT].put(
                Sequence(id=next(self._ids), step=step, group=group, num_response=response, num_verdict=verdict)
                for group in range(work.num_prompts)
                for response, verdict in zip(responses[group].tolist(), verdicts[group].tolist(), strict=True)
            )
            self.mode.on_admitted(self, step)
            self._fill(Role.ROLLOUT)

    def _fill(self, role: Role) -> None:
        queue = self.queues[role]
        if queue.heap:
            changed: dict[int, Replica] = {}
            for sequence, replica in self._schedulers[role].dispatches(queue, self.now, self._ask_again[role]):
                replica.add(sequence, self.now)
                changed[replica.index] = replica
            for replica in changed.values():
                self._retime(replica)
        if role in self._uneven and not queue.heap:
            self._uneven.discard(role)
            self._migrate(role)
            self._fill(role)

    def _fill_at(self, role: Role, when: float) -> None:
        self.at(when, self._fill, role)

    # --- engines

    def _retime(self, replica: Replica) -> None:
        replica.alarm += 1
        when = replica.next_event(self.now)
        if when is not None:
            self.at(when, self._progress, replica, replica.alarm)

    def _progress(self, replica: Replica, alarm: int) -> None:
        if replica.is_dead or replica.alarm != alarm:
            return
        self._advance(replica)
        done, out = replica.finished(), replica.preempted()
        self.queues[replica.role].put(out)
        self._schedulers[replica.role].offer(replica)  # first: the end of a response may admit a step
        if self.finishes is not None:
            self.finishes += [(replica.role, s.step, replica.length(s)) for s in done]
        for sequence in done:
            self._finish(replica.role, sequence)
        if replica.is_dead:  # its GPUs were taken for what follows the step's last sequence
            return
        self._retime(replica)
        for role in INFERENCE:
            self._fill(role)

    def _finish(self, role: Role, sequence: Sequence) -> None:
        step = self.steps[sequence.step]
        if role is Role.ROLLOUT:
            is_last = step.count_rolled_out(self.now)
            self.held_back.append(sequence)
            if is_last or not self.mode.judges_together:
                self._hand_over(sequence.step)
            self.admit()
            if is_last:
                self.mode.on_rolled_out(self, sequence.step)
        elif step.count_scored(self.now):
            self.admit()
            self.train()
            self.mode.on_scored(self, sequence.step)

    def _hand_over(self, step: int) -> None:
        """Its finished responses to the judge."""
        self.queues[Role.REWARD].put(s for s in self.held_back if s.step == step)
        self.held_back = [s for s in self.held_back if s.step != step]

    def _advance(self, replica: Replica) -> None:
        replica.advance(self.now)
        self.usage.note_work(replica)

    def _end(self, replica: Replica) -> list[Sequence]:
        self._advance(replica)
        out = replica.abort(self.now)
        replica.is_dead = True
        self._schedulers[replica.role].withdraw(replica)
        self.replicas[replica.role].remove(replica)
        self.usage.add(replica)
        return out

    # --- blocks

    def _wake(self, block: Block, delay: float) -> None:
        block.ready_at = self.now + delay
        self.usage.note_binding(self.now, block, block.role, block.ready_at)
        self.at(block.ready_at, self._up, block, block.role, block.ready_at)

    def _up(self, block: Block, role: Role, when: float) -> None:
        if block.is_lost or block.role is not role or block.ready_at != when:
            return
        if role is Role.TRAIN:
            self._start_training()
            return
        cost, work = self.setup.role(role), self.setup.workload
        for _ in range(self.setup.block // cost.num_gpus):
            replica = Replica(
                index=next(self._indices),
                role=role,
                block=block.index,
                num_gpus=cost.num_gpus,
                cost=cost.iteration.slower(block.slowness) if block.slowness != 1.0 else cost.iteration,
                kv_tokens=cost.kv_tokens,
                max_num_seqs=self.setup.max_num_seqs,
                prefix_tokens=work.prefix_tokens(role),
                shares_prefix=work.shares_prefix,
                at=self.now,
                noted_at=self.now,
            )
            block.replicas.append(replica)
            self.replicas[role].append(replica)
            self._schedulers[role].offer(replica)
        if role not in self._settling:
            self._settling.add(role)
            self.at(self.now, self._settle, role)

    def _settle(self, role: Role) -> None:
        """After all that come up at one time: what waits goes to them, and then some leave crowded replicas."""
        self._settling.discard(role)
        self._uneven.add(role)
        self._fill(role)

    def _migrate(self, role: Role) -> None:
        for replica in self.replicas[role]:
            self._advance(replica)
        plan = self._schedulers[role].migrations(self.replicas[role], self.now)
        for replica, num in plan:
            out = replica.abort(self.now, num)
            self.usage.num_migrated += len(out)
            self.queues[role].put(out)
            self._retime(replica)
            self._schedulers[role].offer(replica)
        if plan:  # what had to wait for prefill may follow
            self.at(self.now + self.setup.max_prefill_backlog_s, self._settle, role)

    def _lose(self, scenario: LostNode) -> None:
        for block in self.blocks:
            if block.node != scenario.node:
                continue
            block.is_lost = True
            self.usage.note_binding(self.now, block, None, self.now)
            for replica in block.replicas:
                out = self._end(replica)
                unsaved = self.setup.flush_s / replica.cost.iteration_s(max(1, len(out)), 0) if out else 0.0
                for sequence in out:
                    sequence.generated = max(0.0, sequence.generated - unsaved)
                self.queues[replica.role].put(out)
            block.replicas = []
            if scenario.back_after_s is not None:
                self.at(self.now + scenario.back_after_s, self._return, block)
        if self.training is not None and any(block.is_lost for block in self.train_blocks):
            if self.train_end_s is not None:
                self.usage.note_cut(self.train_end_s - self.now, self.num_train_gpus)
            self.train_end_s = None  # it starts again when its GPUs are there
            self._train_alarm += 1
        if scenario.back_after_s is None:
            self.train_blocks = [block for block in self.train_blocks if not block.is_lost]
            self.train()
        for role in INFERENCE:
            self._fill(role)

    def _return(self, block: Block) -> None:
        block.is_lost = False
        if block.role is not None:
            self._wake(block, self.setup.node_start_s)

    # --- training

    def _start_training(self) -> None:
        blocks = self.train_blocks
        if self.training is None or self.train_end_s is not None or not blocks:
            return
        if not all(b.role is Role.TRAIN and not b.is_lost and b.ready_at <= self.now for b in blocks):
            return
        step, work = self.steps[self.training], self.setup.workload
        seconds = self.setup.train.step_s(
            num_tokens=step.train_tokens, mean_context=step.mean_context, num_gpus=self.num_train_gpus
        )
        seconds *= max(block.slowness for block in blocks)
        step.train_started_s = self.now
        self.train_end_s = self.now + seconds
        self._train_alarm += 1
        self.usage.note_training(self.now, seconds, self.num_train_gpus, work.num_sequences)
        self.at(self.train_end_s, self._trained, self.training, self._train_alarm)

    def _trained(self, step: int, alarm: int) -> None:
        if alarm != self._train_alarm:
            return
        self.training = self.train_end_s = None
        self.version = step + 1
        self.steps[step].trained_s = self.now
        for replica in self.replicas[Role.ROLLOUT]:
            self._advance(replica)
            replica.reload(
                self.now, self.setup.rollout.update_s * self.setup.shift_scale, self.setup.recomputes_on_update
            )
            self._retime(replica)
        self.admit()
        self.mode.on_trained(self, step)
        self.train()

    def _where(self) -> str:
        waiting = {role.value: len(queue) for role, queue in self.queues.items()}
        bound = {role.value: sum(b.role is role and not b.is_lost for b in self.blocks) for role in Role}
        return f"version {self.version}, waiting {waiting}, blocks {bound}"
