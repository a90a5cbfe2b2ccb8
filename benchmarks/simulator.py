"""What the simulator costs, and what it says of published runs: `python benchmarks/simulator.py`. About two minutes.

The time of a mode is processor time of 8 steps on 32 GPUs (1,024 sequences per step), of the slowest model group; on
1,024 GPUs it is that of group 2 (32,768 sequences per step). Keys:

  mode_s/<mode>           seconds per mode
  large_s/<mode>          the same on 1,024 GPUs
  memory_mib              largest resident memory of all that
  different/<mode>        whether two processes with one seed print different bytes (0: no)
  published/<row>         time of a step over the published one; the rows are NeMo-RL v0.4's, DGX H100, GRPO on policy:
                          (median length and spread are not published: lognormal, sigma .6, of the published mean)
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from harness import Must, main, parser

from pipeline.core.modes import ModeName
from pipeline.simulator.admission import Admission
from pipeline.simulator.lengths import lognormal_of_mean, measured_lengths
from pipeline.simulator.modes import Schedule
from pipeline.simulator.profiles import GPUS, known_model
from pipeline.simulator.result import simulate
from pipeline.simulator.setup import PAPER_GROUPS, Setup, Workload, paper_setup

STEPS, SEED, LARGE = 8, 1, 1024
TRANSITION_S = 10.0  # of a published step: refit and what else is neither generation nor training; assumed
PROMPT_TOKENS = 150  # OpenMathInstruct-2; assumed
MODES = [mode.value for mode in ModeName]
MUST = {
    **{f"mode_s/{mode}": Must(at_most=10) for mode in MODES},
    **{f"large_s/{mode}": Must(at_most=600) for mode in MODES},
    **{f"different/{mode}": Must(at_most=0) for mode in MODES},
    "memory_mib": Must(at_most=1024),
}


@dataclass(frozen=True)
class Published:
    """A step of NeMo-RL: model, GPUs, GPUs per generating replica, sequences, their mean and largest length."""

    model: str
    num_gpus: int
    replica: int
    sequences: int
    mean: int
    longest: int
    step_s: float


PUBLISHED = [
    Published("llama3.1-8b", 16, 1, 2048, 1060, 4096, 97.7),
    Published("qwen3-32b", 32, 4, 2048, 3206, 4096, 393),
    Published("qwen3-30b-a3b", 32, 4, 2048, 3154, 4096, 225),
    Published("qwen3-235b-a22b", 128, 16, 512, 5671, 8192, 506),
]


def schedule(mode: str, num_gpus: int) -> Schedule:
    name, quarter = ModeName(mode), num_gpus // 4
    if name is ModeName.COLOCATED:
        return Schedule(mode=name, rollout=num_gpus, train=num_gpus, staleness=0)
    if name is ModeName.ROLLOUT_REWARD_COLOCATED:
        return Schedule(mode=name, rollout=2 * quarter, train=2 * quarter)
    if name is ModeName.SHIFTABLE:
        return Schedule(mode=name, rollout=num_gpus, train=2 * quarter, admission=Admission.PAIRS)
    return Schedule(mode=name, rollout=quarter, reward=quarter, train=2 * quarter)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.digest:
        print(digest(args.digest))
        sys.exit()
    small = {mode: {str(g): seconds(g, mode, 32) for g in PAPER_GROUPS} for mode in MODES}
    large = {} if args.small else {mode: seconds(2, mode, LARGE) for mode in MODES}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "load": os.getloadavg()[0],
        "small": small,
        "large": large,
        "memory_mib": memory,
        "digests": {mode: [digest_elsewhere(mode, hash_seed) for hash_seed in ("1", "2")] for mode in MODES},
        "published": {row.model: step_s(row) for row in PUBLISHED},
    }


def seconds(group: int, mode: str, num_gpus: int) -> float:
    setup = paper_setup(group, "h800", num_gpus=num_gpus, num_sequences=32 * num_gpus)
    started = time.process_time()
    simulate(setup, schedule(mode, num_gpus), seed=SEED, num_steps=STEPS)
    return time.process_time() - started


def digest(mode: str) -> str:
    result = simulate(paper_setup(2, "h800"), schedule(mode, 32), seed=SEED, num_steps=STEPS)
    return hashlib.sha256(json.dumps(result.as_json()).encode()).hexdigest()


def digest_elsewhere(mode: str, hash_seed: str) -> str:
    command = [sys.executable, __file__, "--digest", mode]
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


def step_s(row: Published) -> float:
    """Generation and training of a colocated step without a judge, and the transition."""
    model = known_model(row.model)
    setup = Setup(
        gpu=GPUS["h100"],
        num_gpus=row.num_gpus,
        policy=model,
        judge=known_model("qwen2.5-1.5b"),
        rollout_gpus=row.replica,
        reward_gpus=1,
        workload=Workload(
            num_prompts=row.sequences // 16,
            num_each=16,
            rollout=lognormal_of_mean(row.mean, 0.6, row.longest),
            verdict=measured_lengths([16], 16),
            prompt_tokens=PROMPT_TOKENS,
        ),
    )
    steps = simulate(setup, schedule("colocated", row.num_gpus), seed=SEED, num_steps=6).steps[1:]
    generate = [(s.rolled_out_s or 0) - s.admitted_s for s in steps]
    train = [(s.trained_s or 0) - (s.train_started_s or 0) for s in steps]
    return (sum(generate) + sum(train)) / len(steps) + TRANSITION_S


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    return {
        **{f"mode_s/{mode}": max(by_group.values()) for mode, by_group in raw["small"].items()},
        **{f"large_s/{mode}": value for mode, value in raw["large"].items()},
        "memory_mib": raw["memory_mib"],
        **{f"different/{mode}": len(set(found)) - 1 for mode, found in raw["digests"].items()},
        **{f"published/{row.model}": raw["published"][row.model] / row.step_s for row in PUBLISHED},
        "load": raw["load"],
    }


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--small", action="store_true", help="without 1,024 GPUs")
    made.add_argument("--digest", choices=MODES, help=argparse.SUPPRESS)
    sys.exit(main("simulator", made.parse_args(), measure, figures, MUST))
