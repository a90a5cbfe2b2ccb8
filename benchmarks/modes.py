"""The modes of placement on the real control plane: `python benchmarks/modes.py [--scale 8] [--gpus h800 h20]`.

Real controller, agents, queue, scheduler and planner; engines and trainers are emulated: they take the time that the
cost model gives, --scale times as fast, a token standing for --grain (pipeline.emulation). Qwen2.5-7B judged by
Qwen3-30B-A3B on 32 slots, 512 sequences a step: on H800, and on H20, where training is the bottleneck. Each static mode
has its best split and training size, as the simulator finds them among those that a run can do. Beside them the paper's
own static splits. Then on 16 slots, at most 4 times as fast, speed as simulated and measured, without and with true
speeds and lengths that differ by up to 30 % from what is believed (and are told to nobody). Then 128 slots. Parts that
were measured are kept, in benchmarks/out/modes-parts. Keys:

  schedule is in the raw file; `simulated` is what the simulator says of the same inputs, mean of three seeds
  speed/<gpu>/<mode>          sequences per second, in the time of the cost model
  of_simulated/<gpu>/<mode>   the same over the simulator's
  ratio/<gpu>/<mode>          speed of shiftable over that mode's
  ratio_held/<gpu>/<mode>     that ratio over the simulator's
  of_best/<gpu>               speed of shiftable over that of the best static mode
  paper/<gpu>/<split>         over the paper's splits: stream 8/8/16 and colocated 32, measured; barrier 8/8/16, which
                              no run can do: simulated
  shifts/<gpu>                blocks shifted per step, shiftable
  16/<mode>/even, /uneven     measured over simulated speed on 16 slots, without and with 30 %
  128/speed, 128/of_simulated shiftable on 128 slots
  load/max                    the machine's, over the runs
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import Must, kept, main, parser

from pipeline.cli.runs import Rows
from pipeline.comparison import outcome
from pipeline.config import load_files
from pipeline.core.modes import ModeName
from pipeline.emulation import EVEN, Unevenness
from pipeline.run_folder import RunFolder
from pipeline.simulator.admission import Admission
from pipeline.simulator.emulate import Emulation, paper_emulation
from pipeline.simulator.modes import Schedule, shiftable_schedule, static_schedules, train_sizes
from pipeline.simulator.result import simulate

GROUP, SEEDS, SKIPPED = 2, (0, 1, 2), 2
STATIC = [mode for mode in ModeName if mode is not ModeName.SHIFTABLE]
PAPER = {
    "stream": Schedule(mode=ModeName.DISAGGREGATED, rollout=8, reward=8, train=16),
    "barrier": Schedule(mode=ModeName.DISAGGREGATED, rollout=8, reward=8, train=16, admission=Admission.BARRIER),
    "colocated": Schedule(mode=ModeName.COLOCATED, rollout=32, train=32, staleness=0),
}
UNEVEN = Unevenness(speed=0.3, period_s=60.0, length=0.3)
SMALL = (ModeName.SHIFTABLE, ModeName.DISAGGREGATED)
MUST = {
    **{f"ratio_held/{gpu}/{mode}": Must(at_least=0.9) for gpu in ("h800", "h20") for mode in STATIC},
    **{f"of_best/{gpu}": Must(at_least=0.97) for gpu in ("h800", "h20")},
    **{f"16/{mode}/even": Must(at_least=0.9, at_most=1.1) for mode in SMALL},
    **{f"16/{mode}/uneven": Must(at_least=0.8, at_most=1.2) for mode in SMALL},
    "128/speed": Must(at_least=0.0),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One live run."""

    gpu: str
    num_slots: int
    num_sequences: int
    scale: float
    grain: int
    num_steps: int
    uneven: Unevenness = EVEN

    @property
    def emulation(self) -> Emulation:
        return paper_emulation(
            GROUP,
            self.gpu,
            num_gpus=self.num_slots,
            num_sequences=self.num_sequences,
            time_scale=1 / self.scale,
            grain=self.grain,
            uneven=self.uneven,
        )

    def simulated(self, schedule: Schedule, seeds: Iterable[int] = SEEDS) -> float:
        """Sequences per second."""
        setup, steps = self.emulation.comparable, self.num_steps
        runs = [simulate(setup, schedule, seed=seed, num_steps=steps, num_skipped=SKIPPED) for seed in seeds]
        return fmean(run.sequences_per_s for run in runs)

    def best(self, modes: Iterable[ModeName]) -> dict[str, Schedule]:
        """Of each mode, among those that a run can do."""
        setup = self.emulation.comparable
        every = [*static_schedules(setup), *(shiftable_schedule(setup, size) for size in train_sizes(setup))]
        found: dict[str, Schedule] = {}
        for mode in modes:
            able = [s for s in every if s.mode is mode and s.admission is not Admission.BARRIER]
            able = [s for s in able if setup.train.fits(s.train)]
            found[mode.value] = max(able, key=lambda s: self.simulated(s, SEEDS[:1]))
        return found

    def run(self, schedule: Schedule) -> dict[str, Any]:
        loads = [os.getloadavg()[0]]
        with tempfile.TemporaryDirectory(prefix="pivot-modes-") as name:
            folder = Path(name)
            config = self.emulation.write(folder, schedule, self.num_steps)
            run = RunFolder(folder / "run")
            command = [sys.executable, "-P", "-m", "pipeline.cli.main", "submit", "config.yaml", "--run-dir", "run"]
            env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{schedule}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
            found = outcome(Rows(run).new(), load_files([config]))
            rows = [{"step": r["step"], "time": r["time"]} for r in Rows(run).new()]
        loads.append(os.getloadavg()[0])
        return {
            "schedule": str(schedule),
            "outcome": found.as_json(),
            "speed": (found.sequences_per_s or 0.0) / self.scale,
            "simulated": self.simulated(schedule),
            "steps": rows,
            "load": max(loads),
        }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    raw: dict[str, Any] = {"cells": {}, "paper": {}, "small": {}, "large": None, "scale": args.scale}
    for gpu in args.gpus:
        case = Case(gpu=gpu, num_slots=32, num_sequences=512, scale=args.scale, grain=args.grain, num_steps=args.steps)
        best = {k: _schedule(v) for k, v in kept("modes", f"best-{gpu}", partial(_best, case)).items()}
        raw["cells"][gpu] = {
            mode: kept("modes", f"{gpu}-{mode}", partial(case.run, schedule)) for mode, schedule in best.items()
        }
        raw["paper"][gpu] = {}
        for split, schedule in PAPER.items():
            same = next((mode for mode, chosen in best.items() if chosen == schedule), None)
            if split == "barrier":
                raw["paper"][gpu][split] = {"simulated": case.simulated(schedule)}
            elif same:
                raw["paper"][gpu][split] = raw["cells"][gpu][same]
            else:
                raw["paper"][gpu][split] = kept("modes", f"{gpu}-paper-{split}", partial(case.run, schedule))
    small = Case(gpu="h800", num_slots=16, num_sequences=256, scale=min(4.0, args.scale), grain=args.grain, num_steps=7)
    for mode, schedule in small.best(SMALL).items():
        for name, uneven in (("even", EVEN), ("uneven", UNEVEN)):
            case = replace(small, uneven=uneven)
            raw["small"][f"{mode}/{name}"] = kept("modes", f"16-{mode}-{name}", partial(case.run, schedule))
    large = Case(gpu="h800", num_slots=128, num_sequences=2048, scale=args.scale, grain=2 * args.grain, num_steps=5)
    schedule = shiftable_schedule(large.emulation.comparable, 96)
    raw["large"] = kept("modes", "128-shiftable", partial(large.run, schedule))
    return raw


