"""How a worker gets its engine or trainer: by role and config. Imports only what this worker runs."""

import contextlib
import fcntl
import json
import os
import socket
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoint import store_of
from pipeline.config import Model
from pipeline.config_reward import GenRM
from pipeline.core.events import Role
from pipeline.gps.files import SHM
from pipeline.gps.segment import EMULATED
from pipeline.memory import has_gpus
from stages.engines.base import Engine, Stored

if TYPE_CHECKING:
    from stages.rl.base import Trainer
    from stages.rl.ranks import Ranks
    from stages.worker import Worker

_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_TEMPLATE_TOKENS = 1024  # room for the judge's template and its chat's control tokens


def make_engine(worker: "Worker", version: int, *, can_sleep: bool = False) -> Engine:
    """The role's engine with the weights that this node's shared memory holds (policy: `version`; GenRM: its one)."""
    config = worker.config
    genrm = config.reward.genrm
    if worker.role is Role.REWARD:
        assert genrm is not None and config.judge_model is not None, "who has no judge has no slots either"
        model, options, store, version = config.judge_model, genrm.engine, worker.genrm, 0
        length = judge_length(config.data.max_prompt_length + config.rollout.max_response_length, genrm, model)
    else:
        model, options, store = config.model.policy, config.rollout.engine, worker.policy
        length = config.data.max_prompt_length + config.rollout.max_response_length
    return _engine_kind(options.name, worker, model)(
        model.path,
        model.dtype,
        options,
        length,
        Stored(store=store, version=version, wait_s=config.limits.publish_s, is_pinned=config.gps.pin and has_gpus()),
        config.run.seed,
        structured=worker.role is Role.REWARD and genrm is not None and genrm.verdict.structured,
        trust_remote_code=config.model.trust_remote_code,
        can_sleep=can_sleep,
    )


def _engine_kind(name: str, worker: "Worker", model: Model) -> Callable[..., Engine]:
    if name == "emulated":
        from stages.engines.emulated import EmulatedEngine

        return partial(EmulatedEngine, name=worker.name)
    from stages.engines.vllm import VllmEngine

    return partial(VllmEngine, ranks=model.tensor_parallel, name=f"{worker.gps}-{worker.name}")


def make_trainer(worker: "Worker", *, can_sleep: bool = False) -> "Trainer":
    """The trainer, at the newest complete checkpoint, or at the base model. Waits for the other ranks, if it has any,
    and all of them load what the first one has found."""
    store = store_of(worker.run, worker.config)
    offload_to = Path(SHM, f"{worker.gps}-{worker.name}") if can_sleep else None
    trainer: Trainer
    if worker.config.trainer.strategy == "emulated":
        from stages.rl.emulated import EmulatedTrainer

        trainer = EmulatedTrainer(worker.config, rank=worker.rank, offload_to=offload_to)
        step = store.newest_complete().step
    else:
        from stages.rl.trainer import HfTrainer

        ranks = _join_ranks(worker)
        shares = worker.run.rendezvous / f"share-{worker.attempt}"
        trainer = HfTrainer(worker.config, ranks=ranks, offload_to=offload_to, shares=shares)
        step = ranks.agree(store.newest_complete().step if ranks.is_first else 0)
    if step:
        trainer.load(store.path(step))
    return trainer


def _join_ranks(worker: "Worker") -> "Ranks":
    """The group is new in each life, so is the file that it is made over."""
    from stages.rl.ranks import Ranks, join

    config = worker.config
    if config.trainer.strategy == "single":
        return Ranks()
    if _INTERFACE not in config.cluster.env:  # engines listen on loopback; ranks may have to reach other hosts
        os.environ[_INTERFACE] = _interface_of(worker.host)
    announce(worker.rank, config.trainer.ranks, worker.slots[0])
    rendezvous = worker.run.cache / "rendezvous" / f"train-{worker.attempt}-{worker.life}"
    return join(rendezvous, worker.rank, config.trainer.ranks, config.limits.stage_s)


def _interface_of(address: str) -> str:
    """The network interface that has the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    raise RuntimeError(f"no network interface here has the address {address}: name one, cluster.env.{_INTERFACE}")


def announce(rank: int, num_ranks: int, slot: int) -> None:
    """What accelerate goes by. Of the address it only wants to know that there is one: it finds the group made."""
    import torch

    device = slot % torch.cuda.device_count() if torch.cuda.is_available() else 0
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(device), "MASTER_ADDR": "none"}


def judge_length(sequence_tokens: int, genrm: GenRM, model: Model) -> int:
    """Tokens that a judge's request may have. It reads prompt and response in its own tokens: up to twice as many
    are allowed for (and twice that where it reads two responses), within what the model can take."""
    shown = 2 * sequence_tokens * (2 if genrm.mode == "pairwise" else 1)
    wanted = _TEMPLATE_TOKENS + shown + genrm.max_tokens
    return min(wanted, _context_limit(model.path) or wanted)


def _context_limit(path: str) -> int | None:
    if path == EMULATED:
        return None
    tree = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    limit = tree.get("text_config", tree).get("max_position_embeddings")
    return None if limit is None else int(limit)
