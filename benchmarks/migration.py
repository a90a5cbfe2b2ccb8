"""Sequences that move between two live rollout replicas: `python benchmarks/migration.py [--smollm2 FOLDER]`.

One step of configs/quickstart.yaml with two vLLM rollout replicas and 64 sequences, 32 on each, under the real
controller, agent and queue, --runs times. Answers must outlast two moves, and the quickstart's may end at their third
token: so the problems are as long as they may be, and the policy's stop token is made less likely. (The judge is
emulated.) The core is the real one but for a policy: each sequence is aborted twice, when some of its new tokens are
durable, and goes on at the other replica, which has room. With --smollm2 the same of SmolLM2-135M, 8 sequences, 256 MB
of KV. Then the quickstart's policy in one engine of this process, of whose 64 running sequences all are aborted, again
and again. Keys (of all runs together; of seconds the best run's, `/worst` the worst one's):

  sequences, groups            of a step; how many groups have all their members
  first/<replica>              how many sequences each replica began
  moves/min                    how often the sequence that moved least did
  legs/astray                  sequences whose replicas were not A, B, A
  ids/unique                   different ids in the batch
  kept/tokens                  tokens that were in the queue at an abort, over all aborts
  kept/changed                 aborts whose tokens or logprobs are not, bit for bit, the beginning of what was trained
  ends/wrong                   sequences that are too long, have a stop token before their end, or end without a reason
  migration_s/p50 /p90         from the decision to abort to the first new token at the other replica, which the queue
                               has made durable by then, per sequence
  part_s/<part>/p50            of that: `abort` until the core hears that it is back, `queue` until it is dispatched
                               again, `token` until the first new one
  abort_ms/p50 /p90            from EngineHost.abort() to the last output, 64 sequences running
  step_ms/p50                  a step of that engine with 64 sequences, for comparison
  smollm2/<key>                the same of SmolLM2-135M
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import Must, kept, main, parser, percentile

from benchmarks.recorder import RecordedController, run_recorded
from pipeline.config_engine import EngineOptions
from pipeline.core.core import Core, RunPlan
from pipeline.core.decisions import Abort, Decision, Dispatch
from pipeline.core.events import BatchCommitted, Event, Finish, Role, SegmentClosed
from pipeline.core.feeding import Feeder, Server
from pipeline.core.fleet import Capacity
from pipeline.core.scheduler import WaitingQueue
from pipeline.core.sequences import Sequence
from pipeline.queue.client import QueueClient
from pipeline.queue.schema import SequenceRow
from pipeline.run_folder import RunFolder, read_json
from stages.engines.base import Engine, Output, Request, Stored
from stages.engines.host import EngineHost
from stages.text import load_tokenizer
from tests.engines.tiny import load_vllm
from tests.fakes.stores import weight_store

NUM_PROMPTS, NUM_MEMBERS, MOVES = 8, 8, 2
NUM_SEQUENCES = NUM_PROMPTS * NUM_MEMBERS
POLICY = Path(__file__).parents[1] / "configs/quickstart/policy"
KV_BYTES = 256_000_000
SETTINGS = (
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
QUICK = (f"data.train_batch_size={NUM_PROMPTS}", f"rollout.n={NUM_MEMBERS}")
SMOLLM2 = (
    "data.train_batch_size=2",
    "rollout.n=4",
    "data.max_prompt_length=128",
    "rollout.max_response_length=96",
    f"rollout.engine.kv_cache_bytes={KV_BYTES}",
    "trainer.updates_per_step=1",
    "algorithm.max_logprob_diff=10",
    "limits.engine_start_s=300",
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
    "migration_s/p50": Must(at_most=0.25),
    "abort_ms/p50": Must(at_most=100),
}
LARGE = {"smollm2/kept/changed": Must(at_most=0), "smollm2/ends/wrong": Must(at_most=0)}


class Elsewhere(Feeder):
    """Does not give a sequence to the replica that had it last; begins when both are there."""

    last: dict[str, str]

    def feed(self, queue: WaitingQueue[Sequence], servers: Iterable[Server], now: float) -> None:
        servers = [server for server in servers if server.tasks]
        if len({server.worker.name for server in servers}) < 2 and not self.last:
            return
        by_last: dict[str, list[Sequence]] = {}
        for sequence in queue.waiting():
            by_last.setdefault(self.last.get(sequence.id, ""), []).append(sequence)
        for name, sequences in by_last.items():
            others = [server for server in servers if server.worker.name != name]
            super().feed(WaitingQueue(sequences), others, now)


class MigratingCore(Core):
    """Aborts what has new durable tokens. It keeps what the queue had then, and when everything happened."""

    def __init__(self, plan: RunPlan, run: RunFolder, attempt: int) -> None:
        super().__init__(plan)
        capacity = plan.capacities.get(Role.ROLLOUT, Capacity())
        feeder = Elsewhere(Role.ROLLOUT, capacity, self.sequences, self._tasks, self._out, may_move=False)
        feeder.last = self._last = {}  # the replica that had the sequence last
        self._feeders[Role.ROLLOUT] = feeder
        self._run, self._attempt = run, attempt
        self._client: QueueClient | None = None
        self._aborted: set[tuple[str, str]] = set()  # which task was told to give which sequence back
        self._moving: dict[str, dict[str, float]] = {}
        self.moves: list[dict[str, float]] = []
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

    def handle(self, event: Event, now: float) -> list[Decision]:
        is_rollout = isinstance(event, SegmentClosed) and event.task.startswith("rollout")
        moving = self._look_at(event, now) if is_rollout and isinstance(event, SegmentClosed) else {}
        if isinstance(event, BatchCommitted):
            self.batch = [_kept(row) | {"finish": row.finish} for row in self.client.batch(event.step)]
        decisions = super().handle(event, now)
        for decision in decisions:
            if isinstance(decision, Dispatch) and decision.task.startswith("rollout"):
                for id in decision.ids:
                    self._last[id] = decision.worker
                    self.legs.setdefault(id, []).append(decision.worker)
                    if id in self._moving:
                        self._moving[id]["dispatched"] = now
        for task, ids in moving.items():
            if task in self._tasks:
                decisions = [*decisions, Abort(task=task, worker=self._tasks[task].worker, ids=tuple(ids))]
                self._moving |= {id: {"decided": now} for id in ids}
        if is_rollout and isinstance(event, SegmentClosed):
            self._keep(event)
        return decisions

    def _look_at(self, event: SegmentClosed, now: float) -> dict[str, list[str]]:
        """Which sequences are to move now, by their tasks; when those that move came back, and had new tokens."""
        for segment in event.segments:
            times = self._moving.get(segment.id, {})
            if segment.finish is Finish.ABORT and "dispatched" not in times and times:
                times["back"] = now
            elif segment.num_tokens and "dispatched" in times:
                self.moves.append(self._moving.pop(segment.id) | {"token": now})
            elif segment.finish not in (Finish.ABORT, Finish.FLUSH):
                self._moving.pop(segment.id, None)  # it had ended when it was aborted
        flushed = [s.id for s in event.segments if s.finish is Finish.FLUSH and len(self.legs[s.id]) <= MOVES]
        new = [id for id in flushed if self.sequences[id].task == event.task and (event.task, id) not in self._aborted]
        self._aborted |= {(event.task, id) for id in new}
        return {event.task: new} if new else {}

    def _keep(self, event: SegmentClosed) -> None:
        """Of those that were given back, what the queue has."""
        given_back = [s.id for s in event.segments if s.finish is Finish.ABORT]
        self.aborts += [_kept(row) for row in (self.client.get(given_back) if given_back else [])]


def _kept(row: SequenceRow) -> dict[str, Any]:
    return {"id": row.id, "tokens": row.tokens, "logprobs": row.logprobs}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pivot-migration-") as folder:
        path = Path(folder)
        policy = policy_that_goes_on(path / "policy")
        raw: dict[str, Any] = {"runs": [], "smollm2": []}
        for number in range(args.runs):
            name = f"quick-{number}"
            raw["runs"].append(kept("migration", name, partial(migrate, path / name, policy, QUICK)))
            if args.smollm2:
                name, model = f"smollm2-{number}", args.smollm2.resolve()
                raw["smollm2"].append(kept("migration", name, partial(migrate, path / name, model, SMOLLM2)))
        aborts = kept("migration", "aborts", partial(abort_often, path, args.repetitions))
        return raw | {"aborts_of_64": aborts}


def migrate(path: Path, policy: Path, settings: Iterable[str]) -> dict[str, Any]:
    """The run, in this process."""
    problems = path.with_suffix(".jsonl")
    problems.write_text("".join(json.dumps(problem(number)) + "\n" for number in range(NUM_PROMPTS)))
    own = [f"data.train_files={problems}", f"model.policy.path={policy}", *settings]

    def prepare(controller: RecordedController) -> None:
        controller.core = MigratingCore(controller.core.plan, controller.run, controller.attempt)

    load = os.getloadavg()[0]
    controller = run_recorded(path, [*SETTINGS, *own], prepare=prepare)
    core = controller.core
    assert isinstance(core, MigratingCore)
    return {
        "legs": core.legs,
        "aborts": core.aborts,
        "moves": core.moves,
        "batch": core.batch,
        "stop_ids": load_tokenizer(str(policy)).stop_ids,
        "max_response_length": controller.config.rollout.max_response_length,
        "load": max(load, os.getloadavg()[0]),
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
        stored = Stored(store=store, version=0, wait_s=1)
        engine = VllmEngine(str(POLICY), "float32", options, 116, stored, 0)
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
    abort_ms = [1e3 * s for s in raw["aborts_of_64"]["abort_s"]]
    found = of_runs(raw["runs"]) | {
        "abort_ms/p50": percentile(abort_ms, 0.5),
        "abort_ms/p90": percentile(abort_ms, 0.9),
        "step_ms/p50": 1e3 * percentile(raw["aborts_of_64"]["step_s"], 0.5),
        "load/max": max(run["load"] for run in [*raw["runs"], *raw["smollm2"]]),
    }
    large = of_runs(raw["smollm2"]) if raw["smollm2"] else {}
    return found | {f"smollm2/{key}": value for key, value in large.items()}


def of_runs(runs: list[dict[str, Any]]) -> dict[str, float | None]:
    """What is counted is as bad as in the worst run."""
    each = [counts_of(run) for run in runs]
    least = ("groups", "sequences", "ids/unique", "moves/min", "kept/tokens")
    found: dict[str, float | None] = {
        key: (min if key.startswith((*least, "first/")) else max)(counts.get(key, 0.0) for counts in each)
        for key in dict.fromkeys(key for counts in each for key in counts)
    }
    found["migrations"] = float(sum(len(run["moves"]) for run in runs))
    parts: tuple[tuple[str, str, str], ...] = (
        ("migration_s", "decided", "token"),
        ("part_s/abort", "decided", "back"),
        ("part_s/queue", "back", "dispatched"),
        ("part_s/token", "dispatched", "token"),
    )
    for name, begin, end in parts:
        of_runs = [[move[end] - move[begin] for move in run["moves"] if begin in move] for run in runs]
        p50s = [percentile(seconds, 0.5) for seconds in of_runs if seconds]
        found |= {f"{name}/p50": min(p50s, default=None), f"{name}/p50/worst": max(p50s, default=None)}
        if name == "migration_s":
            found[f"{name}/p90"] = min((percentile(seconds, 0.9) for seconds in of_runs if seconds), default=None)
    return found


def counts_of(run: dict[str, Any]) -> dict[str, float]:
    batch, legs = {row["id"]: row for row in run["batch"]}, run["legs"]
    groups = Counter(id.rsplit("-", 1)[0] for id in batch)
    first = Counter(of[0].rpartition("/")[2] for of in legs.values())
    changed = sum(not is_beginning(kept, batch[kept["id"]]) for kept in run["aborts"])
    size = max(groups.values(), default=0)
    return {
        "sequences": float(len(run["batch"])),
        "groups": float(sum(num == size for num in groups.values())),
        **{f"first/{replica}": float(num) for replica, num in sorted(first.items())},
        "moves/min": float(min(len(of) - 1 for of in legs.values())),
        "legs/astray": float(sum(len(set(of)) != 2 or of[::2] != [of[0]] * len(of[::2]) for of in legs.values())),
        "ids/unique": float(len(batch)),
        "kept/tokens": float(sum(len(kept["tokens"]) for kept in run["aborts"])),
        "kept/changed": float(changed),
        "ends/wrong": float(sum(not ends_well(row, run) for row in run["batch"])),
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
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--repetitions", type=int, default=30)
    arguments.add_argument("--smollm2", type=Path, help="the folder of SmolLM2-135M")
    parsed = arguments.parse_args()
    sys.exit(main("migration", parsed, measure, figures, MUST | (LARGE if parsed.smollm2 else {})))
