"""Policies of each family in vLLM: what the trainer publishes is what the engine answers with, also by its probe."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stages.engines.base import Request
from tests.engines.tiny import Rig, load_vllm, one_collection, run
from tests.fakes.families import FAMILIES, write_family
from tests.fakes.tiny_policy import make_config, make_rows

pytestmark = pytest.mark.vllm
EACH = [
    name if name in ("smollm2", "glm4") else pytest.param(name, marks=pytest.mark.slow)
    for name in FAMILIES
    if name
    != "glm"  # vLLM runs it by transformers' own classes, which it changes: no trainer then runs in that process
]


@pytest.fixture(scope="module", autouse=True)
def _engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    load_vllm(tmp_path_factory.mktemp("cache"))
    with one_collection():
        yield


@pytest.mark.parametrize("name", EACH)
def test_r19_an_engine_says_what_the_trainer_says_of_each_family(name: str, tmp_path: Path) -> None:
    from stages.engines.vllm import VllmEngine
    from stages.rl.trainer import HfTrainer

    folder = write_family(FAMILIES[name], tmp_path)
    trainer, rig = HfTrainer(make_config(folder, trainer__lr=1e-3)), Rig.create(folder)
    requests = [Request(id=f"r{n}", prompt_ids=[5 + n, 9, 17], max_tokens=8, temperature=0, seed=n) for n in range(4)]
    try:
        engine = rig.start(VllmEngine)
        before = run(engine, requests)
        for step in (1, 2):
            trainer.train(make_rows(step), step)
            trainer.publish(rig.store, 1.0)
            rig.store.seal(step)
            engine.load(rig.stored(), trainer.probe())  # raises where it says something else
        said = run(engine, requests)
    finally:
        rig.close()
    for request in requests:
        output = said[request.id]
        assert output.version == 2 and output.logprobs != before[request.id].logprobs
        ids = torch.tensor([[*request.prompt_ids, *output.tokens]])
        with torch.no_grad():
            logprobs = torch.log_softmax(trainer.model(input_ids=ids).logits[0, 2:-1], -1)
        assert logprobs.argmax(-1).tolist() == list(output.tokens)
        found = logprobs.gather(-1, ids[0, 3:, None])[:, 0].tolist()
        assert output.logprobs == pytest.approx(found, abs=1e-3)
