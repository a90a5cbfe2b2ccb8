"""How a worker gets its engine or trainer: by role and config. Imports only what this worker runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoint import store_of
from pipeline.config import Config
from pipeline.core.events import Role
from pipeline.gps.segment import EMULATED
from stages.engines.base import Engine

if TYPE_CHECKING:
    from stages.rl.base import Trainer
    from stages.worker import Worker

_TEMPLATE_TOKENS = 1024  # room for the judge's template and its chat's control tokens


def make_engine(worker: "Worker", version: int) -> Engine:
    """The role's engine with the weights that this node's shared memory holds (policy: `version`; GenRM: its one)."""
    config = worker.config
    if worker.role is Role.REWARD:
        model, options, store, version = config.model.genrm, config.reward.genrm.engine, worker.genrm, 0
        length = judge_length(config)
    else:
        model, options, store = config.model.policy, config.rollout.engine, worker.policy
        length = config.data.max_prompt_length + config.rollout.max_response_length
    kind = _engine_kind(options.name)
    with store.read(version, config.limits.publish_s) as reader:
        return kind(
            model.path,
            model.dtype,
            options,
            length,
            reader,
            config.run.seed,
            structured=worker.role is Role.REWARD and config.reward.genrm.verdict.structured,
            trust_remote_code=config.model.trust_remote_code,
        )


def _engine_kind(name: str) -> Callable[..., Engine]:
    if name == "emulated":
        from stages.engines.emulated import EmulatedEngine

        return EmulatedEngine
    from stages.engines.vllm import VllmEngine

    return VllmEngine


def make_trainer(worker: "Worker") -> "Trainer":
    """The trainer, at the newest complete checkpoint, or at the base model."""
    trainer: Trainer
    if worker.config.trainer.strategy == "emulated":
        from stages.rl.emulated import EmulatedTrainer

        trainer = EmulatedTrainer(worker.config)
    else:
        from stages.rl.trainer import HfTrainer

        trainer = HfTrainer(worker.config)
    if checkpoint := store_of(worker.run, worker.config).newest_complete().path:
        trainer.load(checkpoint)
    return trainer


def judge_length(config: Config) -> int:
    """Tokens that a judge's request may have. It reads prompt and response in its own tokens: up to twice as many
    are allowed for, within what the model can take."""
    shown = 2 * (config.data.max_prompt_length + config.rollout.max_response_length)
    wanted = _TEMPLATE_TOKENS + shown + config.reward.genrm.max_tokens
    return min(wanted, _context_limit(config.model.genrm.path) or wanted)


def _context_limit(path: str) -> int | None:
    if path == EMULATED:
        return None
    tree = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    limit = tree.get("text_config", tree).get("max_position_embeddings")
    return None if limit is None else int(limit)
