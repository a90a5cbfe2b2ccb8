"""Prompts: the step's rows of the training data become waiting sequences, `rollout.n` members for each prompt."""

import heapq
from collections.abc import Sequence
from functools import lru_cache

from pipeline.config import Config
from pipeline.core.errors import StageFailed
from pipeline.data import Example, read_examples
from pipeline.queue.schema import PromptRow, sequence_id
from pipeline.sampler import Sampler
from pipeline.stage import StageResult, StageSpec, TaskContext
from stages.text import Tokenizer

_NUM_CHECKED = 64
"""So many of the longest texts are rendered first: a prompt that is too long almost surely stops the first step."""


def prompts(task: TaskContext, spec: StageSpec) -> StageResult:
    """Admit the step's sequences. Raises StageFailed for a prompt that is too long or that the template refuses."""
    config: Config = task.worker.config
    prompt_ids = training_prompts(config, task.worker.tokenizer)
    rows = []
    for prompt_no, example in enumerate(examples_of_step(config, spec.step)):
        for member in range(config.rollout.n):
            rows.append(
                PromptRow(
                    id=sequence_id(spec.step, prompt_no, member),
                    step=spec.step,
                    prompt_no=prompt_no,
                    member=member,
                    text=example.text,
                    data_source=example.data_source,
                    ground_truth=example.ground_truth,
                    prompt_ids=prompt_ids.of(example),
                )
            )
    task.worker.queue.admit(rows)
    task.report_admitted(spec.step, [row.id for row in rows], [len(row.prompt_ids) for row in rows])
    return {"metrics": {}, "num_sequences": len(rows)}


class PromptIds:
    """The prompts' token ids, each rendered once."""

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._ids: dict[int, list[int]] = {}

    def of(self, example: Example) -> list[int]:
        """Raises StageFailed, with file and row, if the prompt is too long or the template refuses it."""
        ids = self._ids.get(example.row)
        if ids is None:
            ids = self._ids[example.row] = self._render(example)
        return ids

    def _render(self, example: Example) -> list[int]:
        try:
            ids = self._tokenizer.encode_chat(example.messages)
        except ValueError as error:
            raise StageFailed(f"{example.place}: {error}") from error
        if len(ids) > self._max_length:
            raise StageFailed(
                f"{example.place}: the prompt has {len(ids)} tokens; data.max_prompt_length is {self._max_length}"
            )
        return ids


def examples_of_step(config: Config, step: int) -> list[Example]:
    """The step's prompts in order: entry i is that of the sequences with prompt_no i."""
    examples = load_once(tuple(config.data.train_files), config.data.prompt_key)
    sampler = Sampler(
        num_rows=len(examples),
        batch_size=config.data.train_batch_size,
        shuffle=config.data.shuffle,
        seed=config.run.seed,
    )
    return [examples[row] for row in sampler.rows(step)]


def training_prompts(config: Config, tokenizer: Tokenizer) -> PromptIds:
    """Kept by the process from step to step."""
    return _training_prompts(
        tuple(config.data.train_files), config.data.prompt_key, config.data.max_prompt_length, tokenizer
    )


@lru_cache(maxsize=1)
def _training_prompts(files: tuple[str, ...], prompt_key: str, max_length: int, tokenizer: Tokenizer) -> PromptIds:
    ids = PromptIds(tokenizer, max_length)
    for example in heapq.nlargest(_NUM_CHECKED, load_once(files, prompt_key), key=_num_characters):
        ids.of(example)
    return ids


@lru_cache(maxsize=2)
def load_once(files: tuple[str, ...], prompt_key: str) -> Sequence[Example]:
    """The examples of these files, kept by the process: the training and the validation data."""
    return list(read_examples(files, prompt_key))


def _num_characters(example: Example) -> int:
    return sum(len(message["content"]) for message in example.messages)
