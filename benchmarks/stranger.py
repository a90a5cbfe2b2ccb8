"""A stranger's way: `python benchmarks/stranger.py [--address ADDRESS]`. In an empty folder, one shell clones this
repository as it is committed and types what docs/tutorial.md says, block by block, but for what needs a cluster. Keys:

total_s           from `git clone` to the end of the last block
install_s         of that the first block: clone, setup, doctor
demo_s            the quickstart
run_s             the own run, killed once, until it is done
slowest_s         the slowest block beside these
failed            blocks that were not run to their end
gain              points of held-out accuracy that the own run gained
wrong_steps       steps of it that do not stand in its metrics exactly once
missing           of checkpoint, export, evaluation, report and fork: what is not there
load              the machine's load average (1 min), at the end
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import Must, main, parser

from tests.docs.console import ROOT, Block, console  # harness has set the path

MUST = {
    "total_s": Must(at_most=900),
    "failed": Must(at_most=0),
    "gain": Must(at_least=20),
    "wrong_steps": Must(at_most=0),
    "missing": Must(at_most=0),
}
PAGE = ROOT / "docs" / "tutorial.md"
_OURS = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONSAFEPATH", "MLFLOW_TRACKING_URI", "MAKEFLAGS")
"""What a stranger's shell does not have."""
_PARTS = {
    "install_s": ("pivot-pipeline doctor",),
    "demo_s": ("make demo",),
    "run_s": ("pivot-pipeline status mine", "pivot-pipeline resume mine"),
}
"""Blocks by their last lines."""
_LEFT = (
    "runs/mine/checkpoints/step_60/MANIFEST.json",
    "runs/mine/exports/step_60/config.json",
    "runs/mine/evals/step_60.json",
    "mine.html",
    "runs/mine-from20/ENDED",
)


def blocks() -> list[Block]:
    return [block for block in console(PAGE) if block.reason != "a cluster"]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pivot-stranger-") as name:
        folder = Path(name)
        times = folder / "times"
        script = "set -eo pipefail\n" + "".join(
            f"{block.text.replace('ADDRESS', args.address)}\ndate +%s.%N >> '{times}'\n" for block in blocks()
        )
        environment = {key: value for key, value in os.environ.items() if key not in _OURS}
        times.write_text(f"{subprocess.check_output(['date', '+%s.%N'], text=True)}")
        done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, stdout=sys.stderr, check=False)
        return {
            "code": done.returncode,
            "titles": [block.text.strip().splitlines()[-1].partition("  #")[0].strip() for block in blocks()],
            "times": [float(line) for line in times.read_text().split()],
            "load": os.getloadavg()[0],
            **left(folder / "pivot-pipeline"),
        }


def left(clone: Path) -> dict[str, Any]:
    """What the tutorial is to leave behind."""
    run = clone / "runs" / "mine"
    summary, metrics = run / "summary.json", run / "metrics.jsonl"
    return {
        "missing": [path for path in _LEFT if not (clone / path).exists()],
        "summary": json.loads(summary.read_text()) if summary.is_file() else {},
        "steps": [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.is_file() else [],
    }


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    took = [end - begin for begin, end in pairwise(raw["times"])]
    by_title = dict(zip(raw["titles"], took, strict=False))
    parts = {key: sum(by_title.get(title, 0.0) for title in titles) for key, titles in _PARTS.items()}
    others = [seconds for title, seconds in by_title.items() if title not in sum(_PARTS.values(), ())]
    first, last = raw["summary"].get("eval_first"), raw["summary"].get("eval_last")
    steps = [step for step in raw["steps"] if step > 0]
    return {
        "total_s": sum(took),
        **parts,
        "slowest_s": max(others, default=None),
        "failed": float(len(raw["titles"]) - len(took)),
        "gain": None if first is None or last is None else 100 * (last - first),
        "wrong_steps": float(sum(steps.count(step) != 1 for step in range(1, 61))),
        "missing": float(len(raw["missing"])),
        "load": raw["load"],
    }


if __name__ == "__main__":
    arguments = parser(__doc__ or "")
    arguments.add_argument("--address", default=str(ROOT), help="of the repository that is cloned")
    sys.exit(main("stranger", arguments.parse_args(), measure, figures, MUST))
