"""Random schedules of shifts, aborts, updates and deaths on real processes, and what must be true of each afterwards.

python -m tests.scenarios.shifts RUN SEED      the controller of such a run: its planner moves blocks at random, and
                                               it aborts what runs, now and then
"""

import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import controller
from pipeline.cli.controller import run_controller
from pipeline.config import load_files, save_resolved
from pipeline.core.events import Role
from pipeline.core.planner.bindings import Bindings
from pipeline.core.planner.planner import Plan
from pipeline.core.planner.settings import PlannerSettings
from pipeline.core.snapshot import Snapshot
from pipeline.queue.schema import SequenceRow
from pipeline.resume import keep_inputs
from pipeline.run_folder import RunFolder, read_json
from pipeline.watcher import Watcher
from tests.scenarios.chaos import RestlessCore, attempt
from tests.scenarios.faults import LEFT_S, PATIENT, SETTINGS, Account, account, remains
from tests.scenarios.oracle import contradictions
from tests.scenarios.runs import pid_by_log, read_queue, sequences, wait_for_end

NUM_STEPS, PER_STEP = 4, 12
LIMIT_S = 400.0
_WORKERS = [f"{role}-{index}" for role in ("rollout", "reward") for index in range(4)] + ["train-0", "train-1"]
VICTIMS = (*_WORKERS, "agent", "zygote", "mover")
MOMENTS = ("NodeJoined", "WorkerWoken", "SegmentClosed", "VerdictGiven", "WorkerSlept", "BatchTrained")


@dataclass
class Outcome:
    """Of one schedule: what happened how often, and what is wrong."""

    counts: dict[str, int]
    account: Account
    changed: list[str] = field(default_factory=list)
    """What the queue held in the middle of the run and is not the beginning of what it holds at the end."""
    untrue: list[str] = field(default_factory=list)
    """Logprobs that are not those of the version they bear, lengths beyond the rules, weights of another batch."""
    unexplained: list[str] = field(default_factory=list)
    """Deaths that nobody ordered: workers whose pid is another one for no reason."""
    left: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return self.account.is_right and not (self.changed or self.untrue or self.unexplained or self.left)


class RandomPlanner:
    """Moves some blocks to any role that they may have, at most once in a random while."""

    def __init__(self, seed: int) -> None:
        self._random, self._next_at = random.Random(seed), 0.0

    def __call__(self, snapshot: Snapshot, settings: PlannerSettings, bindings: Bindings) -> Plan:
        moves: dict[int, Role] = {}
        is_due = snapshot.at_s >= self._next_at
        for block in snapshot.blocks:
            allowed = bindings.of(block.index)
            if allowed and (block.role is None or (is_due and self._random.random() < 0.5)):
                moves[block.index] = self._random.choice(allowed)
        if is_due:
            self._next_at = snapshot.at_s + self._random.choice((0.05, 0.1, 0.2, 0.4))
        return Plan(reason="at random", moves=moves)


