"""The project's own files, and what a Python source imports."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipeline", "stages", "slurm")
_NOT_OURS = {".venv", ".git", "runs", "build", "dist", "node_modules"}


class Import(NamedTuple):
    module: str
    line: int
    is_top: bool
    """At module level: it happens when the file is imported."""


def own_files(pattern: str) -> list[Path]:
    """Files of the repository that git does not ignore, or without git those that lie here."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        found = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        found = [p for p in ROOT.rglob(pattern) if not _NOT_OURS & set(p.relative_to(ROOT).parts)]
    return sorted(path for path in found if path.is_file())


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def modules(*packages: str) -> list[Path]:
    return [path for path in own_files("*.py") if path.relative_to(ROOT).parts[0] in (packages or PACKAGES)]


def imports(source: str) -> Iterator[Import]:
    """What the source imports; `from a import b` may import the module a.b, so both count."""
    tree = ast.parse(source)
    inner = {id(node) for outer in ast.walk(tree) if _is_put_off(outer) for node in ast.walk(outer)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, id(node) not in inner)


def _is_put_off(node: ast.AST) -> bool:
    """What is in it does not happen at import: a function, or what only a type checker reads."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" and not node.orelse
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
