"""Where the user's own code is: `module:name` (of `run.code_path`, or installed) or `path/to/file.py:name`, and whether
it can be called as it will be.

At submit it is read and not imported: the user's code runs in processes of its own, or in workers.
"""

import ast
import difflib
import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from pipeline.core.errors import ConfigError

_NAME = r"[^\W\d]\w*"
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """With so many arguments by position, then these by name; `is_awaited`: what it returns. `form`: how such a
    function is written."""

    form: str
    positional: int = 0
    names: tuple[str, ...] = ()
    is_awaited: bool = False

    def with_options(self, names: Iterable[str]) -> "Called":
        return replace(self, names=(*self.names, *names))


_ROW = ("data_source", "ground_truth", "extra_info")
_COMPUTE_SCORE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None)"
SCORE = Called(form=_COMPUTE_SCORE, names=("solution_str", *_ROW))
CHECKER = Called(form=_COMPUTE_SCORE, positional=4)
STAGE = Called(form="def name(stage)", positional=1)
SINK = Called(form="class Name, with start(run), log(step, metrics) and close(status)")
ROLLOUT = Called(form="async def name(client, **row)", positional=1, names=("messages", *_ROW), is_awaited=True)


def check_function(where: str, path: str, code_path: Sequence[str], called: Called) -> None:
    """Raise ConfigError unless the module or file is there, has that name in it, and a function that can be called so.
    `where`: the key."""
    file, _, name = path.rpartition(":")
    if file.endswith(".py"):
        _check_file(where, Path(file), name, called)
        return
    if not re.fullmatch(rf"{_NAME}(\.{_NAME})*:{_NAME}", path):
        raise ConfigError(
            f"{where} {path!r}: valid is module:name, such as stages.checkers:digit_sort, or path/to/file.py:name"
        )
    source = _source_of(where, path, file, code_path)
    if source is not None:
        _check_file(where, source, name, called)


@dataclass(frozen=True, slots=True)
class _Module:
    """`source` None: it is no Python source. `folders`: of a package."""

    source: Path | None
    folders: list[Path]


def _source_of(where: str, path: str, module: str, code_path: Sequence[str]) -> Path | None:
    """The module's file; None for what is no Python source. No package on the way is imported."""
    parts = module.split(".")
    spec = _top(parts[0]) or PathFinder.find_spec(parts[0], [*code_path])
    found = None
    if spec is not None:
        source = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
        found = _Module(source, [*map(Path, spec.submodule_search_locations or ())])
    for number, part in enumerate(parts):
        if number and found is not None:
            found = _within(found.folders, part)
        if found is None:
            name = ".".join(parts[: number + 1])
            raise ConfigError(f"{where} {path!r}: no module {name!r} in run.code_path {list(code_path)} or installed")
    return found.source if found is not None else None


def _within(folders: Sequence[Path], part: str) -> _Module | None:
    """The module of this name in a package of these folders."""
    places = [folder / part for folder in folders]
    for place in places:
        if (source := place / "__init__.py").is_file():
            return _Module(source, [place])
        if (source := place.with_name(f"{part}.py")).is_file():
            return _Module(source, [])
        if any(place.parent.glob(f"{part}.*.so")):
            return _Module(None, [])
    namespace = [place for place in places if place.is_dir()]
    return _Module(None, namespace) if namespace else None


def _top(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # such as __main__, which has none
        return getattr(sys.modules[name], "__spec__", None)


def _check_file(where: str, file: Path, name: str, called: Called) -> None:
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except OSError as error:
        raise ConfigError(f"{where}: {file} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{where}: {file} is no Python: {error}") from None
    defined = {node.name: node for node in tree.body if isinstance(node, _FUNCTION | ast.ClassDef)}
    if name not in defined:
        if not {name, "*", "__getattr__"} & {*_bound_elsewise(tree), *defined}:
            near = difflib.get_close_matches(name, defined, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"{where}: {file} has no {name!r}{hint}; it defines {', '.join(defined) or 'nothing'}")
        return
    function = defined[name]
    if isinstance(function, _FUNCTION) and not function.decorator_list and (fault := _misfit(function, called)):
        is_now = f"{name}({ast.unparse(function.args)})"
        raise ConfigError(f"{where}: {file}, line {function.lineno}: {is_now} {fault}; valid: {called.form}")


def _bound_elsewise(tree: ast.Module) -> set[str]:
    """Names that are imported (`*` stands for all of a module) or assigned."""
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
    }
    return names | {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _misfit(function: ast.FunctionDef | ast.AsyncFunctionDef, called: Called) -> str:
    """Why the function cannot be called so; "" if it can."""
    args = function.args
    by_place = [*args.posonlyargs, *args.args]
    if len(by_place) < called.positional and args.vararg is None:
        return f"takes {len(by_place)} arguments by position, and is given {called.positional}"
    taken = {arg.arg for arg in [*args.args[max(0, called.positional - len(args.posonlyargs)) :], *args.kwonlyargs]}
    if args.kwarg is None and (refused := [name for name in called.names if name not in taken]):
        return f"takes no {refused[0]}"
    needed = {arg.arg for arg in by_place[called.positional : len(by_place) - len(args.defaults)]}
    needed |= {arg.arg for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value is None}
    if missing := sorted(needed - ({*called.names} & taken)):
        return f"wants {missing[0]}, which nobody gives (`options` would)"
    returns = any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(function))
    is_plain = isinstance(function, ast.FunctionDef) and not returns  # else it may return what can be awaited
    return "is not async" if called.is_awaited and is_plain else ""
