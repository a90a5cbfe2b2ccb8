"""Gives waiting sequences to the replicas of one role, and moves some when others come up: the scheduler, performed."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipeline.core.decisions import Abort, Dispatch
from pipeline.core.events import Role
from pipeline.core.fleet import Capacity
from pipeline.core.iteration import IterationCost
from pipeline.core.outbox import Outbox
from pipeline.core.scheduler import HEADROOM_TOKENS, CountedReplica, Scheduler, WaitingQueue
from pipeline.core.sequences import RUNNING, WAITING, Sequence, Sequences
from pipeline.core.tasks import Tasks
from pipeline.core.worker import Worker

MAX_BACKLOG_S = 1.0
"""Prefill stops decoding: so long may a replica be taken from those who run there (assumed)."""
_SHARE = 8
"""Of the longest response or verdict, what is kept free for each that runs: an eighth (assumed)."""


def due(
    sequences: Sequences, role: Role, oldest: Mapping[int, int], current: int
) -> tuple[WaitingQueue[Sequence], set[int]]:
    """Who may be dispatched now, and the steps of these. `oldest`: of the steps that are served, the least version that
    a token of theirs may have. A policy of version `current` rolls out only what may have that, and has no newer one.

    Mostly that is all who wait: then nothing is looked at but the queue as it stands.
    """
    place = WAITING[role]
    num = {step: sequences.num_of(step, place) for step in oldest}
    if not any(num.values()):
        return WaitingQueue(), set()
    is_rollout = role is Role.ROLLOUT
    is_free = not is_rollout or max(sequences.newest_version, *oldest.values()) <= current
    if is_free and sum(num.values()) == sequences.num_at(place):
        return sequences.queue(role), {step for step in num if num[step]}
    waiting = [seq for i in sequences.waiting[place] if (seq := sequences[i]).step in oldest]
    if is_rollout:
        waiting = [seq for seq in waiting if max(oldest[seq.step], seq.max_version or 0) <= current]
    return WaitingQueue(waiting), {seq.step for seq in waiting}


class Server(NamedTuple):
    """A replica that can be given sequences now: by step the task that takes them. Without any it is about to come up,
    and what it is to have then is kept for it."""

    worker: Worker
    tasks: Mapping[int, str]


@dataclass(slots=True, kw_only=True)
class _Replica(CountedReplica):
    """As the scheduler sees it. What it holds in its cache is what its sequences have, as far as that is known."""

    server: Server

    def prompt_tokens(self, sequence: Any, /) -> float:
        found: float = sequence.context - sequence.generated
        return found

    def add(self, sequence: Sequence, now: float, prefill_s: float) -> None:
        self.num_running += 1
        self.context += sequence.context
        self.held = self.context
        self.prefilled_at = max(now, self.prefilled_at) + sequence.context * prefill_s


class Feeder:
    """Of one inference role. `may_move`: a sequence may go on elsewhere without need; a judge's request begins anew
    when it is moved, so of those only a shift takes any away."""

    def __init__(
        self, role: Role, capacity: Capacity, sequences: Sequences, tasks: Tasks, out: Outbox, *, may_move: bool
    ) -> None:
        self.role = role
        self._capacity, self._sequences, self._tasks, self._out = capacity, sequences, tasks, out
        self._may_move = may_move
        self._headroom_tokens = min(HEADROOM_TOKENS, capacity.longest / _SHARE)
        self._prefilled_at: dict[tuple[str, int], float] = {}  # by worker and life
        self._moving: dict[str, int] = {}  # id and turn of those that were aborted to move
        self.is_uneven = False
        self._prefill_s = 0.0
        self._scheduler: Scheduler[Sequence, _Replica] = Scheduler(headroom_tokens=self._headroom_tokens)

    def measure(self, cost: IterationCost, rest_tokens: float) -> None:
        """What is known of its replicas now."""
        self._prefill_s = cost.prefill_s
        self._scheduler = Scheduler(MAX_BACKLOG_S, rest_tokens, cost, self._headroom_tokens)

    def came_up(self) -> None:
        """A replica did: others may be crowded."""
        self.is_uneven = self._may_move

    def feed(self, queue: WaitingQueue[Sequence], servers: Iterable[Server], now: float) -> None:
        """What is dispatched leaves the queue."""
        replicas = [self._view(server) for server in servers]
        kept = self._dispatch(queue, replicas, now) if queue.heap else []
        if self.is_uneven and replicas and not queue.heap:
            self._even_out([replica for replica in replicas if replica.server.tasks], now)
        queue.put(kept)

    def _view(self, server: Server) -> _Replica:
        worker = server.worker
        tasks = [task.id for task in self._tasks.of(worker.name)]
        context = sum(self._sequences.context(task) for task in tasks)
        return _Replica(
            server=server,
            index=worker.index,
            num_running=sum(self._sequences.num_running(task) for task in tasks),
            max_num_seqs=self._capacity.max_num_seqs,
            context=context,
            held=context,
            kv_tokens=worker.kv_tokens or math.inf,
            prefilled_at=self._prefilled_at.get((worker.name, worker.life), -math.inf),
        )

    def _dispatch(self, queue: WaitingQueue[Sequence], replicas: list[_Replica], now: float) -> list[Sequence]:
        """Returns those that have a place kept where they cannot be given yet."""
        for replica in replicas:
            self._scheduler.offer(replica)
        chosen: dict[tuple[str, str], list[Sequence]] = {}
        kept: list[Sequence] = []
        for sequence, replica in self._scheduler.dispatches(queue, now, self._ask_again):
            replica.add(sequence, now, self._prefill_s)
            worker = replica.server.worker
            if not replica.server.tasks:
                kept.append(sequence)
                continue
            chosen.setdefault((replica.server.tasks[sequence.step], worker.name), []).append(sequence)
            self._prefilled_at[worker.name, worker.life] = replica.prefilled_at
        for replica in replicas:
            self._scheduler.withdraw(replica)
        for (task, worker_name), sequences in chosen.items():
            ids = tuple(seq.id for seq in sequences)
            turns = tuple(self._sequences.dispatch(i, task) for i in ids)
            self._out.emit(Dispatch(task=task, worker=worker_name, ids=ids, turns=turns))
        return kept

    def _ask_again(self, when: float) -> None:
        self._out.limit_to(f"feed:{self.role}", when - self._out.now, "a prefill is done")

    def _even_out(self, replicas: list[_Replica], now: float) -> None:
        """Once nothing is to be gained any more, that was it. What is on its way is waited for."""
        self._moving = {i: turn for i, turn in self._moving.items() if self._is_running(i, turn)}
        if self._moving:
            return
        plan = self._scheduler.migrations(replicas, now)
        self.is_uneven = bool(plan)
        for replica, num in plan:
            tasks = [task.id for task in self._tasks.of(replica.server.worker.name)]
            running = [seq for task in tasks for seq in self._sequences.running(task)]
            chosen = sorted(running, key=lambda seq: (seq.generated, seq.id))[:num]
            self._moving |= {seq.id: seq.turn for seq in chosen}
            for task in tasks:
                if ids := tuple(seq.id for seq in chosen if seq.task == task):
                    self._out.emit(Abort(task=task, worker=replica.server.worker.name, ids=ids))

    def _is_running(self, seq_id: str, turn: int) -> bool:
        if seq_id not in self._sequences:
            return False
        seq = self._sequences[seq_id]
        return seq.place is RUNNING[self.role] and seq.turn == turn
