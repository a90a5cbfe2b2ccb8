"""The ranks of an engine: `model.policy.tensor_parallel` and `placement.roles.rollout.slots` are one number, and so are
those of the judge's model and of reward. Whoever says one of the two has said the other."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.compose import Tree, merge, nest
from pipeline.core.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config import Config, Model

_ROLES = {"policy": "rollout", "genrm": "reward"}
_SAID_TWICE = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend")
"""Options of vLLM that would give a replica other processes than it has slots."""
_CUT = ("num_attention_heads", "intermediate_size", "moe_intermediate_size")


def with_ranks(tree: Tree) -> Tree:
    """The unvalidated tree, in which both are said where one is."""
    for model, role in _ROLES.items():
        ranks, slots = ("model", model, "tensor_parallel"), ("placement", "roles", role, "slots")
        for said, other in ((ranks, slots), (slots, ranks)):
            value = _at(tree, said)
            if value is not None and _at(tree, other) is None and isinstance(_at(tree, ("model", model)), dict):
                tree = merge(tree, nest(other, value))
    return tree


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def rank_faults(config: "Config") -> Iterator[str]:
    """Where the two differ, or a replica does not fit into a node."""
    for where, model, engine in (
        ("policy", config.model.policy, config.rollout.engine),
        ("genrm", config.judge_model, config.judge_engine),
    ):
        if model is None or engine is None:
            continue
        role = _ROLES[where]
        slots, ranks = getattr(config.placement.roles, role).slots, model.tensor_parallel
        if slots != ranks:
            yield (
                f"placement.roles.{role}.slots is {slots}, but model.{where}.tensor_parallel is {ranks}: a replica has "
                "a slot for each rank of its engine; valid: one of the two alone, or both the same"
            )
        if ranks > config.cluster.slots_per_node:
            yield (
                f"model.{where}.tensor_parallel is {ranks}, but a replica stays on one node, and "
                f"cluster.slots_per_node is {config.cluster.slots_per_node}: valid is 1 to "
                f"{config.cluster.slots_per_node}"
            )
        if said := sorted(engine.options.keys() & set(_SAID_TWICE)) if engine.name == "vllm" else ():
            path = next(path for path, of in config.engines.items() if of is engine)
            yield f"{path}.options.{said[0]} must not be set: model.{where}.tensor_parallel says how many ranks it has"


def check_ranks(where: str, model: "Model") -> None:
    """Raise ConfigError where a model cannot be cut into so many equal parts."""
    ranks, described = model.tensor_parallel, Path(model.path) / "config.json"
    if ranks == 1 or not described.is_file():
        return
    tree = json.loads(described.read_text(encoding="utf-8"))
    tree = tree.get("text_config", tree)
    sizes = {key: tree[key] for key in _CUT if tree.get(key)}
    valid = [n for n in range(1, ranks + 1) if all(size % n == 0 for size in sizes.values())]
    kv_heads = tree.get("num_key_value_heads") or sizes.get("num_attention_heads", ranks)
    valid = [n for n in valid if kv_heads % n == 0 or n % kv_heads == 0]
    if ranks not in valid:
        have = ", ".join(f"{key} {size}" for key, size in (sizes | {"num_key_value_heads": kv_heads}).items())
        raise ConfigError(
            f"{where}.tensor_parallel is {ranks}, which does not divide what {model.path} has ({have}): valid up to "
            f"there: {', '.join(map(str, valid))}"
        )
