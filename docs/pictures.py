"""The drawings of docs/: `python docs/pictures.py` writes docs/pictures/*.svg, each for light and for dark pages.

* step: six GPUs that move between roles within a step
* sequence: the walk of a response
* version: the walk of the weights

Lengths are in the pictures' own units, about pixels. Roles have the colours of Okabe and Ito, and say their names.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"


@dataclass(frozen=True)
class Look:
    """Colours of a page."""

    name: str
    back: str
    front: str
    faint: str
    box: str
    rollout: str
    reward: str
    train: str


LIGHT = Look("light", "#ffffff", "#1f2328", "#6e7781", "#f3f5f8", "#0072b2", "#e69f00", "#009e73")
DARK = Look("dark", "#161b22", "#e6edf3", "#9aa4ae", "#242b35", "#56b4e9", "#f0b840", "#2fc79b")
_WHITE, _BLACK = "#ffffff", "#10151b"


def picture(look: Look, width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A whole SVG, with a background of its own, so that it can be read on any page."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif" font-size="14" role="img">'
    )
    arrow = (
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{look.front}"/></marker></defs>'
    )
    back = f'<rect width="{width}" height="{height}" rx="8" fill="{look.back}"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", arrow, back, *parts, "</svg>"]) + "\n"


def text(
    x: float, y: float, said: str, fill: str, *, anchor: str = "middle", size: int = 14, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" fill="{fill}" text-anchor="{anchor}" font-size="{size}"{weight}>{escape(said)}</text>'
    )


def ink(look: Look, role: str) -> str:
    """Of what is written on a role's colour."""
    return _WHITE if look.name == "light" and role != "reward" else _BLACK


def bar(look: Look, role: str, x: float, y: float, width: float, height: float, said: str) -> str:
    """A box in the colour of a role."""
    fill = {"rollout": look.rollout, "reward": look.reward, "train": look.train}[role]
    label = text(x + width / 2, y + height / 2 + 5, said, ink(look, role), size=13, bold=True) if said else ""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}"/>{label}'


def box(look: Look, x: float, y: float, width: float, height: float, *lines: str, bold: bool = False) -> str:
    """A box with lines of text in its middle."""
    top = y + height / 2 + 5 - 9 * (len(lines) - 1)
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{look.box}" stroke="{look.faint}"/>'
    inside = [
        text(x + width / 2, top + 18 * number, line, look.front, size=13, bold=bold or number == 0)
        for number, line in enumerate(lines)
    ]
    return shape + "".join(inside)


