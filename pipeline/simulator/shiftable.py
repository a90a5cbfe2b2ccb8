"""The mode in which GPUs change roles while steps run: the core's planner, driven by the virtual clock."""

from pipeline.core.events import Role
from pipeline.core.planner.bindings import ANY, Bindings
from pipeline.core.planner.planner import Plan, decide
from pipeline.core.planner.settings import DEFAULT, PlannerSettings
from pipeline.core.snapshot import Snapshot
from pipeline.simulator.admission import Admission
from pipeline.simulator.observe import Observer
from pipeline.simulator.priors import monitor_of
from pipeline.simulator.setup import Setup
from pipeline.simulator.simulation import Simulation


class Shiftable:
    """A step that is judged trains at once, on `train_gpus`; the planner splits all other GPUs between rollout and
    reward. It is asked when a step is admitted, rolled out, judged or trained, and every tick."""

    def __init__(
        self,
        believed: Setup,
        *,
        train_gpus: int,
        staleness: int = 1,
        admission: Admission = Admission.STREAM,
        judges_together: bool = False,
        settings: PlannerSettings = DEFAULT,
        bindings: Bindings = ANY,
    ) -> None:
        """`believed`: the setup as the planner believes it to be."""
        self.believed, self.settings, self.bindings = believed, settings, bindings
        self.train_gpus, self.staleness, self.admission = train_gpus, staleness, admission
        self.judges_together = judges_together
        self.plans: list[tuple[float, Plan]] = []
        self._alarm = 0
        self._is_asked = False

    def begin(self, sim: Simulation) -> None:
        sim.train_blocks = sim.blocks[len(sim.blocks) - self.train_gpus // sim.setup.block :]
        for block in sim.blocks:
            sim.bind(block, next(iter(self.bindings.of(block.index)), Role.TRAIN), at_once=True)
        monitor = monitor_of(
            self.believed,
            train_blocks=[block.index for block in sim.train_blocks],
            staleness=self.staleness,
            num_steps=sim.num_steps,
            in_pairs=self.admission is Admission.PAIRS,
        )
        self.observer = Observer(monitor)
        self._ask(sim)

    def may_admit(self, sim: Simulation, step: int) -> bool:
        return self.admission.admits(sim, step)

    def on_admitted(self, sim: Simulation, step: int) -> None:
        self._ask(sim)

    def on_rolled_out(self, sim: Simulation, step: int) -> None:
        self._ask(sim)

    def on_scored(self, sim: Simulation, step: int) -> None:
        self._ask(sim)

    def on_trained(self, sim: Simulation, step: int) -> None:
        self._ask(sim)

    def snapshot(self, sim: Simulation) -> Snapshot:
        return self.observer.snapshot(sim)

    def perform(self, sim: Simulation, plan: Plan) -> None:
        for index, role in plan.moves.items():
            sim.bind(sim.blocks[index], role)
        self._alarm += 1
        if sim.is_over and all(block.is_lost for block in sim.blocks):
            return
        sim.at(sim.now + self.settings.every_s(plan.cycle_s), self._tick, sim, self._alarm)

    def plan(self, sim: Simulation) -> None:
        self._is_asked = False
        plan = decide(self.snapshot(sim), self.settings, self.bindings)
        self.plans.append((sim.now, plan))
        self.perform(sim, plan)

    def _ask(self, sim: Simulation) -> None:
        """Once, after all that happens at this time."""
        if not self._is_asked:
            self._is_asked = True
            sim.at(sim.now, self.plan, sim)

    def _tick(self, sim: Simulation, alarm: int) -> None:
        if alarm == self._alarm:
            self.plan(sim)
