"""What is wrong with a configuration, said so that it can be mended: path, what was given, what is valid, where the
key belongs."""

import types
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from pipeline.compose import Sources
from pipeline.core.errors import ConfigError

_CLOSE = 0.6
"""Least likeness of a name that is proposed (difflib's own default)."""
_ALMOST_EQUAL = 0.9
"""Likeness of a name that is proposed although the key itself exists, elsewhere."""
_SAME_SECTION = 0.1
"""A name of the same section wins over an equally like one elsewhere."""

# What other tools call it, and ours.
_ELSEWHERE_CALLED = {
    "learning_rate": "trainer.lr",
    "optim": "trainer.lr",
    "total_steps": "trainer.total_training_steps",
    "max_steps": "trainer.total_training_steps",
    "total_epochs": "trainer.total_training_steps",
    "max_grad_norm": "trainer.grad_clip",
    "ppo_mini_batch_size": "trainer.updates_per_step",
    "batch_size": "data.train_batch_size",
    "max_new_tokens": "rollout.max_response_length",
    "group_size": "rollout.n",
    "num_generations": "rollout.n",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
    "test_freq": "evaluate.freq",
    "clip_ratio": "algorithm.clip_ratio_low",
    "kl_loss_coef": "algorithm.kl.coef",
    "beta": "algorithm.kl.coef",
    "staleness_threshold": "algorithm.staleness",
    "nnodes": "cluster.nodes",
    "n_gpus_per_node": "cluster.slots_per_node",
    "experiment_name": "run.name",
    "project_name": "tracking.experiment",
    "prompt_template": "reward.genrm.template",
}


def explain(error: ValidationError, model: type[BaseModel], sources: Sources, name: str) -> ConfigError:
    """One line for each thing that is wrong in the configuration called `name`."""
    lines = [_line(problem, model, sources) for problem in error.errors(include_url=False)]
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return ConfigError("\n  ".join([f"{count} in the configuration {name}:", *lines]))


def _line(problem: Any, model: type[BaseModel], sources: Sources) -> str:
    path = tuple(str(part) for part in problem["loc"])
    place = ".".join(path)
    if source := _source(path, sources):
        place += f" ({source})"
    given = _short(problem["input"])
    cause = problem.get("ctx", {}).get("error")
    if not path:
        return str(cause or problem["msg"])
    if problem["type"] == "extra_forbidden":
        section = _section(model, path[:-1])
        keys = ", ".join(sorted(section.model_fields)) if section else "none"
        return f"{place}: no such key (given {given}){_proposal(model, path)}; valid here: {keys}"
    field = _field(model, path)
    if cause and field and submodel(field.annotation):
        return f"{place}: {cause}"
    valid = describe(field.annotation, field.metadata) if field else problem["msg"]
    if problem["type"] == "missing":
        about = f" ({field.description})" if field and field.description else ""
        return f"{place}: is required and was not given; valid: {valid}{about}"
    hint = f": {cause}" if cause else _nearest_choice(field, problem["input"])
    return f"{place}: given {given}{hint}; valid: {valid}"


def _source(path: tuple[str, ...], sources: Sources) -> str | None:
    """Where it was given: what lies in a list came with the list."""
    return next((sources[path[:end]] for end in range(len(path), 0, -1) if path[:end] in sources), None)


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def submodel(annotation: Any) -> type[BaseModel] | None:
    """The section that it is, or may be: one that can be left out is `Section | None`."""
    for kind in (annotation, *(get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def item_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """The section that each item of a list, or of a mapping of names, is."""
    args = get_args(field.annotation) if field and get_origin(field.annotation) in (list, dict) else ()
    return submodel(args[-1]) if args else None


def _walk(model: type[BaseModel], path: tuple[str, ...]) -> tuple[FieldInfo | None, type[BaseModel] | None]:
    """The last field on the path, and the section that the path ends in. An index leads into an item of a list."""
    field: FieldInfo | None = None
    section: type[BaseModel] | None = model
    for key in path:
        if section is not None and key in section.model_fields:
            field = section.model_fields[key]
            section = submodel(field.annotation)
        elif section is None and (item := item_of(field)):
            section = item
        else:
            return field, None
    return field, section


def _section(model: type[BaseModel], path: tuple[str, ...]) -> type[BaseModel] | None:
    return _walk(model, path)[1]


def _field(model: type[BaseModel], path: tuple[str, ...]) -> FieldInfo | None:
    """The field that the path ends in or passes through (`trainer.betas.0` is in `trainer.betas`)."""
    return _walk(model, path)[0]


def all_names(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, field in model.model_fields.items():
        yield (*path, key)
        if section := submodel(field.annotation) or item_of(field):
            yield from all_names(section, (*path, key))


def _proposal(model: type[BaseModel], path: tuple[str, ...]) -> str:
    """Where the key belongs, the nearest valid name, or nothing."""
    name, section = path[-1], tuple(part for part in path[:-1] if not part.isdigit())  # items of lists are one section
    names = list(all_names(model))
    homes = sorted(".".join(p[:-1]) or "the top level" for p in names if p[-1] == name)
    called = [(key, tuple(ours.split("."))) for key, ours in _ELSEWHERE_CALLED.items()]
    best, target = max(
        (_likeness(name, key) + (_SAME_SECTION if p[:-1] == section else 0), p)
        for key, p in [*((p[-1], p) for p in names if p[-1] != name), *called]
    )
    said = [f"{name} belongs under {' or '.join(homes)}"] if homes else []
    if best >= (_ALMOST_EQUAL if homes else _CLOSE):
        said.append(f"did you mean {'.'.join(target)}?")
    return "".join(f"; {text}" for text in said)


def _likeness(left: str, right: str) -> float:
    return SequenceMatcher(None, left.lower(), right.lower()).ratio()


def _nearest_choice(field: FieldInfo | None, given: Any) -> str:
    choices = get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()
    near = [c for c in choices if isinstance(given, str) and _likeness(given, str(c)) >= _CLOSE]
    return f" (did you mean {near[0]}?)" if near else ""


def describe(annotation: Any, metadata: list[Any]) -> str:
    """What a field takes, in words: `a whole number >= 1`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(args[0], [*args[1:], *metadata])
    limits = [m for item in metadata for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
    bounds = " and ".join(text for item in limits if (text := _bound(item)))
    return f"{_kind(annotation, origin, args)} {bounds}".strip()


def _kind(annotation: Any, origin: Any, args: tuple[Any, ...]) -> str:
    if origin is Literal:
        return " or ".join(str(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a, []) for a in args)
    if origin is list:
        return f"a list, each {describe(args[0], [])}"
    if origin is tuple:
        return f"a list of {len(args)}, each {describe(args[0], [])}"
    if origin is dict:
        return f"a mapping of names, each to {describe(args[1], [])}"
    if section := submodel(annotation):
        return "a section with keys of " + ", ".join(sorted(section.model_fields))
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return plain.get(annotation, "anything")


def _bound(item: Any) -> str:
    if getattr(item, "min_length", None):
        return "that is not empty"
    for kind, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
        if (limit := getattr(item, kind, None)) is not None:
            return f"{sign} {limit}"
    return ""
