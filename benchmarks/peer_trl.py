"""The same work as TRL's GRPOTrainer: `python benchmarks/peer_trl.py [--rounds 3] [--steps 60] [--smollm2 FOLDER]`.

Both train the quickstart's policy on the same prompts with the exact checker as reward: 16 prompts x 8 responses of at
most 84 tokens per step, two updates, the same optimizer, learning rate and clipping. TRL runs in an environment of its
own (made once in benchmarks/out/trl), one process, with the number of threads that is best for it on this machine; ours
is a run as the user has it, an engine and a trainer in two processes of one thread each (of two where they take turns
and the model is large enough to gain by it), without a prefix cache, which prompts of 8 tokens only pay for. Rounds are
interleaved; each has its own seed. Starting up (loading models, engines) is left out on both sides. Keys:

  tokens_per_s/<side>      tokens of the responses that the steps are made of, per second: ours, ours_overlapped
                           (staleness 1), trl
  tokens_of_trl            ours over TRL's, the better of ours; median of the rounds' ratios
  tokens_of_trl/on_policy  the same at staleness 0
  with_gradient/<side>     share of these tokens whose group's rewards differ: only they are computed with here, and all
                           of them by TRL
  tokens_of_trl/gradient   ours over TRL's of the tokens with a gradient
  step_s/<side>            seconds per step of 128 responses
  accuracy/<side>          of the trained models on 256 held-out prompts, sampled by the same code; mean over rounds
  accuracy/before          of the policy that they begin with
  accuracy_gap             ours (on-policy) less TRL's
  spent/<side>/<what>      share of the time: of ours by stage on the critical path; of TRL generate and reward
  trl_threads              how many threads were best for TRL
  load                     the machine's load average (1 min) before

With --smollm2 (the folder that configs/examples/smollm2.py makes) the same of SmolLM2-135M, keys with `smollm2/` before
them: 10 steps of 4 prompts x 4 responses of at most 128 tokens, one update, one round; three of four prompts want a
number, the fourth a story, so lengths are skewed. Accuracy says little there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from harness import OUT, Must, main, parser

from pipeline.run_folder import RunFolder
from pipeline.tracking import MetricsLog

ROOT = Path(__file__).parents[1]
POLICY, TRAIN, VAL = (ROOT / "configs/quickstart" / name for name in ("policy", "train.jsonl", "val.jsonl"))
PACKAGES = ("torch==2.13.0+cpu", "trl==1.16.0", "transformers==5.24.0", "accelerate", "datasets", "jinja2")
OURS = {"ours": 0, "ours_overlapped": 1}
"""And their staleness. `threads` of a work are those of each."""
FIRST_SEED = 101
MUST = {
    "tokens_of_trl": Must(at_least=1.0),
    "tokens_of_trl/gradient": Must(at_least=1.0),
    "accuracy_gap": Must(at_least=-0.05),
}
SMOLLM2_MUST = {"smollm2/tokens_of_trl": Must(at_least=1.0), "smollm2/tokens_of_trl/gradient": Must(at_least=1.0)}
_STAGES = ("prompts", "rollout", "reward", "train", "publish", "queue", "control")
_CONFIG = """
reward: {genrm: null, functions: {score: {path: "%(function)s"}}}
model: {policy: {path: "%(model)s"}}
data:
  {train_files: "%(train)s", val_files: "%(val)s", max_prompt_length: %(prompt_tokens)d, train_batch_size: %(prompts)d}
rollout:
  n: %(group)d
  max_response_length: %(max_tokens)d
  engine: {kv_cache_bytes: %(kv_bytes)d, enable_prefix_caching: false}
