"""What the monitor costs and how soon it is right: `python benchmarks/monitor.py`. Half a minute.

A simulated trainer pool (3/8 of the GPUs roll out, 3/8 judge, 2/8 train; 32 sequences per GPU and step) is looked at
every 2 s, 4 steps long. Processor milliseconds of a look, over those with at least 80 % of the most sequences in
flight. The beliefs are wrong by .6 and by 1.6; what is said of them is the worst of both and of groups 1 to 3. Keys:

  observe_ms/<gpus>        one look at the simulation, as reports, and their way into the monitor: median
  observe_p90_ms/<gpus>    the same, p90
  snapshot_ms/<gpus>       the picture for the planner, as p99 of all looks
  in_flight/<gpus>         most sequences that ran or waited
  cost_off/<seconds>       largest error of an iteration's time, so many seconds after a role's first token
  lengths_off/<steps>      largest error of a share of survival, after so many versions
"""

import argparse
import math
import os
import sys
import time
from typing import Any

import numpy as np
from harness import Must, main, parser, percentile

from pipeline.core.events import INFERENCE, Role
from pipeline.core.modes import ModeName
from pipeline.core.snapshot import Snapshot
from pipeline.simulator.modes import Schedule
from pipeline.simulator.observe import Observer
from pipeline.simulator.priors import monitor_of
from pipeline.simulator.setup import Beliefs, Setup, paper_setup
from pipeline.simulator.simulation import Simulation

EVERY_S, STEPS, FACTORS = 2.0, 4, (0.6, 1.6)
AFTER_S, AFTER_VERSIONS = (10, 30, 60, 120), (1, 2, 3)
MUST = {
    "observe_ms/32": Must(at_most=3),
    "observe_ms/128": Must(at_most=12),
    "cost_off/60": Must(at_most=0.03),
    "cost_off/120": Must(at_most=0.03),
}


def looks(setup: Setup, beliefs: Beliefs) -> tuple[list[Snapshot], list[dict[str, float]]]:
    num, block = setup.num_gpus, setup.block
    schedule = Schedule(mode=ModeName.TRAINER_POOL, rollout=num // 8 * 3, reward=num // 8 * 3, train=num // 4)
    sim = Simulation(setup, schedule.policy(setup), seed=0, num_steps=STEPS)
    train_blocks = range((num - num // 4) // block, num // block)
    monitor = monitor_of(setup.believed(beliefs), train_blocks=train_blocks, staleness=1, num_steps=STEPS)
    observer, seen, costs = Observer(monitor), [], []

    def look() -> None:
        started = time.process_time()
        observer.observe(sim)
        observed = time.process_time()
        seen.append(monitor.snapshot(sim.now))
        ended = time.process_time()
        running = sum(len(replica.running) for replicas in sim.replicas.values() for replica in replicas)
        in_flight = running + sum(map(len, sim.queues.values()))
        costs.append(
            {"observe": 1e3 * (observed - started), "snapshot": 1e3 * (ended - observed), "in_flight": in_flight}
        )
        sim.at(sim.now + EVERY_S, look)

    sim.at(0.0, look)
    sim.run_until(STEPS)
    return seen, costs


def cost_off(setup: Setup, seen: list[Snapshot], role: Role, after_s: float) -> float:
    begun_s = next(s.at_s for s in seen if any(b.role is role and b.num_running for b in s.blocks))
    view = next(s for s in seen if s.at_s >= begun_s + after_s).role(role)
    truth, tokens = setup.role(role).iteration, setup.workload.mean_prompt_tokens(role)
    return max(abs(view.cost.iteration_s(b, b * tokens) / truth.iteration_s(b, b * tokens) - 1) for b in (8, 64))


def lengths_off(setup: Setup, seen: list[Snapshot], role: Role, version: int) -> float:
    view = next(s for s in seen if s.version >= version).role(role)
    truth = setup.workload.lengths(role).survival(view.bin_tokens * np.arange(len(view.survival), dtype=float))
    truth[-1] = 0.0
    return float(np.abs(truth - np.array(view.survival)).max())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    raw: dict[str, Any] = {"load": os.getloadavg()[0], "costs": {}, "cost_off": {}, "lengths_off": {}}
    for num in (32, 128):
        setup = paper_setup(1, "h800", num_gpus=num, num_sequences=32 * num)
        raw["costs"][str(num)] = looks(setup, Beliefs.draw(0))[1]
    for group in (1, 2, 3):
        setup = paper_setup(group, "h800")
        for wrong in FACTORS:
            beliefs = Beliefs(rollout=wrong, reward=wrong, rollout_lengths=wrong, verdict_lengths=1 / wrong)
            seen = looks(setup, beliefs)[0]
            for role in INFERENCE:
                key = f"{group}/{wrong}/{role.value}"
                raw["cost_off"][key] = {str(s): cost_off(setup, seen, role, s) for s in AFTER_S}
                raw["lengths_off"][key] = {str(v): lengths_off(setup, seen, role, v) for v in AFTER_VERSIONS}
    return raw


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {"load": raw["load"]}
    for num, costs in raw["costs"].items():
        most = max(cost["in_flight"] for cost in costs)
        full = [cost["observe"] for cost in costs if cost["in_flight"] >= 0.8 * most]
        found |= {
            f"observe_ms/{num}": percentile(full, 0.5),
            f"observe_p90_ms/{num}": percentile(full, 0.9),
            f"snapshot_ms/{num}": percentile([cost["snapshot"] for cost in costs], 0.99),
            f"in_flight/{num}": most,
        }
    for name in ("cost_off", "lengths_off"):
        worst: dict[str, float] = {}
        for by_time in raw[name].values():
            worst = {at: max(off, worst.get(at, -math.inf)) for at, off in by_time.items()}
        found |= {f"{name}/{at}": off for at, off in worst.items()}
    return found


if __name__ == "__main__":
    sys.exit(main("monitor", parser(__doc__).parse_args(), measure, figures, MUST))
