"""The stages of the train worker: a real trainer, store and run folder; rows stand for the queue."""

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline.checkpoint import CheckpointStore
from pipeline.config import Config
from pipeline.core.errors import Fenced, StageFailed, WeightsUnavailable
from pipeline.gps.segment import EMULATED_NAME
from pipeline.gps.store import Store
from pipeline.queue.schema import SequenceRow
from pipeline.run_folder import RunFolder
from pipeline.stage import StageSpec, StageTask, current_task
from pipeline.wire_shift import Probe
from stages.engines import stream
from stages.rl.emulated import EmulatedTrainer
from stages.train import check_mismatch
from tests.fakes.stores import weight_store
from tests.fakes.tiny_policy import make_config, make_rows


@dataclass
class Rows:
    """Stands for the queue: what was recorded for each step."""

    batches: dict[int, list[SequenceRow]] = field(default_factory=dict)

    def batch(self, step: int) -> list[SequenceRow]:
        return self.batches[step]


@dataclass
class Worker:
    config: Config
    run: RunFolder
    policy: Store
    trainer: EmulatedTrainer
    queue: Rows
    rank: int = 0


@dataclass
class Task:
    worker: Worker
    lines: list[str] = field(default_factory=list)

    def log(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def make(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    run.begin_attempt()
    with weight_store("emulated") as store:

        def made(**changes) -> Task:
            config = make_config("emulated", trainer__strategy="emulated", **changes)
            queue = Rows({step: make_rows(step) for step in (1, 2, 3)})
            return Task(Worker(config, run, store, EmulatedTrainer(config), queue))

        yield made


def run_stage(task: Task, name: str, step: int, version: int, attempt: int = 1) -> dict:
    spec = StageSpec(task=f"{name}-{step}", stage=name, step=step, version=version, attempt=attempt)
    token = current_task.set(task)
    try:
        return StageTask(f"stages.train:{name}", spec)()
    finally:
        current_task.reset(token)


def test_a_step_of_the_train_worker(make):
    task = make()
    trained = run_stage(task, "train", 1, 0)
    assert trained["metrics"]["train/num_sequences"] == 16
    published = run_stage(task, "publish", 1, 1)
    task.worker.policy.seal(1)
    with task.worker.policy.read(1, 1.0) as reader:
        entry = reader.entries[EMULATED_NAME]
        stored = np.frombuffer(reader.buffer, np.float32, 1024, entry.offset)
        assert np.array_equal(stored, task.worker.trainer.weights) and stored.any()
        heard = stream.greedy_answer(reader)
    probe = msgspec.convert(published["probe"], Probe)
    assert probe == task.worker.trainer.probe()
    assert heard == (probe.tokens[0], pytest.approx(probe.logprobs[0], abs=probe.tolerance))
    saved = run_stage(task, "checkpoint", 1, 1)
    assert saved == {"metrics": {}, "version": 1, "path": str(task.worker.run.checkpoints / "step_1")}
    for result in (trained, published, saved):
        assert msgspec.json.decode(msgspec.json.encode(result)) == result


def test_another_rank_trains_alike_writes_nothing_and_says_nothing(make):
    tasks = [make(trainer__ranks=2, cluster__slots_per_node=4, checkpoint__keep=1) for _ in range(2)]
    second = tasks[1].worker
    second.rank, second.trainer = 1, EmulatedTrainer(second.config, rank=1)
    for step in (1, 2):
        for name, version in (("train", step - 1), ("publish", step), ("checkpoint", step)):
            assert run_stage(tasks[1], name, step, version) == {"metrics": {}}
    assert not list(second.run.checkpoints.iterdir())
    with pytest.raises(WeightsUnavailable):
        second.policy.seal(2)
    run_stage(tasks[0], "train", 1, 0)
    path = run_stage(tasks[0], "checkpoint", 1, 1)["path"]
    first = tasks[0].worker.trainer
    run_stage(tasks[0], "train", 2, 1)
    assert np.array_equal(first.weights, second.trainer.weights)
    second.trainer.load(path)  # what rank 0 wrote is for all
    assert second.trainer.version == 1 and not np.array_equal(first.weights, second.trainer.weights)
    assert second.trainer.save(str(second.run.checkpoints)) == path


def test_publish_refuses_to_put_another_versions_name_on_the_weights(make):
    task = make()
    run_stage(task, "train", 1, 0)
    with pytest.raises(StageFailed, match="version 2 cannot be published: the trainer holds 1"):
        run_stage(task, "publish", 2, 2)
    with pytest.raises(WeightsUnavailable):
        task.worker.policy.seal(2)


def test_a_publish_that_fails_leaves_nothing_to_seal(make):
    task = make()
    run_stage(task, "train", 1, 0)
    task.worker.trainer.weights = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="broadcast"):
        run_stage(task, "publish", 1, 1)
    with pytest.raises(WeightsUnavailable):
        task.worker.policy.seal(1)


def test_checkpoint_is_named_by_the_trainer_and_prunes(make):
    task = make(checkpoint__keep=2)
    for step in (1, 2, 3):
        run_stage(task, "train", step, step - 1)
        run_stage(task, "checkpoint", step, step)
    assert run_stage(task, "checkpoint", 3, 2)["version"] == 3  # the controller lagged behind
    found = CheckpointStore(str(task.worker.run.checkpoints))
    assert found.newest_complete().step == 3 and found.newest_complete(at_most=2).step == 2
    assert found.newest_complete(at_most=1).step == 0
    assert any("removed step_1" in line for line in task.lines)


def test_checkpoint_goes_to_the_configs_uri(make, tmp_path):
    task = make(checkpoint__uri=f"memory:/{tmp_path}")
    run_stage(task, "train", 1, 0)
    path = run_stage(task, "checkpoint", 1, 1)["path"]
    assert path == f"memory:/{tmp_path}/step_1"
    assert CheckpointStore(f"memory:/{tmp_path}").newest_complete() == (1, path, [])


def test_an_older_attempt_may_not_save(make):
    task = make()
    run_stage(task, "train", 1, 0)
    task.worker.run.begin_attempt()
    with pytest.raises(Fenced, match="attempt 1 may not save: attempt 2"):
        run_stage(task, "checkpoint", 1, 1, attempt=1)
    assert run_stage(task, "checkpoint", 1, 1, attempt=2)["version"] == 1


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda row: row.logprobs.pop(), "logprobs"),
        (lambda row: row.versions.append(0), "versions"),
        (lambda row: row.kv_versions.clear(), "0 versions of caches"),
        (lambda row: row.tokens.append(5), "tokens"),
        (lambda row: row.prompt_ids.clear(), "its prompt is empty"),
        (lambda row: row.tokens.__setitem__(0, -1), "an id is negative"),
    ],
)
def test_r24_a_sequence_of_unequal_lengths_is_not_trained(make, spoil, reason):
    task = make()
    spoil(task.worker.queue.batches[1][5])
    with pytest.raises(StageFailed, match=f"sequence 000001-00001-0001.*{reason}"):
        run_stage(task, "train", 1, 0)
    assert task.worker.trainer.version == 0


