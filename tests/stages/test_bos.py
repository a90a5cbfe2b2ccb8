"""R35 for what users bring: a conversation has one BOS, and a function reads the response as it was written."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.queue.schema import PromptRow, SegmentRow, sequence_id
from stages.reward import reward
from stages.rollout import rollout
from stages.text import Tokenizer, load_tokenizer
from tests.fakes.scripted import FakeTask, FakeWorker, Running, Script, ScriptedEngine, hosted, make_config
from tests.fakes.tokenizers import make_tokenizer

BOS, EOS = 1, 2
SPELT = "<s>ab</s>"
CODE = f"""
async def talk(client, **row):
    call = client.tokenizer.encode("c")
    await client.generate(client.prompt_ids, stop_ids=call)
    await client.generate([*client.ids, *client.tokenizer.encode({SPELT!r})], stop_ids=call)


def reads(data_source, solution_str, ground_truth, extra_info=None):
    return {{"score": float(solution_str == ground_truth), "length": len(solution_str)}}
"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    (tmp_path / "own.py").write_text(CODE)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "q", "reward_model": {"ground_truth": SPELT}}) + "\n")
    return load_tokenizer(str(make_tokenizer(tmp_path / "model")))


def config(folder: Path, **sections: Any) -> Any:
    data = {"train_files": [str(folder / "train.jsonl")], "train_batch_size": 1}
    return make_config(model={"policy": {"path": str(folder / "model")}}, data=data, **sections)


def test_r35_a_conversation_has_the_bos_of_its_prompt_and_no_other(
    queue_client: Any, step: int, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Though the policy's and the tool's texts spell one."""
    id, prompt_ids = sequence_id(step, 0, 0), tokenizer.encode_chat([{"role": "user", "content": SPELT}])
    same = {"step": step, "member": 0, "text": "q", "data_source": "", "ground_truth": ""}
    queue_client.admit([PromptRow(id=id, prompt_no=0, prompt_ids=prompt_ids, **same)])
    said, call = tokenizer.encode(SPELT), tokenizer.encode("c")
    turns = iter(([*said, *call], [*said, EOS]))
    engine = ScriptedEngine(lambda request: Script(tokens=next(turns)))
    with hosted(engine) as host:
        told = config(tmp_path, rollout={"function": f"{tmp_path / 'own.py'}:talk", "max_response_length": 64})
        task = FakeTask(FakeWorker(config=told, queue=queue_client, engine=host, tokenizer=tokenizer), step=step)
        running = Running(rollout, task)
        task.dispatch([id], turn=1)
        task.end()
        running.result()
    (row,) = queue_client.get([id])
    assert row.tokens == [*said, *call, *tokenizer.encode(SPELT), *said, EOS]
    assert [request.prompt_ids for request in engine.requests] == [
        prompt_ids,
        [*prompt_ids, *row.tokens[: -len(said) - 1]],
    ]
    assert all(list(request.prompt_ids).count(BOS) == 1 for request in engine.requests) and BOS not in row.tokens


def test_r35_a_function_reads_the_response_as_it_was_written(
    queue_client: Any, step: int, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Without BOS and EOS, and with what the policy spelt of them."""
    id = sequence_id(step, 0, 0)
    same = {"step": step, "member": 0, "text": "q", "data_source": "", "ground_truth": ""}
    queue_client.admit([PromptRow(id=id, prompt_no=0, prompt_ids=[BOS, 4], **same)])
    queue_client.claim([id], [1])
    tokens = [*tokenizer.encode(SPELT), EOS]
    row = SegmentRow(
        id=id, idx=0, turn=1, tokens=tokens, logprobs=[-0.1] * len(tokens), version=0, replica="r", finish="stop"
    )
    queue_client.put_segments([row])
    functions = {"reads": {"path": f"{tmp_path / 'own.py'}:reads", "memory_bytes": 1 << 28}}
    tree = config(tmp_path).model_dump(mode="json")
    told = type(config(tmp_path)).model_validate(tree | {"reward": {"functions": functions}})
    task = FakeTask(FakeWorker(config=told, queue=queue_client, name="n0-reward-0"), step=1)
    task.spec = type(task.spec)(task="t", stage="reward", step=step, version=0, attempt=1)
    running = Running(reward, task)
    task.dispatch([id], turn=2)
    task.end()
    running.result()
    assert [(verdict.failure, verdict.score) for verdict in task.verdicts] == [("", 1.0)]
