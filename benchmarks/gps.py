"""Weights in shared memory: `python benchmarks/gps.py [--part NAME ...] [--reads 100000 1000] [--real]`.

Parts: stress, kills, copies, cycle, plans, layouts, elsewhere. All of them take six minutes. <size> is 1MiB or 64MiB:
of the model in the stress, of each tensor (256 MiB in all) in the copies. Keys:

  reads/<size>            reads under a writer that never rests, by three processes; every word is compared
  torn/<size>             reads with words of two versions, or of none
  mixed/<size>            reads of a whole version that was not the one asked for
  backward/<size>         reads of an older version than the same reader's last
  versions/<size>         different versions that were read, summed over the readers
  late/<size>             times that a reader asked again: two versions were published before it held one
  writer_kills/num        kills of the busy writer
  writer_kills/halfway    of these, how many left a slot half written
  writer_kills/damaged    kills after which the visible version was not whole
  reader_kill_ms/p50 /max  from a reader's death to the writer going on (50 times)
  write_of_memcpy/<size>  speed of a version's write (publish of a model's parameters, and seal) over that of memcpy
  read_of_memcpy/<size>   the same of a read (hold, copy out, release): each is the ratio of the medians of
                          interleaved pairs; everything is in memory beforehand, one thread
  memcpy_gb_s/<size>      the memcpy (C library, heap to heap, tensor by tensor)
  cycle/opened_elsewhere  files outside /dev/shm that agent, zygote, trainer and engine opened in one cycle of
                          publish ▶ seal ▶ load, under strace. Emulated; with --real the quickstart's policy in vLLM
  cycle_ms/p50            such a cycle without strace
  plan_s/<model>/cold     the first transfer plan for eight replicas on four nodes that hold everything: Qwen2.5-7B
                          (a replica has one rank), 72B (eight) and Qwen3-30B-A3B (four, experts whole); median of five
  plan_layouts_s/<model>  before it, the layouts of these nodes and of a replica
  plan_ms/<model>/cached  a plan for replicas that stand in the same way, under other numbers
  plan_balance/<model>/<situation>/<copies>   the largest load of a holder over the mean; <copies> of each tensor on
                          four nodes. one_new: one replica on one of them; new_node: on a fifth; dead_holder: eight
                          replicas, a holder lost; uneven: three, one, one and none on the nodes
  plan_of_bound/...       the plan's makespan over the lower bound
  layout_of_memcpy/<model>/<kind>  speed of a read over that of memcpy of as many bytes between the same slot and the
                          same tensors; two layers and the embedding, at most 4 GiB; one thread. contiguous: all of it;
                          engine: the last of 2, 8, 4 ranks of an engine; row_parallel: of these what is cut along
                          columns; trainer_writes: a write, by the last of as many fsdp2 ranks
  elsewhere_of_raw        four local nodes, each holds a quarter of two layers of Qwen2.5-7B with an embedding, 1 GiB:
                          speed of one's read of what the others hold over that of a raw batch_isend_irecv of the same
  elsewhere_gb_s/<way>    gps; raw; broadcast (each tensor, from who holds it to all); checkpoint (loading with
                          torch.distributed.checkpoint what the others have saved in memory)
  elsewhere_s/cold /warm  a read by a node that never read before, and the median
  layout_gb_s/...         gigabytes per second of it
  load                    the machine's load average (1 min) before
"""

import argparse
import contextlib
import ctypes
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gps_elsewhere import ELSEWHERE_MUST, elsewhere_figures, measure_elsewhere
from gps_layouts import PLAN_MUST, READS_MUST, layout_figures, measure_layouts, measure_plans, plan_figures
from harness import Must, main, parser, percentile

from pipeline.gps.store import Store
from tests.gps import stress
from tests.gps.cycle import opened_by, publishing

if TYPE_CHECKING:
    from torch import Tensor

