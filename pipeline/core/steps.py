"""Which steps are open: begun as early as staleness allows, trained again when weights are lost, ended by a stop."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.core.dag import Graph, Own, Progress, StepProgress, step_graph
from pipeline.core.events import Role, RunRestored
from pipeline.core.fleet import Capacity, Replicas
from pipeline.core.modes import ModeName


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What the core must know of the configuration."""

    total_steps: int
    sequences_per_step: int
    replicas: tuple[Replicas, ...]
    num_nodes: int
    min_nodes: int
    save_freq: int
    evaluate_freq: int
    restarts: int
    stage_s: float
    save_s: float
    publish_s: float
    engine_start_s: float
    shift_s: float
    staleness: int = 0
    is_streaming: bool = False
    keep_kv: bool = False
    mode: ModeName = ModeName.DISAGGREGATED
    block_slots: int = 1
    has_planner: bool = False
    is_strict: bool = False
    """Nothing depends on time: no sequence goes on at another replica while its own could go on with it."""
    capacities: Mapping[Role, Capacity] = field(default_factory=dict)
    own: tuple[Own, ...] = ()
    """The user's stages."""
    num_piles: int = 1
    """Into how many the tensors of a version are dealt among nodes."""
    writes_shares: bool = False
    """Training ranks on several nodes each write their own parts of a version; otherwise the first writes all."""

    def waits_for_judge(self, step: int) -> bool:
        """Whether it begins only when the one before it is judged: where rollout and reward take turns, and of every
        pair of steps that are rolled out together, the first (docs/policies/planner.md)."""
        if self.mode is ModeName.SHIFTABLE:
            return self.staleness > 0 and step % 2 == 1
        return self.mode in (ModeName.COLOCATED, ModeName.ROLLOUT_REWARD_COLOCATED)

    def oldest_version(self, step: int) -> int:
        """No token of `step` is older than this version."""
        return step - 1 - self.staleness

    def skipped(self, step: int) -> set[str]:
        """Stages that are not due in `step`; the last step is always evaluated and saved."""
        last = step == self.total_steps
        skip = set()
        if not self.evaluate_freq or not (last or step % self.evaluate_freq == 0):
            skip.add("evaluate")
        if not (last or step % self.save_freq == 0):
            skip.add("checkpoint")
        return skip


