"""From YAML files and dotted overrides to one tree. Knows no key; `pipeline/config.py` gives the tree its meaning.

The YAML is that of version 1.2, so that text stays text: only `true` and `false` are booleans (`no` is a word),
`1e-6` is a number, dates and `1:30` are text, and the keys of a mapping are always text (`1:` and `yes:` too).
A key that stands twice in one mapping is refused.
"""

import re
from collections.abc import Hashable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import yaml

from pipeline.core.errors import ConfigError

Tree = dict[str, Any]
Sources = dict[tuple[str, ...], str]
"""Which file or override gave the leaf at this path its value."""

_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "int": (r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        given = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is text", key.start_mark)
            if given.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands here twice", key.start_mark
                )
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}


class _Dumper(yaml.SafeDumper):
    """Quotes what a reader of either version of YAML would not take for text."""


class _FlatDumper(_Dumper):
    """Texts of several lines are quoted."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> Iterator[Tree]:
    tree: Tree = {}
    yield tree
    tree.update(loader.construct_mapping(node))  # type: ignore[arg-type]


for _tag, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_Dumper.add_representer(str, _represent_text)
_FlatDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None),
)


def parse(text: str, where: str) -> Any:
    """The value that a YAML text holds; ConfigError with line and column if it is none."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{where}{place}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {error}") from None


def dump(tree: Tree) -> str:
    """YAML that `parse` reads back to the same tree; long texts stay readable."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def dump_flat(value: Any) -> str:
    """The same of any value, on one line."""
    text: str = yaml.dump(
        value, Dumper=_FlatDumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=inf
    )
    return text.removesuffix("\n").removesuffix("\n...")


def read_tree(path: Path) -> Tree:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    tree = parse(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {type(tree).__name__}; a configuration is a mapping of sections")
    return tree


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """`a.b=c` as path and value; the value is YAML, nothing at all is the empty text."""
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"{text!r} is no override: write section.key=value")
    try:
        return path, parse(value, f"the override {text!r}") if value.strip() else ""
    except ConfigError as error:
        quoted = key.strip() + "='\"" + value.strip() + "\"'"
        raise ConfigError(
            f"{error}. A text with YAML's own signs in it is quoted twice for a shell: {quoted}"
        ) from None


def nest(path: tuple[str, ...], value: Any) -> Tree:
    """The tree that holds only this leaf."""
    for key in reversed(path):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def merge(left: Tree, right: Tree) -> Tree:
    """`right` over `left`: mappings key by key, anything else (lists too) is replaced as a whole."""
    merged = dict(left)
    for key, value in right.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def leaves(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each path with its value; an empty mapping is a leaf."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value
