"""The user's functions, read and not imported: whether they can be called as they will be."""

from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from pipeline.own_code import CHECKER, ROLLOUT, SCORE, SINK, STAGE, Called, check_function

LONGEST = SCORE.with_options(["longest"])


def check(folder: Path, source: str, called: Called, name: str = "f") -> None:
    (folder / "mine.py").write_text(source)
    check_function("key", f"{folder}/mine.py:{name}", [], called)


@pytest.mark.parametrize(
    ("source", "called"),
    [
        ("def f(data_source, solution_str, ground_truth, extra_info=None): ...", SCORE),
        ("def f(solution_str, **row): ...", SCORE),
        ("async def f(*, solution_str, ground_truth, data_source, extra_info): ...", SCORE),
        ("def f(data_source, solution_str, ground_truth, extra_info, longest): ...", LONGEST),
        ("def f(a, b, c, d=None): ...", CHECKER),
        ("def f(*row): ...", CHECKER),
        ("def f(stage): ...", STAGE),
        ("def f(stage, more=1, /): ...", STAGE),
        ("async def f(client, **row): ...", ROLLOUT),
        ("async def f(client, messages, data_source, ground_truth, extra_info): ...", ROLLOUT),
        ("def f(client, **row):\n    return g(client)", ROLLOUT),
        ("class f:\n    def __init__(self, a): ...", SINK),
        ("from elsewhere import f", SCORE),
        ("f = make()", SCORE),
        ("from elsewhere import *", SCORE),
        ("@decorated\ndef f(): ...", SCORE),
    ],
)
def test_what_can_be_called_is_taken(tmp_path: Path, source: str, called: Called) -> None:
    check(tmp_path, source, called)


@pytest.mark.parametrize(
    ("source", "called", "says"),
    [
        ("def f(data_source, solution_str, ground_truth): ...", SCORE, "takes no extra_info"),
        ("def f(solution_str, /, **row): ...", SCORE, "wants solution_str"),
        (
            "def f(solution_str, tokenizer, **row): ...",
            SCORE,
            r"wants tokenizer, which nobody gives \(`options` would\)",
        ),
        ("def f(solution_str, *, limit, **row): ...", SCORE, "wants limit"),
        ("def f(solution_str, ground_truth): ...", CHECKER, "takes 2 arguments by position, and is given 4"),
        ("def f(): ...", STAGE, "takes 0 arguments by position, and is given 1"),
        ("def f(stage, folder): ...", STAGE, "wants folder"),
        ("def f(client, **row): ...", ROLLOUT, r"line 1: f\(client, \*\*row\) is not async; valid: async def"),
        ("async def f(client, messages): ...", ROLLOUT, "takes no data_source"),
        ("def g(): ...\ndef ff(): ...", SCORE, r"has no 'f' \(did you mean ff\?\); it defines g, ff"),
        ("def f(:", SCORE, "is no Python"),
    ],
)
def test_what_cannot_is_refused_with_the_reason(tmp_path: Path, source: str, called: Called, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check(tmp_path, source, called)


def test_a_module_is_found_in_packages_of_code_path_without_an_import(tmp_path: Path) -> None:
    (tmp_path / "own" / "inner").mkdir(parents=True)
    (tmp_path / "own" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "own" / "inner" / "mod.py").write_text("raise RuntimeError('imported')\ndef f(stage): ...")
    check_function("key", "own.inner.mod:f", [str(tmp_path)], STAGE)
    for path, says in (
        ("own.inner.mod:g", "mod.py has no 'g'"),
        ("own.inner.gone:f", r"no module 'own\.inner\.gone'"),
        ("gone:f", "no module 'gone'"),
        ("own.inner", "valid is module:name"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_function("key", path, [str(tmp_path)], STAGE)
