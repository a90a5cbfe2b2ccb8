"""The part `plans` of gps.py: what a transfer plan of a whole model costs, and how good it is."""

import gc
import statistics
import time
from typing import Any

from harness import Must

from pipeline.gps.engine_layout import vllm_layout
from pipeline.gps.layout import Layout
from pipeline.gps.loads import Ends
from pipeline.gps.placement import place
from pipeline.gps.plan_cache import PlanCache
from pipeline.gps.transfer_plan import TransferPlan
from tests.gps.shapes import QWEN_7B, QWEN_30B_A3B, QWEN_72B, Model

MODELS = {"7B": (QWEN_7B, 1), "72B": (QWEN_72B, 8), "30B-A3B": (QWEN_30B_A3B, 4)}
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
        for model in MODELS
        for situation in SITUATIONS
        for copies in (2, 4)
    },
}


def measure_plans() -> dict[str, Any]:
    found: dict[str, Any] = {"cold_s": {}, "layouts_s": {}, "cached_s": {}, "quality": {}}
    for name, (model, ranks) in MODELS.items():
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
