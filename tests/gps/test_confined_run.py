"""A run on two nodes of this host: no process of a node ever maps the other's memory."""

import contextlib
import os
import re
import subprocess
from collections import defaultdict
from pathlib import Path

from tests.scenarios.runs import begin, pids_of

RUN = ("cluster.nodes=2", "placement.roles.rollout.replicas=2", "trainer.options.step_seconds=0.1", "evaluate.freq=0")


def look(run: Path, seen: dict[str, dict[str, set[str]]]) -> None:
    """Note which stores the processes of each node have mapped now, by the log that each writes."""
    for pid in pids_of(run):
        try:
            log = Path(os.readlink(f"/proc/{pid}/fd/1")).stem
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue  # it has ended
        if node := re.match(r"local-\d", log):
            seen[node[0]][log.removeprefix(f"{node[0]}-")].update(
                line.split("/dev/shm/")[1].rpartition(".")[0] for line in lines if "/dev/shm/pivot-" in line
            )


def test_no_process_of_a_node_ever_maps_the_memory_of_the_other(tmp_path: Path) -> None:
    run = tmp_path / "run"
    seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    process = begin("submit", "configs/emulated.yaml", "--run-dir", str(run), "--wait", *RUN)
    out = None
    while out is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, _ = process.communicate(timeout=0.1)
        look(run, seen)
    assert process.returncode == 0, out
    assert set(seen) == {"local-0", "local-1"}
    workers = {name for logs in seen.values() for name in logs}
    assert workers >= {"agent", "zygote", "mover", "rollout-0", "rollout-1", "reward-0", "train-0"}
    for node, logs in seen.items():
        lives = {re.sub("-(policy|genrm)$", "", store) for stores in logs.values() for store in stores}
        assert len(lives) == 1 and f"-{node}-" in lives.copy().pop(), (node, logs)
        assert all(stores for log, stores in logs.items() if log != "zygote"), (node, logs)
