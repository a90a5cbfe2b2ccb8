"""A run whose MLflow server fails: `python benchmarks/tracking.py [--steps 120] [--modes stopped stalled]`.

Emulated runs against a real MLflow server that is a process of its own. Modes: fine (twice), stopped (killed for three
steps, started again, five times over), stalled (SIGSTOP for 30 s), refusing (it answers: no, for 30 steps), full (its
database cannot grow, for 30 steps), and without MLflow. Keys:

  ratio/<mode>       median time of the steps between the begin of the trouble and its end, over that of the same
                     steps of the runs whose server was fine
  ratio/fine         between the two runs with a fine server: the noise
  ratio/without      without MLflow over fine: what tracking itself costs
  missing, doubled   points of metrics.jsonl that the server does not have at the end, or has twice
  unsent             points that are still on their way at the end, by status.json
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Must, main, parser

from tests.fakes.mlflow_server import MlflowServer
from tests.scenarios.runs import begin, rows

FIRST_STEP = 15
"""The trouble begins after it: until then MLflow is imported."""
STALL_S = 30.0
MODES = ("stopped", "stalled", "refusing", "full")
MUST = {f"ratio/{mode}": Must(at_most=1.15) for mode in MODES}
MUST |= {what: Must(at_most=0) for what in ("missing", "doubled", "unsent")}
SETTINGS = (
    "checkpoint.save_freq=1000",
    "rollout.engine.options={median_tokens: 16, step_s: 0.01}",
    "reward.genrm.engine.options={script: judge, step_s: 0.002}",
)

Pass = Callable[[int], None]
"""Waits until the run has done so many steps more."""


def stopped(server: MlflowServer, pass_steps: Pass) -> None:
    for _ in range(5):
        server.kill()
        pass_steps(3)
        server.start()
        pass_steps(5)


def stalled(server: MlflowServer, pass_steps: Pass) -> None:
    server.stall()
    time.sleep(STALL_S)
    server.go_on()


def refusing(server: MlflowServer, pass_steps: Pass) -> None:
    server.refuse()
    pass_steps(30)
    server.accept()


def full(server: MlflowServer, pass_steps: Pass) -> None:
    server.fill()
    pass_steps(30)
    server.free()


def fine(server: MlflowServer, pass_steps: Pass) -> None:
    pass_steps(30)


TROUBLES = {"stopped": stopped, "stalled": stalled, "refusing": refusing, "full": full}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pivot-tracking-") as name:
        folder = Path(name)
        server = MlflowServer(folder)
        server.start()
        try:
            modes = ["fine", *args.modes, "fine", "without"]
            return {"runs": [one(folder / f"{n}-{mode}", mode, server, args.steps) for n, mode in enumerate(modes)]}
        finally:
            server.close()


def one(run: Path, mode: str, server: MlflowServer, num_steps: int) -> dict[str, Any]:
    """The run's rows, between which of them there was trouble, and what the server has of them."""
    uri = "none" if mode == "without" else server.uri
    process = begin(
        *("submit", "configs/emulated.yaml", "--run-dir", str(run), "--wait", *SETTINGS),
        *(f"trainer.total_training_steps={num_steps}", f"tracking.uri={uri}"),
    )

    def step() -> int:
        found = rows(run) if (run / "metrics.jsonl").exists() else []
        return int(found[-1]["step"]) if found else 0

    def until(condition: Callable[[], bool]) -> None:
        while not condition():
            if process.poll() is not None:
                raise RuntimeError(
                    f"{mode}: the run ended too early: more --steps are needed\n{process.communicate()[0]}"
                )
            time.sleep(0.02)

    def pass_steps(number: int) -> None:
        last = step() + number
        until(lambda: step() >= last)

    until(lambda: step() >= FIRST_STEP and (mode == "without" or bool(server.steps(run))))
    load, began = os.getloadavg()[0], step()
    TROUBLES.get(mode, fine)(server, pass_steps)
    ended = step()
    out, _ = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(f"{mode}: {out}")
    missing, doubled = server.account(run) if mode != "without" else ([], [])
    status = json.loads((run / "status.json").read_text())["mlflow"] or {}
    print(f"{mode:10} steps {began} to {ended}, {len(missing)} missing, {len(doubled)} doubled", file=sys.stderr)
    return {
        "mode": mode,
        "load": load,
        "trouble": [began, ended],
        "step_s": {int(row["step"]): row["timing_s/step"] for row in rows(run) if row["step"] > 0},
        "missing": missing,
        "doubled": doubled,
        "unsent": status.get("unsent_points", 0),
    }


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    runs = raw["runs"]
    first, second = (run for run in runs if run["mode"] == "fine")
    found: dict[str, float | None] = {}
    for run in (run for run in runs if run["mode"] not in ("fine", "without")):
        calm = (median(first, run["trouble"]) + median(second, run["trouble"])) / 2
        found[f"step_s/{run['mode']}"] = median(run, run["trouble"])
        found[f"ratio/{run['mode']}"] = median(run, run["trouble"]) / calm
    whole = [FIRST_STEP, max(map(int, first["step_s"]))]
    found["step_s/fine"] = median(first, whole)
    found["ratio/fine"] = median(second, whole) / median(first, whole)
    found["ratio/without"] = median(next(run for run in runs if run["mode"] == "without"), whole) / median(first, whole)
    for what in ("missing", "doubled"):
        found[what] = float(sum(len(run[what]) for run in runs))
    found["unsent"] = float(sum(run["unsent"] for run in runs))
    found["load/max"] = max(run["load"] for run in runs)
    return found


def median(run: dict[str, Any], steps: list[int]) -> float:
    return statistics.median(value for step, value in run["step_s"].items() if steps[0] < int(step) <= steps[1])


if __name__ == "__main__":
    arguments = parser(__doc__ or "")
    arguments.add_argument("--steps", type=int, default=120)
    arguments.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parsed = arguments.parse_args()
    must = MUST if parsed.modes == list(MODES) else {key: MUST[key] for key in ("missing", "doubled", "unsent")}
    sys.exit(main("tracking", parsed, measure, figures, must))