algorithm: {max_logprob_diff: 0}
trainer: {updates_per_step: %(updates)d, lr: %(lr)g, micro_batch_tokens: %(micro_batch)d}
evaluate: {freq: 0}
tracking: {uri: none}
"""
QUICKSTART: dict[str, Any] = {
    "model": str(POLICY),
    "train": str(TRAIN),
    "val": str(VAL),
    "score": "digit_sort",
    "function": "stages.checkers:digit_sort",
    "prompts": 16,
    "group": 8,
    "updates": 2,
    "prompt_tokens": 32,
    "max_tokens": 84,
    "micro_batch": 16384,
    "lr": 3e-4,
    "num_prompts": 256,
    "kv_bytes": 64 << 20,
    "threads": {"ours": 1, "ours_overlapped": 1},
}
SMOLLM2 = QUICKSTART | {
    "score": "says_it",
    "prompts": 4,
    "group": 4,
    "updates": 1,
    "prompt_tokens": 96,
    "max_tokens": 128,
    "micro_batch": 2048,
    "lr": 1e-5,
    "num_prompts": 32,
    "kv_bytes": 256 << 20,
    "threads": {"ours": 2, "ours_overlapped": 1},
}
_SAYS_IT = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
"""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    python = args.python or _environment()
    with tempfile.TemporaryDirectory() as name:
        found = {
            "load": os.getloadavg()[0],
            "quickstart": _compare(python, Path(name), QUICKSTART, args.steps, args.rounds),
        }
        if args.smollm2:
            (folder := Path(name) / "smollm2").mkdir()
            work = SMOLLM2 | {"model": str(args.smollm2.resolve()), **_skewed(folder)}
            found["smollm2"] = _compare(python, folder, work, 10, 1)
        return found


