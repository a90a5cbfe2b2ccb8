"""Rollout tasks for tests: on the real queue and the real engine host, with a scripted engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.queue.schema import PromptRow, SegmentRow, sequence_id
from stages.engines.base import Request
from stages.rollout import rollout
from tests.fakes.scripted import FakeTask, FakeWorker, Running, Script, ScriptedEngine, hosted, make_config

EOS = 2
PROMPT = [1, 50, 60]


def admit(queue: Any, step: int, num: int) -> list[str]:
    ids = [sequence_id(step, i, 0) for i in range(num)]
    same = {"step": step, "member": 0, "text": "q", "data_source": "", "ground_truth": "", "prompt_ids": PROMPT}
    queue.admit([PromptRow(id=id, prompt_no=i, **same) for i, id in enumerate(ids)])
    return ids


@contextmanager
def serving(
    queue: Any, step: int, script: Callable[[Request], Script], version: int = 0, **sections: Any
) -> Iterator[tuple[FakeTask, ScriptedEngine, Running]]:
    engine = ScriptedEngine(script, version)
    with hosted(engine) as host:
        worker = FakeWorker(config=make_config(**sections), queue=queue, engine=host)
        task = FakeTask(worker, step=step, version=version)
        yield task, engine, Running(rollout, task)


def put(queue: Any, id: str, turn: int, tokens: list[int], finish: str, idx: int = 0) -> None:
    """What an earlier task left behind."""
    queue.claim([id], [turn])
    logprobs = [-0.1] * len(tokens)
    row = SegmentRow(
        id=id, idx=idx, turn=turn, tokens=tokens, logprobs=logprobs, version=0, replica="before", finish=finish
    )
    queue.put_segments([row])
