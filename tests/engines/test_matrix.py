"""What trainers of every kind write, engines of one rank and of two answer with: tests.engines.matrix, as a program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.processes import python_environment
from tests.engines.matrix import TRAINERS

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        (2, ("moe",)),
        pytest.param(2, ("dense", "tied"), marks=pytest.mark.slow),
        pytest.param(1, ("moe", "tied"), marks=pytest.mark.slow),
    ],
)
def test_engines_answer_as_fresh_ones_whatever_the_trainer(tmp_path: Path, ranks: int, kinds: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.matrix", str(tmp_path), str(ranks), *kinds],
        cwd=Path(__file__).parents[2],
        env=python_environment(),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [seen.pop("kind") for seen in found] == list(kinds)
    for seen in found:
        assert seen == {
            "equal": dict.fromkeys((*TRAINERS, "woken"), True),
            "are_the_loaders": True,
            "others_differ": True,
            "is_as_written_down": True,
            "reads_directly": True,
            "is_shift_noticed": True,
        }
