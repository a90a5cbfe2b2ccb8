"""When a step may be admitted, beyond the staleness bound."""

from enum import StrEnum

from pipeline.simulator.simulation import Simulation


class Admission(StrEnum):
    STREAM = "stream"
    """As soon as the staleness bound allows it."""
    PAIRS = "pairs"
    """An even step when the one before is judged: at staleness 1 two steps roll out together, in larger batches, and
    train one after the other."""
    BARRIER = "barrier"
    """When all responses of the step before are there."""

    def admits(self, sim: Simulation, step: int) -> bool:
        if step == 0 or self is Admission.STREAM:
            return True
        if self is Admission.PAIRS:
            return step % 2 == 1 or sim.is_scored(step - 1)
        return sim.is_rolled_out(step - 1)
