"""A trainer's tensors into the store: exact names and shapes, or nothing."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from pipeline.core.errors import UpdateRefused
from stages.rl.ranks import Ranks
from stages.weights.publisher import Publisher
from stages.weights.tensors import views
from tests.engines.tiny import Rig

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def parameters(tied: bool = False) -> dict[str, torch.Tensor]:
    """Like `state_dict()` of a model: a tied head is there too."""
    named = {EMBED: torch.randn(7, 4), NORM: torch.randn(4)}
    return named | {HEAD: named[EMBED] if tied else torch.randn(7, 4)}


@pytest.fixture(params=["untied", "tied"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    stored = parameters()
    if request.param == "tied":
        del stored[HEAD]
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    rig = Rig.create(tmp_path, "bfloat16")
    yield rig
    rig.close()


def put(rig: Rig, named: dict[str, torch.Tensor]) -> None:
    version = rig.store.current() + 1
    Publisher(Ranks()).publish(named, rig.store, version, 1)
    rig.store.seal(version)


def test_every_bit_arrives_in_the_declared_dtype(rig: Rig) -> None:
    named = parameters(tied=HEAD not in rig.store.entries)
    put(rig, named)
    with rig.read() as reader:
        stored = views(reader)
        assert stored.keys() == rig.store.entries.keys()
        assert all(torch.equal(tensor, named[name].to(torch.bfloat16)) for name, tensor in stored.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NORM: None}, "model.norm.weight is missing"),
        ({NORM: torch.zeros(5)}, r"model.norm.weight is torch.Size\(\[5\]\), not torch.Size\(\[4\]\)"),
        ({"model.norms.weight": torch.zeros(4)}, "model.norms.weight is unknown"),
        ({NORM: None, "model.norms.weight": torch.zeros(4)}, "norm.weight is missing; .*norms.weight is unknown"),
    ],
)
def test_anything_else_is_refused_and_leaves_the_old_version(
    rig: Rig, change: dict[str, torch.Tensor | None], message: str
) -> None:
    changed = {**parameters(tied=HEAD not in rig.store.entries), **change}
    with rig.read() as reader:
        before = bytes(reader.buffer)
    with pytest.raises(UpdateRefused, match=message):
        put(rig, {name: tensor for name, tensor in changed.items() if tensor is not None})
    with rig.read() as reader:
        assert reader.version == 0 and bytes(reader.buffer) == before


def test_a_head_is_not_guessed(rig: Rig) -> None:
    """A head of its own is not dropped for a store without one, and the embedding is not taken for a lost head."""
    named = parameters(tied=False)
    if HEAD in rig.store.entries:
        del named[HEAD]
    with pytest.raises(UpdateRefused, match=r"lm_head.weight is (missing|unknown)"):
        put(rig, named)


def test_views_do_not_warn_and_copy_nothing(rig: Rig) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with rig.store.write(1, 1) as writer:
            views(writer)[NORM].fill_(3.0)
            assert torch.equal(views(writer)[NORM], torch.full((4,), 3.0, dtype=torch.bfloat16))
        with rig.store.read(0, 1) as reader:
            assert views(reader)[NORM].data_ptr() == views(reader)[NORM].data_ptr()
