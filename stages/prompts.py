"""Prompts: the step's rows of the training data become waiting sequences, `rollout.n` members for each prompt."""

import heapq
import json
from functools import lru_cache
from itertools import islice

from pipeline.config import Config, Data
from pipeline.core.errors import StageFailed
from pipeline.data import Example, read_examples
from pipeline.dataset import Dataset, sampler_of
from pipeline.queue.schema import PromptRow, sequence_id
from pipeline.stage import StageResult, StageSpec, TaskContext
from stages.text import Tokenizer

_NUM_CHECKED = 64
"""So many of the longest texts are rendered first: a prompt that is too long almost surely stops the first step."""
_NUM_SEEN = 100_000
"""Rows among which these are looked for."""
_NUM_KEPT = 8192
"""Prompts whose ids are kept."""


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
                    ground_truth=_as_text(example.ground_truth),
                    prompt_ids=prompt_ids.of(example),
                )
            )
    task.worker.queue.admit(rows)
    task.report_admitted(spec.step, [row.id for row in rows], [len(row.prompt_ids) for row in rows])
    return {"metrics": {}, "num_sequences": len(rows)}


def _as_text(ground_truth: object) -> str:
    return ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth, default=str)


class PromptIds:
    """The prompts' token ids; each is rendered once, unless there are very many."""

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._ids: dict[int, list[int]] = {}

    def of(self, example: Example) -> list[int]:
        """Raises StageFailed, with file and row, if the prompt is too long or the template refuses it."""
        ids = self._ids.get(example.row)
        if ids is None:
            if len(self._ids) >= _NUM_KEPT:
                self._ids.clear()
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
    return _examples_of_step(config.data.model_dump_json(), config.run.seed, step)


@lru_cache(maxsize=4)
def _examples_of_step(data: str, seed: int, step: int) -> list[Example]:
    """Several stages of a step ask."""
    wanted = Data.model_validate_json(data)
    dataset = load_once(tuple(wanted.train_files), wanted.prompt_key)
    return dataset.examples(sampler_of(wanted, dataset.sizes, seed).rows(step))


def training_prompts(config: Config, tokenizer: Tokenizer) -> PromptIds:
    """Kept by the process from step to step."""
    return _training_prompts(
        tuple(config.data.train_files), config.data.prompt_key, config.data.max_prompt_length, tokenizer
    )


@lru_cache(maxsize=1)
def _training_prompts(files: tuple[str, ...], prompt_key: str, max_length: int, tokenizer: Tokenizer) -> PromptIds:
    ids = PromptIds(tokenizer, max_length)
    seen = islice(read_examples(files, prompt_key), _NUM_SEEN)
    for example in heapq.nlargest(_NUM_CHECKED, seen, key=_num_characters):
        ids.of(example)
    return ids


@lru_cache(maxsize=2)
def load_once(files: tuple[str, ...], prompt_key: str) -> Dataset:
    """The training or the validation data, opened once by the process."""
    return Dataset(files, prompt_key)


def _num_characters(example: Example) -> int:
    return sum(len(message["content"]) for message in example.messages)
