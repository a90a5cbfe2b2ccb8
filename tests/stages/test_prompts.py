"""Prompts: the sampler's rows, rendered once, admitted to the real queue in submission order."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import StageFailed
from pipeline.sampler import Sampler
from stages.prompts import prompts
from stages.text import ByteTokenizer, load_tokenizer
from tests.fakes.scripted import FakeTask, FakeWorker, make_config
from tests.fakes.tokenizers import make_tokenizer


class CountingTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        self.rendered: list[str] = []

    def encode_chat(self, messages: Any) -> list[int]:
        self.rendered.append(messages[-1]["content"])
        return super().encode_chat(messages)


def write(file: Path, num_rows: int = 5, **changes: Any) -> str:
    rows = [{"prompt": f"q{i}", "data_source": "d", "reward_model": {"ground_truth": f"a{i}"}} for i in range(num_rows)]
    rows[-1] |= changes
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_step_is_admitted_in_submission_order(queue_client: Any, tmp_path: Path) -> None:
    config = make_config(data={"train_files": [write(tmp_path / "train.jsonl")]}, run={"seed": 3})
    tokenizer = CountingTokenizer()
    worker = FakeWorker(config=config, queue=queue_client, tokenizer=tokenizer)
    sampler = Sampler(num_rows=5, batch_size=2, shuffle=True, seed=3)
    for step in (900_001, 900_002, 900_003, 900_004):
        task = FakeTask(worker, step=step)
        assert prompts(task, task.spec)["num_sequences"] == 4
        ids = [f"{step:06d}-{prompt:05d}-{member:04d}" for prompt in (0, 1) for member in (0, 1)]
        assert task.admitted == ids
        rows = queue_client.get(ids)
        wanted = sampler.rows(step)
        assert [r.text for r in rows] == [f"q{row}" for row in wanted for _ in (0, 1)]
        assert [r.ground_truth for r in rows] == [f"a{row}" for row in wanted for _ in (0, 1)]
        assert {r.data_source for r in rows} == {"d"}
        assert rows[0].prompt_ids == ByteTokenizer().encode_chat([{"role": "user", "content": rows[0].text}])
        prompts(task, task.spec)  # a repeated task admits the same again: no error, nothing new
        assert queue_client.get(ids) == rows
    assert sorted(tokenizer.rendered) == [f"q{i}" for i in range(5)]  # each once, in all steps together


def test_r35_dispatched_prompts_are_rendered_by_the_models_template(queue_client: Any, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(make_tokenizer(tmp_path / "model")))
    config = make_config(data={"train_files": [write(tmp_path / "train.jsonl", 1, prompt="abc</s>")]})
    task = FakeTask(FakeWorker(config=config, queue=queue_client, tokenizer=tokenizer), step=900_010)
    prompts(task, task.spec)
    for row in queue_client.get(task.admitted):
        assert [i for i in row.prompt_ids if i < 6] == [1, 4, 5]
        assert tokenizer.decode(row.prompt_ids) == "<s><|user|>abc</s><|assistant|>"


def test_prompt_that_is_too_long_stops_the_first_step(queue_client: Any, tmp_path: Path) -> None:
    """Also if its row would come much later."""
    file = write(tmp_path / "train.jsonl", 200, prompt="x" * 100)
    config = make_config(data={"train_files": [file], "max_prompt_length": 100, "shuffle": False})
    task = FakeTask(FakeWorker(config=config, queue=queue_client), step=1)
    with pytest.raises(
        StageFailed, match=rf"{file}, line 200: the prompt has 119 tokens; data.max_prompt_length is 100"
    ):
        prompts(task, task.spec)
    assert task.admitted == []


def test_prompt_that_the_template_refuses_is_named(queue_client: Any, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(make_tokenizer(tmp_path / "model")))
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file = write(tmp_path / "train.jsonl", prompt=chat)
    config = make_config(data={"train_files": [file]})
    task = FakeTask(FakeWorker(config=config, queue=queue_client, tokenizer=tokenizer), step=1)
    with pytest.raises(StageFailed, match=rf"{file}, line 5: the chat template refuses the messages: no system role"):
        prompts(task, task.spec)
