"""Where the user's own code is: `module:name` (of `run.code_path`, or installed) or `path/to/file.py:name`.

At submit it is looked for and not imported: the user's code runs in processes of its own, or in workers.
"""

import ast
import importlib.machinery
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.core.errors import ConfigError

_NAME = r"[^\W\d]\w*"


def check_function(where: str, path: str, code_path: Sequence[str]) -> None:
    """Raise ConfigError unless the module, or the file with that name in it, is there. `where`: the key."""
    file, _, name = path.rpartition(":")
    if file.endswith(".py"):
        _check_file(where, Path(file), name)
        return
    if not re.fullmatch(rf"{_NAME}(\.{_NAME})*:{_NAME}", path):
        raise ConfigError(
            f"{where} {path!r}: valid is module:name, such as stages.checkers:digit_sort, or path/to/file.py:name"
        )
    top = path.split(".")[0].split(":")[0]
    if top not in sys.modules and importlib.machinery.PathFinder.find_spec(top, [*code_path, *sys.path]) is None:
        raise ConfigError(f"{where} {path!r}: no module {top!r} in run.code_path {list(code_path)} or installed")


def _check_file(where: str, file: Path, name: str) -> None:
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except OSError as error:
        raise ConfigError(f"{where}: {file} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{where}: {file} is no Python: {error}") from None
    names = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import)
             for alias in node.names}  # fmt: skip
    names |= {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    defined = [
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    if name not in names and name not in defined:
        raise ConfigError(f"{where}: {file} has no {name!r}; it defines {', '.join(defined) or 'nothing'}")
