"""The parts `plans` and `layouts` of gps.py: what a transfer plan of a whole model costs, and how good it is; reads and
writes through layouts, against memcpy of as many bytes."""

import ctypes
import gc
import json
import math
import os
import statistics
import struct
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import Must

from pipeline.gps.engine_layout import vllm_layout
from pipeline.gps.layout import Layout, Part, stored
from pipeline.gps.loads import Ends
from pipeline.gps.placement import place
from pipeline.gps.plan_cache import PlanCache
from pipeline.gps.segment import plan_image
from pipeline.gps.store import Store
from pipeline.gps.trainer_layout import fsdp2
from pipeline.gps.transfer_plan import TransferPlan
from tests.gps.shapes import QWEN_7B, QWEN_30B_A3B, QWEN_72B, Model

PLANNED = {"7B": (QWEN_7B, 1), "72B": (QWEN_72B, 8), "30B-A3B": (QWEN_30B_A3B, 4)}
"""With how many ranks a replica has."""
EIGHT = (0, 0, 1, 1, 2, 2, 3, 3)
SITUATIONS = {
    "eight": ((0, 1, 2, 3), EIGHT),
    "one_new": ((0, 1, 2, 3), (3,)),
    "new_node": ((0, 1, 2, 3), (4,)),
    "dead_holder": ((1, 2, 3), EIGHT),
    "uneven": ((0, 1, 2, 3), (0, 0, 0, 1, 2)),
}
REPEATS = 5
PLAN_MUST = {
    "plan_s/30B-A3B/cold": Must(at_most=0.5),
    "plan_ms/30B-A3B/cached": Must(at_most=5),
    **{
        f"{kind}/{model}/{situation}/{copies}": Must(at_most=bound)
        for kind, bound in (("plan_balance", 1.10), ("plan_of_bound", 1.25))
        for model in PLANNED
        for situation in SITUATIONS
        for copies in (2, 4)
    },
}


def measure_plans() -> dict[str, Any]:
    found: dict[str, Any] = {"cold_s": {}, "layouts_s": {}, "cached_s": {}, "quality": {}}
    for name, (model, ranks) in PLANNED.items():
        cold = [_cold(model, ranks) for _ in range(REPEATS)]
        found["layouts_s"][name] = [layouts_s for layouts_s, _, _ in cold]
        found["cold_s"][name] = [cold_s for _, cold_s, _ in cold]
        found["cached_s"][name] = cold[-1][2]
        for situation in SITUATIONS:
            for copies in (2, 4):
                plan = _plan(PlanCache(model.shapes(), 2), *_layouts(model, ranks, copies), situation)
                found["quality"][f"{name}/{situation}/{copies}"] = {
                    "balance": plan.balance,
                    "of_bound": plan.makespan_s / plan.lower_bound_s,
                }
    return found


def _cold(model: Model, ranks: int) -> tuple[float, float, list[float]]:
    """Seconds for the layouts; for the first plan for eight replicas; for the same with other numbers, again and
    again."""
    gc.collect()
    started = time.perf_counter()
    have, want = _layouts(model, ranks, 4)
    made = time.perf_counter()
    cache = PlanCache(model.shapes(), 2)
    begun = time.perf_counter()
    _plan(cache, have, want, "eight")
    cold_s, again = time.perf_counter() - begun, []
    for shift in range(1, 21):
        begun = time.perf_counter()
        cache.plan(have, want, _ends((0, 1, 2, 3), tuple((node + shift) % 4 for node in EIGHT), want))
        again.append(time.perf_counter() - begun)
    assert cache.hits == len(again)
    return made - started, cold_s, again


def _layouts(model: Model, ranks: int, copies: int) -> tuple[Layout, Layout]:
    """Of four nodes, each tensor on `copies` of them; and of a replica."""
    shapes = model.shapes()
    return place(shapes, 4, copies), vllm_layout(shapes, model.engine(ranks, has_expert_parallel=bool(model.experts)))


def _plan(cache: PlanCache, everywhere: Layout, want: Layout, situation: str) -> TransferPlan:
    alive, receivers = SITUATIONS[situation]
    have = Layout(tuple(everywhere.ranks[node] for node in alive), ({},) * len(alive))
    return cache.plan(have, want, _ends(alive, receivers, want))


def _ends(alive: tuple[int, ...], receivers: tuple[int, ...], want: Layout) -> Ends:
    return Ends(sources=alive, replicas=tuple((node,) * len(want.ranks) for node in receivers))


def plan_figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in raw["cold_s"]:
        found[f"plan_layouts_s/{name}"] = statistics.median(raw["layouts_s"][name])
        found[f"plan_s/{name}/cold"] = statistics.median(raw["cold_s"][name])
        found[f"plan_ms/{name}/cached"] = 1e3 * statistics.median(raw["cached_s"][name])
    for case, quality in raw["quality"].items():
        found[f"plan_balance/{case}"] = quality["balance"]
        found[f"plan_of_bound/{case}"] = quality["of_bound"]
    return found


