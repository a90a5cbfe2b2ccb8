"""What the planner costs, and how good its choices are: `python benchmarks/planner.py [--part NAME ...]`.

Parts: `time` (five minutes) and `accuracy` (an hour with 25 snapshots per group; `--snapshots`). What a part has
measured is kept in benchmarks/out/planner-parts/ and not measured again: remove the folder to start anew. Keys:

  <part>_ms/<gpus>/<percentile>  processor milliseconds of one decision on one core, p50 and p99 of those that compare
                           candidates, in a shiftable simulation of group 1 (a block is one GPU; 32 sequences per GPU
                           and step). Parts: `preprocess` the monitor's picture and its arrays, `construct` candidates
                           and the moves of the one that is taken, `simulate` the look-ahead, `decision` all of it
  decisions/<gpus>         how many those are
  rank/<group>             rank correlation of the look-ahead's value with what the simulator makes of each of up to 8
                           candidates, mean of the snapshots (32 H800, 1,024 sequences, 16k lengths, the training sizes
                           and seeds in ACCURACY). What is compared with is what the value stands for: when the step
                           after the next one can be trained, and the work of the one behind it that is left then
  rank_true/<group>, rank_wrong/<group>  the same with right beliefs at the start, and with wrong ones
  regret/<group>           of the candidate with the best value against the best of those tried, in cycles, mean
  bias/<group>             value minus truth, in cycles, mean
  snapshots/<group>        how many
"""

import argparse
import contextlib
import copy
import math
import os
import sys
import time
from functools import partial
from typing import Any

import numpy as np
from harness import Must, kept, main, mean, parser, percentile

from pipeline.core.events import INFERENCE, Role
from pipeline.core.planner.lookahead import EARLY, SLACK, look_ahead
from pipeline.core.planner.planner import Plan, _why_not, assign, decide
from pipeline.core.planner.preprocess import Picture, preprocess, splits
from pipeline.core.snapshot import Snapshot
from pipeline.simulator.admission import Admission
from pipeline.simulator.setup import RIGHT, Beliefs, paper_setup
from pipeline.simulator.shiftable import Shiftable
from pipeline.simulator.simulation import Simulation

PARTS = ("time", "accuracy")
SIZES = {32: 12, 128: 8, 1024: 4}  # GPUs to steps
ACCURACY = [(size, seed, wrong) for seed in range(40, 60) for wrong in (False, True) for size in (16, 24)]
"""GPUs that train, seed, and whether beliefs are wrong: runs of which each gives up to 5 snapshots."""
PER_RUN, NUM_TRIED, APART = 5, 7, 0.37
MUST = {
    "decision_ms/128/p99": Must(at_most=50),
    "decision_ms/1024/p99": Must(at_most=200),
    **{f"rank/{group}": Must(at_least=0.5) for group in (1, 2, 3, 4)},
    **{f"regret/{group}": Must(at_most=0.05) for group in (1, 2, 3, 4)},
}


class Reached(Exception):
    """What a copy of a simulation was run for has happened."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    raw: dict[str, Any] = {"load": os.getloadavg()[0], "time": {}, "accuracy": {}}
    if "time" in args.part:
        for num, steps in SIZES.items():
            raw["time"][str(num)] = kept("planner", f"time-{num}", partial(decisions, num, steps))
    if "accuracy" in args.part:
        for size, seed, wrong in ACCURACY:
            for group in args.group:
                found = raw["accuracy"].setdefault(str(group), [])
                if len(found) < args.snapshots:
                    name = f"accuracy-{group}-{size}-{seed}-{'wrong' if wrong else 'true'}"
                    found += kept("planner", name, partial(taken, group, size, seed, wrong))
    return raw


# --- time


class Timed(Shiftable):
    """Each decision is taken twice: as a whole, and in parts."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.times: list[dict[str, float]] = []

    def plan(self, sim: Simulation) -> None:
        self._is_asked = False
        self.observer.observe(sim)
        begun = time.process_time()
        seen = self.observer.monitor.snapshot(sim.now)
        looked = time.process_time()
        plan = decide(seen, self.settings, self.bindings)
        decided = time.process_time()
        if plan.candidates:
            picture = preprocess(seen)
            prepared = time.process_time()
            tried = np.asarray([candidate.num_rollout for candidate in plan.candidates])
            built = time.process_time()
            look_ahead(picture, tried, self.settings)
            simulated = time.process_time()
            prepare, simulate = prepared - decided, simulated - built
            self.times.append(
                {
                    "preprocess": 1e3 * (looked - begun + prepare),
                    "construct": 1e3 * max(0.0, decided - looked - prepare - simulate),
                    "simulate": 1e3 * simulate,
                    "decision": 1e3 * (decided - begun),
                }
            )
        self.plans.append((sim.now, plan))
        self.perform(sim, plan)


