"""Several ranks train as one does: the arithmetic, skipped updates, checkpoints of any number of ranks."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from pipeline.checkpoint import Checkpoint
from pipeline.config import Config
from pipeline.core.errors import StageFailed
from pipeline.gps.ranges import read_share
from pipeline.gps.store import Store
from stages.rl.batch import Sample, to_sample
from stages.rl.ranks import Ranks, whole
from stages.rl.tally import Mismatch, Tally
from stages.rl.trainer import HfTrainer
from stages.weights.boxes import box_of
from stages.weights.publisher import Publisher, written_by
from stages.weights.tensors import canonical, views
from tests.fakes.ranks import crew
from tests.fakes.stores import weight_store
from tests.fakes.tiny_policy import make_config, make_rows, model_config, write_model

FILES = ("model/model.safetensors", "trainer/optimizer.safetensors")


@pytest.fixture
def trio():
    with crew(3) as group:
        yield group


def ranked(path, strategy: str, ranks: int = 2, **changes) -> Config:
    return make_config(
        path, trainer__strategy=strategy, trainer__ranks=ranks, cluster__slots_per_node=2 + ranks, **changes
    )


def weights_of(trainer: HfTrainer) -> dict[str, torch.Tensor]:
    return {name: whole(tensor).clone() for name, tensor in trainer.model.state_dict().items()}


def gradients_of(trainer: HfTrainer, samples: list[Sample]) -> tuple[float, dict[str, torch.Tensor]]:
    trainer.optimizer.zero_grad()
    tally = trainer.accumulate(samples)
    found = {name: whole(parameter.grad).clone() for name, parameter in trainer.model.named_parameters()}
    return tally.loss / tally.num_tokens, found


def largest_gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def samples_of(rows) -> list[Sample]:
    return [to_sample(row, (-1.0) ** i * (1 + i / 4)) for i, row in enumerate(rows)]


def saved(trainer, folder) -> dict[str, bytes]:
    checkpoint = Checkpoint(trainer.save(str(folder)))
    return {name: checkpoint.read(name) for name in FILES}


class _Share(Ranks):
    """One rank's share of the work, done without the others."""

    def gather(self, values):
        return [list(values)]


class Accumulating(HfTrainer):
    """One process that does what each rank would, one after the other, and adds up the gradients."""

    num_shares = 2

    def _shares(self):
        for rank in range(self.num_shares):
            self._ranks = _Share(rank, self.num_shares)
            yield rank
        self._ranks = Ranks()

    def _look_at(self, samples: Sequence[Sample], mismatch: Mismatch):
        return [super(Accumulating, self)._look_at(samples, mismatch) for _ in self._shares()]

    def accumulate(self, samples, mismatch=None, start=None) -> Tally:
        sums, total = [torch.zeros_like(p) for p in self.model.parameters()], None
        for rank in self._shares():
            self.optimizer.zero_grad()
            tally = super().accumulate(samples, mismatch, start and start[rank])
            for found, parameter in zip(sums, self.model.parameters(), strict=True):
                found += parameter.grad / self.num_shares
            if total is None:
                total = tally
            else:
                for name in Tally.__slots__:
                    if name not in ("num_tokens", "grad_norm"):
                        setattr(total, name, getattr(total, name) + getattr(tally, name))
        for found, parameter in zip(sums, self.model.parameters(), strict=True):
            parameter.grad = found
        return total


CHANGES = {
    "trainer__micro_batch_tokens": 40,  # several passes, not as many on each rank
    "algorithm__kl__coef": 0.1,
    "algorithm__staleness": 1,
}


def test_two_ddp_ranks_are_one_rank_that_accumulates_both_halves_bit_for_bit(pair, model, tmp_path):
    alone, two = Accumulating(make_config(model, **CHANGES)), pair.make(ranked(model, "ddp", **CHANGES))
    for step in (1, 2, 3, 4):
        rows = make_rows(step)
        assert two.train(rows, step) == alone.train(rows, step)
    assert saved(two, tmp_path / "two") == saved(alone, tmp_path / "alone")


def test_two_sharded_ranks_are_one_rank_that_accumulates_both_halves(pair, model):
    """Gradients to the last bits of the largest. (Adam's first steps divide an element by itself, so weights whose
    gradient is about its epsilon get more of the difference.)"""
    changes = CHANGES | {"trainer__lr": 1e-3}
    alone, two = Accumulating(make_config(model, **changes)), pair.make(ranked(model, "fsdp2", **changes))
    before = weights_of(alone)
    loss, expected = gradients_of(alone, samples_of(make_rows(1)))
    found_loss, found = two.on_each(gradients_of, samples_of(make_rows(1)))
    assert found_loss == loss
    gap, largest = largest_gap(found, expected), max(tensor.abs().max().item() for tensor in expected.values())
    assert largest > 0.1 and gap / largest < 1e-6
    for trainer in (alone, two.own):
        trainer.optimizer.zero_grad()
    two.on_each(clear)
    for step in (1, 2, 3, 4):
        expected_metrics = alone.train(make_rows(step), step)
        assert two.train(make_rows(step), step) == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
    ends = weights_of(alone)
    assert largest_gap(ends, before) > 5e-3 and largest_gap(two.on_each(weights_of), ends) < 1e-6


