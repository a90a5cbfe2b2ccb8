"""Sequences that move between two real rollout replicas: `python benchmarks/migrate.py [--repetitions 30]`.

One step of configs/quickstart.yaml with two vLLM rollout replicas and 64 sequences, 32 on each, under the real
controller, agent and queue. Answers must outlast two moves, and the quickstart's may end at their third token: so the
problems are as long as they may be, and the policy's stop token is made less likely. (The judge is emulated.) The core
is the real one but for a policy: each sequence is aborted twice, when some of its new tokens are durable, and goes on
at the other replica. Then the same policy in one engine of this process, of whose 64 running sequences all are
aborted, again and again. Keys:

  sequences, groups            of the step; how many groups have all their members
  first/<replica>              how many sequences each replica began
  moves/min                    how often the sequence that moved least did
  legs/astray                  sequences whose replicas were not A, B, A
  ids/unique                   different ids in the batch
  kept/tokens                  tokens that were in the queue at an abort, over all aborts
  kept/changed                 aborts whose tokens or logprobs are not, bit for bit, the beginning of what was trained
  ends/wrong                   sequences that are too long, have a stop token before their end, or end without a reason
  abort_ms/p50 /p90            from EngineHost.abort() to the last output, 64 sequences running
  step_ms/p50                  a step of that engine with 64 sequences, for comparison
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import Must, main, parser, percentile

from pipeline.config import EngineOptions, load_files, save_resolved
from pipeline.controller import Controller
from pipeline.core import core
from pipeline.core.decisions import Abort, Decision, Dispatch
from pipeline.core.events import BatchCommitted, Event, Finish, SegmentClosed
from pipeline.core.sequences import Sequence
from pipeline.queue.client import QueueClient
from pipeline.queue.schema import SequenceRow
from pipeline.run_folder import RunFolder, read_json
from slurm.executor import ElasticExecutor
from slurm.local import LocalCluster
from stages.engines.base import Engine, Output, Request
from stages.engines.host import EngineHost
from stages.text import load_tokenizer
from tests.engines.tiny import load_vllm
from tests.fakes.stores import weight_store

NUM_PROMPTS, NUM_MEMBERS, MOVES = 8, 8, 2
NUM_SEQUENCES = NUM_PROMPTS * NUM_MEMBERS
POLICY = Path(__file__).parents[1] / "configs/quickstart/policy"
SETTINGS = (
    f"data.train_batch_size={NUM_PROMPTS}",
    f"rollout.n={NUM_MEMBERS}",
    "rollout.flush_s=0.01",
    "rollout.temperature=0.7",
    "placement.roles.rollout.replicas=2",
    "cluster.slots_per_node=4",
    "trainer.total_training_steps=1",
    "evaluate.freq=0",
    "tracking.uri=none",
    "model.genrm.path=emulated",
    "reward.genrm.engine.name=emulated",
    "reward.genrm.engine.options={script: judge}",
    "reward.genrm.max_tokens=80",
    "reward.genrm.verdict.choices={yes: 1.0, no: 0.0}",
)
MUST = {
    "sequences": Must(at_least=NUM_SEQUENCES, at_most=NUM_SEQUENCES),
    "groups": Must(at_least=NUM_PROMPTS, at_most=NUM_PROMPTS),
    "first/rollout-0": Must(at_least=NUM_SEQUENCES // 2, at_most=NUM_SEQUENCES // 2),
    "first/rollout-1": Must(at_least=NUM_SEQUENCES // 2, at_most=NUM_SEQUENCES // 2),
    "moves/min": Must(at_least=MOVES),
    "legs/astray": Must(at_most=0),
    "ids/unique": Must(at_least=NUM_SEQUENCES, at_most=NUM_SEQUENCES),
    "kept/changed": Must(at_most=0),
    "ends/wrong": Must(at_most=0),
    "abort_ms/p50": Must(at_most=100),
}


class MigratingCore(core.Core):
    """Aborts what has new durable tokens, and sends it to the other replica. It keeps what the queue had then."""

    def __init__(self, plan: core.RunPlan, run: RunFolder, attempt: int) -> None:
        super().__init__(plan)
        self._run, self._attempt = run, attempt
        self._client: QueueClient | None = None
        self._last: dict[str, str] = {}  # the task that had the sequence last
        self._aborted: set[tuple[str, str]] = set()  # which task was told to give which sequence back
        self.legs: dict[str, list[str]] = {}  # the replicas, in order
        self.aborts: list[dict[str, Any]] = []
        self.batch: list[dict[str, Any]] = []

    @property
    def client(self) -> QueueClient:
        if self._client is None:
            place = read_json(self._run.secrets / f"queue-{self._attempt}.json")
            assert place is not None
            secret = (self._run.secrets / "queue.key").read_bytes()
            self._client = QueueClient(place["endpoint"], secret, self._attempt, 30.0)
        return self._client

    def choose(self, waiting: Iterable[Sequence], load: Mapping[str, int]) -> dict[str, list[Sequence]]:
        """In place of choose_dispatch: both replicas share what is new, and get what the other one gave back."""
        if not load or (len(load) < 2 and next(iter(load)).startswith("rollout")):
            return {}  # until both are there
        chosen: dict[str, list[Sequence]] = {task: [] for task in load}
        for seq in waiting:
            others = [task for task in load if task != self._last.get(seq.id)]
            chosen[min(others, key=lambda task: load[task] + len(chosen[task]))].append(seq)
        return {task: ids for task, ids in chosen.items() if ids}

    def handle(self, event: Event, now: float) -> list[Decision]:
        moving: dict[str, list[str]] = {}
        if isinstance(event, SegmentClosed) and event.task.startswith("rollout"):
            moving = self._look_at(event)
        if isinstance(event, BatchCommitted):
            self.batch = [_kept(row) | {"finish": row.finish} for row in self.client.batch(event.step)]
        decisions = super().handle(event, now)
        for decision in decisions:
            if isinstance(decision, Dispatch) and decision.task.startswith("rollout"):
                for id in decision.ids:
                    self._last[id] = decision.task
                    self.legs.setdefault(id, []).append(decision.worker)
        aborts = [
            Abort(task=task, worker=self._tasks[task].worker, ids=tuple(ids))
            for task, ids in moving.items()
            if task in self._tasks
        ]
        return [*decisions, *aborts]

    def _look_at(self, event: SegmentClosed) -> dict[str, list[str]]:
        """Which sequences are to move now, by their tasks; of those that were given back, what the queue has."""
        given_back = [s.id for s in event.segments if s.finish is Finish.ABORT]
        self.aborts += [_kept(row) for row in (self.client.get(given_back) if given_back else [])]
        flushed = [s.id for s in event.segments if s.finish is Finish.FLUSH and len(self.legs[s.id]) <= MOVES]
        new = [id for id in flushed if self._last[id] == event.task and (event.task, id) not in self._aborted]
        self._aborted |= {(event.task, id) for id in new}
        return {event.task: new} if new else {}


def _kept(row: SequenceRow) -> dict[str, Any]:
    return {"id": row.id, "tokens": row.tokens, "logprobs": row.logprobs}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pivot-migrate-") as folder:
        return migrate(Path(folder) / "run") | {"aborts_of_64": abort_often(Path(folder), args.repetitions)}


def migrate(path: Path) -> dict[str, Any]:
    """The run, in this process."""
    problems = path.with_suffix(".jsonl")
    problems.write_text("".join(json.dumps(problem(number)) + "\n" for number in range(NUM_PROMPTS)))
    own = [f"data.train_files={problems}", f"model.policy.path={policy_that_goes_on(path.with_name('policy'))}"]
    config = load_files(["configs/quickstart.yaml"], [*SETTINGS, *own])
    run = RunFolder(path)
    run.create()
    save_resolved(config, run.config)
    controller = Controller(run, config, LocalCluster(run, config), ElasticExecutor)
    policy = MigratingCore(controller.core.plan, run, controller.attempt)
    controller.core = policy
    usual, core.choose_dispatch = core.choose_dispatch, policy.choose
    lock = run.hold()
    try:
        code = asyncio.run(controller.main())
    finally:
        os.close(lock)
        core.choose_dispatch = usual
    assert code == 0, run.ended.read_text()
    return {
        "legs": policy.legs,
        "aborts": policy.aborts,
        "batch": policy.batch,
        "stop_ids": load_tokenizer(str(POLICY)).stop_ids,
        "max_response_length": config.rollout.max_response_length,
    }


def policy_that_goes_on(folder: Path) -> Path:
    """The quickstart's, with an embedding of the stop token (it is the head's row too) that is a third as long."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(POLICY, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][list(load_tokenizer(str(POLICY)).stop_ids)] *= 0.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def problem(number: int) -> dict[str, Any]:
    """With as many digits as the prompt has room for."""
    digits = "".join(random.Random(number).choices("0123456789", k=28))
    model = {"ground_truth": "".join(sorted(digits))}
    return {"data_source": "digit_sort", "prompt": [{"role": "user", "content": digits}], "reward_model": model}