def test_a_sequence_is_not_trained_twice(make):
    task = make()
    task.worker.queue.batches[1][5] = task.worker.queue.batches[1][4]
    with pytest.raises(StageFailed, match="000001-00001-0000 is twice"):
        run_stage(task, "train", 1, 0)


def test_weights_that_differ_between_trainer_and_engine_stop_the_run():
    check_mismatch({"mismatch/max_abs_logprob_diff": 9e-5}, 1e-4)
    check_mismatch({"mismatch/max_abs_logprob_diff": 1.0}, 0.0)
    check_mismatch({}, 1e-4)
    with pytest.raises(StageFailed, match=r"0\.0002 .*max_logprob_diff allows 0\.0001"):
        check_mismatch({"mismatch/max_abs_logprob_diff": 2e-4}, 1e-4)


def test_permuted_verdicts(make):
    """The same scores, dealt out by (seed, step): repeatable, and another deal each step."""
    rows = [replace(row, score=float(i), failure=str(i)) for i, row in enumerate(make_rows(1))]
    straight, permuted, again = make(), make(reward__permute_verdicts=True), make(reward__permute_verdicts=True)
    dealt = []
    for task in (straight, permuted, again):
        task.worker.trainer.train = lambda rows, step: dealt.append(rows) or {"train/num_tokens": 0.0}
        for step in (1, 2):
            task.worker.queue.batches[step] = rows
            run_stage(task, "train", step, step - 1)
    scores = [[row.score for row in rows] for rows in dealt]
    assert dealt[0] == dealt[1] == rows
    assert scores[2] != scores[0] and scores[3] != scores[2]
    assert all(Counter(values) == Counter(scores[0]) for values in scores)
    assert all(row.failure == str(int(row.score)) for rows in dealt for row in rows)
    assert [replace(row, score=None, failure="") for row in dealt[2]] == [
        replace(row, score=None, failure="") for row in rows
    ]
    assert dealt[4:] == dealt[2:4]


def test_nothing_heavy_is_imported():
    """An emulated run's train worker needs no torch."""
    script = (
        "import sys, stages.train, stages.rl.emulated\n"
        "print(sorted({'torch', 'transformers', 'accelerate', 'vllm'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_faults_of_the_emulated_trainer(make, tmp_path):
    task = make(trainer__options={"raise_at": 2, "once": str(tmp_path / "struck")})
    run_stage(task, "train", 1, 0)
    with pytest.raises(StageFailed, match="step 2"):
        run_stage(task, "train", 2, 1)
    assert task.worker.trainer.version == 1
    run_stage(task, "train", 2, 1)  # it strikes once
    with pytest.raises(ValueError, match=r"\['die'\] are unknown; valid: \['die_at'"):
        make(trainer__options={"die": 2})
