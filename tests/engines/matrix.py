"""Run as a program: engines fed by layouts, against engines that were just started: `python -m tests.engines.matrix
FOLDER RANKS KIND ...`. Prints a line of JSON per kind of model. A process of its own, because engines of several ranks
share what a process has once.

Versions are written as trainers of several kinds would: from each rank's own tensors, by its layout.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.tiny import MAX_MODEL_LEN, Rig, load_vllm, make_model

TRAINERS = ("ddp", "fsdp2", "tensor_parallel")


def main(folder: Path, ranks: int, kinds: list[str]) -> None:
    load_vllm(folder / "cache")
    for kind in kinds:
        make_model(kind, folder / kind)
        rig = Rig.create(folder / kind)
        try:
            print(json.dumps({"kind": kind, **look_at(rig, ranks)}), flush=True)
        finally:
            rig.close()


def look_at(rig: Rig, ranks: int) -> dict[str, Any]:
    """Of one engine that is given the same weights by each kind of trainer, and others in between: is it equal to a
    fresh engine, has each rank learnt what the formula says, and is a box that is shifted by a row noticed?"""
    engine = start(rig, ranks)
    found: dict[str, Any] = {
        "is_as_written_down": all(engine.collective_rpc(is_as_written_down, args=(shapes_of(rig), ranks))),
        "reads_directly": all(engine.collective_rpc(take, args=(rig.store, 0, True))),
    }
    said = {}
    for trainer in TRAINERS:
        for seed in (2, 1):
            publish_as(trainer, rig, seed)
            said[trainer, seed] = answers_after(engine, rig)
    fresh = start(rig, ranks)
    expected = answers(fresh)
    found["equal"] = {trainer: said[trainer, 1] == expected for trainer in TRAINERS}
    others = [answer for (_, seed), answer in said.items() if seed == 2]
    found["others_differ"] = expected not in others and others[1:] == others[:-1]
    engine.collective_rpc(shift_a_box)
    found["is_shift_noticed"] = answers_after(engine, rig) != expected
    for ended in (engine, fresh):
        ended.engine_core.shutdown()
    return found


def answers_after(engine: Any, rig: Rig) -> list[tuple[list[int], list[float]]]:
    """Under the visible version."""
    engine.collective_rpc(take, args=(rig.store, rig.store.current()))
    engine.reset_prefix_cache()
    return answers(engine)


def publish_as(trainer: str, rig: Rig, seed: int) -> None:
    """Other weights everywhere, from two ranks that hold them in their own ways."""
    import torch

    from stages.weights.boxes import read, write
    from tests.gps.arrays import KINDS

    shapes = shapes_of(rig)
    layout, generator = KINDS[trainer](shapes, 2), torch.Generator().manual_seed(seed)
    model = {
        name: torch.empty(shape).normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2, generator=generator)
        for name, shape in shapes.items()
    }
    ranks = []
    for rank, parts in enumerate(layout.ranks):
        own = {tensor: torch.zeros(size) for tensor, size in layout.sizes(rank).items()}
        read(parts, model, own)
        ranks.append((parts, own))

    def fill(tensors: dict[str, torch.Tensor]) -> None:
        for parts, own in ranks:
            write(parts, own, tensors)

    rig.publish(fill)


def shapes_of(rig: Rig) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in rig.store.entries.items()}


def start(rig: Rig, ranks: int) -> Any:
    """With the visible version; read by each rank for itself."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from stages.engines.vllm_extension import LOAD_FORMAT, Stored, prepare_cpu

    prepare_cpu()
    arguments = EngineArgs(
        model=rig.folder,
        dtype=rig.dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        kv_cache_memory_bytes=32 << 20,
        skip_tokenizer_init=True,
        load_format=LOAD_FORMAT,
        model_loader_extra_config={"weights": Stored(rig.store, rig.store.current())},
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp" if ranks > 1 else None,
        enforce_eager=True,
        disable_log_stats=True,
    )
    config = arguments.create_engine_config()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # a CPU's config sets another one; ranks need what is imported
    return LLMEngine.from_vllm_config(config, disable_log_stats=True)


def answers(engine: Any) -> list[tuple[list[int], list[float]]]:
    from vllm.inputs import tokens_input
    from vllm.sampling_params import SamplingParams

    for number in range(3):
        parameters = SamplingParams(max_tokens=6, temperature=0, logprobs=0, detokenize=False, ignore_eos=True)
        engine.add_request(f"r{number}", tokens_input([5 + number, 9, 77]), parameters)
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                said = output.outputs[0]
                logprobs = [of[token].logprob for of, token in zip(said.logprobs, said.token_ids, strict=True)]
                done[output.request_id] = (list(said.token_ids), logprobs)
    return [done[id] for id in sorted(done)]


def take(worker: Any, store: Any, version: int, is_first: bool = False) -> bool:
    """In each rank's process: read the version. Whether that goes straight into parameters."""
    from stages.engines.vllm_extension import reload_weights, settle
    from stages.weights.tensors import views

    with store.read(version, 10.0) as reader:
        call: Callable[..., Any] = settle if is_first else reload_weights
        return bool(call(worker, views(reader)))


def is_as_written_down(worker: Any, shapes: dict[str, tuple[int, ...]], ranks: int) -> bool:
    """What this rank learnt from vLLM's loader is what pipeline.gps.engine_layout says."""
    from pipeline.gps.engine_layout import Engine, vllm_layout
    from stages.engines.vllm_extension import _known

    layout = vllm_layout(shapes, Engine(num_heads=4, num_kv_heads=2, ranks=ranks))
    return set(_known[worker.model_runner.get_model()].parts) == set(layout.ranks[worker.rank])


def shift_a_box(worker: Any) -> None:
    """By one row, on one rank."""
    from pipeline.gps.layout import Box, Part
    from stages.engines.vllm_extension import _known

    known = _known[worker.model_runner.get_model()]
    number = next(i for i, part in enumerate(known.parts) if part.name.endswith(".o_proj.weight"))
    name, (start, stop), place = known.parts[number]
    if worker.rank == 0:  # its rows 0 up to the last but one come from rows 1 up to the last
        moved = Part(name, Box((start[0] + 1, start[1]), stop), place)
        known.parts = (*known.parts[:number], moved, *known.parts[number + 1 :])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
