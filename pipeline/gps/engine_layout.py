"""How vLLM's tensor-parallel ranks hold a decoder model: fused tensors, padded vocabularies, stacked experts.

For dense, grouped-query, tied and mixture-of-experts models of the Llama and Qwen families. vLLM's own rules hold:
heads and inner sizes must divide, and the padded vocabulary; ValueError where they do not, as in vLLM.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.gps.layout import Layout, Part, Place, Shape, Shapes, cut, row_major, whole

VOCAB_PADDING = 64
EXPERTS = "routed_experts"
"""What vLLM calls the stack of experts inside of `mlp.experts`."""

_KIND = re.compile(r"(?P<prefix>.*\.)(?P<kind>q|k|v|o|gate|up|down)_proj\.(?P<what>weight|bias)")
_EXPERT = re.compile(r"(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.")
_VOCAB = re.compile(r"(.*\.)?(embed_tokens|lm_head)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """`num_heads`, `num_kv_heads`: of attention; `ranks`: of the tensor-parallel group; `has_expert_parallel`: each
    expert lies whole on one rank, instead of a part of it on each."""

    num_heads: int
    num_kv_heads: int
    ranks: int = 1
    has_expert_parallel: bool = False


def vllm_layout(shapes: Shapes, engine: Engine) -> Layout:
    """Canonical tensors of a whole model in the parameters of each rank. A tied head, which is no canonical tensor of
    its own, shares the embedding's parameter."""
    experts = {int(found["expert"]) for name in shapes if (found := _EXPERT.match(name))}
    ranks: list[list[Part]] = [[] for _ in range(engine.ranks)]
    padded: dict[str, int] = {}
    for name, shape in shapes.items():
        if 0 in shape:
            continue
        for rank, part in _parts(name, shape, shapes, engine, len(experts)):
            ranks[rank].append(part)
        if _VOCAB.fullmatch(name):
            padded[name] = padded_vocab(shape[0]) // engine.ranks * shape[1]
    return Layout(tuple(map(tuple, ranks)), (padded,) * engine.ranks)


def padded_vocab(num_tokens: int) -> int:
    return -(-num_tokens // VOCAB_PADDING) * VOCAB_PADDING


def _parts(name: str, shape: Shape, shapes: Shapes, engine: Engine, num_experts: int) -> Iterator[tuple[int, Part]]:
    """Of one canonical tensor, by rank."""
    found = _KIND.fullmatch(name)
    if found is None:
        return _vocab_parts(name, shape, engine) if _VOCAB.fullmatch(name) else _replicas(name, shape, engine)
    prefix, kind, what = found["prefix"], found["kind"], found["what"]
    if expert := _EXPERT.match(name):
        return _expert_parts(name, shape, expert, kind, engine, num_experts)
    if kind in ("q", "k", "v"):
        rows = {k: shapes[f"{prefix}{k}_proj.{what}"][0] for k in ("q", "k", "v")}
        return _attention_parts(name, shape, kind, f"{prefix}qkv_proj.{what}", rows, engine)
    if kind in ("gate", "up"):
        return _gated_parts(name, shape, kind, f"{prefix}gate_up_proj.{what}", engine)
    return _row_parallel_parts(name, shape, engine) if what == "weight" else _replicas(name, shape, engine)


def _replicas(name: str, shape: Shape, engine: Engine) -> Iterator[tuple[int, Part]]:
    part = Part(name, whole(shape), Place(name, 0, row_major(shape)))
    return ((rank, part) for rank in range(engine.ranks))


def _vocab_parts(name: str, shape: Shape, engine: Engine) -> Iterator[tuple[int, Part]]:
    rows = _even(name, padded_vocab(shape[0]), engine.ranks)
    for rank in range(engine.ranks):
        start, stop = rank * rows, min((rank + 1) * rows, shape[0])
        if start < stop:
            yield rank, Part(name, cut(shape, 0, start, stop), Place(name, 0, row_major(shape)))


def _attention_parts(
    name: str, shape: Shape, kind: str, tensor: str, rows: Mapping[str, int], engine: Engine
) -> Iterator[tuple[int, Part]]:
    """Rows of q, then of k, then of v. Where there are more ranks than key-value heads, several ranks have the same."""
    strides, sharing = row_major(shape), max(1, engine.ranks // engine.num_kv_heads)
    own_q = _even(name, rows["q"], engine.ranks, engine.num_heads)
    own_kv = _even(name, rows["k"], engine.ranks // sharing, engine.num_kv_heads)
    own, first = (own_q, 0) if kind == "q" else (own_kv, own_q if kind == "k" else own_q + own_kv)
    for rank in range(engine.ranks):
        at = own * (rank if kind == "q" else rank // sharing)
        yield rank, Part(name, cut(shape, 0, at, at + own), Place(tensor, first * strides[0], strides))


def _gated_parts(name: str, shape: Shape, kind: str, tensor: str, engine: Engine) -> Iterator[tuple[int, Part]]:
    strides, own = row_major(shape), _even(name, shape[0], engine.ranks)
    place = Place(tensor, 0 if kind == "gate" else own * strides[0], strides)
    for rank in range(engine.ranks):
        yield rank, Part(name, cut(shape, 0, rank * own, (rank + 1) * own), place)


def _row_parallel_parts(name: str, shape: Shape, engine: Engine) -> Iterator[tuple[int, Part]]:
    own = _even(name, shape[1], engine.ranks)
    place = Place(name, 0, (own, 1))
    for rank in range(engine.ranks):
        yield rank, Part(name, cut(shape, 1, rank * own, (rank + 1) * own), place)


def _expert_parts(
    name: str, shape: Shape, found: re.Match[str], kind: str, engine: Engine, num_experts: int
) -> Iterator[tuple[int, Part]]:
    """In w13 [experts, 2 * inner, hidden] the gate's rows, then the up's; in w2 [experts, hidden, inner] the down's."""
    expert, tensor = int(found["expert"]), f"{found['prefix']}.{EXPERTS}.{'w2' if kind == 'down' else 'w13'}_weight"
    inner_axis = 1 if kind == "down" else 0
    if engine.has_expert_parallel:
        rank, local = _owner(expert, num_experts, engine.ranks)
        owners, own = [(rank, whole(shape))], shape[inner_axis]
    else:
        local, own = expert, _even(name, shape[inner_axis], engine.ranks)
        owners = [(r, cut(shape, inner_axis, r * own, (r + 1) * own)) for r in range(engine.ranks)]
    strides = (own, 1) if kind == "down" else row_major(shape)
    size = shape[0] * own if kind == "down" else 2 * own * shape[1]
    place = Place(tensor, local * size + (own * shape[1] if kind == "up" else 0), strides)
    return ((rank, Part(name, box, place)) for rank, box in owners)


def _owner(expert: int, num_experts: int, num_ranks: int) -> tuple[int, int]:
    """Rank, and number there: consecutive experts, the first ranks have one more where it does not divide."""
    each, more = divmod(num_experts, num_ranks)
    if expert < more * (each + 1):
        return divmod(expert, each + 1)
    rank, local = divmod(expert - more * (each + 1), each)
    return more + rank, local


def _even(name: str, length: int, num_parts: int, units: int | None = None) -> int:
    if num_parts == 0 or length % num_parts or (units is not None and units % num_parts):
        raise ValueError(f"vLLM does not cut {name} (length {length}, {units or length} units) into {num_parts} parts")
    return length // num_parts
