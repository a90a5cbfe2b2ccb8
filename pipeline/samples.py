"""Which responses are kept to be read by people, with what was said of them: judge_samples.jsonl.

Of a step: the first responses to one prompt, so that what was better can be compared with what was worse, and a few of
those on which the judge failed. Of a long run not every step: some hundred in all, however long it is.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

NUM_MEMBERS = 4
"""Of the group."""
MOST_FAILURES = 4
"""Of a step; and of a task, which does not know of the others."""
_OF_A_TYPE = 8
"""So many failures of a type are kept of any step, then only those of steps that are kept: a rare one is seen, too."""
_REMEMBERED = 4
"""Steps. More are never judged at once."""
_ALL_STEPS = 64
"""Up to this step each is kept; up to twice as many every second one, up to four times every fourth, ..."""
_SPREAD = 7919
"""A prime: another place in the batch from step to step."""
_HEAD, _TAIL = 1000, 600
"""Characters of a text that are kept: how it begins, and how it ends, which is what a verdict is."""


def chosen_prompt(step: int, num_prompts: int) -> int:
    """Whose responses are kept."""
    return step * _SPREAD % num_prompts


def is_chosen(step: int, prompt_no: int, member: int, num_prompts: int) -> bool:
    return member < NUM_MEMBERS and prompt_no == chosen_prompt(step, num_prompts)


def is_kept(step: int) -> bool:
    return step % (1 << max(0, step.bit_length() - _ALL_STEPS.bit_length() + 1)) == 0


def clipped(text: str) -> str:
    if len(text) <= _HEAD + _TAIL:
        return text
    return f"{text[:_HEAD]}\n[... {len(text) - _HEAD - _TAIL} characters ...]\n{text[-_TAIL:]}"


class Choice:
    """Of what the tasks kept, what is written: each sequence once, and not too many failures."""

    def __init__(self) -> None:
        self._ids: dict[int, set[str]] = {}
        self._failures: Counter[int] = Counter()
        self._types: Counter[str] = Counter()

    def take(self, step: int, samples: Iterable[Mapping[str, Any]], num_prompts: int) -> list[Mapping[str, Any]]:
        """Those to be written. `num_prompts`: of a step."""
        for old in [old for old in self._ids if old <= step - _REMEMBERED]:
            del self._ids[old], self._failures[old]
        return [sample for sample in samples if self._is_taken(step, sample["id"], sample["failure"], num_prompts)]

    def _is_taken(self, step: int, id: str, failure: str, num_prompts: int) -> bool:
        ids = self._ids.setdefault(step, set())
        if id in ids:
            return False
        prompt_no, member = map(int, id.split("-")[1:])
        if not (is_kept(step) and is_chosen(step, prompt_no, member, num_prompts)):
            is_rare = self._types[failure] < _OF_A_TYPE
            if not failure or self._failures[step] >= MOST_FAILURES or not (is_rare or is_kept(step)):
                return False
            self._failures[step] += 1
            self._types[failure] += 1
        ids.add(id)
        return True
