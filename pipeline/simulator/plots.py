"""Plots of simulated runs as pictures (matplotlib, loaded when the first figure is made)."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from pipeline.core.events import Role
from pipeline.report.looks import DARK, GREY, MODE_LOOKS, OTHER_LOOK, ROLE_LOOKS, Look
from pipeline.simulator.cluster import LOST, SHIFT
from pipeline.simulator.lengths import Array
from pipeline.simulator.series import ROLES, Stretch, Timeline, share_of_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
WIDTH_IN = 9.0
_FONT = 9
_ABREAST = 4
"""Panels."""


_HATCH = 3
"""As dense as hatches are."""
_STATES = {
    Role.ROLLOUT.value: ROLE_LOOKS[Role.ROLLOUT],
    Role.REWARD.value: ROLE_LOOKS[Role.REWARD],
    SHIFT: Look(GREY, hatch="x"),
    Role.TRAIN.value: ROLE_LOOKS[Role.TRAIN],
    LOST: Look(DARK),
}


@dataclass(frozen=True, kw_only=True)
class Picture:
    name: str
    """For a file: letters, digits, - and _."""
    heading: str
    """Of its section; pictures that follow each other may share one."""
    caption: str
    figure: "Figure"


def throughput_figure(
    groups: Mapping[str, Mapping[str, float]], *, unit: str = "sequences/s", shares_scale: bool = True
) -> "Figure":
    """One panel per group (a number of GPUs, or a pair of models) with one bar per mode of `groups[group]`.

    `shares_scale`: all panels have the same axis; not for models that differ by an order of magnitude.
    """
    modes = list(dict.fromkeys(mode for by_mode in groups.values() for mode in by_mode))
    num_rows, num_columns = math.ceil(len(groups) / _ABREAST), min(len(groups), _ABREAST)
    figure = _figure(num_rows * (0.8 + 0.36 * len(modes)))
    panels = figure.subplots(num_rows, num_columns, sharey=True, squeeze=False).flat
    overall = max((value for by_mode in groups.values() for value in by_mode.values()), default=0.0)
    for (group, by_mode), panel in zip(groups.items(), panels, strict=False):  # in this order: the rest is hidden
        _title(panel, group)
        most = max(by_mode.values(), default=0.0)
        for place, mode in enumerate(modes):
            if mode not in by_mode:
                panel.text(0, place, " does not fit", va="center", fontsize=_FONT - 1, color="#555555")
                continue
            look, value = MODE_LOOKS.get(mode, OTHER_LOOK), by_mode[mode]
            panel.barh(place, value, 0.72, color=_light(look.colour), edgecolor=look.colour, hatch=_HATCH * look.hatch)
            weight = "bold" if value == most else "normal"
            panel.text(value, place, f" {value:.2f}", va="center", fontsize=_FONT, fontweight=weight)
        panel.set_yticks(range(len(modes)), [_words(mode) for mode in modes])
        panel.set_xlabel(unit)
        panel.set_xlim(0, 1.3 * ((overall if shares_scale else most) or 1.0))
        panel.set_ylim(len(modes) - 0.5, -0.5)
        _plain(panel, "x")
    for panel in panels:
        panel.set_visible(False)
    return figure


def timeline_figure(shown: Timeline, *, title: str) -> "Figure":
    """Above, each role's rate over time; below, the GPUs of each. Lines down both mark shifts, triangles versions."""
    figure = _figure(4.8)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _title(above, title)
    for role in ROLES:
        look = _STATES[role.value]
        rate = np.append(shown.rates[role], shown.rates[role][-1:])
        above.plot(
            shown.edges_s, rate, color=look.colour, linestyle=_line(look), drawstyle="steps-post", label=role.value
        )
    above.set_ylim(0, 1.12 * max(1e-9, *(float(rate.max(initial=0.0)) for rate in shown.rates.values())))
    above.set_ylabel("sequences/s")
    for at in shown.shifts_s:
        for panel in (above, below):
            panel.axvline(at, color="#555555", linewidth=0.7, dashes=(3, 2), zorder=0.5 if panel is above else 3)
    high = above.get_ylim()[1]
    above.plot(
        shown.published_s, [high] * len(shown.published_s), "v", color="black", clip_on=False, label="version published"
    )
    if shown.shifts_s:
        above.plot([], [], color="#555555", linewidth=0.7, dashes=(3, 2), label="shift")
    figure.legend(ncols=5, loc="outside lower center", frameon=False, fontsize=_FONT - 1)
    _stack(below, shown)
    below.set_xlim(0, float(shown.edges_s[-1]))
    below.set_xlabel("seconds from the first of these steps")
    below.set_ylabel("GPUs")
    for panel in (above, below):
        _plain(panel, "y")
    return figure


