"""A vLLM engine on a node that holds a third of its model, fed by two others: equal to a fresh engine that has all."""

import math
from pathlib import Path

import pytest
import torch

from pipeline.run_folder import RunFolder
from stages.engines.base import Stored
from tests.engines.test_vllm import KINDS, questions
from tests.engines.tiny import Rig, load_vllm, make_model, run
from tests.stages.weights.fetching import World

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    load_vllm(made / "cache")
    return made


@pytest.mark.parametrize(
    "kind", [kind if kind == "moe" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_r19_r20_an_engine_that_reads_from_other_nodes_equals_one_that_has_everything(folder: Path, kind: str) -> None:
    """From its start, through updates, a sleep and a wake."""
    from stages.engines.vllm import VllmEngine

    make_model(kind, folder / kind)
    run_folder = RunFolder(folder / f"run-{kind}")
    run_folder.create()
    rig, nodes = Rig.create(folder / kind), World(run_folder, str(folder / kind), "float32", 3, 1)
    try:
        publish(nodes, rig, 1)
        with nodes.reader("n1").read(1, 5.0) as reader:
            assert 0 < len(reader.here) < len(reader.entries)
        own = Rig(rig.folder, nodes.reader("n1"))
        engine = own.start(VllmEngine)
        assert engine.reads_directly
        said = run(engine, questions())
        assert said == run(rig.start(VllmEngine), questions())
        for version in (2, 3, 4):
            publish(nodes, rig, version)
            if version == 3:
                engine.sleep()
                engine.wake(Stored(store=own.store, version=version, wait_s=5))
            else:
                engine.load(Stored(store=own.store, version=version, wait_s=5))
            before, said = said, run(engine, questions())
            assert said == run(rig.start(VllmEngine), questions())
            assert all(not set(said[id].logprobs) & set(before[id].logprobs) for id in said)
        for ended in (*own.engines, *rig.engines):
            ended.close()
        rig.engines.clear()
    finally:
        nodes.close()
        rig.close()


def publish(nodes: World, rig: Rig, version: int) -> None:
    """The same on all nodes, and on the one that has everything."""

    def values(name: str, version: int, nbytes: int) -> bytes:
        generator = torch.Generator().manual_seed(1000 * version + sum(name.encode()))
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        return torch.empty(nbytes // 4).normal_(mean, 0.2, generator=generator).numpy().tobytes()

    def write(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            flat = torch.frombuffer(bytearray(values(name, version, 4 * math.prod(tensor.shape))), dtype=torch.float32)
            tensor.copy_(flat.view(tensor.shape))

    nodes.publish(version, values)
    assert rig.publish(write) == version
