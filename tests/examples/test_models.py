"""The example of models, and what becomes of a trained one: exported, loaded by others, evaluated."""

import json
import shutil
from math import comb
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.examples.runs import submit, train
from tests.fakes.families import FAMILIES, write_family
from tests.scenarios.runs import ROOT, pivot, rows, succeed


def test_the_example_of_models_trains(tmp_path: Path) -> None:
    train(tmp_path / "run", "models", "data.max_prompt_length=128", "trainer.total_training_steps=3")
    for row in rows(tmp_path / "run"):
        assert row["reward/says_it/mean"] == 0.0 and row["queue/num_trained"] == 8  # an emulated policy knows nothing


def test_pass_at_k_is_the_chance_that_one_of_k_is_right() -> None:
    from stages.offline import pass_at

    assert pass_at(1, 4, 1) == pytest.approx(0.25) and pass_at(4, 4, 1) == 1.0 and pass_at(2, 4, 0) == 0.0
    assert pass_at(2, 5, 2) == pytest.approx(1 - comb(3, 2) / comb(5, 2))


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    succeed(submit(run, "data"))
    ended = pivot("export", str(run))
    assert ended.code == 2 and "has an emulated policy: there is no model to load" in ended.out


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_trained_policy_is_exported_loaded_by_others_and_evaluated(tmp_path: Path) -> None:
    run, base = tmp_path / "run", "configs/quickstart.yaml"
    train(run, "data", "checkpoint.save_freq=1", "checkpoint.keep=2", base=base)
    out = succeed(pivot("export", str(run)))
    assert "transformers and vLLM load it; 8 of 8 greedy answers are the same, with logprobs that differ by" in out
    assert float(out.strip().split()[-1]) < 1e-3
    folder = run / "exports" / "step_3"
    saved = (run / "checkpoints" / "step_3" / "model" / "model.safetensors").read_bytes()
    assert (folder / "model.safetensors").read_bytes() == saved
    ended = pivot("export", str(run), "--step", "1")
    assert ended.code == 2 and "has no checkpoint of step 1; there are 2, 3" in ended.out
    assert pivot("export", str(run)).code == 2  # it is there already
    told = ("--step", "2", "--samples", "4", "--num-prompts", "16", "--json")
    found = json.loads(succeed(pivot("eval", str(run), *told)).strip().splitlines()[-1])
    assert found == json.loads((run / "evals" / "step_2.json").read_text())
    assert found["num_prompts"] == 16 and 0 < found["pass@1"] == pytest.approx(found["avg@4"])
    assert found["pass@1"] <= found["pass@2"] <= found["pass@4"] <= 1


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_mixture_of_experts_is_trained_served_and_exported(tmp_path: Path) -> None:
    """A policy with random experts, the quickstart's tokenizer and judge."""
    quickstart, policy, run = ROOT / "configs" / "quickstart" / "policy", tmp_path / "policy", tmp_path / "run"
    vocab_size = json.loads((quickstart / "config.json").read_text())["vocab_size"]
    write_family(FAMILIES["qwen3-moe"], policy, vocab_size=vocab_size)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(quickstart / file, policy)
    small = (f"model.policy.path={policy}", "data.train_batch_size=4", "evaluate.freq=0", "reward.functions={}")
    train(run, "rewards", *small, "algorithm.filter_groups=false", base="configs/quickstart.yaml")
    assert all(row["mismatch/max_abs_logprob_diff"] < 1e-4 for row in rows(run) if row["step"])
    out = succeed(pivot("export", str(run)))
    assert "transformers and vLLM load it; 8 of 8 greedy answers are the same" in out
    assert float(out.strip().split()[-1]) < 1e-3
    saved, first = (
        load_file(path) for path in (run / "exports" / "step_3" / "model.safetensors", policy / "model.safetensors")
    )
    assert saved.keys() == first.keys()
    assert all((saved[name] != first[name]).any() for name in saved if ".experts." in name or "_proj" in name)
