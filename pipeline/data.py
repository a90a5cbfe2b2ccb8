"""Training and validation data: one declared schema (verl's columns), checked whole at submit.

    data.prompt_key   required: a list of {role, content}, role system, user or assistant, the last one user;
                      or a text, which is one user message
    data_source       a text that checkers read
    ability           a text; not read
    reward_model      {style: text, ground_truth: text, list or object}; for checkers and reward functions, never for
                      the judge
    extra_info        any object; passed to checkers and reward functions

A column may be left out (not the prompt), never null; any other column is refused.
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypedDict

from pipeline.config import Config, Data
from pipeline.core.errors import ConfigError, DataError
from pipeline.data_files import read_rows
from pipeline.own_code import CHECKER, check_function

ROLES: Final = ("system", "user", "assistant")
_TEXT_COLUMNS: Final = ("data_source", "ability")
_OTHER_COLUMNS: Final = (*_TEXT_COLUMNS, "reward_model", "extra_info")
_REWARD_MODEL_KEYS: Final = ("style", "ground_truth")
_MOST_NAMED = 20


class Message(TypedDict):
    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row of the data. `row` counts from 0 through all files; `place` names file and line for messages."""

    row: int
    place: str
    messages: tuple[Message, ...]
    data_source: str = ""
    ground_truth: Any = ""
    extra_info: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The last user message: what the judge is shown."""
        return self.messages[-1]["content"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    num_rows: int
    num_val_rows: int


def check(data: Data) -> DatasetInfo:
    """Read every row of every file once. Raises DataError with those that do not fit, a line of the message for each:
    file, line (parquet: row) and column, what was found and what is valid."""
    _check_prompt_key(data.prompt_key)
    wrong: list[str] = []
    numbers = [
        _count(key, files, data.prompt_key, wrong)
        for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files))
    ]
    if wrong:
        more = [f"and {len(wrong) - _MOST_NAMED} rows more"] if len(wrong) > _MOST_NAMED else []
        raise DataError("\n".join([*wrong[:_MOST_NAMED], *more]))
    return DatasetInfo(num_rows=numbers[0], num_val_rows=numbers[1])


def _count(key: str, files: Iterable[str], prompt_key: str, wrong: list[str]) -> int:
    """How many rows there are in the files of this key; what is wrong with those that do not fit is added."""
    row = 0
    for file in files:
        try:
            for place, value in read_rows(file):
                row += 1
                try:
                    parse(value, row, place, prompt_key)
                except DataError as error:
                    wrong.append(str(error))
        except DataError as error:  # of the file as a whole
            wrong.append(f"{key}: {error}")
    return row


def load(files: Sequence[str], data: Data) -> list[Example]:
    """The examples of `files` (`data.train_files` or `data.val_files`), in order. Raises DataError as `check` does."""
    return list(read_examples(files, data.prompt_key))


def check_evaluate(config: Config) -> None:
    """What evaluation and the measurement of the judge need. Raises ConfigError (DataError for the files)."""
    wanted, data = config.evaluate, config.data
    if wanted.function:
        check_function("evaluate.function", wanted.function, config.run.code_path, CHECKER)
    if not wanted.freq:
        return
    if not data.val_files:
        raise ConfigError(f"evaluate.freq is {wanted.freq} but data.val_files is empty: name a file, or set it to 0")
    if not wanted.function:
        raise ConfigError(
            f"evaluate.freq is {wanted.freq} but evaluate.function is empty: name the checker, module:name"
        )
    for example in islice(read_examples(data.val_files, data.prompt_key), wanted.num_prompts):
        if not example.ground_truth:
            raise DataError(
                f"{example.place}, column reward_model: no ground_truth; valid: a text in each of the first "
                f"{wanted.num_prompts} rows of data.val_files (evaluate.num_prompts)"
            )


def read_examples(files: Iterable[str], prompt_key: str) -> Iterator[Example]:
    """The examples of the files one by one, in order. Raises DataError at the first row that does not fit."""
    _check_prompt_key(prompt_key)
    row = 0
    for file in files:
        for place, value in read_rows(file):
            yield parse(value, row, place, prompt_key)
            row += 1


def _check_prompt_key(prompt_key: str) -> None:
    if prompt_key in _OTHER_COLUMNS:
        raise ConfigError(f"data.prompt_key {prompt_key!r} is the name of another column: {', '.join(_OTHER_COLUMNS)}")


def parse(value: Any, row: int, place: str, prompt_key: str) -> Example:
    """Raises DataError for a value that does not fit, or that is one (see `read_rows`)."""
    if isinstance(value, DataError):
        raise value
    if not isinstance(value, dict):
        raise DataError(f"{place}: found {_found(value)}; valid: an object with the column {prompt_key}")
    if not value.keys() <= {prompt_key, *_OTHER_COLUMNS}:
        lacks = prompt_key not in value
        advice = "if it holds the prompts, set data.prompt_key to it" if lacks else "other data goes under extra_info"
        _refuse_unknown(value, (prompt_key, *_OTHER_COLUMNS), f"{place}, column", f"; {advice}")
    if prompt_key not in value:
        raise DataError(f"{place}, column {prompt_key}: the column is missing (data.prompt_key); found {list(value)}")
    for name in _TEXT_COLUMNS:
        if name in value:
            _check_text(value[name], f"{place}, column {name}")
    extra_info = value.get("extra_info", {})
    if not isinstance(extra_info, dict):
        raise _wrong(f"{place}, column extra_info", extra_info, "an object")
    return Example(
        row=row,
        place=place,
        messages=_parse_prompt(value[prompt_key], f"{place}, column {prompt_key}"),
        data_source=value.get("data_source", ""),
        ground_truth=_parse_ground_truth(value.get("reward_model", {}), f"{place}, column reward_model"),
        extra_info=extra_info,
    )


def _parse_prompt(value: Any, where: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise _wrong(where, value, "a text or a list of {role, content}")
    if not value:
        raise DataError(f"{where}: the prompt is an empty list; valid: at least one message of the user")
    for number, message in enumerate(value):
        at = f"{where}[{number}]"
        if not isinstance(message, dict):
            raise _wrong(at, message, "an object {role, content}")
        if message.keys() != {"role", "content"}:
            _refuse_unknown(message, ("role", "content"), f"{at}, key")
            raise DataError(f"{at}: found only {list(message)}; valid: role and content")
        if message["role"] not in ROLES:
            raise DataError(f"{at}.role: found {message['role']!r}; valid: {', '.join(ROLES)}")
        _check_text(message["content"], f"{at}.content")
        if message["role"] == "user" and not message["content"].strip():
            raise DataError(f"{at}.content: the prompt is empty; valid: a text that is not blank")
    if value[-1]["role"] != "user":
        raise DataError(f"{where}: the last message is of {value[-1]['role']!r}; valid: user")
    return tuple(value)


def _parse_ground_truth(value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object {style, ground_truth}")
    if not value.keys() <= set(_REWARD_MODEL_KEYS):
        _refuse_unknown(value, _REWARD_MODEL_KEYS, f"{where}, key")
    if "style" in value:
        _check_text(value["style"], f"{where}.style")
    truth = value.get("ground_truth", "")
    if not isinstance(truth, list | dict):
        _check_text(truth, f"{where}.ground_truth")
    return truth


def _check_text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise _wrong(where, value, "a text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: half a surrogate pair at character {error.start + 1}; valid: Unicode") from None


def _refuse_unknown(value: dict[Any, Any], valid: Sequence[str], where: str, advice: str = "") -> None:
    for name in value:
        if name not in valid:
            near = difflib.get_close_matches(str(name), valid, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise DataError(f"{where} {name!r} is unknown{hint}; valid: {', '.join(valid)}{advice}")


def _wrong(where: str, value: Any, valid: str) -> DataError:
    return DataError(f"{where}: found {_found(value)}; valid: {valid}")


def _found(value: Any) -> str:
    names = {type(None): "null", bool: "a bool", int: "a number", float: "a number", str: "a text", list: "a list"}
    kind = names.get(type(value), "an object" if isinstance(value, dict) else type(value).__name__)
    text = repr(value)
    return kind if value is None else f"{kind}, {text if len(text) <= 40 else text[:37] + '...'}"
