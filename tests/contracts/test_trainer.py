"""What every trainer promises, on every trainer."""

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from pipeline.checkpoint import Checkpoint, CheckpointStore
from pipeline.config import Config
from pipeline.core.errors import RunError, StageFailed
from pipeline.gps.store import Store
from stages.rl.base import Trainer
from stages.rl.emulated import EmulatedTrainer
from stages.rl.trainer import HfTrainer
from tests.fakes.ranks import crew
from tests.fakes.stores import weight_store
from tests.fakes.tiny_policy import make_config, make_rows, write_model

WEIGHTS = {f"actor/tis_{what}" for what in ("weight_mean", "clipfrac", "ess")}
NAMES = {
    *(f"critic/{what}/{how}" for what in ("score", "advantages") for how in ("mean", "max", "min")),
    *(f"actor/{what}" for what in ("pg_loss", "pg_clipfrac", "ppo_kl", "kl_loss", "entropy", "grad_norm", "lr")),
    *(f"response_length/{what}" for what in ("mean", "max", "min", "clip_ratio")),
    "prompt_length/mean",
    *(f"staleness/{what}" for what in ("lag_0", "mean", "max")),
    *(f"mismatch/{how}_abs_logprob_diff" for how in ("max", "mean")),
    *(f"train/{what}" for what in ("num_tokens", "num_sequences", "num_groups_used", "nonfinite_updates")),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("model"))


