"""Weight versions between two nodes' memories on one host: `python benchmarks/node_copy.py [--mib 256] [--repeats 8]`.

Two movers, as agents start them, against two processes that exchange the same bytes by `batch_isend_irecv` and do
nothing else; one after the other, in turns. Keys:

  moved_gb_s/p50, raw_gb_s/p50   gigabytes per second, one way
  ratio                          moved to raw, of the medians
  changed                        moves after which the two memories differ
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from harness import Must, main, parser, percentile
from safetensors.numpy import save_file

from pipeline.gps.store import Store
from pipeline.processes import python_environment
from stages.weights.mover import Moved
from tests.stages.weights.movers import move, two_movers

MUST = {"ratio": Must(at_least=0.7), "changed": Must(at_most=0)}
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
    num_bytes = args.mib << 20
    with tempfile.TemporaryDirectory(prefix="pivot-copy-") as name:
        folder = Path(name)
        model = folder / "model"
        model.mkdir()
        save_file({"weight": np.zeros(num_bytes // 4, np.float32)}, model / "model.safetensors")
        (model / "config.json").write_text(json.dumps({"model_type": "none"}))
        raw: dict[str, Any] = {"num_bytes": num_bytes, "moved_s": [], "raw_s": [], "changed": 0}
        stores = [
            Store.create(f"pivot-{os.getuid()}-copy{uuid.uuid4().hex[:8]}-1-n{n}-policy", str(model), "float32", 0)
            for n in range(2)
        ]
        try:
            with two_movers() as movers:
                for version in range(1, args.repeats + 1):
                    _write(stores[0], version)
                    answers = move(movers, (stores[0].name, stores[1].name), version, folder / "pair")
                    assert all(isinstance(answer, Moved) for answer in answers), answers
                    raw["moved_s"].append(max(answer.seconds for answer in answers if isinstance(answer, Moved)))
                    for store in stores:
                        store.seal(version)
                    raw["changed"] += not _are_equal(stores, version)
                    raw["raw_s"].append(_raw(folder / f"raw{version}", num_bytes))
        finally:
            for store in stores:
                store.unlink()
    return raw


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
    moved, plain = raw["moved_s"][1:], raw["raw_s"][1:]  # the first move makes the pair and touches the memory
    of = {name: raw["num_bytes"] / 1e9 / percentile(times, 0.5) for name, times in (("moved", moved), ("raw", plain))}
    return {
        "moved_gb_s/p50": of["moved"],
        "raw_gb_s/p50": of["raw"],
        "ratio": of["moved"] / of["raw"],
        "changed": float(raw["changed"]),
    }


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--mib", type=int, default=256, help="size of the model")
    options.add_argument("--repeats", type=int, default=8, help="versions moved")
    sys.exit(main("node_copy", options.parse_args(), measure, figures, MUST))
