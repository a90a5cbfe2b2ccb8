"""Random schedules on real processes: sequences taken back at random, workers, nodes, servers and controllers killed.

python -m tests.scenarios.chaos RUN SEED      the controller of such a run: it aborts what runs, now and then
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline import controller
from pipeline.cli.controller import run_controller
from pipeline.config import load_files, save_resolved
from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.core import Core
from pipeline.core.sequences import SequenceState
from pipeline.resume import keep_inputs
from pipeline.run_folder import RunFolder, read_json
from pipeline.status import EXIT_CODES
from tests.scenarios.faults import SETTINGS, Account, account
from tests.scenarios.runs import ROOT, environment, pid_by_log, wait_for_end

NUM_STEPS, PER_STEP = 4, 12
VICTIMS = ("rollout-0", "rollout-1", "reward-0", "reward-1", "train-0", "train-1", "zygote", "agent", "mover")
LIMIT_S = 60.0


class RestlessCore(Core):
    """Takes running sequences back at random: each time they go on by the rules of every abort."""

    random = random.Random()

    def handle(self, event: ev.Event, now: float) -> list[de.Decision]:
        decisions = super().handle(event, now)
        if self.ended or self.random.random() > 0.1:
            return decisions
        aborted: dict[str, list[str]] = {}
        for step in self.steps:
            for seq in self.sequences.of_step(step):
                if seq.state is SequenceState.RUNNING and self.random.random() < 0.5:
                    aborted.setdefault(seq.task, []).append(seq.id)
        for task, ids in aborted.items():
            decisions.append(de.Abort(task=task, worker=self._tasks[task].worker, ids=tuple(ids)))
        return decisions


def schedule(path: Path, seed: int) -> tuple[Counter[str], Account]:
    """One run under a random schedule, to its end. What happened how often, and what is wrong afterwards."""
    rng = random.Random(seed)
    staleness, mode = rng.choice((0, 1, 1)), rng.choice(("stream", "stream", "barrier"))
    keep_kv = rng.random() < 0.2
    num_nodes, num_ranks = rng.choice((1, 1, 2)), rng.choice((1, 2))
    config = load_files(
        ["configs/emulated.yaml"],
        [
            *SETTINGS,
            f"trainer.total_training_steps={NUM_STEPS}",
            *("data.train_batch_size=3", "rollout.flush_s=0.05"),
            *(f"cluster.nodes={num_nodes}", f"cluster.slots_per_node={6 // num_nodes}", f"trainer.ranks={num_ranks}"),
            *("placement.roles.rollout.replicas=2", "placement.roles.reward.replicas=2"),
            *(f"algorithm.staleness={staleness}", f"placement.admission={mode}", f"run.seed={seed}"),
            *(("rollout.on_update=keep_kv", "rollout.engine.enable_prefix_caching=false") if keep_kv else ()),
            f"run.root={path.parent}",
        ],
    )
    run = RunFolder(path)
    run.create()
    keep_inputs(run, config)
    save_resolved(config, run.config)
    counts = Counter({f"staleness {staleness}": 1, mode: 1, "keep_kv": int(keep_kv)})
    counts.update({f"{num_nodes} nodes": 1, f"{num_ranks} ranks": 1})
    is_last = False
    while not run.ended.exists():
        num_kills = 0 if is_last else rng.choice((0, 1, 1, 2, 3))
        is_last = attempt(run, seed, rng, num_kills, counts, VICTIMS, __name__)
    assert read_json(run.ended)["status"] == "done", read_json(run.status)
    wait_for_end(path)
    for number in run.attempts():
        text = run.journal(number).read_text()
        counts["aborts"] += text.count('"finish":"abort"')
        counts["updates"] += text.count('"event":"VersionLoaded"')
    return counts, account(path, NUM_STEPS, PER_STEP, staleness)


def attempt(
    run: RunFolder,
    seed: int,
    rng: random.Random,
    num_kills: int,
    counts: Counter[str],
    victims: Sequence[str],
    module: str,
    moments: Sequence[str] = ("NodeJoined",),
    before_kill: Callable[[], None] = lambda: None,
    limit_s: float = LIMIT_S,
) -> bool:
    """One life of the controller, which is `module`. True if it was killed, or had not to be. Each death
    comes some time after the first event of one of the `moments`."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(run.path), str(seed)],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    try:
        journal = run.journal((run.attempts() or [0])[-1] + 1)
        for _ in range(num_kills):
            moment = f'"event":"{rng.choice(moments)}"'.encode()
            while process.poll() is None and not (journal.exists() and moment in journal.read_bytes()):
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.5))
            name = rng.choice((*victims, *victims, "queue", "controller"))
            if process.poll() is not None:
                break
            before_kill()
            if name == "controller":
                process.kill()
                process.wait()
                counts["controller"] += 1
                wait_for_end(run.path)
                return True
            if pid := pid_of(run, name, rng):
                os.kill(pid, signal.SIGKILL)
                counts[name.partition("-")[0]] += 1
        out, _ = process.communicate(timeout=limit_s)
        assert process.returncode == EXIT_CODES["done"], f"seed {seed}: exit code {process.returncode}\n{out}"
        return True
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def pid_of(run: RunFolder, name: str, rng: random.Random) -> int | None:
    """Of the queue server, or of the worker or other process of that name; of several nodes', any."""
    logs = run.logs(run.attempts()[-1])
    paths = [logs / "queue.log"] if name == "queue" else sorted(logs.glob(f"*[0-9]-{name}.log"))
    pids = [pid for path in paths if (pid := pid_by_log(run.path, path))]
    return rng.choice(pids) if pids else None


if __name__ == "__main__":
    RestlessCore.random.seed(int(sys.argv[2]))
    controller.Core = RestlessCore  # type: ignore[misc]
    sys.exit(run_controller(sys.argv[1]))
