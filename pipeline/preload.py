"""What processes import before they are workers: that takes seconds, and a zygote's forks share it."""

from collections.abc import Iterable, Sequence

from pipeline.config import Config
from pipeline.core.dag import STAGES
from pipeline.core.events import Role


def of_zygote(config: Config) -> list[str]:
    """All that this run's workers need which it is to fork, and nothing else."""
    movers = ["stages.weights.mover"] if config.cluster.nodes > 1 else []
    if config.by_steps:
        return movers
    starts = _starts(config, sorted({engine.name for engine in config.engines.values()}), has_trainer=True)
    return [*starts, *_paths(list(Role)), *movers, "stages.worker", "pipeline.queue.client"]


def of_worker(config: Config, role: Role) -> list[str]:
    """What one that is no fork needs."""
    engine = {Role.ROLLOUT: config.rollout.engine, Role.REWARD: config.judge_engine}.get(role)
    starts = _starts(config, [engine.name] if engine else [], has_trainer=role is Role.TRAIN)
    return [*starts, *_paths([role]), "stages.worker", "pipeline.queue.client"]


def _starts(config: Config, engines: Iterable[str], *, has_trainer: bool) -> list[str]:
    is_emulated = config.trainer.strategy == "emulated"
    starts = ["stages.engines.vllm_start"] if "vllm" in engines else []
    starts += ["stages.engines.torch_start"] if has_trainer and not is_emulated else []
    makers = [f"stages.engines.{name}" for name in engines]
    if has_trainer:
        makers += ["stages.rl.emulated" if is_emulated else "stages.rl.trainer"]
    return [*starts, *makers]


def _paths(roles: Sequence[Role]) -> list[str]:
    return sorted({stage.path.partition(":")[0] for stage in STAGES if stage.path and stage.role in roles})
