"""What HfTrainer promises beyond the contract: the arithmetic, the names, the reference model."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM

from pipeline.core.errors import RunError, StageFailed
from pipeline.queue.schema import GIVEN
from stages.rl.batch import split_groups, to_sample
from stages.rl.trainer import HfTrainer
from tests.fakes.tiny_policy import EOS, VOCAB_SIZE, make_config, make_row, make_rows, write_model


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


def gradients(trainer: HfTrainer, samples) -> tuple[float, dict[str, torch.Tensor]]:
    trainer.optimizer.zero_grad()
    tally = trainer.accumulate(samples)
    return tally.loss / tally.num_tokens, {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def sampled_rows(path, temperature: float, step: int = 1, scores=(1.0, 0.0)):
    """Two groups of two whose logprobs are those of the model itself, one row at a time, without padding."""
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    random = np.random.default_rng(step)
    rows = []
    for number in range(4):
        prompt = random.integers(3, VOCAB_SIZE, 2 + number).tolist()
        tokens = [*random.integers(3, VOCAB_SIZE, 3 * number + 1).tolist(), EOS]
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits / temperature, -1)[range(len(tokens)), tokens].tolist()
        group, member = divmod(number, 2)
        rows.append(
            make_row(step, group, member, prompt_ids=prompt, tokens=tokens, logprobs=logprobs, score=scores[member])
        )
    return rows


# --- the loss --------------------------------------------------------------------------------------------------


def test_what_a_tool_said_carries_no_loss(model):
    """The gradient is that of the sampled tokens' logprobs alone, with the tool's tokens read; and it is not that of a
    conversation in which the policy had sampled them too."""
    (row, *_) = sampled_rows(model, 1.0)[3:]
    given = replace(row, logprobs=[GIVEN if 2 <= at < 6 else logprob for at, logprob in enumerate(row.logprobs)])
    trainer = HfTrainer(make_config(model))
    _, found = gradients(trainer, [to_sample(given, 1.5)])
    _, whole = gradients(trainer, [to_sample(row, 1.5)])
    ids = torch.tensor([row.prompt_ids + row.tokens])
    logits = trainer.model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1]
    logprobs = torch.log_softmax(logits, -1)[range(len(row.tokens)), row.tokens]
    kept = [at for at in range(len(row.tokens)) if not 2 <= at < 6]
    trainer.optimizer.zero_grad()
    (-1.5 * logprobs[kept].mean()).backward()  # on policy, where the ratio is 1
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)
    assert any(not torch.allclose(found[name], whole[name], rtol=1e-2) for name in found)


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_r34_gradient_does_not_depend_on_micro_batches_or_padding(model, kl):
    rows = make_rows(1, num_prompts=1, min_tokens=12)
    rows = [
        replace(row, **{name: getattr(row, name)[-n:] for name in ("tokens", "logprobs", "versions", "kv_versions")})
        for row, n in zip(rows, (1, 12, 7, 4), strict=True)
    ]
    samples = [to_sample(row, (-1.0) ** i * (1 + i)) for i, row in enumerate(rows)]
    longest = max(sample.num_tokens for sample in samples)
    found = []
    for micro_batch_tokens, num_passes in ((1, 4), (longest + 8, 3), (16384, 2)):
        trainer = HfTrainer(make_config(model, trainer__micro_batch_tokens=micro_batch_tokens, algorithm__kl__coef=kl))
        if trainer.reference is not None:  # else its KL to itself has no gradient
            with torch.no_grad():
                trainer.model.get_input_embeddings().weight += 0.05
        found.append(gradients(trainer, samples))
        assert len(list(trainer._micro_batches(samples))) == num_passes
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        for name, expected in found[0][1].items():
            torch.testing.assert_close(gradient[name], expected, rtol=1e-4, atol=1e-6)


def test_loss_is_the_mean_over_all_tokens_of_the_mini_batch(model):
    """Against the formula, written once more by hand: one row at a time."""
    config = make_config(model)
    rows = sampled_rows(model, 1.0)
    rows = [replace(row, logprobs=[p + 0.1 * (-1) ** i for i, p in enumerate(row.logprobs)]) for row in rows]
    loss, _ = gradients(HfTrainer(config), [to_sample(row, a) for row, a in zip(rows, (1, -1, 2, -2), strict=True)])
    terms = []
    for row, advantage in zip(rows, (1, -1, 2, -2), strict=True):
        for i in range(len(row.tokens)):
            ratio = math.exp(-0.1 * (-1) ** i)
            terms.append(-min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage))
    assert loss == pytest.approx(sum(terms) / len(terms), rel=1e-4)


def test_r25_ratio_of_unchanged_weights_is_one_at_the_sampling_temperature(model):
    rows = sampled_rows(model, 0.6)
    options = {"trainer__updates_per_step": 1}
    metrics = HfTrainer(make_config(model, rollout__temperature=0.6, **options)).train(rows, 1)
    assert metrics["mismatch/max_abs_logprob_diff"] < 1e-5
    assert abs(metrics["actor/ppo_kl"]) < 1e-5
    assert metrics["actor/pg_clipfrac"] == 0
    wrong = HfTrainer(make_config(model, rollout__temperature=1.0, **options)).train(rows, 1)
    assert wrong["mismatch/max_abs_logprob_diff"] > 0.1


def test_mismatch_is_of_all_parts_before_the_first_update(model):
    """Two updates: the second part's logprobs are looked at under the weights that sampled it."""
    rows = sampled_rows(model, 1.0)
    metrics = HfTrainer(make_config(model, trainer__updates_per_step=2, trainer__lr=0.1)).train(rows, 1)
    assert metrics["mismatch/max_abs_logprob_diff"] < 1e-5
    assert abs(metrics["actor/ppo_kl"]) > 1e-3  # the second update did see changed weights
    for spoilt in range(4):
        rows = sampled_rows(model, 1.0)
        rows[spoilt].logprobs[0] -= 0.5
        metrics = HfTrainer(make_config(model)).train(rows, 1)
        assert metrics["mismatch/max_abs_logprob_diff"] == pytest.approx(0.5, abs=1e-4)


