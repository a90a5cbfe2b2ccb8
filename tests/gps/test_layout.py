"""Layouts of trainers and engines: every element once, where those who make them put it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.gps.engine_layout import Engine, vllm_layout
from pipeline.gps.layout import Box, whole
from pipeline.gps.trainer_layout import (
    FLAT,
    flat_boxes,
    flat_shards,
    fsdp2,
    pipelined,
    stages_of,
    tensor_parallel,
    unfused,
)
from tests.gps.arrays import KINDS, PADDING, any_layout, any_shapes, equal, laid_out, numbered, put_together
from tests.gps.shapes import Model

GROUPED = Model(layers=2, hidden=8, inner=12, heads=4, kv_heads=2, head_dim=3, vocab=70, has_bias=True, is_tied=True)
EXPERTS = Model(layers=1, hidden=4, inner=6, heads=2, kv_heads=1, head_dim=2, vocab=5, experts=5, has_norms=True)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_all_ranks_have_is_the_model_and_nothing_is_there_twice(data: st.DataObject) -> None:
    shapes = data.draw(any_shapes())
    layout, model = data.draw(any_layout(shapes)), numbered(shapes)
    ranks = [laid_out(layout, rank, model) for rank in range(len(layout.ranks))]
    assert equal([put_together(layout, ranks, shapes)], [model])
    for parts, own in zip(layout.ranks, ranks, strict=True):
        values = np.concatenate(list(own.values()) or [np.array([])])
        values = values[values != PADDING]
        assert len(np.unique(values)) == len(values) == sum(part.box.size for part in parts)


@settings(max_examples=100, deadline=None)
@given(any_shapes(), st.integers(1, 5))
def test_fsdp2_cuts_as_torch_does(shapes: dict[str, tuple[int, ...]], num_ranks: int) -> None:
    layout, model = fsdp2(shapes, num_ranks), numbered(shapes)
    ranks = [laid_out(layout, rank, model) for rank in range(num_ranks)]
    for name, array in model.items():
        chunks = torch.from_numpy(array).chunk(num_ranks)
        for rank, own in enumerate(ranks):
            expected = chunks[rank].flatten().tolist() if rank < len(chunks) else []
            assert own.get(name, np.array([])).tolist() == expected


def test_flat_shards_are_ranges_of_all_tensors_in_a_row() -> None:
    shapes = {"a": (3, 2), "b": (2,), "c": (2, 2, 2)}
    layout, model = flat_shards(shapes, 3), numbered(shapes)
    assert [laid_out(layout, rank, model)[FLAT].tolist() for rank in range(3)] == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
        [12, 13, 14, 15, PADDING, PADDING],
    ]


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_a_range_of_a_matrix_is_at_most_three_boxes(rows: int, columns: int, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, rows * columns))
    high = data.draw(st.integers(low, rows * columns))
    boxes = list(flat_boxes((rows, columns), low, high))
    numbers = np.arange(rows * columns).reshape(rows, columns)
    cells = [numbers[b.start[0] : b.stop[0], b.start[1] : b.stop[1]].ravel() for b in boxes]
    assert np.concatenate([*cells, []]).tolist() == list(range(low, high))
    assert len(boxes) <= 3


def test_tensor_parallel_trainers_cut_rows_or_columns() -> None:
    shapes = {"m.q_proj.weight": (5, 4), "m.o_proj.weight": (4, 5), "m.norm.weight": (4,), "m.o_proj.bias": (4,)}
    layout = tensor_parallel(shapes, 2)
    boxes = [{part.name.removeprefix("m."): part.box for part in parts} for parts in layout.ranks]
    assert boxes[1]["q_proj.weight"] == Box((3, 0), (5, 4))
    assert boxes[1]["o_proj.weight"] == Box((0, 3), (4, 5))
    assert boxes[0]["norm.weight"] == boxes[1]["norm.weight"] == whole((4,))
    assert boxes[1]["o_proj.bias"] == whole((4,))


def test_stages_have_their_own_layers_and_each_end_its_own_tensors() -> None:
    stages = stages_of(Model(**{**EXPERTS.__dict__, "layers": 3}).shapes(), 2)
    assert sorted({name.split(".")[2] for name in stages[0] if ".layers." in name}) == ["0", "1"]
    assert "model.embed_tokens.weight" in stages[0] and {"lm_head.weight", "model.norm.weight"} <= set(stages[1])
    layout = pipelined([KINDS["ddp"](stage, 2) for stage in stages])
    assert [len(parts) for parts in layout.ranks] == [len(stages[0])] * 2 + [len(stages[1])] * 2


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "flat_shards"])
def test_experts_of_a_trainer_have_their_canonical_names(kind: str, num_ranks: int) -> None:
    """By numpy's own means: one expert, and halves of it."""
    fused = {"m.experts.gate_up_proj": (5, 6, 4), "m.experts.down_proj": (5, 4, 3), "m.norm.weight": (4,)}
    had, layout = numbered(fused), unfused(KINDS[kind](fused, num_ranks), fused)
    ranks = [laid_out(KINDS[kind](fused, num_ranks), rank, had) for rank in range(num_ranks)]
    expected = {"m.norm.weight": had["m.norm.weight"]}
    for number in range(5):
        gate, up = np.split(had["m.experts.gate_up_proj"][number], 2)
        down = had["m.experts.down_proj"][number]
        for name, array in (("gate", gate), ("up", up), ("down", down)):
            expected[f"m.experts.{number}.{name}_proj.weight"] = array
    shapes = {name: array.shape for name, array in expected.items()}
    assert equal([put_together(layout, ranks, shapes)], [expected])


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_engine_has_its_heads_in_one_tensor(ranks: int) -> None:
    """By numpy's own means: split by heads, put one below the other."""
    shapes = GROUPED.shapes()
    model, layout = numbered(shapes), vllm_layout(shapes, GROUPED.engine(ranks))
    layer = "model.layers.1."
    for rank in range(ranks):
        own = laid_out(layout, rank, model)
        kv_rank = rank * GROUPED.kv_heads // ranks if ranks > GROUPED.kv_heads else rank
        for what in ("weight", "bias"):
            q, k, v = (model[f"{layer}self_attn.{kind}_proj.{what}"] for kind in "qkv")
            kv = [np.split(part, min(ranks, GROUPED.kv_heads))[kv_rank] for part in (k, v)]
            expected = np.concatenate([np.split(q, ranks)[rank], *kv])
            assert own[f"{layer}self_attn.qkv_proj.{what}"].tolist() == expected.ravel().tolist()
        gate, up, down = (model[f"{layer}mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        expected = np.concatenate([np.split(gate, ranks)[rank], np.split(up, ranks)[rank]])
        assert own[f"{layer}mlp.gate_up_proj.weight"].tolist() == expected.ravel().tolist()
        expected = np.split(down, ranks, 1)[rank]
        assert own[f"{layer}mlp.down_proj.weight"].tolist() == expected.ravel().tolist()
        norm = model["model.norm.weight"]
        assert own["model.norm.weight"].tolist() == norm.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_vocabulary_is_padded_at_the_end(ranks: int) -> None:
    shapes = GROUPED.shapes()
    model, layout = numbered(shapes), vllm_layout(shapes, GROUPED.engine(ranks))
    name, rows = "model.embed_tokens.weight", 128 // ranks
    assert "lm_head.weight" not in layout.sizes(0), "tied: it shares the embedding's"
    padded = np.full((128, GROUPED.hidden), PADDING)
    padded[: GROUPED.vocab] = model[name]
    for rank in range(ranks):
        expected = padded[rank * rows : (rank + 1) * rows].ravel()
        assert laid_out(layout, rank, model).get(name, expected).tolist() == expected.tolist()
        assert layout.sizes(rank)[name] == rows * GROUPED.hidden


def expert(model: dict[str, np.ndarray], number: int, kind: str) -> np.ndarray:
    return model[f"model.layers.0.mlp.experts.{number}.{kind}_proj.weight"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_are_stacked_and_each_is_cut(ranks: int) -> None:
    shapes = EXPERTS.shapes()
    model, layout = numbered(shapes), vllm_layout(shapes, EXPERTS.engine(ranks))
    for rank in range(ranks):
        own = laid_out(layout, rank, model)
        first, second = [], []
        for number in range(EXPERTS.experts):
            gate, up, down = (expert(model, number, kind) for kind in ("gate", "up", "down"))
            first += [np.split(gate, ranks)[rank], np.split(up, ranks)[rank]]
            second.append(np.split(down, ranks, 1)[rank])
        prefix = "model.layers.0.mlp.experts.routed_experts."
        assert own[f"{prefix}w13_weight"].tolist() == np.concatenate(first).ravel().tolist()
        assert own[f"{prefix}w2_weight"].tolist() == np.concatenate(second).ravel().tolist()


@pytest.mark.parametrize(("ranks", "owned"), [(1, [[0, 1, 2, 3, 4]]), (2, [[0, 1, 2], [3, 4]])])
def test_with_expert_parallelism_each_expert_is_whole(ranks: int, owned: list[list[int]]) -> None:
    shapes = EXPERTS.shapes()
    model, layout = numbered(shapes), vllm_layout(shapes, EXPERTS.engine(ranks, has_expert_parallel=True))
    for rank, numbers in enumerate(owned):
        own = laid_out(layout, rank, model)
        first = np.concatenate([expert(model, n, kind).ravel() for n in numbers for kind in ("gate", "up")])
        second = np.concatenate([expert(model, n, "down").ravel() for n in numbers])
        prefix = "model.layers.0.mlp.experts.routed_experts."
        assert own[f"{prefix}w13_weight"].tolist() == first.tolist()
        assert own[f"{prefix}w2_weight"].tolist() == second.tolist()


@pytest.mark.parametrize(("heads", "message"), [((3, 1), "3 units.* into 2 parts"), ((4, 3), "3 units.* into 2 parts")])
def test_what_vllm_refuses_is_refused(heads: tuple[int, int], message: str) -> None:
    shapes = GROUPED.shapes()
    with pytest.raises(ValueError, match=message):
        vllm_layout(shapes, Engine(num_heads=heads[0], num_kv_heads=heads[1], ranks=2))