def utilisation_figure(by_mode: Mapping[str, Array], *, title: str) -> "Figure":
    """`by_mode`: throughput per GPU in equal bins of time (`series.utilisation`)."""
    figure = _figure(3.4)
    panel = figure.subplots()
    _title(panel, title)
    most = max([1.0, *(float(np.quantile(values, 0.99)) for values in by_mode.values())])
    levels = np.linspace(0, most, 401)
    for mode, values in by_mode.items():
        look = MODE_LOOKS.get(mode, OTHER_LOOK)
        label = f"{_words(mode)} (mean {values.mean():.0%})"
        panel.plot(
            100 * levels, 100 * share_of_time(values, levels), color=look.colour, linestyle=_line(look), label=label
        )
    panel.set_xlim(0, 100 * most)
    panel.set_ylim(0, 100)
    panel.set_xlabel("throughput per GPU, % of what a GPU gives at its most efficient")
    panel.set_ylabel("% of time at or below")
    panel.legend(loc="lower right", fontsize=_FONT - 1)
    _plain(panel, "both")
    return figure


def as_png(figure: "Figure") -> bytes:
    """Of the figure's inches times DPI pixels."""
    return _saved(figure, "png")


def as_svg(figure: "Figure") -> bytes:
    """Text as outlines: no font is needed. The same figure gives the same bytes."""
    return _saved(figure, "svg")


def size_px(figure: "Figure") -> tuple[int, int]:
    width, height = figure.get_size_inches()
    return int(width * DPI), int(height * DPI)


def _stack(panel: "Axes", shown: Timeline) -> None:
    """GPUs by state as areas, each with its number where there is room, and its name where there is more."""
    total, length = max((sum(s.gpus.values()) for s in shown.stretches), default=1), float(shown.edges_s[-1])
    for area in _areas(shown.stretches):
        look = _STATES[area.state]
        panel.fill_between(
            [area.start_s, area.end_s],
            area.low,
            area.low + area.num,
            facecolor=_light(look.colour),
            edgecolor=look.colour,
            hatch=_HATCH * look.hatch,
            linewidth=0,
        )
        panel.hlines(area.low + area.num, area.start_s, area.end_s, color=look.colour, linewidth=1)
        width = (area.end_s - area.start_s) / length
        if width < _NARROW or area.num < total * _LOW:
            continue
        panel.text(
            (area.start_s + area.end_s) / 2,
            area.low + area.num / 2,
            f"{area.state} {area.num}" if width > _WIDE else str(area.num),
            ha="center",
            va="center",
            fontsize=_FONT - 1,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2},
            zorder=4,
        )
    panel.set_ylim(0, total)
    panel.set_yticks([total * i // 4 for i in range(5)] if total % 4 == 0 else [0, total])


_NARROW, _WIDE, _LOW = 0.018, 0.1, 0.1
"""Shares of the panel's width that a number and a name with it need, and of its height."""


class _Area(NamedTuple):
    state: str
    start_s: float
    end_s: float
    low: int
    num: int


def _areas(stretches: Sequence[Stretch]) -> list[_Area]:
    """Stacked in the order of the states. What neither moves nor changes from one stretch to the next is one."""
    found: list[_Area] = []
    last: dict[str, int] = {}
    for stretch in stretches:
        low = 0
        for state in _STATES:
            num = stretch.gpus.get(state, 0)
            if num == 0:
                continue
            area = _Area(state, stretch.start_s, stretch.end_s, low, num)
            before = found[last[state]] if state in last else None
            if before is not None and (before.end_s, before.low, before.num) == (area.start_s, low, num):
                found[last[state]] = before._replace(end_s=area.end_s)
            else:
                last[state] = len(found)
                found.append(area)
            low += num
    return found


def _figure(height_in: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained", facecolor="white")


def _saved(figure: "Figure", form: str) -> bytes:
    from matplotlib import rc_context

    out = io.BytesIO()
    with rc_context({"svg.hashsalt": "pivot", "svg.fonttype": "path", "hatch.linewidth": 0.4}):
        figure.savefig(out, format=form, dpi=DPI, metadata={"Date": None} if form == "svg" else None)
    return out.getvalue()


def _title(panel: "Axes", text: str) -> None:
    panel.set_title(text, fontsize=_FONT + 1, fontweight="bold", loc="left")


def _plain(panel: "Axes", grid: Literal["x", "y", "both"]) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis=grid, color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=_FONT - 1)
    panel.xaxis.label.set_fontsize(_FONT)
    panel.yaxis.label.set_fontsize(_FONT)


def _line(look: Look) -> str | tuple[int, tuple[int, ...]]:
    return (0, look.dashes) if look.dashes else "-"


def _light(colour: str) -> tuple[float, float, float]:
    """The colour, mostly white: hatches and numbers are read on it."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return (1 + (red - 1) * _TINT, 1 + (green - 1) * _TINT, 1 + (blue - 1) * _TINT)


_TINT = 0.35


def _words(mode: str) -> str:
    return mode.replace("_", " ")