def _skewed(folder: Path) -> dict[str, str]:
    """Prompts whose answers are short, and every fourth whose answer is long; and the function that scores them."""
    rows = []
    for n in range(11, 75):
        asked = f"What is {n} + {n // 3}? Answer with the number alone."
        if n % 4 == 0:
            asked = f"Tell a story of a hundred words about the number {n + n // 3}."
        truth = {"style": "rule", "ground_truth": str(n + n // 3)}
        rows.append({"data_source": "numbers", "prompt": [{"role": "user", "content": asked}], "reward_model": truth})
    path, function = folder / "numbers.jsonl", folder / "says_it.py"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    function.write_text(_SAYS_IT)
    return {"train": str(path), "val": str(path), "function": f"{function}:compute_score"}


def _compare(python: str, folder: Path, work: dict[str, Any], steps: int, rounds: int) -> dict[str, Any]:
    threads = {n: _trl(python, folder, work, max(1, steps // 8), FIRST_SEED, n)["wall_s"] for n in (1, 2)}
    best = min(threads, key=lambda n: threads[n])
    found: dict[str, Any] = {"threads": threads, "before": _accuracy(python, work, work["model"]), "steps": steps}
    found["rounds"] = []
    for number in range(rounds):
        seed, sides = FIRST_SEED + number, {}
        for side in OURS:
            sides[side] = _ours(python, folder / f"{side}-{number}", work, steps, seed, side)
        sides["trl"] = _trl(python, folder, work, steps, seed, best)
        sides["trl"]["accuracy"] = _accuracy(python, work, str(folder / "trl"))
        found["rounds"].append(sides)
    return found


def _environment() -> str:
    """The Python of one that has TRL."""
    python = OUT / "trl" / "bin" / "python"
    if not (OUT / "trl" / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", OUT / "trl"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
        (OUT / "trl" / "made").touch()
    return str(python)


def _side(python: str, threads: int, *args: str) -> dict[str, Any]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": str(threads)}
    script = str(Path(__file__).with_name("peer_trl_side.py"))
    done = subprocess.run([python, "-P", script, *args], env=env, stdout=subprocess.PIPE, text=True, check=True)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def _trl(python: str, folder: Path, work: dict[str, Any], steps: int, seed: int, threads: int) -> dict[str, Any]:
    settings = work | {"steps": steps, "seed": seed, "threads": threads}
    return _side(python, threads, "train", work["model"], work["train"], str(folder / "trl"), json.dumps(settings))


def _accuracy(python: str, work: dict[str, Any], model: str) -> float:
    return float(_side(python, 1, "eval", model, work["val"], json.dumps(work | {"seed": 1}))["accuracy"])


def _ours(python: str, folder: Path, work: dict[str, Any], steps: int, seed: int, side: str) -> dict[str, Any]:
    """Seconds from the first step's begin to the last one's end, and what the rows say."""
    folder.mkdir()
    (folder / "peer.yaml").write_text(_CONFIG % work)
    settings = (
        *(f"run.seed={seed}", f"trainer.total_training_steps={steps}", f"algorithm.staleness={OURS[side]}"),
        f'cluster.env={{OMP_NUM_THREADS: "{work["threads"][side]}"}}',
    )
    command = [sys.executable, "-P", "-m", "pipeline.cli.main"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = str(folder / "run")
    submit = ["submit", str(ROOT / "configs/quickstart.yaml"), str(folder / "peer.yaml"), "--run-dir", run, "--wait"]
    subprocess.run([*command, *submit, *settings], env=env, stdout=subprocess.DEVNULL, check=True)
    export = ["export", run, "--step", str(steps), "--to", str(folder / "model"), "--no-engine"]
    subprocess.run([*command, *export], env=env, stdout=subprocess.DEVNULL, check=True)
    rows = [row for _, row in MetricsLog(RunFolder(Path(run)).metrics).rows()]
    began = float(rows[0]["time"] or 0) - float(rows[0]["perf/time_per_step"] or 0)
    return {
        "wall_s": float(rows[-1]["time"] or 0) - began,
        "tokens": sum(row["perf/total_num_tokens"] or 0 for row in rows),
        "tokens_with_gradient": sum(row["train/num_tokens"] or 0 for row in rows),
        "spent_s": {stage: sum(row.get(f"timing_s/{stage}") or 0 for row in rows) for stage in _STAGES},
        "accuracy": _accuracy(python, work, str(folder / "model")),
    }


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found = _figures(raw["quickstart"]) | {"load": raw["load"]}
    if "smollm2" in raw:
        found |= {f"smollm2/{key}": value for key, value in _figures(raw["smollm2"]).items()}
    return found


def _rates(rounds: list[dict[str, Any]], counted: str) -> dict[str, list[float]]:
    return {side: [one[side][counted] / one[side]["wall_s"] for one in rounds] for side in (*OURS, "trl")}


def _ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """Ours over TRL's of the same round, the median."""
    return {side: median(a / b for a, b in zip(rates[side], rates["trl"], strict=True)) for side in OURS}


def _figures(raw: dict[str, Any]) -> dict[str, float | None]:
    rounds, steps = raw["rounds"], raw["steps"]
    rates = _rates(rounds, "tokens")
    ratios, of_gradient = _ratios(rates), _ratios(_rates(rounds, "tokens_with_gradient"))
    found: dict[str, float | None] = {
        "tokens_of_trl": max(ratios.values()),
        "tokens_of_trl/on_policy": ratios["ours"],
        "tokens_of_trl/gradient": max(of_gradient.values()),
        "accuracy_gap": mean(one["ours"]["accuracy"] - one["trl"]["accuracy"] for one in rounds),
        "accuracy/before": raw["before"],
    }
    for side in (*OURS, "trl"):
        found[f"tokens_per_s/{side}"] = median(rates[side])
        found[f"with_gradient/{side}"] = mean(one[side]["tokens_with_gradient"] / one[side]["tokens"] for one in rounds)
        found[f"step_s/{side}"] = median(one[side]["wall_s"] / steps for one in rounds)
        found[f"accuracy/{side}"] = mean(one[side]["accuracy"] for one in rounds)
        total = sum(one[side]["wall_s"] for one in rounds)
        for what in rounds[0][side]["spent_s"]:
            found[f"spent/{side}/{what}"] = sum(one[side]["spent_s"][what] for one in rounds) / total
    threads = {int(n): seconds for n, seconds in raw["threads"].items()}
    return found | {"trl_threads": min(threads, key=lambda n: threads[n])}


if __name__ == "__main__":
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--python", default="", help="of an environment that has TRL; otherwise one is made")
    arguments.add_argument("--smollm2", type=Path, help="also train SmolLM2-135M, from this folder")
    given = arguments.parse_args()
    sys.exit(main("peer_trl", given, measure, figures, MUST | (SMOLLM2_MUST if given.smollm2 else {})))
