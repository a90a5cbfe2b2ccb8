"""Charts of a page, as its script draws them (script/): what is in them, without how.

All charts of one `axis` show the same stretch of it: to look closer at one is to look closer at all. Curves have no
more points than can be told apart on a screen; numbers are written as short as they can be read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pipeline.report.looks import SERIES_LOOKS, Look

TIME, STEP = "time", "step"
"""Axes: seconds, and numbers of steps. Any other name is an axis of its own, of numbers."""
_MOST_POINTS = 1500
_DIGITS = 5
Spec = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points in ascending order of x. `holds`: each value holds until the next point."""

    x: Sequence[float]
    y: Sequence[float]
    look: Look | None = None
    holds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Curves by name. `low`: the y axis begins there; None: at the least value. `marks`: lines across, with a word."""

    curves: Mapping[str, Curve]
    axis: str
    unit: str
    low: float | None = None
    height: int = 180

    def spec(self) -> Spec:
        return {
            "kind": "lines",
            "axis": self.axis,
            "unit": self.unit,
            "low": self.low,
            "height": self.height,
            "series": [
                {
                    "name": name,
                    "look": (curve.look or SERIES_LOOKS[i % len(SERIES_LOOKS)])._asdict(),
                    "holds": curve.holds,
                    **_points(curve),
                }
                for i, (name, curve) in enumerate(self.curves.items())
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Areas on top of each other between `edges`: `parts[name][i]` from edge i to the next; a `look` for each."""

    edges: Sequence[float]
    parts: Mapping[str, Sequence[float]]
    looks: Mapping[str, Look]
    axis: str
    unit: str
    titles: Sequence[str] = ()
    """What each stretch between two edges is called."""
    height: int = 240

    def spec(self) -> Spec:
        return {
            "kind": "stack",
            "axis": self.axis,
            "unit": self.unit,
            "height": self.height,
            "edges": rounded(self.edges),
            "titles": list(self.titles),
            "series": [
                {"name": name, "look": self.looks[name]._asdict(), "y": rounded(values)}
                for name, values in self.parts.items()
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """A histogram: `parts[name][i]` counts what lies from `edges[i]` to the next. `marks`: places on the x axis."""

    edges: Sequence[float]
    parts: Mapping[str, Sequence[float]]
    unit: str
    x_unit: str
    marks: Mapping[str, float] = field(default_factory=dict)
    height: int = 220

    def spec(self) -> Spec:
        return {
            "kind": "bars",
            "axis": "",
            "unit": self.unit,
            "x_unit": self.x_unit,
            "height": self.height,
            "edges": rounded(self.edges),
            "marks": [[name, value] for name, value in self.marks.items()],
            "series": [
                {"name": name, "look": SERIES_LOOKS[i % len(SERIES_LOOKS)]._asdict(), "y": rounded(values)}
                for i, (name, values) in enumerate(self.parts.items())
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened to some of the rows, from `at` to `until`, told in `text`, and in the note of this
    number; below 0: there is none."""

    at: float
    until: float
    rows: Sequence[int]
    text: str
    note: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """Rows of what was done from when to when. `rows`: name and stretches (start, end, code); by code a word and a
    look. `groups`: the codes that a reader shows and hides together."""

    rows: Sequence[tuple[str, Sequence[tuple[float, float, str]]]]
    words: Mapping[str, str]
    looks: Mapping[str, Look]
    groups: Mapping[str, str]
    axis: str
    marks: Sequence[Mark] = ()
    notes: Sequence[str] = ()
    row_height: int = 12

    def spec(self) -> Spec:
        return {
            "kind": "stretches",
            "axis": self.axis,
            "unit": "",
            "row_height": self.row_height,
            "rows": [{"name": name, **_stretches(spans)} for name, spans in self.rows],
            "words": dict(self.words),
            "looks": {code: look._asdict() for code, look in self.looks.items()},
            "groups": dict(self.groups),
            "marks": [[_hundredths(m.at), _hundredths(m.until), list(m.rows), m.text, m.note] for m in self.marks],
            "notes": list(self.notes),
        }


Chart = Lines | Stack | Bars | Stretches


def rounded(values: Iterable[float]) -> list[float]:
    return [_short(value) for value in values]


def decimated(x: Sequence[float], y: Sequence[float], most: int = _MOST_POINTS) -> tuple[list[float], list[float]]:
    """Of each stretch of the curve its lowest and its highest point, so that no spike is lost. The ends stay."""
    if len(x) <= most:
        return list(x), list(y)
    cuts = [round(i * (len(x) - 2) / (most // 2 - 1)) + 1 for i in range(most // 2)]
    kept = [0]
    for start, end in pairwise(cuts):
        part = range(start, end)
        kept += sorted({min(part, key=y.__getitem__), max(part, key=y.__getitem__)})
    kept.append(len(x) - 1)
    return [x[i] for i in kept], [y[i] for i in kept]


def _points(curve: Curve) -> Spec:
    x, y = decimated(curve.x, curve.y)
    return {"x": rounded(x), "y": rounded(y)}


def _stretches(spans: Sequence[tuple[float, float, str]]) -> Spec:
    """Begins, codes, and where the last one ends. A gap is a stretch of nothing, code " "."""
    times: list[float] = []
    codes: list[str] = []
    end = None
    for start, until, code in spans:
        if end is not None and start > end:
            times.append(_hundredths(end))
            codes.append(" ")
        times.append(_hundredths(start))
        codes.append(code)
        end = until
    return {"times": times, "codes": "".join(codes), "end": _hundredths(end or 0.0)}


def _hundredths(value: float) -> float:
    return _whole(round(value, 2))


def _short(value: float) -> float:
    """As few digits as are seen: five, and all of a whole number."""
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return _whole(round(value, 2)) if abs(value) >= 10 ** (_DIGITS - 2) else _whole(float(f"{value:.{_DIGITS}g}"))


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value
