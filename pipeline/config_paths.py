"""Where the files are that a configuration names, before it is validated."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.compose import Tree, merge, nest
from pipeline.core.errors import ConfigError

_INPUTS = (
    ("run", "code_path"),
    ("data", "train_files"),
    ("data", "val_files"),
    ("model", "policy", "path"),
    ("model", "genrm", "path"),
)
_TEMPLATE = ("reward", "genrm", "template")
_FUNCTIONS = (("evaluate", "function"), ("rollout", "function"), ("tracking", "also"))


def with_absolute_inputs(tree: Tree, folders: list[Path]) -> Tree:
    """Replace relative paths, and the template's path by its text, at the known places of an unvalidated tree.

    What has a wrong type is left alone: the validation says so. Raises ConfigError for a template that is no file.
    """
    for key in _INPUTS:
        tree = _replaced(tree, key, lambda text: _looked_up(text, folders))
    for place in (*_FUNCTIONS, *_own_functions(tree)):
        tree = _replaced(tree, place, lambda text: _function_path(text, folders))
    if isinstance(stages := tree.get("stages"), list):
        tree = tree | {"stages": [_with_path(stage, folders) for stage in stages]}
    return _replaced(tree, _TEMPLATE, lambda text: _template_text(text, folders))


def _own_functions(tree: Tree) -> list[tuple[str, ...]]:
    reward = tree.get("reward")
    functions = reward.get("functions") if isinstance(reward, dict) else None
    return [("reward", "functions", name, "path") for name in functions] if isinstance(functions, dict) else []


def _with_path(stage: Any, folders: list[Path]) -> Any:
    if isinstance(stage, dict) and isinstance(path := stage.get("path"), str):
        return stage | {"path": _function_path(path, folders)}
    return stage


def _function_path(text: str, folders: list[Path]) -> str:
    """`path/to/file.py:name` with the file's whole path; `module:name` as it is."""
    file, _, name = text.rpartition(":")
    return f"{_looked_up(file, folders)}:{name}" if file.endswith(".py") else text


def _replaced(tree: Tree, path: tuple[str, ...], change: Callable[[str], str]) -> Tree:
    value: Any = tree
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, str):
        return merge(tree, nest(path, change(value)))
    if isinstance(value, list):
        return merge(tree, nest(path, [change(v) if isinstance(v, str) else v for v in value]))
    return tree


def _looked_up(text: str, folders: list[Path]) -> str:
    """Where the file is; the first folder's path if it is nowhere, so that the message about it names a place."""
    if "://" in text or text in ("", "emulated"):
        return text
    candidates = [os.path.abspath(folder / Path(text).expanduser()) for folder in folders]
    return next((c for c in candidates if os.path.exists(c)), candidates[0])


def _template_text(text: str, folders: list[Path]) -> str:
    if "\n" in text or "{" in text:
        return text
    path = Path(_looked_up(text, folders))
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if path.suffix in (".jinja", ".jinja2", ".j2", ".txt"):
        places = ", ".join(str(folder) for folder in folders)
        raise ConfigError(f"reward.genrm.template: no such file: {text} (looked in {places})")
    return text


def packaged_configs() -> Path:
    """The folder of the configs that come with the package (in a wheel: inside it; in a checkout: beside it)."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"


def find_config(path: str | Path) -> Path:
    """The file itself, else the packaged one of that name (`configs/quickstart.yaml` works from a wheel)."""
    packaged = packaged_configs()
    for candidate in (Path(path), packaged / path, packaged.parent / path):
        if candidate.is_file():
            return candidate.absolute()
    names = ", ".join(sorted(f"configs/{p.relative_to(packaged)}" for p in packaged.rglob("*.yaml")))
    raise ConfigError(f"no such configuration file: {path} (in {Path.cwd()}); packaged ones: {names}")
