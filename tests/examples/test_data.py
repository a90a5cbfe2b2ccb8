"""The example of data: verl's columns beside lists of messages and plain texts, in given shares."""

from pathlib import Path

from pipeline.data import read_examples
from tests.examples.runs import EXAMPLES, train
from tests.scenarios.runs import pivot, sequences


def test_the_example_of_data_trains(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, "data", "data.train_batch_size=4")
    first, second = ([e.text for e in read_examples([str(EXAMPLES / "data" / name)], "prompt")]
                     for name in ("verl.parquet", "chats.jsonl"))  # fmt: skip
    for step, rows in sequences(run).items():
        prompts = [row.text for row in rows if row.member == 0]
        assert (len(prompts), sum(text in first for text in prompts)) == (4, 3), step
        assert sum(text in second for text in prompts) == 1
        assert {row.ground_truth for row in rows} == {"".join(sorted(text)) for text in prompts}


def test_r15_other_weights_do_not_resume(tmp_path: Path) -> None:
    train(tmp_path / "run", "data")
    ended = pivot("resume", str(tmp_path / "run"), "data.weights=[1, 1]", "trainer.total_training_steps=4")
    assert ended.code == 2 and "data.weights from [3.0, 1.0] to [1.0, 1.0]" in ended.out
