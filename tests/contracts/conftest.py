from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import safetensors.numpy

from stages.engines.base import Engine
from tests.contracts.engine_case import KV_BYTES, Case
from tests.engines.tiny import Rig, load_vllm, make_model

KINDS = [
    "emulated",
    pytest.param("vllm", marks=pytest.mark.vllm),
    pytest.param("vllm of two ranks", marks=[pytest.mark.vllm, pytest.mark.slow]),
]


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("models")
    if request.param == "emulated":
        from stages.engines.emulated import EmulatedEngine

        rig = Rig.create("emulated")
        kind, options = EmulatedEngine, {"holds_bytes": KV_BYTES}
        unfit = {"weight": np.zeros((2, 512), np.float32)}
    else:
        load_vllm(folder / "cache")
        from stages.engines.vllm import VllmEngine

        make_model("dense", folder / "dense")
        rig = Rig.create(folder / "dense")
        kind, options = partial(VllmEngine, ranks=2) if "ranks" in request.param else VllmEngine, {}
        unfit = safetensors.numpy.load_file(folder / "dense/model.safetensors")
        del unfit["lm_head.weight"]
        unfit["model.norm.weight"] = np.zeros(32, np.float32)
        unfit["model.extra.weight"] = np.zeros(32, np.float32)
    (folder / "unfit").mkdir()
    safetensors.numpy.save_file(unfit, folder / "unfit/model.safetensors")
    other = Rig.create(folder / "unfit")
    yield Case(kind, options, rig, other)
    rig.close()
    other.close()


@pytest.fixture
def engine(case: Case) -> Iterator[Engine]:
    assert not case.engine.has_unfinished()
    yield case.engine
    case.engine.abort()
