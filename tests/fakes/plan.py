"""The plan of a small run, and the odds of what can go wrong in it."""

from dataclasses import dataclass

from pipeline.core.core import RunPlan
from pipeline.core.events import Role
from pipeline.core.fleet import Replicas


def make_plan(**changes: object) -> RunPlan:
    values: dict[str, object] = {
        "total_steps": 3,
        "sequences_per_step": 4,
        "replicas": tuple(Replicas(role=r, replicas=1, slots=1) for r in Role),
        "num_nodes": 1,
        "min_nodes": 1,
        "save_freq": 2,
        "evaluate_freq": 2,
        "restarts": 3,
        "stage_s": 1e4,
        "save_s": 1e4,
        "publish_s": 1e4,
        "engine_start_s": 1e4,
        "shift_s": 1e4,
    }
    return RunPlan(**(values | changes))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Odds:
    """How likely what can go wrong does, each time that it can."""

    flush: float = 0.0
    abort: float = 0.0
    judge_fails: float = 0.0
    update_fails: float = 0.0
    wake_fails: float = 0.0
    start_fails: float = 0.0
    node_fails: float = 0.0
    copy_fails: float = 0.0
    stage_fails: float = 0.0
    says_started: float = 1.0
    """A task that ends at once may say that alone."""
