"""What HfTrainer publishes and saves: every tensor under its name, bit for bit."""

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load, load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from pipeline.checkpoint import Checkpoint
from pipeline.core.errors import ConfigError, UpdateRefused
from pipeline.gps.store import Store
from stages.rl.trainer import HfTrainer
from stages.weights.tensors import views
from tests.fakes.stores import weight_store
from tests.fakes.tiny_policy import make_config, make_rows, model_config, write_model


@pytest.fixture
def fresh_accelerate():
    """accelerate keeps one precision per process; a worker has one trainer, a test process several."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def weights_of(trainer: HfTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def publish(trainer: HfTrainer, store: Store) -> dict[str, torch.Tensor]:
    trainer.publish(store, 1.0)
    store.seal(trainer.version)
    with store.read(trainer.version, 1.0) as reader:
        return {name: tensor.clone() for name, tensor in views(reader).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_r19_weights_reach_store_and_checkpoint_bit_for_bit(tmp_path, fresh_accelerate, is_tied, dtype):
    folder = write_model(tmp_path / "model", is_tied=is_tied)
    config = make_config(folder, model__policy={"path": str(folder), "dtype": dtype})
    declared = getattr(torch, dtype)
    with weight_store(folder, dtype) as store:
        with store.read(0, 1.0) as reader:
            trainer = HfTrainer(config, reader)
            base = {name: tensor.clone() for name, tensor in views(reader).items()}
        assert ("lm_head.weight" in base) != is_tied
        trainer.train(make_rows(1), 1)
        assert all(tensor.dtype == torch.float32 for tensor in weights_of(trainer).values())
        published = publish(trainer, store)
        with store.read(0, 1.0) as reader:
            assert are_equal(dict(views(reader)), base)  # training did not write through a view
    assert published.keys() == base.keys()
    for name, tensor in published.items():
        assert torch.equal(tensor, weights_of(trainer)[name].to(declared)), name
        assert not torch.equal(tensor, base[name])
    saved = trainer.save(str(tmp_path / "checkpoints"))
    assert are_equal(load(Checkpoint(saved).read("model/model.safetensors")), published)
    user = AutoModelForCausalLM.from_pretrained(f"{saved}/model")
    assert user.dtype == declared
    assert torch.equal(user.lm_head.weight, published["model.embed_tokens.weight" if is_tied else "lm_head.weight"])
    assert (tmp_path / "checkpoints/step_1/model/tokenizer.json").read_text() == '{"a": "stand-in"}'


def test_bfloat16_resumes_from_the_float32_masters(tmp_path, fresh_accelerate):
    folder = write_model(tmp_path / "model")
    config = make_config(folder, model__policy={"path": str(folder), "dtype": "bfloat16"}, trainer__lr=1e-3)
    straight = HfTrainer(config)
    straight.train(make_rows(1), 1)
    resumed = HfTrainer(config)
    resumed.load(straight.save(str(tmp_path / "checkpoints")))
    assert are_equal(weights_of(resumed), weights_of(straight))
    assert resumed.train(make_rows(2), 2) == straight.train(make_rows(2), 2)
    assert are_equal(weights_of(resumed), weights_of(straight))
    assert resumed.probe() == straight.probe() and resumed.probe().tolerance == 0.3


def test_experts_keep_their_checkpoint_names(tmp_path):
    """Transformers fuses a layer's experts in memory; store and checkpoint hold them one by one."""
    folder = write_model(tmp_path / "dense")
    settings = {k: v for k, v in model_config(folder).items() if k not in ("model_type", "architectures")}
    torch.manual_seed(0)
    moe = Qwen3MoeConfig(**settings, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    Qwen3MoeForCausalLM(moe).save_pretrained(tmp_path / "moe")
    config = make_config(tmp_path / "moe")
    with weight_store(tmp_path / "moe") as store:
        trainer = HfTrainer(config)
        trainer.train(make_rows(1), 1)
        published = publish(trainer, store)
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in published
    resumed = HfTrainer(config)
    path = trainer.save(str(tmp_path / "checkpoints"))
    resumed.load(path)
    assert are_equal(weights_of(resumed), weights_of(trainer))
    assert are_equal(load(Checkpoint(path).read("model/model.safetensors")), published)


def test_r20_a_store_of_other_tensors_is_refused(model, tmp_path):
    trainer = HfTrainer(make_config(model))
    trainer.train(make_rows(1), 1)
    tensors = load_file(model / "model.safetensors")
    renamed = {("model.norm.bias" if name == "model.norm.weight" else name): t for name, t in tensors.items()}
    reshaped = tensors | {"model.norm.weight": torch.ones(3)}
    dropped = {name: t for name, t in tensors.items() if name != "model.norm.weight"}
    added = tensors | {"model.extra": torch.ones(3)}
    for number, changed in enumerate((renamed, reshaped, dropped, added)):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(changed, folder / "model.safetensors")
        with weight_store(folder) as store:
            with store.write(1, 1.0) as writer:
                before = bytes(writer.buffer)
            with pytest.raises(UpdateRefused, match=r"model\.(norm|extra)"):
                trainer.publish(store, 1.0)
            assert bytes(store.read(1, 1.0, is_sealed=False).buffer) == before
            (folder / "config.json").write_bytes((model / "config.json").read_bytes())
            with pytest.raises(ConfigError, match=r"model\.(norm|extra)"):
                HfTrainer(make_config(folder))
    with (
        weight_store(model, "bfloat16") as store,
        pytest.raises(UpdateRefused, match="dtype"),
    ):
        trainer.publish(store, 1.0)


def test_probe_is_what_the_model_says(model):
    trainer = HfTrainer(make_config(model, rollout__temperature=0.5))
    probe = trainer.probe()
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    assert len(probe.prompts) == 4 and probe.tolerance == 1e-3
    for prompt, token, logprob in zip(probe.prompts, probe.tokens, probe.logprobs, strict=True):
        logprobs = torch.log_softmax(policy(input_ids=torch.tensor([prompt])).logits[0, -1], -1)  # not tempered
        best = logprobs.topk(2)
        assert best.indices[0] == token and best.values[0].item() == pytest.approx(logprob, abs=1e-5)
        assert best.values[0] - best.values[1] > 0.1  # no near tie
