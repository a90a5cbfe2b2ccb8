"""Run as a program: engines fed by layouts, against engines that were just started: `python -m tests.engines.matrix
FOLDER RANKS KIND ...`. Prints a line of JSON per kind of model. A process of its own, because engines of several ranks
share what a process has once.

What each rank holds is held, bit for bit, against what vLLM's own loader makes of the same weights as files.

Versions are written as trainers of several kinds would: from each rank's own tensors, by its layout.
"""

import copy
import gc
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.engines.tiny import Rig, load_vllm, make_model, run

TRAINERS = ("ddp", "fsdp2", "tensor_parallel")


def main(folder: Path, ranks: int, kinds: list[str]) -> None:
    load_vllm(folder / "cache")
    gc.freeze()  # as a zygote does: vLLM collects with each load of a model
    for kind in kinds:
        make_model(kind, folder / kind)
        rig = Rig.create(folder / kind)
        try:
            print(json.dumps({"kind": kind, **look_at(rig, ranks)}), flush=True)
        finally:
            rig.close()


def look_at(rig: Rig, ranks: int) -> dict[str, Any]:
    """Of one engine that is given the same weights by each kind of trainer, and others in between: is it equal to a
    fresh engine, does each rank hold what vLLM's loader makes of the weights, also when it has slept, has it learnt
    what the formula says, and is a box that is shifted by a row noticed?"""
    from stages.engines.vllm_ranks import on_each

    engine = start(rig, ranks)
    found: dict[str, Any] = {
        "is_as_written_down": all(on_each(engine._llm, is_as_written_down, shapes_of(rig), ranks)),
        "reads_directly": engine.reads_directly,
    }
    said, are_loaders = {}, [are_the_loaders(engine, rig)]
    for trainer in TRAINERS:
        for seed in (2, 1):
            publish_as(trainer, rig, seed)
            said[trainer, seed] = answers_after(engine, rig)
        are_loaders.append(are_the_loaders(engine, rig))
    publish_as(TRAINERS[0], rig, 3)
    are_unequal = not are_the_loaders(engine, rig)
    engine.sleep()
    engine.wake(rig.stored())
    are_loaders.append(are_the_loaders(engine, rig))
    publish_as(TRAINERS[0], rig, 1)
    said["woken", 1] = answers_after(engine, rig)
    expected = answers(start(rig, ranks))
    found["equal"] = {trainer: said[trainer, 1] == expected for trainer in (*TRAINERS, "woken")}
    found["are_the_loaders"] = all(are_loaders) and are_unequal
    others = [answer for (_, seed), answer in said.items() if seed == 2]
    found["others_differ"] = expected not in others and others[1:] == others[:-1]
    on_each(engine._llm, shift_a_box)
    found["is_shift_noticed"] = answers_after(engine, rig) != expected
    return found


def are_the_loaders(engine: Any, rig: Rig) -> bool:
    """Each rank holds what vLLM's loader makes of the visible version in a file."""
    from stages.engines.vllm_ranks import on_each

    exported = Path(rig.folder).with_name("exported")
    exported.mkdir(exist_ok=True)
    shutil.copy(Path(rig.folder) / "config.json", exported)
    with rig.read() as reader:
        last = max(reader.entries.values(), key=lambda entry: entry.offset)
        (exported / "model.safetensors").write_bytes(reader.buffer[: last.offset + last.nbytes])
    return all(on_each(engine._llm, is_the_loaders, str(exported)))


def answers_after(engine: Any, rig: Rig) -> list[tuple[list[int], list[float]]]:
    """Under the visible version."""
    engine.load(rig.stored())
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
    """With the visible version."""
    from stages.engines.vllm import VllmEngine

    return rig.start(VllmEngine, ranks=ranks)


def answers(engine: Any) -> list[tuple[list[int], list[float]]]:
    from stages.engines.base import Request

    requests = [
        Request(id=f"r{number}", prompt_ids=[5 + number, 9, 77], max_tokens=6, temperature=0) for number in range(3)
    ]
    return [(said.tokens, said.logprobs) for said in run(engine, requests).values()]


def is_the_loaders(worker: Any, exported: str) -> bool:
    """In each rank's process: parameters, and what is computed from packed copies of them."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model

    config = copy.copy(worker.vllm_config)
    config.model_config, config.load_config = copy.copy(config.model_config), LoadConfig(load_format="safetensors")
    config.model_config.model = exported
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    with set_current_vllm_config(config):
        theirs = dict(get_model(vllm_config=config).named_modules())
    for name, mine in worker.model_runner.get_model().named_modules():
        parameters = dict(theirs[name].named_parameters(recurse=False))
        for own, parameter in mine.named_parameters(recurse=False):
            if not torch.equal(parameter, parameters[own]):
                return False
        if hasattr(mine, "cpu_linear"):
            size = getattr(mine, "input_size_per_partition", 0) or getattr(mine, "input_size", 0) or mine.embedding_dim
            unit = torch.eye(size)
            made = [of.cpu_linear and of.cpu_linear(unit, of.weight, None) for of in (mine, theirs[name])]
            if made[0] is None or not torch.equal(*made):
                return False
    return True


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
