"""What becomes the metric row of one step, while its stages report one by one.

What is measured before training cannot be measured again once the batch is recorded: a recorded batch is trained
again, never sampled again. So it is kept with the batch, and the row of a step that was interrupted in between has
all that the row of any other step has.
"""

from dataclasses import dataclass, field
from typing import Any

from pipeline.core.dag import StepProgress
from pipeline.metrics import Span


@dataclass
class StepParts:
    """Metrics of each stage, one dict per task. `earlier` and `began` are of the attempt that recorded the batch:
    what ran until then, and since when; relative to that moment, so not positive."""

    metrics: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    num_sequences: tuple[int, int] = (0, 0)
    """(trained, dropped)"""
    queue_depth: int = 0
    earlier: list[Span] = field(default_factory=list)
    began: float = 0.0

    def kept(self, this: StepProgress, before: StepProgress | None, now: float) -> dict[str, Any]:
        """All this as JSON, when the batch of `this` step is about to be recorded."""
        own = this.spans(now)
        began = (before.started if before else {}).get("record") or min(begin for _, begin, _ in own)
        spans = [*own, *(before.spans(now) if before else ())]
        relative = [(stage, begin - now, end - now) for stage, begin, end in spans]
        return {"metrics": self.metrics, "queue_depth": self.queue_depth, "spans": relative, "began": began - now}

    @classmethod
    def restored(cls, kept: dict[str, Any]) -> "StepParts":
        return cls(
            metrics=kept["metrics"],
            queue_depth=kept["queue_depth"],
            earlier=[(stage, begin, end) for stage, begin, end in kept["spans"]],
            began=kept["began"],
        )

    def whole(self, spans: list[Span], began: float) -> tuple[list[Span], float]:
        """The stages of both attempts, as if the later one had begun (at `began`) when the batch was recorded."""
        shifted = [(stage, begin + began, end + began) for stage, begin, end in self.earlier]
        return [*shifted, *spans], began + self.began