def settings_of(seed: int, rng: random.Random) -> tuple[list[str], dict[str, Any]]:
    """The configuration of a schedule, and what of it is told."""
    mode = rng.choice((*("shiftable",) * 5, "colocated", "rollout_reward_colocated", "trainer_pool"))
    staleness = 0 if mode == "colocated" else rng.choice((0, 1, 1))
    num_nodes, num_ranks, by_hand = rng.choice((1, 1, 2)), rng.choice((1, 1, 2)), False
    slots = 2 if num_nodes == 2 else rng.choice((2, 3, 4))
    if mode in ("rollout_reward_colocated", "trainer_pool"):
        slots = max(slots, 4 // num_nodes)
    told = [
        f"placement.mode={mode}",
        f"algorithm.staleness={staleness}",
        *(f"cluster.nodes={num_nodes}", f"cluster.slots_per_node={slots}", f"trainer.ranks={num_ranks}"),
        f"placement.admission={rng.choice(('stream', 'stream', 'barrier'))}",
    ]
    if rng.random() < 0.2:
        told += ["rollout.on_update=keep_kv", "rollout.engine.enable_prefix_caching=false"]
    if mode == "shiftable":
        by_hand = rng.random() < 0.25
        told += ["placement.planner.tick_s=0.1", "placement.planner.tick_share=0"]
        if by_hand:
            shifts = _one_at_a_time(_shift(rng, num_nodes * slots) for _ in range(12))
            told += ["placement.planner.enabled=false", f"placement.planner.schedule={json.dumps(shifts)}"]
    kind = f"{mode}{' by hand' if by_hand else ''}"
    return told, {kind: 1, f"staleness {staleness}": 1, f"{num_nodes} nodes": 1, f"{num_ranks} ranks": 1}


def _one_at_a_time(shifts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those that would give a block to two roles at one moment: such a schedule is refused."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for shift in shifts:
        found.setdefault((shift["step"], shift["at"]), shift)
    return list(found.values())


def _shift(rng: random.Random, num_blocks: int) -> dict[str, Any]:
    return {
        "step": rng.randint(1, NUM_STEPS),
        "at": rng.choice(("admitted", "rolled_out", "judged", "trained")),
        "blocks": rng.sample(range(num_blocks), rng.randint(1, num_blocks)),
        "role": rng.choice(("rollout", "reward")),
    }


def shift_schedule(path: Path, seed: int) -> Outcome:
    """One run under a random schedule, to its end."""
    rng = random.Random(seed)
    told, kind = settings_of(seed, rng)
    config = load_files(
        ["configs/emulated.yaml"],
        [
            *(*SETTINGS, *PATIENT, *told, f"trainer.total_training_steps={NUM_STEPS}"),
            *("data.train_batch_size=3", "rollout.flush_s=0.05", f"run.seed={seed}", f"run.root={path.parent}"),
        ],
    )
    run = RunFolder(path)
    run.create()
    keep_inputs(run, config)
    save_resolved(config, run.config)
    counts, photos = Counter(kind), []

    def photograph() -> None:
        photos.append(_photograph(run))

    is_last = False
    while not run.ended.exists():
        num_kills = 0 if is_last else rng.choice((0, 1, 2, 3, 4))
        is_last = attempt(run, seed, rng, num_kills, counts, VICTIMS, __name__, MOMENTS, photograph, LIMIT_S)
        if not run.ended.exists():
            photos.append({row.id: row for rows in sequences(path).values() for row in rows})
    assert read_json(run.ended)["status"] == "done", read_json(run.status)
    wait_for_end(path, LEFT_S)
    for number in run.attempts():
        text = run.journal(number).read_text()
        counts["aborts"] += text.count('"finish":"abort"')
        for event, name in (("WorkerSlept", "downs"), ("WorkerWoken", "ups"), ("VersionLoaded", "updates")):
            counts[name] += text.count(f'"event":"{event}"')
    outcome = Outcome(dict(counts), account(path, NUM_STEPS, PER_STEP, config.algorithm.staleness))
    final = {row.id: row for rows in sequences(path).values() for row in rows}
    outcome.counts["photographs"] = len(photos)
    outcome.counts["photographed tokens"] = sum(len(row.tokens) for photo in photos for row in photo.values())
    outcome.changed = [text for photo in photos for text in _changes(photo, final)]
    outcome.untrue = contradictions(path, config)
    outcome.unexplained = [text for number in run.attempts() for text in _unexplained(run, number)]
    losses = sum(run.journal(number).read_text().count('"event":"NodeLost"') for number in run.attempts())
    if losses > counts["agent"] + counts["zygote"]:
        outcome.unexplained.append(f"{losses} nodes were lost")
    outcome.left = remains(run)
    return outcome


# --- what was acknowledged -------------------------------------------------------------------------------------------


def _photograph(run: RunFolder) -> dict[str, SequenceRow]:
    """What the queue holds now, by sequence. Its server stands still meanwhile, as after a kill."""
    pid = pid_by_log(run.path, run.logs(run.attempts()[-1]) / "queue.log")
    if pid is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="pivot-photo-") as name:
        folder = Path(name) / "queue"
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                shutil.copytree(run.queue, folder)
            finally:
                os.kill(pid, signal.SIGCONT)
        if not (folder / "index.db").exists():
            return {}
        return {row.id: row for rows in read_queue(folder).sequences.values() for row in rows}


def _changes(before: dict[str, SequenceRow], after: dict[str, SequenceRow]) -> list[str]:
    found = []
    for id, old in before.items():
        new = after.get(id)
        if new is None:
            found.append(f"{id} is gone")
            continue
        for name in ("tokens", "logprobs", "versions", "kv_versions"):
            kept, now = list(getattr(old, name)), list(getattr(new, name))
            if now[: len(kept)] != kept:
                found.append(f"{name} of {id}: {kept} became {now}")
        if new.prompt_ids != old.prompt_ids or (old.score is not None and new.score != old.score):
            found.append(f"{id}: prompt or score changed, {old.score} became {new.score}")
    return found


# --- who died --------------------------------------------------------------------------------------------------------


def _unexplained(run: RunFolder, number: int) -> list[str]:
    """Deaths of an attempt without a cause that is a kill, and pids that changed without a death."""
    deaths: Counter[str] = Counter()
    found = []
    events = [json.loads(line) for line in run.journal(number).read_bytes().split(b"\n")[:-1]]
    nodes_lost = [event for event in events if event["event"] == "NodeLost"]
    for event in events:
        if event["event"] == "WorkerDied":
            deaths[event["worker"]] += 1
            if not _is_killed(event):
                found.append(f"attempt {number}: {event['worker']} died: {event['reason'][:300]}")
    for log in run.logs(number).glob("*-*-*.log"):
        worker = log.stem.split("-", 2)[2]
        if worker not in _WORKERS:
            continue
        lives = log.read_text(errors="replace").count(f"--- {worker} on ")
        if lives > 1 + deaths[worker] + len(nodes_lost):
            found.append(f"attempt {number}: {worker} lived {lives} times and died {deaths[worker]} times")
    return found


def _is_killed(event: dict[str, Any]) -> bool:
    reason, worker = event["reason"], event["worker"]
    return reason.startswith("killed by SIGKILL") or (worker.startswith("train-") and "another rank" in reason)


def main(arguments: Sequence[str]) -> int:
    path, seed = arguments
    RestlessCore.random.seed(int(seed))
    controller.Core = RestlessCore  # type: ignore[misc]
    controller.Watcher = functools.partial(Watcher, decide=RandomPlanner(int(seed)))  # type: ignore[misc,assignment]
    return run_controller(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
