"""What docs/guides/slurm-traps.md promises of the whole tree, and that the tests it names are there."""

import ast
import re

import pytest

from tests.architecture.sources import ROOT, modules, relative

PAGE = ROOT / "docs/guides/slurm-traps.md"
_NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
_SLOW = re.compile(r"::(\w+)` \(slow\)")


def named_in(source: str) -> dict[str, bool]:
    """The tests of a file by name, and whether each is slow."""
    tree = ast.parse(source)
    marks = [
        node for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
    ]
    all_slow = any("mark.slow" in ast.unparse(node) for node in marks)
    return {
        node.name: all_slow or any("mark.slow" in ast.unparse(one) for one in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def wrong(text: str) -> list[str]:
    """What the page says of tests that is not so."""
    found, slow = [], set(_SLOW.findall(text))
    for path, name in _NAMED.findall(text):
        file = ROOT / path
        tests = named_in(file.read_text(encoding="utf-8")) if file.is_file() else None
        if tests is None or (name and name not in tests):
            found.append(f"{path}::{name} is not there")
        elif name and tests[name] != (name in slow):
            found.append(f"{path}::{name} is {'slow' if tests[name] else 'not slow'}")
    return found


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]


def test_each_trap_has_a_test_that_is_there_or_cannot_occur() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert wrong(text) == []
    found = rows(text)
    assert len(found) > 50 and {len(row) for row in found} == {3}
    for trap, done, test in found:
        assert _NAMED.search(test) or "the same" in test or "cannot happen" in done + test, trap


@pytest.mark.parametrize(
    "named",
    ["tests/slurm/gone.py::test_x", "tests/slurm/test_parse.py::test_gone", "tests/cluster/test_quickstart.py"],
)
def test_a_page_that_names_what_is_not_there_is_found(named: str) -> None:
    assert bool(wrong(f"| a | b | `{named}` |")) is ("::" in named)
    slow = "tests/cluster/test_quickstart.py::test_a_node_holds_its_own_stores_alone"
    assert wrong(f"`{slow}`") and not wrong(f"`{slow}` (slow)")


def files_that_say(word: str) -> set[str]:
    """Modules with the word in a text that is no docstring."""
    found = set()
    for path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in bare]
        if any(isinstance(node.value, str) and re.search(rf"(^|[ (]){word}( |$)", node.value) for node in texts):
            found.add(relative(path))
    return found


def test_only_scripts_run_srun() -> None:
    """The job's own with its launcher, and the shell of an allocation that asks whether it fits."""
    assert files_that_say("srun") == {"slurm/allocation.py", "slurm/held.py", "slurm/launcher.py"}


def test_nothing_asks_for_accounting() -> None:
    assert files_that_say("sacct") == set() != files_that_say("squeue")
