"""What decisions of the planner were worth, where all of the truth is known."""

from statistics import mean

from pipeline.core.planner.bindings import ANY
from pipeline.simulator.admission import Admission
from pipeline.simulator.moment import _Watched
from pipeline.simulator.setup import paper_setup
from pipeline.simulator.simulation import Simulation
from pipeline.watching.worth import Prediction, Worth, measure, predict

NUM_VERSIONS = 6


class Closed(_Watched):
    """Closes each prediction as the live watcher does, at the first plan after its moment."""

    def begin(self, sim: Simulation) -> None:
        self.open: list[Prediction] = []
        self.worths: list[Worth] = []
        super().begin(sim)

    def plan(self, sim: Simulation) -> None:
        super().plan(sim)
        judged = {s.step: s.scored_s for s in sim.steps if s.scored_s is not None}
        published = {s.step + 1: s.trained_s for s in sim.steps if s.trained_s is not None}
        due = [(p, at) for p in self.open if (at := p.due_s(judged, published)) is not None]
        self.worths += [measure(p, judged, published, at, self.seen[-1]) for p, at in due if at > sim.now - 1.0]
        self.open = [p for p in self.open if all(p is not q for q, _ in due)]
        found = predict(len(self.plans), self.seen[-1], self.plans[-1][1], ANY)
        self.open += [found] if found is not None else []


def test_the_measured_value_is_what_the_planner_predicts_on_average() -> None:
    setup = paper_setup(1, "h800", num_gpus=16, num_sequences=512)
    mode = Closed(setup, train_gpus=8, staleness=1, admission=Admission.PAIRS)
    Simulation(setup, mode, seed=0, num_steps=NUM_VERSIONS + 3).run_until(NUM_VERSIONS)
    settled = [worth for worth in mode.worths if worth.prediction.first >= 2]
    assert len(settled) > 30
    assert 0.93 < mean(w.measured_s / w.prediction.value_s for w in settled) < 1.07
    shifts = [worth for worth in settled if worth.prediction.is_shift]
    assert shifts and abs(mean(w.regret_s for w in shifts)) < 0.07 * mean(w.measured_s for w in shifts)
