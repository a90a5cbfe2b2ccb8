"""What HfTrainer does with batches whose tokens several versions sampled."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.queue.schema import SequenceRow
from stages.rl.batch import to_sample
from stages.rl.tally import Mismatch
from stages.rl.trainer import HfTrainer
from tests.fakes.tiny_policy import EOS, VOCAB_SIZE, make_config, make_row, make_rows

KINDS = ("ppo", "decoupled", "none")


def logprobs_of(policy: torch.nn.Module, row: SequenceRow) -> torch.Tensor:
    """One row at a time, without padding."""
    logits = policy(input_ids=torch.tensor([row.prompt_ids + row.tokens])).logits[0, len(row.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits, -1)[range(len(row.tokens)), row.tokens]


def sampled_rows(path, step: int = 1) -> list[SequenceRow]:
    """Four groups of two, whose logprobs are those of the base model."""
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    random = np.random.default_rng(step)
    rows = []
    for number in range(8):
        tokens = [*random.integers(3, VOCAB_SIZE, 2 * number + 1).tolist(), EOS]
        prompt = random.integers(3, VOCAB_SIZE, 2 + number % 3).tolist()
        row = make_row(
            step, *divmod(number, 2), prompt_ids=prompt, tokens=tokens, logprobs=[], score=number % 2, version=step - 1
        )
        with torch.no_grad():
            rows.append(replace(row, logprobs=logprobs_of(policy, row).tolist()))
    return rows


def trained(model, kind: str, rows: list[SequenceRow], **changes) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    trainer = HfTrainer(make_config(model, algorithm__correction=kind, **changes))
    metrics = trainer.train(rows, 1)
    return metrics, trainer.model.state_dict()


@pytest.mark.parametrize("updates", [1, 4])
def test_on_policy_all_corrections_train_alike(model, updates):
    """Staleness 0. With four updates too: the start, not the present, is what the later ones are compared to."""
    rows = sampled_rows(model)
    changes = {"trainer__updates_per_step": updates, "trainer__micro_batch_tokens": 24, "trainer__lr": 0.01}
    expected, weights = trained(model, "ppo", rows, **changes)
    assert (abs(expected["actor/ppo_kl"]) > 1e-3) == (updates > 1)
    for kind in ("decoupled", "none"):
        metrics, found = trained(model, kind, rows, **changes)
        assert {"actor/tis_weight_mean", "actor/tis_ess"} <= set(metrics) or kind == "none"
        for name in metrics:
            if "tis" not in name:
                assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


def test_decoupled_weighs_what_the_start_thinks_of_old_tokens(model):
    """Old tokens at twice their behaviour's probability, others at a tenth: weights of 2 and .1, under a cap of 1.5."""
    rows = sampled_rows(model)
    for i, row in enumerate(rows):
        row.logprobs[:] = [logprob - np.log(2.0 if i % 2 else 0.1) for logprob in row.logprobs]
    num_high, num_low = (sum(len(row.tokens) for row in rows[first::2]) for first in (1, 0))
    metrics, _ = trained(model, "decoupled", rows, algorithm__tis_imp_ratio_cap=1.5)
    total, squares = 1.5 * num_high + 0.1 * num_low, 1.5**2 * num_high + 0.1**2 * num_low
    num_tokens = num_high + num_low
    assert metrics["actor/tis_weight_mean"] == pytest.approx(total / num_tokens, rel=1e-4)
    assert metrics["actor/tis_clipfrac"] == pytest.approx(num_high / num_tokens)
    assert metrics["actor/tis_ess"] == pytest.approx(total**2 / (num_tokens * squares), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_a_later_update_against_a_slow_reference(model, kind):
    """The weights moved since the step's start: three policies, each in float64 and one row at a time."""
    rows = make_rows(1, num_prompts=4)
    advantages = [(-1.0) ** i * (1 + i / 4) for i in range(len(rows))]
    samples = [to_sample(row, advantage) for row, advantage in zip(rows, advantages, strict=True)]
    trainer = HfTrainer(make_config(model, algorithm__correction=kind, trainer__micro_batch_tokens=30))
    assert len(list(trainer._micro_batches(samples))) > 2
    start = trainer._look_at(samples, Mismatch(0))
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    with torch.no_grad():
        start_logprobs = [logprobs_of(reference, row) for row in rows]
        for policy in (trainer.model, reference):
            policy.get_input_embeddings().weight += 0.03
    tally = trainer.accumulate(samples, start=start)

    terms, cases = [], set()
    for row, advantage, prox in zip(rows, advantages, start_logprobs, strict=True):
        for cur_t, prox_t, mu_t in zip(logprobs_of(reference, row), prox, row.logprobs, strict=True):
            ratio_t = (cur_t - (mu_t if kind == "ppo" else prox_t)).exp()
            weight = min(math.exp(prox_t - mu_t), 2.0) if kind == "decoupled" else 1.0
            ratio = ratio_t.item()
            is_held = ratio > 1.28 if advantage > 0 else ratio < 0.8
            terms.append(-weight * advantage * (min(max(ratio, 0.8), 1.28) if is_held else ratio_t))
            cases.add((is_held, weight == 2.0))
    assert len(cases) == (4 if kind == "decoupled" else 2)  # held or not, cut or not: the batch has them all
    loss = sum(terms) / len(terms)
    loss.backward()
    assert tally.loss / tally.num_tokens == pytest.approx(loss.item(), rel=1e-4)
    for (name, found), expected in zip(trainer.model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad.double(), expected.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["versions", "kv_versions"])
def test_mismatch_is_of_tokens_of_the_trainers_version_only(model, kind):
    """What an older version, or its cache, had a part in differs for a good reason, and proves nothing."""
    rows = sampled_rows(model, 2)
    rows[3].logprobs[0] -= 0.5
    trainer = HfTrainer(make_config(model, algorithm__staleness=1))
    trainer.train([], 1)  # nothing changes: the base model is version 1
    getattr(rows[3], kind)[0] = 0
    assert trainer.train(rows, 2)["mismatch/max_abs_logprob_diff"] < 1e-5
    all_old = HfTrainer(make_config(model, algorithm__staleness=1))
    all_old.train([], 1)
    metrics = all_old.train([replace(row, **{kind: [0] * len(row.tokens)}) for row in rows], 2)
    assert not [name for name in metrics if name.startswith("mismatch/")]
