"""The planner against the best sequence of splits: `python benchmarks/tandem.py`. Five minutes, resumable.

A lone step in tandem: rollouts, then verdicts, and no training to speak of. 50 instances (seeds 0 to 49): 32 or 64
sequences, 4 to 6 GPUs, long-tailed lengths, shifts charged. The splits change at five times. All sequences of them are
tried in the simulator but those that cannot beat the best so far: each sequence that is left would have to be faster
than alone on a GPU. They know the lengths that were drawn, the planner knows their distribution. Keys:

  mean, worst   time of the step under the planner over that of the best sequence, minus 1; 0 where it is faster
  p90           the same, p90
  static        mean of the same for the best split that never changes, known afterwards
  faster        in how many instances the planner is faster than all sequences
  over_30, static_over_30  in how many the loss is above 30 %
"""

import contextlib
import copy
import math
import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from harness import Must, kept, main, mean, parser, percentile

from pipeline.core.errors import RunError
from pipeline.core.events import INFERENCE, Role
from pipeline.simulator.lengths import lognormal_mixture
from pipeline.simulator.setup import Setup, Workload, paper_setup
from pipeline.simulator.shiftable import Shiftable
from pipeline.simulator.simulation import Simulation

NUM_INSTANCES, NUM_SEGMENTS = 50, 5
MUST = {"mean": Must(at_most=0.08), "worst": Must(at_most=0.30)}


class Reached(Exception):
    """The step is judged."""


class Planned(Shiftable):
    def on_scored(self, sim: Simulation, step: int) -> None:
        raise Reached


class Scripted:
    """Splits from outside; in the beginning all blocks roll out, as in a shiftable run."""

    staleness = 0
    judges_together = False

    def begin(self, sim: Simulation) -> None:
        sim.train_blocks = sim.blocks[-1:]
        for block in sim.blocks:
            sim.bind(block, Role.ROLLOUT, at_once=True)

    def may_admit(self, sim: Simulation, step: int) -> bool:
        return True

    def on_admitted(self, sim: Simulation, step: int) -> None: ...

    def on_rolled_out(self, sim: Simulation, step: int) -> None: ...

    def on_scored(self, sim: Simulation, step: int) -> None:
        raise Reached

    def on_trained(self, sim: Simulation, step: int) -> None: ...


def pause() -> None:
    raise TimeoutError


def split(sim: Simulation, num_rollout: int) -> None:
    """The fewest moves; of these, blocks that run the least."""
    have = [block for block in sim.blocks if block.role is Role.ROLLOUT]
    old, new, num = Role.ROLLOUT, Role.REWARD, len(have) - num_rollout
    if num < 0:
        old, new, num = new, old, -num
    running = {block.index: sum(r.num_running for r in block.replicas) for block in sim.blocks}
    blocks = sorted((b for b in sim.blocks if b.role is old), key=lambda b: (running[b.index], -b.index))
    for block in blocks[:num]:
        sim.bind(block, new)


def least_s(sim: Simulation) -> float:
    """Of what is left: each sequence alone on a replica."""
    setup = sim.setup
    alone = {r: setup.role(r).iteration.iteration_s(1, setup.workload.prefix_tokens(r)) for r in INFERENCE}
    most = 0.0
    for role in INFERENCE:
        left: list[tuple[float, float]] = [
            (replica.length(s) - replica.generated(s), s.num_verdict)
            for replica in sim.replicas[role]
            for s in (entry[2] for entry in replica.running)
        ]
        left += [
            ((s.num_response if role is Role.ROLLOUT else s.num_verdict) - s.generated, s.num_verdict)
            for s in sim.queues[role].waiting()
        ]
        verdict_s = alone[Role.REWARD] if role is Role.ROLLOUT else 0.0
        most = max([most, *(tokens * alone[role] + verdict * verdict_s for tokens, verdict in left)])
    return most


class Search:
    def __init__(self, best_s: float) -> None:
        self.best_s, self.segment_s = best_s, best_s / NUM_SEGMENTS
        self.num_tried = 0

    def run(self, sim: Simulation, segment: int) -> None:
        now = sum(block.role is Role.ROLLOUT for block in sim.blocks)
        for k in sorted(range(len(sim.blocks) + 1), key=lambda k: abs(k - now)):
            self.num_tried += 1
            twin = copy.deepcopy(sim, {id(sim.setup): sim.setup})
            split(twin, k)
            is_last = segment == NUM_SEGMENTS - 1
            twin.at(self.best_s if is_last else (segment + 1) * self.segment_s, pause)
            try:
                twin.run_until(1)
            except Reached:
                self.best_s = min(self.best_s, twin.now)
            except RunError:
                pass  # a role that has work has no block
            except TimeoutError:
                for replicas in twin.replicas.values():
                    for replica in replicas:
                        replica.advance(twin.now)
                if not is_last and twin.now + least_s(twin) < self.best_s:
                    self.run(twin, segment + 1)


def instance(seed: int) -> tuple[Setup, int]:
    rng = np.random.default_rng([77, seed])
    num_blocks = 4 + seed % 3
    work = Workload(
        num_prompts=int(rng.choice([32, 64])),
        num_each=1,
        rollout=lognormal_mixture([(1.0, float(rng.uniform(800, 2500)), float(rng.uniform(0.8, 1.2)))], 16_384),
        verdict=lognormal_mixture([(1.0, float(rng.uniform(400, 2000)), float(rng.uniform(0.4, 0.8)))], 8192),
    )
    base = paper_setup(1, "h800", num_gpus=8)
    return replace(base, num_gpus=num_blocks, workload=work, max_num_seqs=int(rng.choice([2, 4, 8]))), num_blocks


def tandem(seed: int) -> dict[str, float]:
    setup, num_blocks = instance(seed)
    planned = Simulation(setup, Planned(setup, train_gpus=1, staleness=0), seed=seed, num_steps=1)
    planned_s = until(planned)
    static_s = math.inf
    for k in range(1, num_blocks):
        static = Simulation(setup, Scripted(), seed=seed, num_steps=1)
        static.at(0.0, split, static, k)
        static_s = min(static_s, until(static))
    search = Search(min(planned_s, static_s))
    first = Simulation(setup, Scripted(), seed=seed, num_steps=1)
    first.at(0.0, pause)
    try:
        first.run_until(1)
    except TimeoutError:
        search.run(first, 0)
    return {
        "planned_s": planned_s,
        "static_s": static_s,
        "best_s": search.best_s,
        "tried": search.num_tried,
        "blocks": num_blocks,
    }


def until(sim: Simulation) -> float:
    with contextlib.suppress(Reached):
        sim.run_until(1)
    return sim.now


def measure(args: Any) -> dict[str, Any]:
    found = {str(seed): kept("tandem", str(seed), partial(tandem, seed)) for seed in range(NUM_INSTANCES)}
    return {"load": os.getloadavg()[0], "instances": found}


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    rows = list(raw["instances"].values())
    losses = [row["planned_s"] / row["best_s"] - 1 for row in rows]
    static = [row["static_s"] / row["best_s"] - 1 for row in rows]
    return {
        "mean": mean(losses),
        "p90": percentile(losses, 0.9),
        "worst": max(losses),
        "static": mean(static),
        "faster": sum(loss <= 0 for loss in losses),
        "over_30": sum(loss > 0.3 for loss in losses),
        "static_over_30": sum(loss > 0.3 for loss in static),
    }


if __name__ == "__main__":
    sys.exit(main("tandem", parser(__doc__).parse_args(), measure, figures, MUST))