def arrow(look: Look, path: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<path d="{path}" fill="none" stroke="{look.front}" stroke-width="1.5" marker-end="url(#tip)"{dash}/>'


# --- the three --------------------------------------------------------------------------------------------------------

_GPUS = (
    (("rollout", 58), ("reward", 76), ("rollout", 100)),
    (("rollout", 46), ("reward", 76), ("rollout", 100)),
    (("rollout", 34), ("reward", 72), ("rollout", 100)),
    (("rollout", 22), ("reward", 66), ("rollout", 100)),
    (("rollout", 14), ("reward", 76), ("train", 91), ("rollout", 100)),
    (("rollout", 8), ("reward", 76), ("train", 91), ("reward", 100)),
)
"""Of each GPU: the role, and until when it has it, in percent of the picture's time."""
_NAMES = {"rollout": "rollout", "reward": "judge", "train": "train"}


def step(look: Look) -> str:
    left, top, wide, row = 80, 46, 740, 34
    parts = [text(left, 28, "one step, six GPUs", look.front, anchor="start", size=16, bold=True)]
    parts.append(text(left + wide, 28, "time ▶", look.faint, anchor="end"))
    for number, spans in enumerate(_GPUS):
        y, start = top + number * row, 0
        parts.append(text(left - 10, y + 19, f"GPU {number}", look.faint, anchor="end"))
        for role, end in spans:
            width = (end - start) * wide / 100
            parts.append(
                bar(look, role, left + start * wide / 100, y, width - 3, row - 6, _NAMES[role] if width > 50 else "")
            )
            start = end
    bottom = top + len(_GPUS) * row
    trained = left + 91 * wide / 100
    parts.append(arrow(look, f"M{trained - 1.5} {bottom + 24}V{bottom - 2}"))
    for x, said, anchor in (
        (left, "answers are sampled; GPUs go to the judge one by one, as answers end", "start"),
        (trained + 8, "new weights", "end"),
    ):
        parts.append(text(x, bottom + 40, said, look.faint, anchor=anchor, size=13))
    return picture(look, 860, bottom + 58, "GPUs that move between rollout, judge and training within a step", parts)


def sequence(look: Look) -> str:
    names = (
        ("WAITING", "for rollout"),
        ("RUNNING", "the policy writes"),
        ("WAITING", "for the judge"),
        ("RUNNING", "the judge reads"),
        ("SCORED", "a verdict, or none"),
        ("BATCHED", "ids are durable"),
        ("TRAINED", "in the weights"),
    )
    wide, gap, y, high = 122, 26, 98, 56
    at = [20 + number * (wide + gap) for number in range(len(names))]
    parts = [text(20, 30, "the walk of a response", look.front, anchor="start", size=16, bold=True)]
    for number, (x, lines) in enumerate(zip(at, names, strict=True)):
        role = {1: "rollout", 3: "reward", 6: "train"}.get(number)
        parts.append(box(look, x, y, wide, high, *lines))
        parts += [bar(look, role, x, y + high, wide, 6, "")] if role else []
        parts += [arrow(look, f"M{x + wide} {y + high / 2}H{x + wide + gap - 2}")] if number + 1 < len(names) else []
    for waiting, running in ((0, 1), (2, 3)):
        start, end = at[running] + wide / 2, at[waiting] + wide / 2
        parts.append(arrow(look, f"M{start} {y}C{start} {y - 40} {end} {y - 40} {end} {y - 3}", dashed=True))
    parts.append(text(at[0] + wide + gap / 2, y - 38, "cut short: first in line, with its tokens", look.faint, size=12))
    parts.append(text(at[2] + wide + gap / 2, y - 38, "cut short: it waits again", look.faint, size=12))
    parts.append(arrow(look, f"M{at[4] + wide / 2} {y + high}V{y + 104}"))
    parts.append(box(look, at[4] - 18, y + 106, wide + 36, 44, "DROPPED", "for a counted reason"))
    note = "All of it stands in the queue's index, but RUNNING: after a crash that is WAITING again."
    parts.append(text(20, y + 128, note, look.faint, anchor="start", size=13))
    return picture(look, at[-1] + wide + 20, y + 168, "The walk of a response from waiting to trained", parts)


def version(look: Look) -> str:
    parts = [text(20, 30, "the walk of the weights", look.front, anchor="start", size=16, bold=True)]
    for x, node in ((20, "node 1"), (480, "node 2")):
        parts.append(
            f'<rect x="{x}" y="46" width="400" height="212" rx="8" fill="none" stroke="{look.faint}" '
            f'stroke-dasharray="4 4"/>{text(x + 12, 66, node, look.faint, anchor="start", size=13)}'
        )
    for x in (40, 500):
        parts.append(box(look, x + 180, 100, 180, 62, "shared memory", "two slots: v and v+1"))
    parts.append(bar(look, "train", 40, 100, 110, 62, "trainer"))
    parts.append(bar(look, "rollout", 220, 206, 180, 36, "engines of the policy"))
    parts.append(bar(look, "rollout", 680, 206, 180, 36, "engines of the policy"))
    parts.append(arrow(look, "M150 131H218"))
    parts.append(text(184, 122, "1", look.front, bold=True))
    parts.append(arrow(look, "M400 131H678"))
    parts.append(text(450, 122, "2", look.front, bold=True))
    for x in (310, 770):
        parts.append(arrow(look, f"M{x} 162V204"))
        parts.append(text(x + 14, 189, "4", look.front, bold=True))
    said = (
        "1  written by the trainer, each rank its own parts",
        "2  copied from node to node",
        "3  sealed: visible on each node, once all nodes hold all of it",
        "4  loaded by each engine from its own node's memory; from then on its answers carry the version v+1",
    )
    for number, line in enumerate(said):
        parts.append(text(20, 286 + 22 * number, line, look.front, anchor="start", size=13))
    return picture(look, 900, 368, "The walk of a weight version from the trainer to the engines", parts)


PICTURES: dict[str, Callable[[Look], str]] = {"step": step, "sequence": sequence, "version": version}


def drawn() -> dict[Path, str]:
    """Each file and its content."""
    return {FOLDER / f"{name}-{look.name}.svg": PICTURES[name](look) for name in PICTURES for look in (LIGHT, DARK)}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, content in drawn().items():
        path.write_text(content, encoding="utf-8")
