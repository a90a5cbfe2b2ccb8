"""A tiny random policy on disk, a config that names it, and batches that it could have sampled. Needs torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.config import Config
from pipeline.queue.schema import SequenceRow, State, sequence_id
from stages.engines.vllm_start import hide_broken_packages

VOCAB_SIZE = 61
EOS = 2


def write_model(folder: Path, *, is_tied: bool = True, **changes: Any) -> Path:
    """A Qwen3 model of a few thousand weights, and files that stand for a tokenizer's. `changes`: of its config."""
    hide_broken_packages()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": is_tied,
        "initializer_range": 0.3,
        "pad_token_id": EOS,
        "eos_token_id": EOS,
    }
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**(settings | changes))).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"a": "stand-in"}')
    return folder


def make_config(path: Path | str, **changes: Any) -> Config:
    """`changes`: dotted keys with "__" for the dot, such as trainer__lr=1e-3."""
    genrm = {"path": "emulated", "dtype": "float32"}
    tree: dict[str, Any] = {
        "run": {"seed": 7},
        "model": {"policy": {"path": str(path), "dtype": "float32"}, "genrm": genrm},
        "data": {"train_files": ["unused.jsonl"], "train_batch_size": 4},
        "rollout": {"n": 4},
        "reward": {"genrm": {"template": "{{ prompt }}"}},
        "algorithm": {},
        "trainer": {"total_training_steps": 10, "updates_per_step": 2, "lr": 1e-2},
    }
    for key, value in changes.items():
        section = tree
        *parents, leaf = key.split("__")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return Config.model_validate(tree)


def make_rows(
    step: int,
    *,
    num_prompts: int = 4,
    n: int = 4,
    scores: Sequence[float | None] | None = None,
    version: int | None = None,
    min_tokens: int = 1,
    max_tokens: int = 12,
    vocab_size: int = VOCAB_SIZE,
) -> list[SequenceRow]:
    """A step's batch in submission order, with random tokens and made-up logprobs; ends with EOS."""
    random = np.random.default_rng(step)
    rows = []
    for number in range(num_prompts * n):
        prompt_no, member = divmod(number, n)
        num_tokens = int(random.integers(min_tokens, max_tokens + 1))
        row = make_row(
            step,
            prompt_no,
            member,
            prompt_ids=np.random.default_rng(prompt_no).integers(3, vocab_size, 2 + prompt_no).tolist(),
            tokens=[*random.integers(3, vocab_size, num_tokens - 1).tolist(), EOS],
            logprobs=(-random.random(num_tokens) * 6).tolist(),
            score=float(random.integers(0, 2)) if scores is None else scores[number],
            version=step - 1 if version is None else version,
        )
        rows.append(row)
    return rows


def make_row(
    step: int,
    prompt_no: int,
    member: int,
    *,
    prompt_ids: list[int],
    tokens: list[int],
    logprobs: list[float],
    score: float | None,
    version: int = 0,
    finish: str = "stop",
) -> SequenceRow:
    return SequenceRow(
        id=sequence_id(step, prompt_no, member),
        step=step,
        prompt_no=prompt_no,
        member=member,
        text="",
        data_source="",
        ground_truth="",
        prompt_ids=prompt_ids,
        state=State.BATCHED,
        reason="",
        tokens=tokens,
        logprobs=logprobs,
        versions=[version] * len(tokens),
        kv_versions=[version] * len(tokens),
        num_segments=1,
        finish=finish,
        score=score,
        failure="" if score is not None else "timeout",
    )


def model_config(folder: Path | str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return found
