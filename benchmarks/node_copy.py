"""Weight versions between nodes' memories on one host: `python benchmarks/node_copy.py [--mib 256] [--repeats 8]
[--publishes 200] [--kills 20] [--nodes 3] [--seed 1]`.

Two movers, as agents keep them, against two processes that exchange the same bytes by `batch_isend_irecv` and do
nothing else; one after the other, in turns:

  moved_gb_s/p50, raw_gb_s/p50   gigabytes per second, one way
  ratio                          moved to raw, of the medians
  changed                        moves after which the two memories differ

Versions of 16 MiB published to real nodes (agents, zygotes, movers), while agents are killed at any moment of a
publish and come back with an empty memory; on each node a reader compares every word of what it reads:

  publishes, kills               how many; a killed node is back before the next one is killed
  kills/halfway                  of these, how many broke a copy that was on its way
  kills/again                    of these, how many took the only holder of a version with them: it was written again
  reads, torn, mixed, backward   as in gps.py, over all readers
  versions                       different versions that were read, summed over the readers' lives
  publish_ms/p50 /max            from the begin of its writing to visible on all nodes, without a kill
  disturbed_ms/p50 /max          the same where an agent was killed
  warm_again_s/p50               from the loss of a node to its memory showing the current version
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from harness import Must, main, parser, percentile
from safetensors.numpy import save_file

from pipeline import wire_gps
from pipeline.gps.store import Store
from pipeline.processes import python_environment
from tests.slurm.publishing import Publishing
from tests.stages.weights.movers import move, two_movers

PUBLISHES, KILLS, PUBLISH_BYTES, KILL_WITHIN_S = 200, 20, 16 << 20, 0.06
MUST = {
    "ratio": Must(at_least=0.7),
    "changed": Must(at_most=0),
    "publishes": Must(at_least=PUBLISHES),
    "kills": Must(at_least=KILLS),
    "kills/halfway": Must(at_least=KILLS // 4),
    **{kind: Must(at_most=0) for kind in ("torn", "mixed", "backward")},
    "versions": Must(at_least=PUBLISHES),
}
RAW = """
import datetime, sys, time, torch
import torch.distributed as dist
rank, path, num_bytes, repeats = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
data = torch.full((num_bytes,), rank, dtype=torch.uint8)
for _ in range(repeats):
    dist.barrier()
    began = time.monotonic()
    op = dist.P2POp(dist.isend if rank == 0 else dist.irecv, data, 1 - rank)
    for work in dist.batch_isend_irecv([op]):
        work.wait()
    print(time.monotonic() - began, flush=True)
"""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pivot-copy-") as name:
        return {
            "load": os.getloadavg()[0],
            "copies": measure_copies(Path(name), args.mib << 20, args.repeats),
            "publishing": measure_publishing(Path(name), args),
        }


def measure_copies(folder: Path, num_bytes: int, repeats: int) -> dict[str, Any]:
    model = folder / "copied"
    model.mkdir()
    save_file({"weight": np.zeros(num_bytes // 4, np.float32)}, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({"model_type": "none"}))
    raw: dict[str, Any] = {"num_bytes": num_bytes, "moved_s": [], "raw_s": [], "changed": 0}
    run = f"pivot-{os.getuid()}-copy{uuid.uuid4().hex[:8]}"
    stores = [Store.create(f"{run}-1-n{n}-policy", str(model), "float32", 0) for n in range(2)]
    try:
        with two_movers((stores[0].name, stores[1].name)) as movers:
            for version in range(1, repeats + 1):
                _write(stores[0], version)
                answers = move(movers, version, folder / "pair")
                assert all(isinstance(answer, wire_gps.Moved) for answer in answers), answers
                raw["moved_s"].append(max(answer.seconds for answer in answers if isinstance(answer, wire_gps.Moved)))
                for store in stores:
                    store.seal(version)
                raw["changed"] += not _are_equal(stores, version)
                raw["raw_s"].append(_raw(folder / f"raw{version}", num_bytes))
    finally:
        for store in stores:
            store.unlink()
    return raw


def measure_publishing(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(args.seed)
    killed = set(chance.sample(range(2, args.publishes + 1), args.kills))
    publishing = Publishing(folder, args.nodes, PUBLISH_BYTES)
    try:
        for version in range(1, args.publishes + 1):
            if version in killed:
                publishing.kill(chance.randrange(args.nodes), chance.uniform(0, KILL_WITHIN_S))
            publishing.publish(version)
    finally:
        publishing.close()
    return asdict(publishing.tally)


def _write(store: Store, version: int) -> None:
    with store.write(version, 10.0) as writer:
        first = min(entry.offset for entry in writer.entries.values())
        np.frombuffer(writer.buffer, np.uint8)[first:] = version


def _are_equal(stores: list[Store], version: int) -> bool:
    with stores[0].read(version, 1.0) as one, stores[1].read(version, 1.0) as other:
        return bool(np.array_equal(np.frombuffer(one.buffer, np.uint8), np.frombuffer(other.buffer, np.uint8)))


def _raw(path: Path, num_bytes: int, repeats: int = 2) -> float:
    """Seconds of the last of `repeats`: the first one touches memory for the first time."""
    ends = [
        subprocess.Popen(
            [sys.executable, "-c", RAW, str(rank), str(path), str(num_bytes), str(repeats)],
            env=python_environment(OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return max(float(end.communicate(timeout=120)[0].split()[-1]) for end in ends)


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    copies, tally = raw["copies"], raw["publishing"]
    # The first makes the pair and touches the memory.
    moved, plain = copies["moved_s"][1:] or copies["moved_s"], copies["raw_s"][1:] or copies["raw_s"]
    of = {
        name: copies["num_bytes"] / 1e9 / percentile(times, 0.5) for name, times in (("moved", moved), ("raw", plain))
    }
    found: dict[str, float | None] = {
        "moved_gb_s/p50": of["moved"],
        "raw_gb_s/p50": of["raw"],
        "ratio": of["moved"] / of["raw"],
        "changed": copies["changed"],
        "publishes": len(tally["publish_s"]) + len(tally["disturbed_s"]),
        "kills": tally["kills"],
        "kills/halfway": tally["halfway"],
        "kills/again": tally["again"],
        "versions": sum(seen["num_versions"] for seen in tally["seen"]),
    }
    for kind in ("reads", "torn", "mixed", "backward"):
        found[kind] = sum(seen[kind] for seen in tally["seen"])
    for kind in ("publish", "disturbed"):
        times = tally[f"{kind}_s"]
        for name, q in (("p50", 0.5), ("max", 1.0)):
            found[f"{kind}_ms/{name}"] = 1e3 * percentile(times, q) if times else None
    found["warm_again_s/p50"] = percentile(tally["warm_again_s"], 0.5) if tally["warm_again_s"] else None
    found["load"] = raw["load"]
    return found


if __name__ == "__main__":
    options = parser(__doc__ or "")
    options.add_argument("--mib", type=int, default=256, help="size of the model that is copied")
    options.add_argument("--repeats", type=int, default=8, help="versions moved")
    options.add_argument("--publishes", type=int, default=PUBLISHES)
    options.add_argument("--kills", type=int, default=KILLS)
    options.add_argument("--nodes", type=int, default=3)
    options.add_argument("--seed", type=int, default=1)
    sys.exit(main("node_copy", options.parse_args(), measure, figures, MUST))