KINDS = ["single", "emulated", "ddp", "fsdp2", "single+lora", pytest.param("fsdp2+lora", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=KINDS)
def config(request, model) -> Config:
    strategy, _, has_adapters = request.param.partition("+")
    ranks = {"ddp": 2, "fsdp2": 2}.get(strategy, 1)
    return make_config(
        "emulated" if strategy == "emulated" else model,
        trainer__strategy=strategy,
        trainer__ranks=ranks,
        trainer__lora={"rank": 3, "alpha": 6} if has_adapters else None,
        cluster__slots_per_node=2 + ranks,
    )


@pytest.fixture(scope="module")
def kind(config) -> Iterator[Callable[..., Trainer]]:
    """Makes the trainer of a configuration, and of the version that a reader holds."""
    if config.trainer.ranks == 1:
        yield EmulatedTrainer if config.trainer.strategy == "emulated" else HfTrainer
        return
    with crew(config.trainer.ranks) as group:
        yield group.make


@pytest.fixture
def make(config, kind) -> Callable[[], Trainer]:
    return lambda: kind(config)


@pytest.fixture
def store(config):
    with weight_store(config.model.policy.path) as made:
        yield made


def weights_in(store: Store, version: int) -> dict[str, bytes]:
    with store.read(version, 1.0) as reader:
        return {
            name: bytes(reader.buffer[entry.offset : entry.offset + entry.nbytes])
            for name, entry in reader.entries.items()
        }


def publish(trainer: Trainer, store: Store) -> dict[str, bytes]:
    trainer.publish(store, 1.0)
    store.seal(trainer.version)
    return weights_in(store, trainer.version)


def test_starts_as_version_0_from_the_store_and_from_the_folder_alike(config, kind, make, store, tmp_path):
    with store.read(0, 1.0) as reader:
        from_store = kind(config, reader)
    assert from_store.version == 0
    first, second = (Checkpoint(t.save(str(tmp_path / n))) for n, t in (("a", from_store), ("b", make())))
    assert first.read("model/model.safetensors") == second.read("model/model.safetensors")


def test_a_reader_of_another_version_is_refused(config, kind, make, store):
    trainer = make()
    trainer.train(make_rows(1), 1)
    publish(trainer, store)
    with store.read(1, 1.0) as reader, pytest.raises(ValueError, match="not from version 1"):
        kind(config, reader)


def test_a_step_gives_the_next_version_and_its_metrics(make):
    trainer = make()
    rows = make_rows(1, scores=[1.0, 0.0, None, 1.0] + [0.0] * 4 + [0.0, 1.0] * 4)
    metrics = trainer.train(rows, 1)
    assert trainer.version == 1
    assert set(metrics) == NAMES
    assert all(type(value) is float for value in metrics.values())
    lengths = [len(row.tokens) for row in rows]
    used = lengths[:2] + lengths[3:4] + lengths[8:]
    assert metrics["train/num_sequences"] == 16
    assert metrics["train/num_groups_used"] == 3
    assert metrics["train/num_tokens"] == sum(used)
    assert metrics["critic/score/mean"] == pytest.approx(6 / 15)
    assert metrics["response_length/max"] == max(lengths)
    assert metrics["response_length/mean"] == pytest.approx(sum(lengths) / 16)


@pytest.mark.parametrize("step", [0, 1, 3])
def test_only_the_next_step_is_trained(make, step):
    trainer = make()
    trainer.train(make_rows(1), 1)
    with pytest.raises(StageFailed, match=f"step {step} .* version 1"):
        trainer.train(make_rows(step), step)
    assert trainer.version == 1
    trainer.train(make_rows(2), 2)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("lag", [-1, 0, 1, 2])
def test_a_token_beyond_the_bound_ends_the_step_before_it_begins(config, kind, staleness, lag):
    algorithm = config.algorithm.model_copy(update={"staleness": staleness})
    trainer = kind(config.model_copy(update={"algorithm": algorithm}))
    for step in (1, 2):
        trainer.train(make_rows(step), step)
    before = trainer.probe()
    rows = make_rows(3, min_tokens=2)
    rows[5].versions[1] = 2 - lag
    if lag not in range(staleness + 1):
        found = f"sequence {rows[5].id} has a token of version {2 - lag}: .* version 2, and algorithm.staleness"
        with pytest.raises(StageFailed, match=f"{found} {staleness} allows"):
            trainer.train(rows, 3)
        assert trainer.version == 2 and trainer.probe() == before
        rows[5].versions[1] = 2
    metrics = trainer.train(rows, 3)
    num_old = sum(version < 2 for row in rows for version in row.versions)
    num_tokens = sum(len(row.tokens) for row in rows)
    assert metrics["staleness/mean"] == pytest.approx(num_old / num_tokens)
    assert metrics["staleness/max"] == bool(num_old) == (lag == 1 and staleness == 1)


def test_importance_weights_have_their_numbers(config, kind):
    algorithm = config.algorithm.model_copy(update={"staleness": 1})
    trainer = kind(config.model_copy(update={"algorithm": algorithm}))
    assert set(trainer.train(make_rows(1), 1)) == NAMES | WEIGHTS
    rows = make_rows(2)
    for row in rows[::2]:
        row.versions[:] = [0] * len(row.tokens)
    metrics = trainer.train(rows, 2)
    assert set(metrics) == NAMES | WEIGHTS | {"staleness/lag_1"}
    assert metrics["staleness/lag_0"] + metrics["staleness/lag_1"] == pytest.approx(1)
    assert 0 < metrics["actor/tis_weight_mean"] <= algorithm.tis_imp_ratio_cap
    assert 0 <= metrics["actor/tis_clipfrac"] < 1 and 0 < metrics["actor/tis_ess"] <= 1


def trained_names(config: Config, names: Iterable[str]) -> set[str]:
    return {name for name in names if config.trainer.lora is None or "_proj." in name}


def test_publish_writes_the_weights_and_training_changes_them(config, make, store):
    trainer = make()
    base = weights_in(store, 0)
    trainer.train(make_rows(1), 1)
    first = publish(trainer, store)
    assert set(first) == set(base)
    assert {name for name in base if first[name] != base[name]} == trained_names(config, base)
    assert weights_in(store, 0) == base  # the other slot
    trainer.train(make_rows(2), 2)
    assert publish(trainer, store) != first


def test_probe_repeats_and_tells_versions_apart(make):
    trainer = make()
    before = trainer.probe()
    assert before == trainer.probe()
    assert len(before.prompts) == len(before.tokens) == len(before.logprobs) > 0
    trainer.train(make_rows(1), 1)
    after = trainer.probe()
    assert after != before and trainer.probe() == after


def test_same_batches_same_weights(make, tmp_path):
    saved = []
    for name in ("a", "b"):
        trainer = make()
        trainer.train(make_rows(1), 1)
        saved.append(Checkpoint(trainer.save(str(tmp_path / name))).read("model/model.safetensors"))
    assert saved[0] == saved[1]
    other = make()
    other.train(make_rows(2, version=0), 1)
    assert Checkpoint(other.save(str(tmp_path / "c"))).read("model/model.safetensors") != saved[0]


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_r12_three_and_three_steps_are_six(config, make, scheme, tmp_path):
    """Bit for bit: the saved weights, optimizer and state; and each step's metrics."""
    if scheme == "memory" and config.trainer.ranks > 1:
        pytest.skip("it lives in one process")
    uri = str(tmp_path) if scheme == "file" else f"memory:/{tmp_path}"
    straight = make()
    metrics = [straight.train(make_rows(step), step) for step in range(1, 7)]
    first = make()
    again = [first.train(make_rows(step), step) for step in range(1, 4)]
    path = first.save(f"{uri}/resumed")
    resumed = make()
    torch.manual_seed(12345)  # whatever the process did before
    resumed.load(path)
    assert resumed.version == 3
    again += [resumed.train(make_rows(step), step) for step in range(4, 7)]
    assert again == metrics
    ends = [Checkpoint(straight.save(f"{uri}/straight")), Checkpoint(resumed.save(f"{uri}/resumed"))]
    assert ends[0].files == ends[1].files  # names, sizes and hashes
    assert resumed.probe() == straight.probe()


def test_save_names_the_trainers_own_version_and_is_idempotent(make, tmp_path):
    trainer = make()
    trainer.train(make_rows(1), 1)
    path = trainer.save(str(tmp_path))
    assert path == str(tmp_path / "step_1") == trainer.save(str(tmp_path))
    assert CheckpointStore(str(tmp_path)).newest_complete() == (1, path, [])
    assert Checkpoint(path).read_json("state.json")["version"] == 1


def test_a_damaged_checkpoint_is_not_loaded(config, make, tmp_path):
    trainer = make()
    trainer.train(make_rows(1), 1)
    path = trainer.save(str(tmp_path))
    what = "model/model" if config.trainer.lora is None else "adapter/adapter_model"
    file = tmp_path / "step_1" / f"{what}.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunError, match="damaged"):
        make().load(path)


def test_a_batch_of_nothing_is_a_step_too(make):
    trainer = make()
    before = trainer.probe()
    assert trainer.train([], 1)["train/num_sequences"] == 0
    assert trainer.version == 1
    if not isinstance(trainer, EmulatedTrainer):
        assert trainer.probe() == before


# --- asleep ---------------------------------------------------------------------------------------------------------


def ended(trainer: Trainer, folder) -> dict[str, dict]:
    """Names, sizes and hashes of all that it saves."""
    return Checkpoint(trainer.save(str(folder))).files


def test_r21_a_trainer_that_slept_trains_on_bit_for_bit(make, tmp_path):
    """Before the first step, when there are no moments yet, and between steps; also one that saved asleep."""
    straight, rested = make(), make()
    for step in (1, 2, 3):
        rested.sleep()
        if step == 2:
            rested.save(str(tmp_path / "meanwhile"))
        rested.wake()
        assert rested.train(make_rows(step), step) == straight.train(make_rows(step), step)
    assert rested.probe() == straight.probe()
    assert ended(rested, tmp_path / "rested") == ended(straight, tmp_path / "straight")


def test_a_checkpoint_saved_asleep_is_the_one_saved_awake(config, make, tmp_path):
    trainer = make()
    for step in (0, 1):
        if step:
            trainer.train(make_rows(step), step)
        awake = ended(trainer, tmp_path / "awake")
        trainer.sleep()
        assert ended(trainer, tmp_path / "asleep") == awake
        assert trainer.save(str(tmp_path / "asleep")) == str(tmp_path / "asleep" / f"step_{step}")
        trainer.wake()
        assert ended(trainer, tmp_path / "woken") == awake
    again = make()
    again.load(str(tmp_path / "asleep" / "step_1"))
    assert again.train(make_rows(2), 2) == trainer.train(make_rows(2), 2)


def test_a_loaded_trainer_sleeps_and_wakes_too(make, tmp_path):
    first = make()
    first.train(make_rows(1), 1)
    loaded = make()
    loaded.load(first.save(str(tmp_path / "first")))
    loaded.sleep()
    loaded.wake()
    assert loaded.train(make_rows(2), 2) == first.train(make_rows(2), 2)
    assert ended(loaded, tmp_path / "loaded") == ended(first, tmp_path / "straight")


def test_a_sleeping_trainer_saves_and_wakes_and_nothing_else(make, store, tmp_path):
    trainer = make()
    trainer.train(make_rows(1), 1)
    path, before = trainer.save(str(tmp_path)), trainer.probe()
    with pytest.raises(StageFailed, match="awake"):
        trainer.wake()
    trainer.sleep()
    for use in (
        lambda: trainer.train(make_rows(2), 2),
        trainer.probe,
        trainer.sleep,
        lambda: trainer.load(path),
        lambda: trainer.publish(store, 1.0),
    ):
        with pytest.raises(StageFailed, match="sleeps"):
            use()
    assert trainer.version == 1
    trainer.wake()
    assert trainer.probe() == before
    publish(trainer, store)
