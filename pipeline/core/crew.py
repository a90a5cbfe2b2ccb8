"""The nodes and workers of a run: who is started where, whose memory holds what, and what follows from an end.

A lost node is started again, and what ran there is bound elsewhere at once where slots are free. The ranks of the
training group live and die together. A node that is lost too often is given up; the run goes on while `min_nodes` are
left, if need be with fewer replicas.
"""

from collections.abc import Callable

from pipeline.core import events as ev
from pipeline.core.blocks import Blocks
from pipeline.core.decisions import (
    CopyVersion,
    EndCopy,
    EndNode,
    EndStray,
    FenceReplica,
    LoadVersion,
    StartNode,
    StartWorker,
)
from pipeline.core.events import Role
from pipeline.core.fleet import Fleet
from pipeline.core.memories import Memories
from pipeline.core.modes import shared_roles
from pipeline.core.outbox import Outbox
from pipeline.core.shifts import Shifts
from pipeline.core.steps import RunPlan, Steps
from pipeline.core.tasks import Tasks
from pipeline.core.versions import Versions
from pipeline.core.worker import Worker


class Crew:
    """`release(worker)`: what it worked on waits again; `go_back(version)`: the only memory there is shows that."""

    def __init__(
        self,
        plan: RunPlan,
        out: Outbox,
        steps: Steps,
        tasks: Tasks,
        release: Callable[[Worker], None],
        go_back: Callable[[int], None],
    ) -> None:
        self.fleet = Fleet(plan.replicas, shared_roles(plan.mode, plan.replicas))
        self.blocks = Blocks(self.fleet, plan.block_slots)
        self.versions = Versions()
        self.memories = Memories(plan.num_piles)
        self._plan, self._out, self._steps, self._tasks = plan, out, steps, tasks
        self._release, self._go_back = release, go_back
        self.shifts = Shifts(self.fleet, self.blocks, self.versions, tasks, out, self._start_all)
        self.given_up: set[str] = set()
        self._num_starts = 0

    def nodes(self) -> dict[str, str]:
        """How each node stands that was ever there, in a word."""
        there = {node: "joining" if memory.is_cold else "ready" for node, memory in self.memories.items()}
        away = dict.fromkeys(self.given_up, "given up") | dict.fromkeys(self._out.limited("node"), "starting")
        return dict(sorted((away | there).items()))

    def progress(self) -> None:
        """The run got further: what failed before this does not count any more."""
        self.fleet.progress()
        self.memories.progress()

    # --- nodes -----------------------------------------------------------------------------------------------------

    def expect_nodes(self) -> None:
        """They are being started; the first start of each may fail."""
        self._out.limit("nodes", "engine_start_s", times=2)

    def join(self, event: ev.NodeJoined) -> None:
        if event.node in self.memories:
            return
        self._out.clear(f"node:{event.node}")
        self.given_up.discard(event.node)
        if not self.memories:
            self._go_back(event.version)
            self.versions.reset(event.version)
        self.memories.join(event.node, event.num_slots, event.version, event.piles)
        if self._are_all_there:
            self._out.clear("nodes")
            self._require_current()

    def lose(self, node: str, reason: str, *, is_gone: bool = False) -> None:
        """Nothing runs on the node any more, and its memory is gone."""
        for worker in self.fleet.lose(node):
            if worker.die():
                self._out.clear(f"worker:{worker.name}")
                self._release(worker)
        for name in (f"node:{node}", f"copy:{node}", f"seal:{node}", f"stray:{node}"):
            self._out.clear(name)
        for receiver in self.memories.lose(node):
            self._out.clear(f"copy:{receiver}")
        times = self.fleet.losses[node]
        if is_gone:
            self._give_up(node, f"node {node} is gone: {reason}", "requeued")
        elif times > self._plan.restarts:
            self._give_up(node, f"node {node} was lost {times} times without progress: {reason}", "failed")
        else:
            self._start_node(node)
        if self._out.ended:
            return
        if not self.memories.warm():
            self._start_cold_anew()
        elif (written := self.versions.written) and self.memories.is_lost(written):
            self.versions.lose(written)
            self._steps.unpublish(written)
        self._regroup()

    def _start_node(self, node: str) -> None:
        self._out.emit(StartNode(node=node))
        self._out.limit(f"node:{node}", "engine_start_s")
        if self._out.limited("nodes"):
            self.expect_nodes()

    def _end_node(self, node: str, reason: str) -> None:
        """Its loss is known when nothing is left of it."""
        self.memories[node].is_ending = True
        self._out.emit(EndNode(node=node, reason=reason))
        self._out.limit(f"node:{node}", "engine_start_s")

    def _start_cold_anew(self) -> None:
        """No memory shows the current version, and what was being copied is not whole: these begin anew, too."""
        for node in list(self.memories):
            for name in (f"copy:{node}", f"seal:{node}"):
                self._out.clear(name)
            del self.memories[node]
            self._start_node(node)

    def _give_up(self, node: str, reason: str, end: str) -> None:
        self.given_up.add(node)
        self.fleet.abandon(node)
        if self._plan.num_nodes - len(self.given_up) < self._plan.min_nodes:
            self._out.end(end, reason)
        elif self._are_all_there:
            self._out.clear("nodes")
            self._require_current()

    @property
    def _are_all_there(self) -> bool:
        """All that are not given up."""
        return len(self.memories) == self._plan.num_nodes - len(self.given_up)

    def require_publishable(self, version: int) -> None:
        """The trainer holds `version`, a checkpoint's. If all memories have begun anew with an older one, because they
        were filled while that was saved, the versions in between can come from nowhere: they begin anew once more."""
        if version > self.versions.current + 1:
            shows = f"its memory shows version {self.versions.current}, and the newest checkpoint is {version}"
            self._end_nodes(shows)

    def _require_current(self) -> None:
        """Tensors of the current version that nobody holds any more come from nowhere: all memories begin anew."""
        if self.memories.is_lost(self.versions.current):
            self._end_nodes(f"no memory holds all of version {self.versions.current} any more")

    def _end_nodes(self, reason: str) -> None:
        for node, memory in self.memories.items():
            if not memory.is_ending:
                self._end_node(node, reason)

    # --- memories --------------------------------------------------------------------------------------------------

    def write(self, version: int) -> None:
        """The training group has written the version: each rank its part, into the memory of its node, or the first
        rank all of it."""
        self.versions.write(version)
        ranks = sorted((w for w in self.fleet.workers.values() if w.role is Role.TRAIN), key=lambda w: w.index)
        nodes = list(dict.fromkeys(rank.node for rank in ranks))
        self.memories.write(nodes if self._plan.writes_shares else nodes[:1], version)

    def take(self, event: ev.VersionCopied | ev.CopyFailed | ev.VersionSealed) -> None:
        node = event.node
        match event:
            case ev.VersionCopied():
                if self.memories.copied(node, event.number):
                    self._out.clear(f"copy:{node}")
            case ev.CopyFailed():
                if self.memories.failed(node, event.number):
                    self._out.clear(f"copy:{node}")
                    if (times := self.memories[node].num_failed) > self._plan.restarts:
                        self._end_node(node, f"{times} copies of weights into its memory failed: {event.reason}")
            case ev.VersionSealed():
                if self.memories.sealed(node, event.version):
                    self._out.clear(f"seal:{node}")

    def spread(self) -> None:
        """Have versions copied and sealed as far as it goes now; nodes whose memory is warm are given workers."""
        written = self.versions.written
        if written is not None and self.memories.is_shown(written):
            self.versions.seal(written)
        if warm := list(self.memories.warm_up(self.versions.current)):
            for node in warm:
                self.fleet.join(node, self.memories[node].num_slots)
            self._regroup()
        for order in self.memories.orders(self.versions):
            self._out.emit(order)
            if isinstance(order, CopyVersion):
                self._out.limit(f"copy:{order.node}", "publish_s", times=2)
            else:
                self._out.limit(f"seal:{order.node}", "stage_s")

    # --- workers ---------------------------------------------------------------------------------------------------

    def bury(self, worker: Worker, reason: str) -> None:
        """It has died: a new process takes its place."""
        if not worker.die():
            return
        self._out.clear(f"worker:{worker.name}")
        self._release(worker)
        if worker.is_dismissed and worker.role is not Role.TRAIN:
            del self.fleet.workers[worker.name]  # others have its slots now
        elif not worker.is_dismissed:
            worker.deaths += 1
            if worker.deaths > self._plan.restarts:
                cause = f"{worker.fault}\n{reason}" if worker.fault else reason
                times = f"died {worker.deaths} times without progress"
                self._out.end("failed", f"{worker.name} on {worker.node} {times}: {cause}")
        self._regroup()

    def fence(self, worker: Worker) -> None:
        """It is killed. Its own limit holds until its death is known, those of its tasks do no more."""
        for task in self._tasks.of(worker.name):
            self._out.clear(f"task:{task.id}")
        self._out.emit(FenceReplica(worker=worker.name, reason=worker.fault))
        self._out.limit(f"worker:{worker.name}", "engine_start_s")

    def end_strays(self, event: ev.StraysReported) -> None:
        """What nobody planned is ended; what is to have its name or its slots waits for that."""
        node, limit = event.node, f"stray:{event.node}"
        if node not in self.memories:
            return
        before = self.fleet.strays.pop(node, ())
        self._out.clear(limit)
        if event.strays:
            self.fleet.strays[node] = event.strays
            self._out.limit(limit, "engine_start_s")
        for stray in event.strays:
            if stray not in before:
                reason = f"nobody ordered it on {node}, slots {list(stray.slots)}"
                self._out.emit(EndStray(worker=stray.worker, node=node, reason=reason))
        self._regroup()

    def load_versions(self, load: Callable[[str], int]) -> None:
        """Rollout replicas that serve an older version than the sealed one take that. Those with nothing to do
        (`load(worker)` sequences) do it at once; of the others one after the other, so that the rest goes on."""
        version = self.versions.current
        for worker in self.fleet.ready(Role.ROLLOUT):
            if worker.version < version and (
                self._plan.keep_kv or not load(worker.name) or not self.fleet.loading(Role.ROLLOUT)
            ):
                worker.ask(version)
                self._out.emit(LoadVersion(worker=worker.name, version=version, keep_kv=self._plan.keep_kv))
                self._out.limit(f"worker:{worker.name}", "stage_s")

    def _regroup(self) -> None:
        """Bind what has no place, start what is down, and end the ranks of a group that is not whole any more."""
        if self._out.ended:
            return
        for worker in self.fleet.broken_group():
            worker.dismiss("another rank of the training group has ended")
            self.fence(worker)
        self.fleet.place(is_short=bool(self.given_up))
        self.blocks.refresh()
        self.shifts.start_due()
        if self._are_all_there and len(self.fleet.nodes) == len(self.memories):
            self._make_room()

    def _make_room(self) -> None:
        """All slots that there will be are there."""
        missing = self.fleet.missing(essential=bool(self.given_up))
        is_yielding = any(w.is_dismissed and not w.is_down for w in self.fleet.workers.values())
        if not missing or is_yielding or self.fleet.strays:
            return
        yielding = self.fleet.yielding(missing[0]) if self.given_up else []
        if not yielding:
            self._out.end("failed", f"no node has slots left for {', '.join(missing)}; free: {self.fleet.free()}")
            return
        for worker in yielding:
            if worker.dismiss(f"its slots are needed for {missing[0]}"):
                self.fence(worker)
            elif worker.is_down:
                del self.fleet.workers[worker.name]
        if all(worker.is_down for worker in yielding):
            self._regroup()

    def _start_all(self, workers: list[Worker]) -> None:
        self._num_starts += 1
        for worker in workers:
            self._start(worker)

    def _start(self, worker: Worker) -> None:
        version = self.versions.current
        worker.start(version, self._num_starts)
        self._out.emit(
            StartWorker(
                worker=worker.name,
                role=worker.role,
                index=worker.index,
                life=worker.life,
                node=worker.node,
                slots=worker.slots,
                version=version,
                is_shared=worker.is_shared,
            )
        )
        self._out.limit(f"worker:{worker.name}", "engine_start_s")

    # --- limits ----------------------------------------------------------------------------------------------------

    def expire(self, limit: str, reason: str) -> None:
        """A limit ran out. Where somebody can be started afresh for it, that is done; else the run cannot go on."""
        kind, _, name = limit.partition(":")
        worker = self.fleet.workers.get(self._tasks[name].worker if kind == "task" else name)
        if kind == "node":
            self.lose(name, reason)
        elif kind in ("seal", "stray"):
            self._end_node(name, reason)
        elif kind == "copy":
            self._expire_copy(name, reason)
        elif worker is not None and worker.expire(reason):
            self.fence(worker)
        elif kind != "nodes" or len(self.fleet.nodes) < self._plan.min_nodes or self.fleet.missing(essential=True):
            self._out.end("failed", reason)

    def _expire_copy(self, node: str, reason: str) -> None:
        memory = self.memories[node]
        if memory.is_copy_ending:
            self._end_node(node, reason)
            return
        memory.is_copy_ending = True
        self._out.emit(EndCopy(node=node, reason=reason))
        self._out.limit(f"copy:{node}", "engine_start_s")