def abort_often(folder: Path, repetitions: int) -> dict[str, list[float]]:
    """Seconds of each abort of 64 running sequences, and of the steps before."""
    load_vllm(folder / "cache")
    from stages.engines.vllm import VllmEngine

    found: dict[str, list[float]] = {"abort_s": [], "step_s": []}
    with weight_store(POLICY) as store:
        options = EngineOptions(max_num_seqs=NUM_SEQUENCES)
        with store.read(0, 1) as reader:
            engine = VllmEngine(str(POLICY), "float32", options, 116, reader, 0)
        host = EngineHost(engine, lambda counts: None)

        def ask() -> None:
            try:
                for number in range(repetitions + 1):  # the first is not counted
                    abort_once(host, number, found)
            finally:
                host.post(_leave)

        threading.Thread(target=ask, name="asks").start()
        with suppress(SystemExit):
            host.run()
        engine.close()
    return {name: seconds[len(seconds) // (repetitions + 1) :] for name, seconds in found.items()}


def abort_once(host: EngineHost, number: int, found: dict[str, list[float]]) -> None:
    """When each of 64 sequences has eight tokens."""
    import queue  # only now: this folder has one too

    outbox: queue.SimpleQueue[Output] = queue.SimpleQueue()
    num_tokens: Counter[str] = Counter()
    ids = [f"{number}-{n}" for n in range(NUM_SEQUENCES)]
    prompt = load_tokenizer(str(POLICY)).encode("sort 31415926")
    host.submit([Request(id=id, prompt_ids=prompt, max_tokens=84, seed=n) for n, id in enumerate(ids)], outbox)
    times: list[float] = []
    while min(num_tokens[id] for id in ids) < 8:
        output = outbox.get(timeout=60)
        num_tokens[output.id] += len(output.tokens)
        if output.id == ids[0]:
            times.append(time.perf_counter())
    started, left = time.perf_counter(), NUM_SEQUENCES
    host.abort(None)
    while left:
        left -= outbox.get(timeout=60).finish == "abort"
    found["abort_s"].append(time.perf_counter() - started)
    found["step_s"] += [after - before for before, after in pairwise(times)]


def _leave(engine: Engine) -> None:
    sys.exit()  # ends the host's loop


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    batch, legs = {row["id"]: row for row in raw["batch"]}, raw["legs"]
    groups = Counter(id.rsplit("-", 1)[0] for id in batch)
    first = Counter(of[0].rpartition("/")[2] for of in legs.values())
    changed = sum(not is_beginning(kept, batch[kept["id"]]) for kept in raw["aborts"])
    abort_ms = [1e3 * s for s in raw["aborts_of_64"]["abort_s"]]
    return {
        "sequences": float(len(raw["batch"])),
        "groups": float(sum(num == NUM_MEMBERS for num in groups.values())),
        **{f"first/{replica}": float(num) for replica, num in sorted(first.items())},
        "moves/min": float(min(len(of) - 1 for of in legs.values())),
        "legs/astray": float(sum(len(set(of)) != 2 or of[::2] != [of[0]] * len(of[::2]) for of in legs.values())),
        "ids/unique": float(len(batch)),
        "kept/tokens": float(sum(len(kept["tokens"]) for kept in raw["aborts"])),
        "kept/changed": float(changed),
        "ends/wrong": float(sum(not ends_well(row, raw) for row in raw["batch"])),
        "abort_ms/p50": percentile(abort_ms, 0.5),
        "abort_ms/p90": percentile(abort_ms, 0.9),
        "step_ms/p50": 1e3 * percentile(raw["aborts_of_64"]["step_s"], 0.5),
    }


def is_beginning(kept: dict[str, Any], whole: dict[str, Any]) -> bool:
    num = len(kept["tokens"])
    return bool(whole["tokens"][:num] == kept["tokens"] and whole["logprobs"][:num] == kept["logprobs"])


def ends_well(row: dict[str, Any], raw: dict[str, Any]) -> bool:
    """A stop token ends the response and is nowhere else; without one it is as long as it may be."""
    stops = [at for at, token in enumerate(row["tokens"], 1) if token in raw["stop_ids"]]
    length, limit = len(row["tokens"]), raw["max_response_length"]
    if row["finish"] == "stop":
        return stops == [length] and length <= limit and length == len(row["logprobs"])
    return not stops and row["finish"] == "length" and length == limit == len(row["logprobs"])


if __name__ == "__main__":
    arguments = parser(__doc__ or "")
    arguments.add_argument("--repetitions", type=int, default=30)
    sys.exit(main("migrate", arguments.parse_args(), measure, figures, MUST))