def clear(trainer: HfTrainer) -> None:
    trainer.optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_sharded_rank_holds_a_part_and_any_other_the_whole(pair, model, strategy):
    own = pair.make(ranked(model, strategy)).own.model
    held = [p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in own.parameters()]
    share = sum(held) / sum(p.numel() for p in own.parameters())
    assert share == pytest.approx({"ddp": 1.0, "fsdp2": 0.5}[strategy], abs=0.01)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_r34_loss_and_gradient_do_not_depend_on_the_number_of_ranks(trio, model, strategy):
    """Also where a rank has nothing to train: a mini-batch of two sequences."""
    alone = HfTrainer(make_config(model, algorithm__kl__coef=0.1))
    three = trio.make(ranked(model, strategy, 3, trainer__micro_batch_tokens=40, algorithm__kl__coef=0.1))
    for num_rows in (16, 2):
        samples = samples_of(make_rows(1)[:num_rows])
        loss, expected = gradients_of(alone, samples)
        found_loss, found = three.on_each(gradients_of, samples)
        assert found_loss == pytest.approx(loss, rel=1e-5)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_rank_without_a_valid_group_takes_part(trio, model, strategy):
    """One group of four, three updates a step; then a step whose scores are all equal."""
    config = make_config(model, trainer__updates_per_step=1)
    alone, three = HfTrainer(config), trio.make(ranked(model, strategy, 3, trainer__updates_per_step=1))
    one_group = make_rows(1, scores=[1.0, 0.0, 0.0, 1.0] + [1.0] * 12)
    metrics = three.train(one_group, 1)
    assert metrics == pytest.approx(alone.train(one_group, 1), rel=1e-4, abs=1e-6)
    assert metrics["train/num_groups_used"] == 1 and metrics["actor/grad_norm"] > 0.1
    before = three.on_each(weights_of)
    none = make_rows(2, scores=[1.0] * 16)
    assert three.train(none, 2) == pytest.approx(alone.train(none, 2), rel=1e-4, abs=1e-5)
    assert three.train(make_rows(3, scores=[1.0] * 16)[:1], 3)
    assert largest_gap(three.on_each(weights_of), before) == 0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_r32_a_nonfinite_update_is_skipped_on_all_ranks_alike(pair, model, strategy):
    """One rank alone has the row that is broken."""
    two = pair.make(ranked(model, strategy, trainer__max_nonfinite_steps=1, trainer__updates_per_step=1))
    before = two.on_each(weights_of)
    rows = make_rows(1)
    rows[5].logprobs[0] = math.nan
    assert two.train(rows, 1)["train/nonfinite_updates"] == 1
    assert largest_gap(two.on_each(weights_of), before) == 0
    assert two.train(make_rows(2), 2)["train/nonfinite_updates"] == 0
    assert largest_gap(two.on_each(weights_of), before) > 0
    for step in (3, 4):
        rows = make_rows(step)
        rows[5].logprobs[0] = math.nan
        if step == 3:
            two.train(rows, step)
    with pytest.raises(StageFailed, match="2 updates in a row"):
        two.train(rows, 4)


# --- weights and checkpoints ----------------------------------------------------------------------------------------


def test_any_number_of_ranks_continues_from_what_any_other_saved(model, tmp_path):
    """Bit for bit: weights, optimizer, and the step after."""
    alone = HfTrainer(make_config(model))
    alone.train(make_rows(1), 1)
    path = alone.save(str(tmp_path / "0"))
    first = {name: Checkpoint(path).read(name) for name in FILES}
    for number, (strategy, ranks) in enumerate((("fsdp2", 2), ("ddp", 2), ("fsdp2", 3), ("ddp", 1)), start=1):
        with crew(ranks) as group:
            trainer = group.make(ranked(model, strategy, ranks))
            trainer.load(path)
            assert trainer.version == 1
            path = trainer.save(str(tmp_path / str(number)))
            assert {name: Checkpoint(path).read(name) for name in FILES} == first, strategy
            assert Checkpoint(path).read_json("state.json") == {"version": 1, "trainer": strategy}
            assert trainer.train(make_rows(2), 2) == pytest.approx(
                trained_on(model, path).train(make_rows(2), 2), rel=1e-4, abs=1e-5
            )


def trained_on(model, path: str) -> HfTrainer:
    trainer = HfTrainer(make_config(model))
    trainer.load(path)
    return trainer


def test_r12_three_strict_ranks_resume_bit_for_bit(trio, tmp_path):
    """With three the order of a sum matters; DDP's own changes within a process's life."""
    folder = write_model(tmp_path / "model", hidden_size=64, intermediate_size=256)
    strict = {"run__determinism": "strict", "trainer__micro_batch_tokens": 40}
    config = ranked(folder, "ddp", 3, **strict)
    straight, first, resumed = (trio.make(config) for _ in range(3))
    metrics = [straight.train(make_rows(step), step) for step in (1, 2, 3, 4)]
    again = [first.train(make_rows(step), step) for step in (1, 2)]
    resumed.load(first.save(str(tmp_path / "first")))
    assert again + [resumed.train(make_rows(step), step) for step in (3, 4)] == metrics
    assert saved(resumed, tmp_path / "resumed") == saved(straight, tmp_path / "straight")


