"""A run's configuration as one that gives the same run again: without its name and place, and without secrets. Pure."""

import re
from collections.abc import Iterator
from typing import Any

from pipeline.compose import dump
from pipeline.config import CREDENTIALS, SECRET_NAME, Config

_FREE = frozenset({"options", "function_options", "env", "extra"})
"""Mappings whose keys are the user's: a text under a secret-looking name is one."""
_ASSIGNED = re.compile(r"\b(\w*(?:TOKEN|SECRET|PASSW|KEY|CREDENTIAL)\w*)=", re.IGNORECASE)
"""In a line of shell."""


def exported(config: Config, source: str) -> str:
    """YAML, at its head what was left out. `source`: the run's name."""
    tree = config.model_dump(mode="json")
    out = [f"run.name: {tree['run'].pop('name')} has its folder; --name gives the next one another"]
    if config.checkpoint.uri:
        uri = _without_password(tree["checkpoint"].pop("uri"))
        out.append(f"checkpoint.uri: {uri} holds the checkpoints of {source}; name another place")
    out += [f"{'.'.join(path)}: {why}" for path, why in _clean(tree, ())]
    said = "\n".join(f"# left out: {line}" for line in out)
    return f"# The run {source} again: pivot-pipeline submit THIS_FILE\n{said}\n{dump(tree)}"


def _clean(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Takes secrets out of the tree; each with where it was."""
    is_free = any(key in _FREE for key in path)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        here = (*path, str(key))
        if not isinstance(item, str):
            yield from _clean(item, here)
        elif is_free and SECRET_NAME.search(str(key)):
            del value[key]
            yield here, "it looks like a secret; set it again"
        elif "setup" in path and (found := _ASSIGNED.search(item)):
            value[key] = ":"
            yield here, f"it sets {found[1]}, which looks like a secret; set it again"
        elif CREDENTIALS.search(item):
            value[key] = _without_password(item)
            yield here, "its user and password; set them again"


def _without_password(uri: str) -> str:
    return CREDENTIALS.sub("://", uri)
