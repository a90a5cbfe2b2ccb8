"""One moment of a simulated shiftable run: what the planner sees there, and what it would do."""

from dataclasses import dataclass

from pipeline.core.events import INFERENCE, Role
from pipeline.core.modes import ModeName
from pipeline.core.planner.planner import GAINS, Plan, decide
from pipeline.core.planner.settings import DEFAULT, PlannerSettings
from pipeline.core.snapshot import Snapshot
from pipeline.simulator.admission import Admission
from pipeline.simulator.modes import Schedule
from pipeline.simulator.setup import RIGHT, Beliefs, Setup
from pipeline.simulator.shiftable import Shiftable
from pipeline.simulator.simulation import Simulation

VERSION = 3
"""The first steps fill up; from then on one cycle is like the next."""
_MOST_VERSIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """One of those that follow: GPUs of rollout and reward, before and after."""

    at_s: float
    before: tuple[int, int]
    after: tuple[int, int]
    gain_s: float | None
    """None: the blocks had no role before, or nothing would have gone on without."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    snapshot: Snapshot
    plan: Plan
    num_asked: int
    """How often the planner was asked from then on until the next version."""
    shifts: tuple[Shift, ...]
    """What it shifted until then."""


class _Watched(Shiftable):
    """Keeps what the planner saw at each plan."""

    seen: list[Snapshot]

    def begin(self, sim: Simulation) -> None:
        self.seen = []
        super().begin(sim)

    def plan(self, sim: Simulation) -> None:
        super().plan(sim)
        self.seen.append(self.last)

    def snapshot(self, sim: Simulation) -> Snapshot:
        self.last = super().snapshot(sim)
        return self.last


def look_at(
    setup: Setup,
    schedule: Schedule,
    *,
    settings: PlannerSettings = DEFAULT,
    beliefs: Beliefs = RIGHT,
    seed: int = 0,
    at_s: float | None = None,
    version: int | None = None,
) -> Moment:
    """At `at_s`, or when the `version` is published. Neither: the first shift of GPUs that serve, in the two cycles
    after `VERSION`; if these have none, the first plan there that compares splits.

    Raises ValueError for a schedule that is not shiftable, or a moment that is too late to be simulated.
    """
    if schedule.mode is not ModeName.SHIFTABLE:
        raise ValueError(f"{schedule} has no planner")
    mode = _Watched(
        setup.believed(beliefs),
        train_gpus=schedule.train,
        staleness=schedule.staleness,
        admission=schedule.admission,
        judges_together=schedule.judging is Admission.BARRIER,
        settings=settings,
    )
    sim = Simulation(setup, mode, seed=seed, num_steps=_MOST_VERSIONS)
    if at_s is not None:
        return _at(sim, mode, at_s, settings)
    wanted = VERSION if version is None else version
    if wanted >= _MOST_VERSIONS:
        raise ValueError(f"version {wanted} is late; valid: below {_MOST_VERSIONS}")
    sim.run_until(wanted)
    first = len(mode.plans)
    sim.run_until(wanted + 2)
    if version is None:
        first = min(range(first, len(mode.plans)), key=lambda i: _telling(mode.seen[i], mode.plans[i][1]))
    return _moment(mode, mode.seen[first], mode.plans[first][1], first)


def _telling(seen: Snapshot, plan: Plan) -> int:
    """0 for the plans that show most."""
    if not plan.candidates:
        return 2
    return 0 if plan.moves and not _is_first_role(seen, plan) else 1


def _is_first_role(seen: Snapshot, plan: Plan) -> bool:
    """Whether some of the moved blocks served neither inference role."""
    return any(block.role not in INFERENCE for block in seen.blocks if block.index in plan.moves)


def _at(sim: Simulation, mode: _Watched, at_s: float, settings: PlannerSettings) -> Moment:
    found: list[tuple[Snapshot, Plan, int]] = []

    def look() -> None:
        snapshot = mode.snapshot(sim)
        found.append((snapshot, decide(snapshot, settings), len(mode.plans)))

    sim.at(at_s, look)
    while not found:
        if sim.version + 1 >= _MOST_VERSIONS:
            raise ValueError(f"{at_s:g} s is later than version {sim.version}, at {sim.now:.0f} s, the last simulated")
        sim.run_until(sim.version + 1)
    ((snapshot, plan, first),) = found
    return _moment(mode, snapshot, plan, first)


def _moment(mode: _Watched, snapshot: Snapshot, plan: Plan, first: int) -> Moment:
    """`first`: of the plans from then on."""
    asked = [i for i in range(first, len(mode.plans)) if mode.seen[i].version == snapshot.version]
    shifts = [_shift(mode.seen[i], mode.plans[i][1]) for i in asked if mode.plans[i][1].moves]
    return Moment(snapshot=snapshot, plan=plan, num_asked=len(asked), shifts=tuple(shifts))


def _shift(seen: Snapshot, plan: Plan) -> Shift:
    chosen = plan.candidates[plan.chosen]
    roles = {block.index: block.role for block in seen.blocks}

    def gpus(bound: dict[int, Role | None]) -> tuple[int, int]:
        num = [sum(role is wanted for role in bound.values()) for wanted in INFERENCE]
        return num[0] * seen.block_slots, num[1] * seen.block_slots

    before, after = gpus(roles), gpus({**roles, **plan.moves})
    gain_s = chosen.gain_s if plan.reason == GAINS else None
    return Shift(at_s=seen.at_s, before=before, after=after, gain_s=gain_s, reason=plan.reason)