def _best(case: Case) -> dict[str, Any]:
    return {mode: asdict(schedule) for mode, schedule in case.best(ModeName).items()}


def _schedule(kept: dict[str, Any]) -> Schedule:
    names = {"mode": ModeName, "admission": Admission, "judging": Admission}
    return Schedule(**{key: names[key](value) if key in names else value for key, value in kept.items()})


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    loads = []
    for gpu, runs in raw["cells"].items():
        ours = runs[ModeName.SHIFTABLE]
        for mode, run in runs.items():
            found[f"speed/{gpu}/{mode}"] = run["speed"]
            found[f"of_simulated/{gpu}/{mode}"] = run["speed"] / run["simulated"]
            loads.append(run["load"])
        for mode in STATIC:
            ratio, expected = ours["speed"] / runs[mode]["speed"], ours["simulated"] / runs[mode]["simulated"]
            found |= {f"ratio/{gpu}/{mode}": ratio, f"ratio_held/{gpu}/{mode}": ratio / expected}
        found[f"of_best/{gpu}"] = ours["speed"] / max(runs[mode]["speed"] for mode in STATIC)
        for split, run in raw["paper"][gpu].items():
            found[f"paper/{gpu}/{split}"] = ours["speed"] / run.get("speed", run["simulated"])
        found[f"shifts/{gpu}"] = ours["outcome"]["shifts_per_step"]
    for name, run in raw["small"].items():
        found[f"16/{name}"] = run["speed"] / run["simulated"]
        loads.append(run["load"])
    if raw["large"]:
        found["128/speed"] = raw["large"]["speed"]
        found["128/of_simulated"] = raw["large"]["speed"] / raw["large"]["simulated"]
        loads.append(raw["large"]["load"])
    return found | {"load/max": max(loads)}


if __name__ == "__main__":
    made = parser(__doc__ or "")
    made.add_argument("--gpus", nargs="+", default=["h800", "h20"], choices=["h800", "h20"])
    made.add_argument("--scale", type=float, default=8.0, help="how many times as fast; at most 10")
    made.add_argument("--grain", type=int, default=32, help="tokens for which one stands")
    made.add_argument("--steps", type=int, default=9)
    parsed = made.parse_args()
    if parsed.scale > 10:
        made.error("--scale: at most 10")
    sys.exit(main("modes", parsed, measure, figures, MUST))
