import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.cli.main import run

CHECKOUT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-P", "-m", "pipeline.cli.main"]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("MLFLOW_TRACKING_URI", "PYTHONPATH")}
    return {**kept, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Pivot = Callable[..., Done]


@pytest.fixture
def pivot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Pivot:
    """A command, given in an empty folder: its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def give(*arguments: str) -> Done:
        code = run(arguments)
        printed = capsys.readouterr()
        return Done(code, printed.out, printed.err)

    return give
