"""docs/metrics.md knows each metric that a run writes."""

import json
import re
from pathlib import Path

from tests.architecture.sources import ROOT

PAGE = ROOT / "docs" / "metrics.md"
_NOT_METRICS = {"step", "time"}


def documented(text: str) -> list[str]:
    """Patterns of the names in first cells; a bare name has the folder of the one before: `a/b`, `c` is a/b and a/c."""
    found: list[str] = []
    for cell in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([^`]+)`", cell):
            folder = name.rpartition("/")[0] if "/" in name else folder
            found.append(re.sub(r"<\w+>", "[^/]+", name if "/" in name else f"{folder}/{name}"))
    return found


def missing(names: set[str], text: str) -> set[str]:
    patterns = [pattern for pattern in documented(text) if not pattern.startswith("[^/]+/")]
    return {name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)}


def test_each_metric_of_a_run_is_documented(done: Path) -> None:
    rows = [json.loads(line) for line in (done / "runs" / "RUN" / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row} - _NOT_METRICS
    assert len(names) > 80
    assert missing(names, PAGE.read_text(encoding="utf-8")) == set()


def test_a_metric_that_is_not_documented_is_found() -> None:
    page = "| `a/b`, `c` | |\n| `d/<role>/e` | |\n| `<name>/<figure>` | |\n"
    assert missing({"a/b", "a/c", "d/x/e", "a/d", "d/x/y", "z/z"}, page) == {"a/d", "d/x/y", "z/z"}
