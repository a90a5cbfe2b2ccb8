"""R36: the data is checked whole at submit against the declared schema; messages say file, line and column."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import Data
from pipeline.core.errors import ConfigError, DataError
from pipeline.data import DatasetInfo, check, check_evaluate, load
from tests.fakes.scripted import make_config

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart"
GOOD = {"prompt": [{"role": "user", "content": "4793"}]}
FULL = {
    "data_source": "digit_sort",
    "ability": "sort",
    "prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "4793"}],
    "reward_model": {"style": "rule", "ground_truth": "3479"},
    "extra_info": {"index": 3, "nested": {"a": [1, None]}},
}

WriteJsonl = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> WriteJsonl:
    def write(*lines: Any, name: str = "train.jsonl") -> str:
        file = tmp_path / name
        file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return str(file)

    return write


def data_of(*files: str, **changes: Any) -> Data:
    return Data(train_files=list(files), **changes)


def refusal(*files: str, **changes: Any) -> str:
    with pytest.raises(DataError) as caught:
        check(data_of(*files, **changes))
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ good data
def test_examples_of_jsonl(write: WriteJsonl) -> None:
    file = write(GOOD, FULL, {"prompt": "one user message"})
    data = data_of(file)
    assert check(data) == DatasetInfo(num_rows=3, num_val_rows=0)
    first, full, plain = load([file], data)
    assert (first.row, first.text, first.ground_truth, first.data_source) == (0, "4793", "", "")
    assert full.place == f"{file}, line 2"
    assert (full.text, full.ground_truth, full.data_source) == ("4793", "3479", "digit_sort")
    assert [m["role"] for m in full.messages] == ["system", "user"]
    assert full.extra_info == FULL["extra_info"]
    assert plain.messages == ({"role": "user", "content": "one user message"},)


def test_rows_are_numbered_through_all_files(write: WriteJsonl) -> None:
    files = [write(GOOD, GOOD), write(GOOD, name="part 2.jsonl")]
    examples = load(files, data_of(*files))
    assert [e.row for e in examples] == [0, 1, 2]
    assert examples[2].place == f"{files[1]}, line 1"


def test_byte_order_mark_crlf_and_blank_lines_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "windows.jsonl"
    row = json.dumps({"prompt": "zwölf"}, ensure_ascii=False).encode()
    file.write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\r\n" + row)  # no newline at the end
    assert check(data_of(str(file))).num_rows == 2
    assert [e.place for e in load([str(file)], data_of(str(file)))] == [f"{file}, line 1", f"{file}, line 3"]


def test_parquet_gives_the_same_examples(tmp_path: Path, write: WriteJsonl) -> None:
    rows = [FULL, FULL | {"prompt": [{"role": "user", "content": "12"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    file = str(tmp_path / "train.parquet")
    from_parquet, from_jsonl = load([file], data_of(file)), load([write(*rows)], data_of("x"))
    assert check(data_of(file)).num_rows == 2
    assert [e.messages for e in from_parquet] == [e.messages for e in from_jsonl]
    assert [e.extra_info for e in from_parquet] == [e.extra_info for e in from_jsonl]
    assert from_parquet[1].place == f"{file}, row 2"


def test_files_behind_a_url() -> None:
    with fsspec.open("memory://data/train.jsonl", "w") as file:
        file.write(json.dumps(GOOD) + "\n")
    assert check(data_of("memory://data/train.jsonl")).num_rows == 1
    assert "no such file" in refusal("memory://data/absent.jsonl")
    assert "cannot be opened" in refusal("nosuchprotocol://data/train.jsonl")


def test_another_prompt_column(write: WriteJsonl) -> None:
    assert check(data_of(write({"question": "x"}), prompt_key="question")).num_rows == 1
    assert "column prompt" in refusal(write({"extra_info": {}}))
    with pytest.raises(ConfigError, match="prompt_key 'ability' is the name of another column"):
        check(data_of(write(GOOD), prompt_key="ability"))


def test_quickstart_is_checked_without_pyarrow() -> None:
    """An all-emulated run is to start within a second or so: plain jsonl needs nothing heavy."""
    data = data_of(str(QUICKSTART / "train.jsonl"), val_files=[str(QUICKSTART / "val.jsonl")])
    assert check(data) == DatasetInfo(num_rows=4000, num_val_rows=512)
    code = (
        "import sys; from pipeline.config import Data; from pipeline.data import check; "
        f"check(Data(train_files={data.train_files})); "
        "sys.exit(bool({'pyarrow', 'fsspec', 'numpy', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ------------------------------------------------------------------------------------------------ malformed rows
@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({}, ["column prompt", "missing"]),
        ({"prompts": "x"}, ["column 'prompts'", "did you mean prompt"]),
        (GOOD | {"answer": "x"}, ["column 'answer'", "unknown", "extra_info"]),
        (GOOD | {"reward_modl": {}}, ["did you mean reward_model"]),
        ({"prompt": None}, ["column prompt", "found null"]),
        ({"prompt": 3}, ["column prompt", "found a number, 3", "a list of {role, content}"]),
        ({"prompt": {"role": "user", "content": "x"}}, ["column prompt", "found an object"]),
        ({"prompt": ""}, ["prompt[0].content", "empty"]),
        ({"prompt": "  \n"}, ["prompt[0].content", "empty"]),
        ({"prompt": []}, ["column prompt", "empty list"]),
        ({"prompt": ["x"]}, ["column prompt[0]", "found a text, 'x'"]),
        ({"prompt": [[GOOD]]}, ["column prompt[0]", "found a list"]),
        ({"prompt": [{"role": "user"}]}, ["column prompt[0]", "valid: role and content"]),
        ({"prompt": [{"role": "user", "content": "x", "name": "y"}]}, ["column prompt[0], key 'name'", "unknown"]),
        ({"prompt": [{"role": "human", "content": "x"}]}, ["prompt[0].role", "'human'", "system, user, assistant"]),
        ({"prompt": [{"role": ["user"], "content": "x"}]}, ["prompt[0].role"]),
        ({"prompt": [{"role": "user", "content": None}]}, ["prompt[0].content", "found null"]),
        ({"prompt": [{"role": "user", "content": [{"text": "x"}]}]}, ["prompt[0].content", "found a list"]),
        ({"prompt": [*GOOD["prompt"], {"role": "assistant", "content": "x"}]}, ["last message", "'assistant'"]),
        ({"prompt": "\ud800"}, ["prompt[0].content", "surrogate"]),
        (GOOD | {"data_source": None}, ["column data_source", "found null", "a text"]),
        (GOOD | {"data_source": 1}, ["column data_source", "a number"]),
        (GOOD | {"ability": ["x"]}, ["column ability", "a list"]),
        (GOOD | {"reward_model": None}, ["column reward_model", "found null"]),
        (GOOD | {"reward_model": "3479"}, ["column reward_model", "a text, '3479'"]),
        (GOOD | {"reward_model": {"ground_truth": 5}}, ["reward_model.ground_truth", "a number, 5"]),
        (GOOD | {"reward_model": {"ground_truth": None}}, ["reward_model.ground_truth", "found null"]),
        (GOOD | {"reward_model": {"ground_truths": "5"}}, ["reward_model, key 'ground_truths'", "mean ground_truth"]),
        (GOOD | {"extra_info": None}, ["column extra_info", "found null"]),
        (GOOD | {"extra_info": "x"}, ["column extra_info", "an object"]),
        ([1], ["found a list"]),
        (None, ["found null"]),
        ("{", ["bad JSON at character"]),
        ('{"prompt": "x", "prompt": "y"}', ["'prompt' is given twice"]),
        ('{"prompt": "x", "extra_info": {"a": NaN}}', ["NaN is not JSON"]),
        ('{"prompt": "x", "extra_info": {"a": ' + "[" * 100_000 + "}", ["bad JSON"]),
        ('{"prompt": "x"} {"prompt": "y"}', ["bad JSON", "Extra data"]),
    ],
)
def test_r36_malformed_row_is_named(write: WriteJsonl, row: Any, parts: list[str]) -> None:
    row = "null" if row is None else row
    file = write(GOOD, row, GOOD)
    message = refusal(file)
    assert message.startswith(f"{file}, line 2")
    for part in parts:
        assert part in message, message
    assert len(message) < len(file) + 300


def test_r36_types_that_differ_between_parts(write: WriteJsonl) -> None:
    """Each part is checked alone, so neither order of the parts hides the other."""
    one, two = write({"answer": None}, name="part1.jsonl"), write({"answer": "x"}, name="part2.jsonl")
    assert f"{one}, line 1, column 'answer'" in refusal(one, two)
    assert f"{two}, line 1, column 'answer'" in refusal(two, one)
    text, null = write(GOOD | {"data_source": "x"}, name="a.jsonl"), write(GOOD | {"data_source": None}, name="b.jsonl")
    assert f"{null}, line 1, column data_source" in refusal(text, null)
    free = [write(GOOD | {"extra_info": {"answer": a}}, name=f"{a}.jsonl") for a in (None, "x")]
    assert check(data_of(*free)).num_rows == 2  # what is under extra_info may differ


def test_r36_validation_files_are_checked_too(write: WriteJsonl) -> None:
    bad = write({"prompt": None}, name="val.jsonl")
    assert f"{bad}, line 1" in refusal(write(GOOD), val_files=[bad])


def test_r36_files_that_are_no_data(tmp_path: Path, write: WriteJsonl) -> None:
    assert "no such file" in refusal(str(tmp_path / "absent.jsonl"))
    assert "the file has no row" in refusal(write(name="empty.jsonl"))
    assert "the file has no row" in refusal(write("", " ", name="blank.jsonl"))
    assert "valid endings: .jsonl, .parquet" in refusal(str(tmp_path / "train.csv"))
    (tmp_path / "folder.jsonl").mkdir()
    assert "cannot be opened" in refusal(str(tmp_path / "folder.jsonl"))
    (tmp_path / "utf16.jsonl").write_text(json.dumps(GOOD), encoding="utf-16")
    assert "utf16.jsonl, line 1: not UTF-8" in refusal(str(tmp_path / "utf16.jsonl"))


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        (pa.table({"answer": ["x"]}), ["row 1", "column 'answer'"]),
        (pa.table({"data_source": ["x"]}), ["row 1, column prompt", "missing"]),
        (pa.table({"prompt": ["x", None]}), ["row 2, column prompt", "found null"]),
        (pa.table({"prompt": [1]}), ["row 1, column prompt", "a number"]),
        (pa.table({"prompt": [b"x"]}), ["row 1, column prompt", "bytes"]),
        (pa.table({"prompt": ["x"], "extra_info": [None]}), ["row 1, column extra_info", "found null"]),
        (pa.table({"prompt": pa.array([], pa.string())}), ["the file has no row"]),
    ],
)
def test_r36_malformed_parquet_is_named(tmp_path: Path, table: pa.Table, parts: list[str]) -> None:
    pq.write_table(table, tmp_path / "train.parquet")
    message = refusal(str(tmp_path / "train.parquet"))
    for part in [str(tmp_path / "train.parquet"), *parts]:
        assert part in message, message


def test_r36_broken_parquet_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["x" * 50] * 2000}), file, compression="none", use_dictionary=False)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "broken parquet" in refusal(str(file))
    file.write_bytes(b"no parquet at all")
    assert "broken parquet" in refusal(str(file))
    twice = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["prompt", "prompt"])
    pq.write_table(twice, file)
    assert "column prompt: the column is there twice" in refusal(str(file))


# ------------------------------------------------------------------------------------------------ evaluation
def test_evaluation_needs_files_a_checker_and_ground_truth(write: WriteJsonl) -> None:
    checker = "stages.checkers:digit_sort"
    good, bare = write(FULL, GOOD), write(GOOD, name="bare.jsonl")

    def verify(val_files: list[str], **evaluate: Any) -> None:
        check_evaluate(make_config(data={"val_files": val_files}, evaluate={"freq": 1, **evaluate}))

    verify([good], function=checker, num_prompts=1)
    check_evaluate(make_config())  # never evaluated: nothing is needed
    for val_files, changes, message in [
        ([], {"function": checker}, "data.val_files is empty"),
        ([good], {}, "evaluate.function is empty"),
        ([good], {"function": "digit_sort"}, "valid is module:name"),
        ([good], {"function": "no_such_module_here:score"}, "no module 'no_such_module_here'"),
        ([good], {"function": checker, "num_prompts": 2}, f"{good}, line 2, column reward_model: no ground_truth"),
        ([bare], {"function": checker}, f"{bare}, line 1, column reward_model: no ground_truth"),
    ]:
        with pytest.raises(ConfigError) as caught:
            verify(val_files, **changes)
        assert message in str(caught.value)


def test_checker_is_found_in_code_path_without_being_imported(tmp_path: Path) -> None:
    (tmp_path / "my_checker.py").write_text("raise RuntimeError('imported at submit')\ndef score(*row): ...\n")
    config = make_config(run={"code_path": [str(tmp_path)]}, evaluate={"function": "my_checker:score"})
    check_evaluate(config)
    assert "my_checker" not in sys.modules