def decisions(num_gpus: int, steps: int) -> list[dict[str, float]]:
    setup = paper_setup(1, "h800", num_gpus=num_gpus, num_sequences=32 * num_gpus)
    mode = Timed(setup, train_gpus=num_gpus // 2, admission=Admission.PAIRS)
    Simulation(setup, mode, seed=0, num_steps=steps).run_until(steps)
    return mode.times


# --- accuracy


class Taking(Shiftable):
    """Now and then, what each of some splits leads to is found out on copies of the simulation."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.found: list[dict[str, Any]] = []
        self.first: int | None = None  # in a copy: the step to be trained next
        self.start_s = 0.0
        self._taken_at = -math.inf
        self._held_until = 0.0

    def plan(self, sim: Simulation) -> None:
        if sim.now < self._held_until:
            self._is_asked = False
            self._alarm += 1
            sim.at(self._held_until, self._tick, sim, self._alarm)
            return
        seen = self.snapshot(sim)
        is_soon = sim.version < 3 or len(self.found) == PER_RUN
        if self.first is None and not is_soon and not _why_not(seen):
            picture = preprocess(seen)
            if len(picture.free) > 1 and sim.now > self._taken_at + APART * picture.cycle_s:
                self._taken_at = sim.now
                self.found.append(self.take(sim, seen, picture))
        super().plan(sim)

    def take(self, sim: Simulation, seen: Snapshot, picture: Picture) -> dict[str, Any]:
        tried = splits(picture, self.settings)
        outcome = look_ahead(picture, tried, self.settings)
        spread = np.unique(np.round(np.linspace(0, len(tried) - 1, NUM_TRIED)).astype(int)).tolist()
        chosen = sorted({*spread, int(np.argmin(outcome.value_s))})
        futures = [self.future(sim, seen, picture, int(tried[i])) for i in chosen]
        return {
            "at_s": sim.now,
            "cycle_s": picture.cycle_s,
            "is_training": picture.is_training,
            "num_rollout": tried[chosen].tolist(),
            "value_s": outcome.value_s[chosen].tolist(),
            "start_s": outcome.train_start_s[chosen].tolist(),
            "next_s": outcome.next_start_s[chosen].tolist(),
            "true_s": [f["next_s"] + EARLY * f["start_s"] + SLACK * f["judged_s"] + f["left_s"] for f in futures],
            "futures": futures,
        }

    def future(self, sim: Simulation, seen: Snapshot, picture: Picture, num_rollout: int) -> dict[str, float]:
        """What the look-ahead's value stands for, as it comes: the split is held, then the planner goes on."""
        twin = copy.deepcopy(sim, {id(sim.setup): sim.setup, id(self.believed): self.believed, id(self.found): []})
        mode = twin.mode
        assert isinstance(mode, Taking)
        mode.first = sim.version + picture.is_training
        mode._held_until = sim.now + self.settings.hold_s(picture.cycle_s)
        mode.perform(twin, Plan(reason="", moves=assign(seen, picture.free, num_rollout), cycle_s=picture.cycle_s))
        with contextlib.suppress(Reached):
            twin.run_until(mode.first + 2)
        left_s = self.left_slot_s(twin, mode.first + 2, picture) / twin.setup.num_gpus
        judged_s = twin.steps[mode.first + 1].scored_s
        assert judged_s is not None
        return {
            "start_s": mode.start_s - sim.now,
            "next_s": twin.now - sim.now,
            "judged_s": judged_s - sim.now,
            "left_s": left_s,
        }

    @staticmethod
    def left_slot_s(sim: Simulation, step: int, picture: Picture) -> float:
        """Of a step, in GPU-seconds of full batches."""
        rollout, reward = picture.rollout, picture.reward
        if step >= len(sim.steps):
            return picture.step_slot_s
        times = sim.steps[step]
        tokens = dict.fromkeys(INFERENCE, 0.0)
        for role in INFERENCE:
            for replica in sim.replicas[role]:
                replica.advance(sim.now)
                on = [entry[2] for entry in replica.running if entry[2].step == step]
                tokens[role] += sum(replica.length(s) - replica.generated(s) for s in on)
            for s in (s for s in sim.queues[role].waiting() if s.step == step):
                tokens[role] += (s.num_response if role is Role.ROLLOUT else s.num_verdict) - s.generated
        to_come = times.num_sequences - times.num_rolled_out
        return (
            tokens[Role.ROLLOUT] / rollout.mean * rollout.slot_s
            + (to_come + tokens[Role.REWARD] / reward.mean) * reward.slot_s
        )

    def on_scored(self, sim: Simulation, step: int) -> None:
        self._look(sim)
        self._held_until = 0.0  # other blocks are free now: the look-ahead holds nothing beyond this either
        super().on_scored(sim, step)

    def on_trained(self, sim: Simulation, step: int) -> None:
        self._look(sim)
        self._held_until = 0.0
        super().on_trained(sim, step)

    def _look(self, sim: Simulation) -> None:
        if self.first is None:
            return
        if not self.start_s and sim.is_scored(self.first) and sim.version >= self.first:
            self.start_s = sim.now
        if sim.is_scored(self.first + 1) and sim.version > self.first:
            raise Reached


def taken(group: int, size: int, seed: int, wrong: bool) -> list[dict[str, Any]]:
    setup = paper_setup(group, "h800")
    mode = Taking(setup.believed(Beliefs.draw(seed) if wrong else RIGHT), train_gpus=size, admission=Admission.PAIRS)
    sim = Simulation(setup, mode, seed=seed, num_steps=10)
    while len(mode.found) < PER_RUN and sim.version < 10:
        sim.run_until(sim.version + 1)
    return [{**found, "wrong": wrong} for found in mode.found]


def ranks(values: list[float]) -> Any:
    """Equal ones share a rank."""
    _, which, counts = np.unique(np.round(values, 6), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[which]


def rank_correlation(a: list[float], b: list[float]) -> float:
    x, y = ranks(a), ranks(b)
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


# --- figures


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {"load": raw["load"]}
    for num, times in raw["time"].items():
        found[f"decisions/{num}"] = len(times)
        for part in ("preprocess", "construct", "simulate", "decision"):
            samples = [row[part] for row in times]
            found |= {f"{part}_ms/{num}/p{q}": percentile(samples, q / 100) for q in (50, 99)}
    for group, taken in raw["accuracy"].items():
        rows = [row for row in taken if len(row["value_s"]) > 2]
        for name, some in (
            ("rank", rows),
            ("rank_true", [row for row in rows if not row["wrong"]]),
            ("rank_wrong", [row for row in rows if row["wrong"]]),
        ):
            found[f"{name}/{group}"] = mean([rank_correlation(row["value_s"], row["true_s"]) for row in some])
        found[f"regret/{group}"] = mean(
            [(row["true_s"][int(np.argmin(row["value_s"]))] - min(row["true_s"])) / row["cycle_s"] for row in rows]
        )
        found[f"bias/{group}"] = mean(
            [float(np.mean(np.subtract(row["value_s"], row["true_s"]))) / row["cycle_s"] for row in rows]
        )
        found[f"snapshots/{group}"] = len(rows)
    return found


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    made.add_argument("--snapshots", type=int, default=25, help="per group, for accuracy")
    made.add_argument("--group", nargs="+", type=int, default=[1, 2, 3, 4], help="for accuracy")
    sys.exit(main("planner", made.parse_args(), measure, figures, MUST))