def test_groups_without_variance_leave_the_loss(model):
    """The weights are those of a step without them, the sequences are counted."""
    rows = make_rows(1, num_prompts=2, scores=[1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    with_them, without = HfTrainer(make_config(model)), HfTrainer(make_config(model))
    metrics = with_them.train(rows, 1)
    without.train(rows[:4], 1)
    assert are_equal(weights_of(with_them), weights_of(without))
    assert metrics["train/num_sequences"] == 8 and metrics["train/num_groups_used"] == 1
    assert metrics["train/num_tokens"] == sum(len(row.tokens) for row in rows[:4])
    counted = HfTrainer(make_config(model, algorithm__filter_groups=False, trainer__updates_per_step=1))
    assert counted.train(rows, 1)["train/num_tokens"] == sum(len(row.tokens) for row in rows)


def test_a_step_of_equal_scores_changes_nothing_but_shows_the_mismatch(model):
    trainer = HfTrainer(make_config(model))
    before = weights_of(trainer)
    metrics = trainer.train(sampled_rows(model, 1.0, scores=(1.0, 1.0)), 1)
    assert are_equal(weights_of(trainer), before) and trainer.version == 1
    assert 0 < metrics["mismatch/max_abs_logprob_diff"] < 1e-5
    assert "actor/pg_loss" not in metrics and metrics["train/num_groups_used"] == 0


def test_r31_the_batchs_order_does_not_matter(model):
    rows = make_rows(1)
    straight, shuffled = HfTrainer(make_config(model)), HfTrainer(make_config(model))
    straight.train(rows, 1)
    shuffled.train([rows[i] for i in np.random.default_rng(1).permutation(len(rows))], 1)
    assert are_equal(weights_of(straight), weights_of(shuffled))


def test_training_raises_the_logprob_of_better_responses(model):
    trainer = HfTrainer(make_config(model, trainer__updates_per_step=1))

    def preference() -> float:
        with torch.no_grad():
            logprobs = [trainer._logprobs(trainer.model, m)[0].sum().item() for m in micro_batches]
        return logprobs[0] - logprobs[1]

    rows = sampled_rows(model, 1.0)[2:]
    micro_batches = [next(iter(trainer._micro_batches([to_sample(row, 1.0)]))) for row in rows]
    before = preference()
    trainer.train(rows, 1)
    assert preference() > before + 0.1


# --- non-finite updates ------------------------------------------------------------------------------------------


def test_r32_nonfinite_updates_are_skipped_counted_and_stop_the_run(model):
    trainer = HfTrainer(make_config(model, trainer__max_nonfinite_steps=2, trainer__updates_per_step=1))
    before = weights_of(trainer)
    for step in (1, 2):
        rows = make_rows(step)
        rows[5].logprobs[0] = math.nan
        metrics = trainer.train(rows, step)
        assert metrics["train/nonfinite_updates"] == 1
        assert all(map(math.isfinite, metrics.values()))
        assert are_equal(weights_of(trainer), before)
    assert trainer.train(make_rows(3), 3)["train/nonfinite_updates"] == 0  # a good one starts the count anew
    assert not are_equal(weights_of(trainer), before)
    for step in (4, 5, 6):
        rows = make_rows(step)
        rows[5].logprobs[0] = math.nan
        if step < 6:
            trainer.train(rows, step)
    with pytest.raises(StageFailed, match="3 updates in a row"):
        trainer.train(rows, 6)


def test_r32_extreme_behaviour_logprobs_train_finitely(model):
    trainer = HfTrainer(make_config(model))
    rows = make_rows(1)
    for row in rows:
        row.logprobs[0] = -120.0
    metrics = trainer.train(rows, 1)
    assert metrics["train/nonfinite_updates"] == 0
    assert all(tensor.isfinite().all() for tensor in weights_of(trainer).values())


def test_the_count_of_nonfinite_updates_survives_a_resume(model, tmp_path):
    config = make_config(model, trainer__max_nonfinite_steps=1, trainer__updates_per_step=1)
    trainer = HfTrainer(config)
    rows = make_rows(1)
    rows[0].logprobs[0] = math.nan
    trainer.train(rows, 1)
    resumed = HfTrainer(config)
    resumed.load(trainer.save(str(tmp_path)))
    rows = make_rows(2)
    rows[0].logprobs[0] = math.nan
    with pytest.raises(StageFailed, match="2 updates in a row"):
        resumed.train(rows, 2)


def test_weights_of_a_broken_step_are_of_no_use_until_a_load(model, tmp_path):
    """A step that raises half-way has changed weights already: they are no version."""
    trainer = HfTrainer(make_config(model, trainer__max_nonfinite_steps=0))
    path, before = trainer.save(str(tmp_path)), weights_of(trainer)
    rows = make_rows(1, scores=[1.0, 0.0] * 8)
    _, second_update = split_groups([to_sample(row, 0.0) for row in rows], 2, (7, 1))
    next(row for row in rows if row.tokens == second_update[0].tokens).logprobs[0] = math.nan
    with pytest.raises(StageFailed, match="1 updates in a row"):
        trainer.train(rows, 1)
    assert not are_equal(weights_of(trainer), before)  # the first update was applied
    for use in (lambda: trainer.train(make_rows(1), 1), trainer.probe, lambda: trainer.save(str(tmp_path))):
        with pytest.raises(StageFailed, match="step 1 was begun"):
            use()
    trainer.accumulate(second_update)  # gradients of an interrupted update
    trainer.load(path)
    trainer.train(make_rows(1), 1)
    straight = HfTrainer(make_config(model))
    straight.train(make_rows(1), 1)
    assert are_equal(weights_of(trainer), weights_of(straight))


# --- the reference model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_r13_the_kl_reference_is_the_base_model_after_a_resume_too(model, tmp_path, estimator):
    config = make_config(model, algorithm__kl={"coef": 0.1, "estimator": estimator}, trainer__updates_per_step=1)
    trainer = HfTrainer(config)
    base = weights_of(trainer)
    kl = [trainer.train(make_rows(step), step)["actor/kl_loss"] for step in (1, 2, 3)]
    assert kl[0] == 0 and kl[1] > 1e-6
    resumed = HfTrainer(config)
    resumed.load(trainer.save(str(tmp_path)))
    assert are_equal(resumed.reference.state_dict(), base) and not are_equal(weights_of(resumed), base)
    assert resumed.train(make_rows(4), 4) == trainer.train(make_rows(4), 4)
    assert are_equal(resumed.reference.state_dict(), base)  # never trained


def test_r13_another_base_model_is_refused(model, tmp_path):
    kl = {"coef": 0.1}
    trainer = HfTrainer(make_config(model, algorithm__kl=kl))
    path = trainer.save(str(tmp_path / "checkpoints"))
    other = write_model(tmp_path / "other", initializer_range=0.2)
    with pytest.raises(RunError, match="with the base model"):
        HfTrainer(make_config(other, algorithm__kl=kl)).load(path)
    with pytest.raises(RunError, match="gives none"):
        HfTrainer(make_config(model)).load(path)


def test_the_kl_term_pulls_with_its_coefficient(model):
    """Without any advantage the gradient is the KL's alone."""
    samples = [to_sample(row, 0.0) for row in make_rows(1)]
    found = {}
    for coef in (0.0, 0.1, 0.2):
        trainer = HfTrainer(make_config(model, algorithm__kl__coef=coef))
        with torch.no_grad():
            trainer.model.get_input_embeddings().weight *= 1.5
        found[coef] = gradients(trainer, samples)[1]["model.norm.weight"]
    assert not found[0.0].any() and found[0.1].any()
    torch.testing.assert_close(found[0.2], 2 * found[0.1])


def test_without_a_kl_term_there_is_no_reference_model(model):
    trainer = HfTrainer(make_config(model))
    assert trainer.reference is None
    assert trainer.train(make_rows(1), 1)["actor/kl_loss"] == 0
