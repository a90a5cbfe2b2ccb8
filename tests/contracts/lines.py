"""What every line between two movers promises. Needs torch alone, so that it runs wherever there is a GPU."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Carry = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Send the first, receive into the second."""

PIECE_BYTES = 1 << 16
IMAGES = {
    "one_byte": [1],
    "less_than_a_piece": [1000],
    "a_piece": [PIECE_BYTES],
    "a_piece_and_a_byte": [PIECE_BYTES, 1],
    "many": [PIECE_BYTES] * 7 + [12345],
}
"""Sizes of pieces: as large as they may be, but for the last."""


def check_image(carry: Carry, name: str, seed: int = 0) -> None:
    """Bit for bit, each piece in its place."""
    random = torch.Generator().manual_seed(seed)
    pieces = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random) for size in IMAGES[name]]
    arrived = [torch.zeros_like(piece_C) for piece_C in pieces]
    carry(pieces, arrived)
    assert all(map(torch.equal, pieces, arrived)), name


def check_line(carry: Carry) -> None:
    """All images over one line, one after the other, twice: what it holds is used again."""
    for seed in (1, 2):
        for name in IMAGES:
            check_image(carry, name, seed)