@pytest.mark.parametrize(
    ("kind", "strategy", "ranks"),
    [("tied", "fsdp2", 2), ("bfloat16", "fsdp2", 3), ("experts", "fsdp2", 3), ("experts", "ddp", 2)],
)
def test_r19_weights_of_all_ranks_reach_store_and_checkpoint_under_their_names(tmp_path, kind, strategy, ranks):
    folder = write_model(tmp_path / "dense", is_tied=kind == "tied")
    if kind == "experts":
        settings = {k: v for k, v in model_config(folder).items() if k not in ("model_type", "architectures")}
        moe = Qwen3MoeConfig(**settings, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
        folder = tmp_path / "moe"
        Qwen3MoeForCausalLM(moe).save_pretrained(folder)
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    changes = {"model__policy": {"path": str(folder), "dtype": dtype}}
    with crew(ranks) as group, weight_store(folder, dtype) as store:
        trainer = group.make(ranked(folder, strategy, ranks, **changes))
        trainer.train(make_rows(1), 1)
        trainer.publish(store, 1.0)
        store.seal(1)
        with store.read(1, 1.0) as reader:
            published = {name: tensor.clone() for name, tensor in views(reader).items()}
        weights = trainer.on_each(weights_of)
        checkpoint = Checkpoint(trainer.save(str(tmp_path / "checkpoints")))
    written = load(checkpoint.read("model/model.safetensors"))
    assert written.keys() == published.keys()
    assert all(torch.equal(tensor, published[name]) for name, tensor in written.items())
    expected = canonical(weights)
    assert all(torch.equal(tensor, expected[name].to(tensor.dtype)) for name, tensor in published.items())
    assert ("lm_head.weight" in published) == (kind != "tied")
    assert ("model.layers.0.mlp.experts.3.up_proj.weight" in published) == (kind == "experts")


def publish_on_nodes(trainer, names: list[str], prefix: Path) -> None:
    publisher = Publisher(trainer._ranks, prefix)
    publisher.publish(trainer.model.state_dict(), Store.attach(names[trainer._ranks.rank]), 1, 1.0)


@pytest.mark.parametrize(("strategy", "nodes"), [("fsdp2", (0, 1, 1)), ("ddp", (0, 1, 0))])
def test_ranks_on_several_nodes_write_shares_there_which_are_the_whole_together(trio, model, tmp_path, strategy, nodes):
    three = trio.make(ranked(model, strategy, 3))
    three.train(make_rows(1), 1)
    with weight_store(model) as first, weight_store(model) as second:
        stores, prefix = (first, second), tmp_path / "share"
        three.on_each(publish_on_nodes, [stores[node].name for node in nodes], prefix)
        with second.read(1, 1.0, is_sealed=False) as has, first.write_more(1, 1.0) as lacks:
            for offset, length in read_share(prefix, 1):
                lacks.buffer[offset : offset + length] = has.buffer[offset : offset + length]
        first.seal(1)
        expected = three.on_each(weights_of)
        with first.read(1, 1.0) as reader:
            assert largest_gap(dict(views(reader)), {name: expected[name] for name in first.entries}) == 0
        sizes = [sum(length for _, length in read_share(prefix, node)) for node in (0, 1)]
        assert sum(sizes) == sum(entry.nbytes for entry in first.entries.values()) and min(sizes) > 0


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_all_ranks_have_each_writes_a_part_of(tmp_path, num_ranks):
    """All of it together, nothing twice, and about as much each."""
    folder = write_model(tmp_path / "model")
    with weight_store(folder) as store:
        tensors = dict(views(store.read(0, 1.0)))
        plans = [written_by(tensors, store, Ranks(rank, num_ranks)) for rank in range(num_ranks)]
    counts = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    for parts in plans:
        for name, box, _ in parts:
            box_of(counts[name], box).add_(1)
    assert all(bool((count == 1).all()) for count in counts.values())
    sizes = [sum(part.box.size for part in parts) for parts in plans]
    assert max(sizes) <= 1.25 * min(sizes)


def test_a_save_that_fails_leaves_no_rank_waiting(pair, model, tmp_path):
    two = pair.make(ranked(model, "fsdp2"))
    two.train(make_rows(1), 1)
    (tmp_path / "file").touch()
    two.on_each(save_or_fail, str(tmp_path / "file" / "inside"))
    path = two.save(str(tmp_path))
    assert two.save(str(tmp_path)) == path  # nothing is asked of the ranks


def save_or_fail(trainer: HfTrainer, uri: str) -> None:
    """The first rank alone writes, so it alone can fail."""
    if trainer._ranks.is_first:
        with pytest.raises(OSError):
            trainer.save(uri)
    else:
        trainer.save(uri)
