"""Policies of each family: trained, published, saved, and loaded by transformers and by vLLM, which say the same."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from pipeline.checkpoint import Checkpoint
from stages.rl.trainer import HfTrainer
from tests.fakes.families import FAMILIES, write_family
from tests.fakes.stores import weight_store
from tests.fakes.tiny_policy import make_config, make_rows
from tests.stages.rl.test_published_weights import are_equal, publish

IDS = torch.tensor([[5, 9, 17, 33, 4, 60, 3]])


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["weights", "adapters"])
@pytest.mark.parametrize("name", FAMILIES)
def test_r19_a_policy_of_the_family_is_trained_published_and_loaded_by_others(name, lora, tmp_path: Path):
    family = FAMILIES[name]
    folder = write_family(family, tmp_path / "model")
    trainer = HfTrainer(make_config(folder, trainer__lora=lora, trainer__lr=1e-3))
    before = logits_of(trainer.model)
    with weight_store(folder) as store:
        assert ("lm_head.weight" in store.entries) != family.is_tied
        for step in (1, 2):
            trainer.train(make_rows(step), step)
            published = publish(trainer, store)
    assert not torch.allclose(logits_of(trainer.model), before, atol=1e-3)
    saved = trainer.save(str(tmp_path / "checkpoints"))
    assert are_equal(load(Checkpoint(saved).read("model/model.safetensors")), published)
    user, info = AutoModelForCausalLM.from_pretrained(f"{saved}/model", output_loading_info=True)
    assert not any(info.values()) and user.dtype == torch.float32
    exact = {} if lora is None else {"atol": 1e-4, "rtol": 1e-4}  # W x + B A x is not (W + B A) x in the last bits
    torch.testing.assert_close(logits_of(user), logits_of(trainer.model), **(exact or {"atol": 0, "rtol": 0}))
    assert user.config.tie_word_embeddings == family.is_tied
    resumed = HfTrainer(make_config(folder, trainer__lora=lora, trainer__lr=1e-3))
    resumed.load(saved)
    assert resumed.train(make_rows(3), 3) == trainer.train(make_rows(3), 3)
