"""Tables and texts as HTML. Whatever comes from a model, a log or a file is text there, and its control characters are
spelt out."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from pipeline.wording import visible


class Cell(NamedTuple):
    """`is_text`: words, on the left; else a figure, on the right."""

    text: str
    is_text: bool = False


def words(text: str) -> Cell:
    return Cell(text, is_text=True)


def shown(text: str) -> str:
    """The text in HTML."""
    return escape(visible(text))


def table(
    header: Sequence[Cell], rows: Iterable[Sequence[Cell]], *, best: Sequence[bool] = (), is_listed: bool = False
) -> str:
    """`best`: rows in bold. `is_listed`: long; the page's script shows some rows at a time, sorts and finds."""
    found = list(rows)
    marks = [' class="best"' if mark else "" for mark in best] or [""] * len(found)
    head = f"<thead>{_line(header, 'th')}</thead>" if header else ""
    body = "\n".join(_line(cells, "td", mark) for cells, mark in zip(found, marks, strict=True))
    kinds = [*(["figures"] if header else []), *(["listed"] if is_listed else [])]
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    return f'<div class="wide"><table{kind}>{head}\n<tbody>\n{body}\n</tbody></table></div>'


def _line(cells: Sequence[Cell], tag: str, kind: str = "") -> str:
    side = ' class="text"'
    inner = "".join(f"<{tag}{side if cell.is_text else ''}>{shown(cell.text)}</{tag}>" for cell in cells)
    return f"<tr{kind}>{inner}</tr>"