class Steps(dict[int, StepProgress]):
    """The open steps and the one closed before them, by number, in ascending order."""

    def __init__(self, plan: RunPlan) -> None:
        super().__init__()
        self._plan = plan
        self.graph = Graph(step_graph(plan.staleness, is_streaming=plan.is_streaming, own=plan.own))
        self._names = self.graph.names()
        self.stopping = ""
        """Why no new step is begun; empty while the run goes on."""
        self.may_save = True
        """False once there is no time for it any more."""

    def restore(self, event: RunRestored) -> None:
        """Begin after `event.version`; of the steps above it, what is stored is done."""
        first = self[event.version] = StepProgress.closed(event.version, names=self._names)
        if event.version == 0 and self._plan.evaluate_freq and 0 not in event.recorded:
            first.stages.update(evaluate=Progress.PENDING, record=Progress.PENDING)
        newest = max((step.step for step in event.steps), default=event.version)
        for number in range(event.version + 1, newest + 1):  # one of two that are begun at once may have left nothing
            evaluated = {"evaluate"} if number in event.recorded else set()
            self[number] = StepProgress.open(number, self._plan.skipped(number) | evaluated, self._names)
        for step in event.steps:
            progress = self[step.step]
            if step.batched:
                progress.stages.update(dict.fromkeys((*self.graph.leads_to("batch"), "batch"), Progress.DONE))
            elif len(step.sequences) == self._plan.sequences_per_step:
                progress.stages["prompts"] = Progress.DONE

    def is_ready(self, stage: str, step: StepProgress) -> bool:
        return self.graph.is_ready(stage, step.step, self)

    def is_waited_for(self, stage: str, step: StepProgress) -> bool:
        """It runs, or nothing but somebody to run it is missing."""
        progress = step.stages[stage]
        return progress is Progress.RUNNING or (progress is Progress.PENDING and self.is_ready(stage, step))

    def open(self) -> list[StepProgress]:
        """Those on which there is something to do, ascending; when there are none, the run is over.

        Begins the next ones as soon as they may, and forgets those closed before the newest closed one.
        """
        following = max(self, default=self._plan.total_steps) + 1
        while following <= self._plan.total_steps and not self.stopping:
            if not self.graph.is_ready("prompts", following, self):
                break
            if self._plan.waits_for_judge(following) and not self._is_judged(following - 1):
                break
            self[following] = StepProgress.open(following, self._plan.skipped(following), self._names)
            following += 1
        closed: list[int] = []
        found: list[StepProgress] = []
        for number, step in self.items():
            if step.is_closed:
                closed.append(number)
            else:
                found.append(step)
        for number in closed[:-1]:
            if number + 1 in closed:
                del self[number]
        if self.stopping:
            return [step for step in found if not self._is_abandoned(step)] or self._unsaved()
        return found

    def _is_judged(self, step: int) -> bool:
        return step not in self or self[step].is_over("reward")

    def rewind(self, version: int, *, unpublish: bool = False) -> None:
        """The trainer holds `version`: the recorded batches above it are trained again, those up to it are not. What
        is published stays so; `unpublish`: that is lost too, and comes again with the training."""
        begun = (Progress.RUNNING, Progress.DONE)
        last = version
        for step in self.values():
            if step.stages["train"] is Progress.DONE or (unpublish and step.stages["publish"] in begun):
                last = max(last, step.step)
        for number in range(version + 1, last + 1):
            step = self.setdefault(number, StepProgress.closed(number, self._plan.skipped(number), self._names))
            for stage in ("train", "checkpoint"):
                if step.stages[stage] is Progress.DONE:
                    step.stages[stage] = Progress.PENDING
            if unpublish and step.stages["publish"] in begun:
                step.stages["publish"] = Progress.PENDING
        for number, step in self.items():
            if number > version:
                continue
            if unpublish and step.stages["publish"] is not Progress.DONE:
                step.stages["publish"] = Progress.DONE  # it is what the new memory holds
            elif not unpublish and step.stages["train"] is Progress.PENDING:
                step.stages["train"] = Progress.DONE  # a memory that began anew may be older than the checkpoint
                if step.stages["checkpoint"] is Progress.PENDING:
                    step.stages["checkpoint"] = Progress.DONE
        ascending = sorted(self.items())
        self.clear()
        self.update(ascending)

    def unpublish(self, version: int) -> None:
        """What was written of `version` is lost: it is published again."""
        step = self.get(version)
        if step is not None and step.stages["publish"] is Progress.RUNNING:
            step.stages["publish"] = Progress.PENDING

    def stop(self, reason: str) -> None:
        """Begin no new step, and save the newest trained version, due or not. The first reason stays."""
        self.stopping = self.stopping or reason or "stopped"

    def window(self, step: int) -> tuple[list[tuple[str, float, float]], float, float]:
        """The spans of what ran since the step before was recorded, and the begin and end of that time."""
        this, before = self[step], self.get(step - 1)
        ended = this.started["record"]
        own = this.spans(ended)
        began = (before.started if before else {}).get("record") or min(start for _, start, _ in own)
        others = (span for other in self.values() if other is not this for span in other.spans(ended))
        return [*own, *others], began, ended

    def _is_abandoned(self, step: StepProgress) -> bool:
        """Once the run stops, only what was begun to train is brought to its end, with all that goes before it: a
        checkpoint that is saved now must not leave a step behind without its row."""
        rest = (s for s in self.values() if s.step >= max(step.step, 1))
        return all(s.stages["train"] is Progress.PENDING for s in rest)

    def _unsaved(self) -> list[StepProgress]:
        """The newest trained step, if its version is not saved: now that is due."""
        trained = [s for s in self.values() if s.step and s.stages["train"] is Progress.DONE]
        if not self.may_save or not trained or trained[-1].stages["checkpoint"] is not Progress.SKIPPED:
            return []
        trained[-1].stages["checkpoint"] = Progress.PENDING
        return [trained[-1]]
