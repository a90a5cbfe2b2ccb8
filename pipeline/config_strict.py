"""`run.determinism: strict` needs the rest of the configuration to be so that nothing depends on time or load: then
weights repeat bit for bit, also across kills and resumes (on a CPU: one thread for each process)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.compose import Tree, merge, nest
from pipeline.config_room import replicas_of
from pipeline.core.events import Role
from pipeline.core.modes import ModeName, shared_roles

if TYPE_CHECKING:
    from pipeline.config import Config

_ENGINES = (("rollout", "engine"), ("reward", "genrm", "engine"))
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_TIMED_OPTIONS = ("enable_prefix_caching", "async_scheduling", "speculative_config")
"""Options of vLLM with which a token's numbers depend on what else the engine has done, or does at that time."""


def with_strict_defaults(tree: Tree) -> Tree:
    """The unvalidated tree of a strict run: without a word on it, no engine caches prefixes, and nothing streams."""
    run = tree.get("run")
    if not isinstance(run, dict) or run.get("determinism") != "strict":
        return tree
    defaults = [((*path, "enable_prefix_caching"), False) for path in _ENGINES]
    for (*section, name), value in (*defaults, (("placement", "admission"), "barrier")):
        at = tree
        for key in section:
            at = at.get(key, {}) if isinstance(at, dict) else {}
        if "genrm" in section and not _has_judge(tree):
            continue
        if isinstance(at, dict) and name not in at:
            tree = merge(tree, nest((*section, name), value))
    return tree


def _has_judge(tree: Tree) -> bool:
    reward = tree.get("reward")
    return isinstance(reward, dict) and isinstance(reward.get("genrm"), dict)


def strict_faults(config: "Config") -> Iterator[str]:
    """What in a strict run's configuration keeps it from being strict."""
    for name, model in (("policy", config.model.policy), ("genrm", config.judge_model)):
        if model is not None and model.dtype != "float32":
            yield f"model.{name}.dtype is {model.dtype}, must be float32"
    if config.algorithm.staleness:
        yield f"algorithm.staleness is {config.algorithm.staleness}, must be 0"
    if config.placement.admission != "barrier":
        yield f"placement.admission is {config.placement.admission}, must be barrier"
    if config.rollout.on_update != "recompute":
        yield f"rollout.on_update is {config.rollout.on_update}, must be recompute"
    replicas = replicas_of(config)
    is_shared = shared_roles(ModeName(config.placement.mode), replicas)
    for placed in replicas:
        if placed.role is Role.TRAIN or placed.replicas == 1:
            continue
        if placed.role in is_shared:
            yield f"placement.mode {config.placement.mode} gives {placed.role} {placed.replicas} replicas, must be 1"
        else:
            yield f"placement.roles.{placed.role}.replicas is {placed.replicas}, must be 1"
    if config.reward.genrm is not None and config.reward.genrm.endpoint is not None:
        yield "reward.genrm.endpoint is set: what a server answers cannot be repeated"
    for place, engine in config.engines.items():
        if engine.enable_prefix_caching:
            yield f"{place}.enable_prefix_caching is true, must be false"
        for option in _TIMED_OPTIONS:
            if engine.options.get(option):
                yield f"{place}.options.{option} is {engine.options[option]!r}, must not be set"
        if engine.options.get("dtype", "float32") != "float32":
            yield f"{place}.options.dtype is {engine.options['dtype']!r}, must be float32"
    for variable in _THREADS:
        if config.cluster.env.get(variable, "1") != "1":
            yield f"cluster.env.{variable} is {config.cluster.env[variable]!r}, must be 1"
