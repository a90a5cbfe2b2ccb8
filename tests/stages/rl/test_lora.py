"""Adapters: what is trained, published and saved of them, and what their KL reference is."""

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import PeftModel
from safetensors.torch import load
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from pipeline.checkpoint import Checkpoint
from pipeline.core.errors import ConfigError, RunError
from stages.rl.policy import base_tensors
from stages.rl.trainer import HfTrainer
from tests.fakes.stores import weight_store
from tests.fakes.tiny_policy import make_config, make_rows, model_config, write_model
from tests.stages.rl.test_published_weights import are_equal, publish

LORA = {"rank": 4, "alpha": 8}
IDS = torch.tensor([[5, 9, 17, 33, 4]])


@torch.no_grad()
def logits_of(model):
    return model(input_ids=IDS).logits


def adapters(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("is_tied", [True, False])
def test_r19_what_is_published_and_saved_is_the_base_with_the_adapters_added(tmp_path, is_tied):
    folder = write_model(tmp_path / "model", is_tied=is_tied)
    targets = ["q_proj", "down_proj"] if is_tied else ["q_proj", "down_proj", "lm_head"]
    config = make_config(folder, trainer__lora=LORA | {"target_modules": targets})
    base = base_tensors(config.model.policy)
    trainer = HfTrainer(config)
    with weight_store(folder) as store:
        for step in (1, 2):
            trainer.train(make_rows(step), step)
            published = publish(trainer, store)
    own = adapters(trainer)
    assert published.keys() == base.keys()
    for name, tensor in published.items():
        layer = name.removesuffix(".weight")
        if name.endswith(tuple(f"{target}.weight" for target in targets)):
            added = 2 * own[f"{layer}.lora_B.default.weight"] @ own[f"{layer}.lora_A.default.weight"]
            torch.testing.assert_close(tensor, base[name] + added)
            assert added.abs().max() > 1e-4
        else:
            assert torch.equal(tensor, base[name]), name
    assert len(own) == 2 * (5 if not is_tied else 4)
    saved = trainer.save(str(tmp_path / "checkpoints"))
    assert are_equal(load(Checkpoint(saved).read("model/model.safetensors")), published)
    user = AutoModelForCausalLM.from_pretrained(f"{saved}/model")
    torch.testing.assert_close(logits_of(user), logits_of(trainer.model), atol=1e-4, rtol=1e-4)
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), f"{saved}/adapter")
    torch.testing.assert_close(logits_of(by_peft), logits_of(trainer.model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("with_kl", [True, False])
def test_r13_the_base_model_is_below_the_adapters_and_the_kl_reference_after_a_resume_too(model, tmp_path, with_kl):
    kl = {"coef": 0.1} if with_kl else {}
    config = make_config(model, trainer__lora=LORA, trainer__updates_per_step=1, algorithm__kl=kl)
    trainer = HfTrainer(config)
    assert trainer.reference is None  # its own frozen weights are it
    base, seen = AutoModelForCausalLM.from_pretrained(model).eval(), []
    found = [trainer.train(make_rows(step), step)["actor/kl_loss"] for step in (1, 2, 3)]
    assert found[0] == 0 and (found[2] > 1e-6) == with_kl
    resumed = HfTrainer(config)
    resumed.load(path := trainer.save(str(tmp_path / "checkpoints")))
    for each in (trainer, resumed):
        assert not torch.allclose(logits_of(each.model), logits_of(base), atol=1e-3)
        micro = next(each._micro_batches([to_own(row) for row in make_rows(4)]))
        seen.append(each._reference_logprobs(micro))
        torch.testing.assert_close(seen[-1], each._logprobs(base, micro)[0].detach())
    assert torch.equal(*seen)
    assert resumed.train(make_rows(4), 4) == trainer.train(make_rows(4), 4)
    assert are_equal(adapters(resumed), adapters(trainer))
    other = write_model(tmp_path / "other", initializer_range=0.2)
    with pytest.raises(RunError, match="with the base model"):
        HfTrainer(make_config(other, trainer__lora=LORA, algorithm__kl=kl)).load(path)
    with pytest.raises(RunError, match=r"not those of trainer\.lora"):
        HfTrainer(make_config(model, trainer__lora=LORA | {"rank": 5}, algorithm__kl=kl)).load(path)


def to_own(row):
    from stages.rl.batch import to_sample

    return to_sample(row, 1.0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_r34_ranks_train_the_adapters_that_one_process_trains(model, tmp_path, pair, strategy):
    """With a KL reference, whose passes without adapters come between those of an update."""
    changes = {"trainer__lora": LORA, "trainer__lr": 1e-3, "algorithm__kl": {"coef": 0.1}}
    ranked = {"trainer__strategy": strategy, "trainer__ranks": 2, "cluster__slots_per_node": 4}
    one, two = HfTrainer(make_config(model, **changes)), pair.make(make_config(model, **changes, **ranked))
    with weight_store(model) as store, weight_store(model) as other:
        for step in (1, 2):
            found, wanted = two.train(make_rows(step), step), one.train(make_rows(step), step)
            assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)
            published, expected = publish(two, store), publish(one, other)
    torch.testing.assert_close(published, expected, atol=1e-4, rtol=1e-3)
    path = two.save(str(tmp_path / "checkpoints"))
    torch.testing.assert_close(load(Checkpoint(path).read("model/model.safetensors")), published, atol=1e-6, rtol=1e-6)
    alone = HfTrainer(make_config(model, **changes))
    alone.load(path)
    assert alone.train(make_rows(3), 3) == pytest.approx(two.train(make_rows(3), 3), rel=1e-3, abs=1e-5)


def test_bfloat16_is_rounded_once_and_resumes_from_float32_adapters(tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)  # one precision per process
    folder = write_model(tmp_path / "model")
    policy = {"path": str(folder), "dtype": "bfloat16"}
    config = make_config(folder, model__policy=policy, trainer__lora=LORA, trainer__lr=1e-3)
    straight, resumed = HfTrainer(config), HfTrainer(config)
    straight.train(make_rows(1), 1)
    path = straight.save(str(tmp_path / "checkpoints"))
    files = set(Checkpoint(path).files)
    assert "trainer/master.safetensors" not in files and "adapter/adapter_config.json" in files
    resumed.load(path)
    with weight_store(folder, "bfloat16") as store:
        assert are_equal(publish(resumed, store), load(Checkpoint(path).read("model/model.safetensors")))
    assert resumed.train(make_rows(2), 2) == straight.train(make_rows(2), 2)
    assert are_equal(adapters(resumed), adapters(straight))
    AcceleratorState._reset_state(reset_partial_state=True)


def test_of_a_mixture_of_experts_attention_gets_adapters(tmp_path):
    folder = write_model(tmp_path / "dense")
    settings = {k: v for k, v in model_config(folder).items() if k not in ("model_type", "architectures")}
    moe = Qwen3MoeConfig(**settings, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    Qwen3MoeForCausalLM(moe).save_pretrained(tmp_path / "moe")
    config = make_config(tmp_path / "moe", trainer__lora=LORA)
    trainer = HfTrainer(config)
    trainer.train(make_rows(1), 1)
    assert {name.split(".")[4] for name in adapters(trainer)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with weight_store(tmp_path / "moe") as store:
        published = publish(trainer, store)
    base = base_tensors(config.model.policy)
    changed = {name for name in base if not torch.equal(base[name], published[name])}
    assert changed == {name for name in base if "_proj." in name and ".experts." not in name}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_modules": ["lm_head"]}, "is its embedding"),
        ({"target_modules": ["embed_tokens"]}, "no linear layer 'embed_tokens'"),
        ({"target_modules": ["proj"]}, "no linear layer 'proj'"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["self_attn.q_proj"]}, "leaves no layer"),
    ],
)
def test_layers_that_cannot_have_an_adapter_are_refused(model, changes, said):
    with pytest.raises(ConfigError, match=rf"trainer\.lora.*{said}"):
        HfTrainer(make_config(model, trainer__lora=LORA | changes))
