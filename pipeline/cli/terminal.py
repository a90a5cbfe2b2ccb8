"""What the commands print. Text of models, logs and data is shown, never obeyed by the terminal."""

import os
from collections.abc import Iterable, Sequence
from typing import TextIO

from pipeline.wording import visible


def table(rows: Iterable[Sequence[str]], indent: str = "  ") -> str:
    """Left-aligned columns."""
    lines = [tuple(map(visible, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))).rstrip()
        for line in lines
    )


def abandon(out: TextIO) -> None:
    """Nobody reads `out` any more: what is still to be written goes nowhere, also at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
