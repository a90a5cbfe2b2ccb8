"""Data by row number: the same rows as read one after the other, in little memory, in given shares."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.config import Data
from pipeline.core.errors import DataError
from pipeline.data import check, load
from pipeline.dataset import Dataset, sampler_of
from pipeline.sampler import Mixture, Sampler, shares

ODD = ["\u2028 line", "emoji \U0001f9ee", "e\u0301", "\u202ertl", "tab\tnul\u0000", "  nbsp\u00a0", '"quoted\\"']
"""What editors and copy and paste bring along."""


def jsonl(file: Path, num: int, *, name: str = "q") -> str:
    """With a byte order mark, CRLF here and there, and blank lines."""
    lines = []
    for i in range(num):
        row = {"prompt": f"{name}{i} {ODD[i % len(ODD)]}", "extra_info": {"i": i}}
        text = json.dumps(row, ensure_ascii=i % 2 == 0)
        lines.append(text + ("\r\n" if i % 3 else "\n") + ("\n" if i % 50 == 7 else ""))
    file.write_bytes(b"\xef\xbb\xbf" + "".join(lines).encode())
    return str(file)


def parquet(file: Path, num: int, group: int) -> str:
    """verl's columns."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"p{i}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(num)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=group)
    return str(file)


def test_any_rows_are_those_that_reading_all_gives(tmp_path: Path) -> None:
    files = [
        jsonl(tmp_path / "a.jsonl", 500),
        parquet(tmp_path / "b.parquet", 3000, 1300),
        jsonl(tmp_path / "c.jsonl", 3),
    ]
    whole, dataset = load(files, Data(train_files=files)), Dataset(files, "prompt")
    assert (len(dataset), dataset.sizes) == (3503, (500, 3000, 3))
    for rows in ([0], [499, 500, 0], [3502, 1799, 1800, 1801, 64, 63, 64], list(range(3502, -1, -7))):
        assert dataset.examples(rows) == [whole[row] for row in rows]


def test_a_file_that_was_cut_meanwhile_is_named(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", 100)
    dataset = Dataset([file], "prompt")
    Path(file).write_bytes(Path(file).read_bytes()[:2000])
    with pytest.raises(DataError, match=r"a.jsonl.*(row 100 is gone|bad JSON)"):
        dataset.examples([99])


def test_r36_every_malformed_row_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "x"}\n{"prompt": null}\n{\n{"prompt": "y", "answer": 1}\n')
    other = tmp_path / "b.parquet"
    pq.write_table(pa.table({"prompt": ["x", None, ""]}), other)
    with pytest.raises(DataError) as caught:
        check(Data(train_files=[str(file), str(other)], val_files=[str(tmp_path / "gone.jsonl")]))
    named = [line.split(":")[0].split(", column")[0] for line in str(caught.value).splitlines()]
    assert named == [f"{file}, line 2", f"{file}, line 3", f"{file}, line 4", f"{other}, row 2", f"{other}, row 3",
                     "data.val_files"]  # fmt: skip
    file.write_text('{"prompt": null}\n' * 100)
    with pytest.raises(DataError, match=r"line 20, column prompt: .*\nand 80 rows more"):
        check(Data(train_files=[str(file)]))


def test_ground_truth_may_have_parts(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": "x", "reward_model": {"ground_truth": {"target": ["a", "b"]}}}))
    assert Dataset([str(file)], "prompt").examples([0])[0].ground_truth == {"target": ["a", "b"]}


# ------------------------------------------------------------------------------------------------ in given shares
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    weights=st.lists(st.floats(0.01, 9), min_size=4, max_size=4),
    batch_size=st.integers(1, 30),
    shuffle=st.booleans(),
)
def test_a_mixture_gives_each_file_its_share(
    sizes: list[int], weights: list[float], batch_size: int, shuffle: bool
) -> None:
    weights = weights[: len(sizes)]
    mixture = Mixture(sizes=tuple(sizes), weights=tuple(weights), batch_size=batch_size, shuffle=shuffle, seed=5)
    steps = 1000 // batch_size
    taken = [row for step in range(1, steps + 1) for row in mixture.rows(step)]
    start = 0
    for size, weight in zip(sizes, weights, strict=True):
        of_file = [row for row in taken if start <= row < start + size]
        assert abs(len(of_file) - len(taken) * max(weight / sum(weights), 1e-3)) <= 4
        counts = Counter(of_file)
        assert max(counts.values(), default=0) - min((counts[r] for r in range(start, start + size)), default=0) <= 1
        start += size


def test_r11_steps_of_a_mixture_do_not_depend_on_those_before() -> None:
    def make() -> Mixture:
        return Mixture(sizes=(7, 5), weights=(3, 1), batch_size=4, shuffle=True, seed=1)

    straight = make()
    assert [straight.rows(step) for step in range(1, 400)] == [make().rows(step) for step in range(1, 400)]
    assert all(sum(row < 7 for row in straight.rows(step)) == 3 for step in range(1, 400)), "even within each step"


def test_shares_add_up() -> None:
    assert shares([0.7, 0.3], 1000) == [700, 300]
    assert shares([1, 1, 1], 1000) == [334, 333, 333]
    assert shares([1e6, 1e-6], 1000) == [999, 1]


def test_weights_are_for_files(tmp_path: Path) -> None:
    assert isinstance(sampler_of(Data(train_files=["a", "b"], weights=[1, 2]), [3, 4], 0), Mixture)
    assert isinstance(sampler_of(Data(train_files=["a", "b"]), [3, 4], 0), Sampler)
    for weights in ([1.0], [1.0, 0.0], [1.0, 1.0, 1.0]):
        with pytest.raises(ValidationError, match="valid is one above 0 for each"):
            Data(train_files=["a", "b"], weights=weights)


# ------------------------------------------------------------------------------------------------ memory
_MEASURE = """
import resource, sys
from pipeline.config import Data
from pipeline.data import check
from pipeline.dataset import Dataset, sampler_of
import pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = Data(train_files=sys.argv[1:], train_batch_size=16)
if {check}: check(data)
dataset = Dataset(data.train_files, "prompt")
for step in (1, 2, 3):
    assert len(dataset.examples(sampler_of(data, dataset.sizes, 0).rows(step))) == 16
print(len(dataset), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def grown_mib(*files: str, check: bool) -> tuple[int, float]:
    """Rows, and by how much the memory grew."""
    command = [sys.executable, "-P", "-c", _MEASURE.format(check=check), *files]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    num, mib = done.stdout.split()
    return int(num), float(mib)


def many(folder: Path, num: int) -> list[str]:
    """Half of the rows in each kind of file."""
    line = json.dumps({"prompt": "what is the sum of these numbers? " * 4, "extra_info": {"index": 1}}) + "\n"
    with open(folder / "many.jsonl", "w") as file:
        for _ in range(num // 2 // 1000):
            file.write(line * 1000)
    part = pa.table({"prompt": ["what is the sum of these numbers? " * 4] * 100_000})
    with pq.ParquetWriter(folder / "many.parquet", part.schema) as writer:
        for _ in range(num // 2 // 100_000):
            writer.write_table(part)
    return [str(folder / "many.jsonl"), str(folder / "many.parquet")]


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    num, mib = grown_mib(*many(tmp_path, 400_000), check=False)
    assert num == 400_000 and mib < 30


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_million_rows_take_less_than_200_mib(tmp_path: Path) -> None:
    num, mib = grown_mib(*many(tmp_path, 10_000_000), check=True)
    assert num == 10_000_000 and mib < 200, mib