# --- reads and writes ---

READ = {"7B": (QWEN_7B, 2), "72B": (QWEN_72B, 8), "30B-A3B": (QWEN_30B_A3B, 4)}
MOST_BYTES = 4 << 30
ROUNDS = 5
READS_MUST = {
    f"layout_of_memcpy/{model}/{kind}": Must(at_least=bound)
    for model in READ
    for kind, bound in (("contiguous", 0.85), ("engine", 0.70), ("row_parallel", 0.50))
}


def measure_layouts() -> dict[str, Any]:
    return {name: _measure(model, ranks) for name, (model, ranks) in READ.items()}


def cut_down(model: Model, most_bytes: int = MOST_BYTES) -> Model:
    """Two layers and as much of the embedding as fits."""
    small = Model(**{**model.__dict__, "layers": 2, "is_tied": True, "vocab": 64})
    rest = most_bytes - 2 * sum(map(math.prod, small.shapes().values()))
    return Model(**{**small.__dict__, "vocab": min(model.vocab, max(64, rest // (2 * model.hidden) // 64 * 64))})


def _measure(model: Model, ranks: int) -> dict[str, Any]:
    """Seconds of each: the last rank of an engine, what of it is row-parallel, everything, what a trainer's last rank
    writes. Each beside the memcpy of as many bytes, in turns."""
    model = cut_down(model)
    shapes = model.shapes()
    engine = vllm_layout(shapes, model.engine(ranks, has_expert_parallel=bool(model.experts)))
    halves = vllm_layout(shapes, model.engine(ranks))
    narrow = tuple(part for part in halves.ranks[-1] if part.name.endswith(("o_proj.weight", "down_proj.weight")))
    cases = {
        "contiguous": (stored(shapes, [shapes]).ranks[0], False),
        "engine": (engine.ranks[-1], False),
        "row_parallel": (narrow, False),
        "trainer_writes": (fsdp2(shapes, ranks).ranks[-1], True),
    }
    with tempfile.TemporaryDirectory() as folder:
        sparse_model(Path(folder), shapes)
        name = f"pivot-{os.getuid()}-bench{uuid.uuid4().hex[:8]}-1-n0-policy"
        store = Store.create(name, folder, "bfloat16", 0, slots=2)
        try:
            return {case: _time(store, parts, is_write) for case, (parts, is_write) in cases.items()}
        finally:
            store.unlink()


def sparse_model(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """All zeros, which take no room on the disk."""
    table, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        table[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    assert plan_image(str(folder), "bfloat16").nbytes > at


def _time(store: Store, parts: Sequence[Part], is_write: bool) -> dict[str, Any]:
    import torch

    from stages.weights.boxes import read, write
    from stages.weights.tensors import views

    torch.set_num_threads(1)
    sizes = Layout((tuple(parts),), ({},)).sizes(0)
    own = {tensor: torch.zeros(size, dtype=torch.bfloat16) for tensor, size in sizes.items()}
    num_bytes = 2 * sum(part.box.size for part in parts)

    def copy() -> None:
        if is_write:
            with store.write(1, 1.0) as writer:
                write(parts, own, views(writer))
        else:
            with store.read(0, 1.0) as reader:
                read(parts, views(reader), own)

    def memcpy() -> None:
        """The first `num_bytes` of the same slot and the same tensors, each tensor in one piece."""
        with store.write(1, 1.0) if is_write else store.read(0, 1.0) as held:
            image, at = next(iter(views(held).values())).data_ptr(), 0
            for tensor in own.values():
                ends = (image + at, tensor.data_ptr()) if is_write else (tensor.data_ptr(), image + at)
                size = min(tensor.nbytes, num_bytes - at)
                ctypes.memmove(*ends, size)
                at += size

    return {"num_bytes": num_bytes, **_in_turns(copy, memcpy)}


def _in_turns(copy: Callable[[], None], memcpy: Callable[[], None]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"copy": [], "memcpy": []}
    for number in range(ROUNDS + 1):
        for key, call in (("memcpy", memcpy), ("copy", copy)):
            started = time.perf_counter()
            call()
            if number:  # the first round makes page tables
                found[key].append(time.perf_counter() - started)
    return found


def layout_figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for model, cases in raw.items():
        for case, seen in cases.items():
            medians = {key: statistics.median(seen[key]) for key in ("copy", "memcpy")}
            found[f"layout_of_memcpy/{model}/{case}"] = medians["memcpy"] / medians["copy"]
            found[f"layout_gb_s/{model}/{case}"] = seen["num_bytes"] / medians["copy"] / 1e9
    return found
