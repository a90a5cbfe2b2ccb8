"""The quickstart's committed models and data are what the quickstart needs: small, loadable, and free of leaks."""

import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stages.checkers import digit_sort

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart"
MODELS = ("policy", "genrm")


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The task module, which lives beside the script that makes the models."""
    monkeypatch.syspath_prepend(QUICKSTART)
    return importlib.import_module("task")


@pytest.fixture
def make(task: ModuleType) -> ModuleType:
    """The making script as a module; heavy."""
    return importlib.import_module("make")


@pytest.fixture(params=MODELS)
def tokenizer(request: pytest.FixtureRequest, make: ModuleType) -> Iterator[Any]:
    """The tokenizer beside each model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(QUICKSTART / request.param)


def read_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (QUICKSTART / name).read_text().splitlines()]


def num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)


# ------------------------------------------------------------------------------------------------ models
@pytest.mark.parametrize("name", MODELS)
def test_model_loads_with_its_special_ids(make: ModuleType, name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(QUICKSTART / name)
    assert sum(p.numel() for p in model.parameters()) == 113_856
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (make.PAD, make.BOS, make.EOS)
    assert model.generation_config.temperature in (None, 1.0)  # engines take these as sampling defaults


def test_tokenizer_round_trips_printable_text(tokenizer: Any) -> None:
    rng = random.Random(0)
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    texts = ["".join(rng.choices(characters, k=40)) for _ in range(200)]
    for text in [*texts, " Verdict: right", "33447799$$ Verdict: wrong", "  two  spaces "]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_tokenizer_and_model_agree_on_special_ids(tokenizer: Any, make: ModuleType) -> None:
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (make.PAD, make.BOS, make.EOS)


def test_chat_template_writes_one_bos(tokenizer: Any, make: ModuleType) -> None:
    chat = [{"role": "user", "content": "4793"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids.count(make.BOS) == 1
    assert ids[0] == make.BOS
    assert ids == make.encode_chat(tokenizer, "4793")
    assert tokenizer.decode(ids) == "<|bos|><|user|>4793<|assistant|>"
    answered = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "3479"}], tokenize=False)
    assert answered == "<|bos|><|user|>4793<|assistant|>3479<|eos|>"


def test_models_answer_and_judge(make: ModuleType, task: ModuleType) -> None:
    """On held-out problems the policy ends its responses and the GenRM writes verdicts, nearly all of them right."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "genrm")
    policy, genrm = (AutoModelForCausalLM.from_pretrained(QUICKSTART / name) for name in MODELS)
    problems = [row["prompt"][0]["content"] for row in read_rows("val.jsonl")[:64]]
    policy_figures, judged = make.measure_policy(policy, genrm, tokenizer, problems)
    assert policy_figures["finished"] > 0.9
    assert judged["unparsable"] < 0.05
    assert make.measure_genrm(genrm, tokenizer, 256)["accuracy"] > 0.93


def test_everything_is_small() -> None:
    assert num_bytes(QUICKSTART) < 1_800_000
    assert sum(num_bytes(QUICKSTART / name) for name in MODELS) < 1_000_000


# ------------------------------------------------------------------------------------------------ data
@pytest.mark.parametrize(("name", "num_rows", "held_out"), [("train.jsonl", 4000, False), ("val.jsonl", 512, True)])
def test_rows_are_distinct_and_on_their_side_of_the_hold_out(
    task: ModuleType, name: str, num_rows: int, held_out: bool
) -> None:
    prompts = []
    for row in read_rows(name):
        prompt = row["prompt"][0]["content"]
        assert row == {
            "data_source": "digit_sort",
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": task.solve(prompt)},
        }
        assert 3 <= len(prompt) <= 8 and prompt.isdigit()
        assert task.is_held_out(prompt) is held_out
        prompts.append(prompt)
    assert len(prompts) == len(set(prompts)) == num_rows


def test_hold_out_is_the_documented_hash(task: ModuleType) -> None:
    import hashlib

    for prompt in ("123", "4793", "00000000", "918273"):
        assert task.is_held_out(prompt) == (int(hashlib.sha256(prompt.encode()).hexdigest(), 16) % 10 == 0)


def test_training_streams_hold_out(make: ModuleType, task: ModuleType) -> None:
    policy, genrm = make.policy_examples(random.Random(1)), make.genrm_examples(random.Random(1))
    for _ in range(1000):
        assert not task.is_held_out(next(policy)[0])
        assert not task.is_held_out(next(genrm)[0].split(" Answer: ")[0])


# ------------------------------------------------------------------------------------------------ judge and checker
@pytest.mark.parametrize(
    ("response", "rendered"),
    [
        ("3479", "4793 Answer: 3479$"),
        ("3749;34;3479", "4793 Answer: 3479$"),
        ("3479;", "4793 Answer: $"),
        ("", "4793 Answer: $"),
        ("34$79", "4793 Answer: 34 79$"),
        ("0123456789abcdef", "4793 Answer: 0123456789ab$"),
    ],
)
def test_judge_template_renders_the_training_form(task: ModuleType, response: str, rendered: str) -> None:
    template = ImmutableSandboxedEnvironment().from_string((QUICKSTART / "judge.jinja").read_text())
    assert template.render(prompt="4793", response=response) == rendered
    assert rendered == f"4793 Answer: {task.judged_answer(response)}$"


def test_critique_compares_up_to_the_first_difference(task: ModuleType) -> None:
    assert task.critique("4793", "3479") == "33447799$$ Verdict: right"
    assert task.critique("42", "64") == "26 Verdict: wrong"
    assert task.critique("4793", "347") == "3344779$ Verdict: wrong"
    assert task.critique("4793", "34799") == "33447799$9 Verdict: wrong"


@pytest.mark.parametrize(
    ("text", "score"), [("33$$ Verdict: right", 1.0), ("26 Verdict: wrong", 0.0), ("33$$", None), ("Verdict: ", None)]
)
def test_parse_verdict(task: ModuleType, text: str, score: float | None) -> None:
    assert task.parse_verdict(text) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("3479", 1.0),
        ("3749;4;3479", 1.0),
        ("3479;", 0.0),
        ("3479;3749", 0.0),
        ("3479 ", 0.0),
        ("03479", 0.0),
        ("", 0.0),
    ],
)
def test_checker_reads_what_follows_the_last_semicolon(task: ModuleType, response: str, score: float) -> None:
    assert digit_sort("digit_sort", response, "3479") == score
    assert digit_sort("digit_sort", response, "3479", extra_info={"split": "val"}) == score
    assert (task.final_answer(response) == task.solve("4793")) == bool(score)