MIB = 1 << 20
SIZES = {"1MiB": MIB, "64MiB": 64 * MIB}
READERS, WRITER_KILLS, READER_KILLS, PAIRS, CYCLES = 3, 20, 50, 25, 10
MODEL_BYTES = 256 * MIB  # of the copies: far more than any cache
MUST = {
    "reads/1MiB": Must(at_least=100_000),
    "reads/64MiB": Must(at_least=1000),
    **{f"{kind}/{size}": Must(at_most=0) for kind in ("torn", "mixed", "backward") for size in SIZES},
    **{f"versions/{size}": Must(at_least=300) for size in SIZES},
    "writer_kills/halfway": Must(at_least=WRITER_KILLS // 4),
    "writer_kills/damaged": Must(at_most=0),
    "reader_kill_ms/p50": Must(at_most=10),
    **{f"{kind}_of_memcpy/{size}": Must(at_least=0.8) for kind in ("write", "read") for size in SIZES},
    "cycle/opened_elsewhere": Must(at_most=0),
    **PLAN_MUST,
    **READS_MUST,
    **ELSEWHERE_MUST,
}
PARTS = ("stress", "kills", "copies", "cycle", "plans", "layouts", "elsewhere")
REAL = {
    "model": {"policy": {"path": str(Path(__file__).parents[1] / "configs/quickstart/policy")}},
    "data": {"max_prompt_length": 32},
    "rollout": {"engine": {"name": "vllm"}},
    "trainer": {"strategy": "single"},
}


@contextlib.contextmanager
def small_store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder, a_store(stress.make_model(Path(folder) / "model", MIB)) as store:
        yield store


@contextlib.contextmanager
def a_store(model: Path) -> Iterator[Store]:
    store = Store.create(f"pivot-{os.getuid()}-bench{uuid.uuid4().hex[:8]}-1-n0-policy", str(model), "float32", 0)
    try:
        yield store
    finally:
        store.unlink()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    sizes = zip(SIZES.items(), args.reads, strict=True)
    parts: dict[str, Callable[[], Any]] = {
        "stress": lambda: {size: measure_stress(nbytes, reads) for (size, nbytes), reads in sizes},
        "kills": measure_kills,
        "copies": lambda: {size: measure_copies(nbytes) for size, nbytes in SIZES.items()},
        "cycle": lambda: measure_cycle(REAL if args.real else {}),
        "plans": measure_plans,
        "layouts": measure_layouts,
        "elsewhere": measure_elsewhere,
    }
    return {"load": os.getloadavg()[0]} | {part: parts[part]() for part in args.part}


def measure_stress(nbytes: int, reads: int) -> list[dict[str, int]]:
    with tempfile.TemporaryDirectory() as folder, a_store(stress.make_model(Path(folder) / "m", nbytes)) as store:
        return [asdict(seen) for seen in stress.read_under_a_writer(store.name, reads, READERS)]


def measure_kills() -> dict[str, Any]:
    with small_store() as store:
        states = stress.killed_writers(store.name, WRITER_KILLS)
        return {"writer": states, "reader_s": [stress.killed_reader(store.name) for _ in range(READER_KILLS)]}


def measure_copies(nbytes: int) -> dict[str, list[float]]:
    """Seconds of each copy of the whole model: memcpy, write, memcpy, read, and again."""
    import safetensors.torch
    import torch

    from stages.rl.ranks import Ranks
    from stages.weights.publisher import Publisher
    from stages.weights.tensors import views

    torch.set_num_threads(1)
    publisher = Publisher(Ranks())
    source = {f"layer.{n:03d}": torch.randn(nbytes // 4) for n in range(MODEL_BYTES // nbytes)}
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    with tempfile.TemporaryDirectory() as folder:
        safetensors.torch.save_file(source, f"{folder}/model.safetensors")
        with a_store(Path(folder)) as store:

            def write() -> None:
                version = store.current() + 1
                publisher.publish(source, store, version, 1.0)
                store.seal(version)

            def read() -> None:
                with store.read(store.current(), 1.0) as reader:
                    for name, tensor in views(reader).items():
                        target[name].copy_(tensor)

            return time_pairs(lambda: memcpy(source, target), {"write": write, "read": read})


def memcpy(source: "dict[str, Tensor]", target: "dict[str, Tensor]") -> None:
    for name, tensor in source.items():
        ctypes.memmove(target[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)


def time_pairs(reference: Callable[[], None], copies: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for copy in copies for name in (copy, f"memcpy for {copy}")}
    for number in range(PAIRS + 2):
        for name, copy in copies.items():
            for key, call in ((f"memcpy for {name}", reference), (name, copy)):
                started = time.perf_counter()
                call()
                if number >= 2:  # two rounds for the page tables of both slots
                    found[key].append(time.perf_counter() - started)
    return found


def measure_cycle(sections: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, publishing(Path(folder) / "run", **sections) as cycle:
        cycle.run()  # what is done once is done
        seconds = [cycle.run() for _ in range(CYCLES)]
        return {"seconds": seconds, "opened": opened_by(cycle, Path(folder) / "strace")}


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    parts = {
        "stress": stress_figures,
        "kills": kill_figures,
        "copies": copy_figures,
        "cycle": cycle_figures,
        "plans": plan_figures,
        "layouts": layout_figures,
        "elsewhere": elsewhere_figures,
    }
    found: dict[str, float | None] = {}
    for part, figures_of in parts.items():
        if part in raw:
            found |= figures_of(raw[part])
    return found | {"load": raw["load"]}


def stress_figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for size, readers in raw.items():
        for key in ("reads", "torn", "mixed", "backward", "late"):
            found[f"{key}/{size}"] = sum(seen[key] for seen in readers)
        found[f"versions/{size}"] = sum(seen["num_versions"] for seen in readers)
    return found


def kill_figures(raw: dict[str, Any]) -> dict[str, float | None]:
    states = raw["writer"]
    return {
        "writer_kills/num": len(states),
        "writer_kills/halfway": states.count("half written"),
        "writer_kills/damaged": states.count("damaged"),
        "reader_kill_ms/p50": 1e3 * percentile(raw["reader_s"], 0.5),
        "reader_kill_ms/max": 1e3 * percentile(raw["reader_s"], 1.0),
    }


def copy_figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for size, copies in raw.items():
        medians = {name: percentile(seconds, 0.5) for name, seconds in copies.items()}
        for copy in ("write", "read"):
            found[f"{copy}_of_memcpy/{size}"] = medians[f"memcpy for {copy}"] / medians[copy]
        found[f"memcpy_gb_s/{size}"] = MODEL_BYTES / medians["memcpy for write"] / 1e9
    return found


def cycle_figures(raw: dict[str, Any]) -> dict[str, float | None]:
    elsewhere = [path for path in raw["opened"] if not path.startswith("/dev/shm/")]
    return {"cycle/opened_elsewhere": len(elsewhere), "cycle_ms/p50": 1e3 * percentile(raw["seconds"], 0.5)}


if __name__ == "__main__":
    arguments = parser(__doc__ or "")
    arguments.add_argument("--part", choices=PARTS, nargs="+", default=PARTS)
    arguments.add_argument("--reads", type=int, nargs=2, default=[100_000, 1000], help="of 1 MiB and of 64 MiB")
    arguments.add_argument("--real", action="store_true", help="trace a real trainer and a vLLM engine")
    sys.exit(main("gps", arguments.parse_args(), measure, figures, MUST))
