"""Copies of boxes, short runs and long ones, of every dtype, give what the layout says."""

import pytest
import torch
from torch import Tensor

from pipeline.gps.trainer_layout import fsdp2, tensor_parallel
from stages.weights.boxes import read, write

SHAPES = {
    "m.q_proj.weight": (6, 1200),
    "m.o_proj.weight": (5, 1200),
    "m.down_proj.weight": (7, 6),
    "m.norm.weight": (9,),
}


def numbered(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("own_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cut", [fsdp2, tensor_parallel])
def test_what_is_read_and_written_again_is_the_same(cut, dtype, own_dtype) -> None:
    model, layout = numbered(dtype), cut(SHAPES, 3)
    back = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    for rank, parts in enumerate(layout.ranks):
        own = {tensor: torch.zeros(size, dtype=own_dtype) for tensor, size in layout.sizes(rank).items()}
        read(parts, model, own)
        for name, box, _ in parts:
            index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            assert torch.equal(own[name], model[name][index].to(own_dtype).flatten())
        write(parts, own, back)
    expected = {name: tensor.to(own_dtype).to(dtype) for name, tensor in model.items()}
    assert all(torch.equal(back[name], expected[name]) for name in model)
