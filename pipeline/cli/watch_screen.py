"""The screen of `watch`, from what a run's status and metric rows say. Roles differ by colour and by letter."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from math import ceil
from typing import Any

from rich.cells import cell_len
from rich.console import ConsoleDimensions, Group
from rich.table import Table
from rich.text import Text

from pipeline.cli.runs import Status, how_it_stands
from pipeline.report.troubles import FAILED, troubles
from pipeline.wording import number, seconds, visible

MetricRow = Mapping[str, float | None]
Slot = Mapping[str, Any]

_LETTERS = {"rollout": "R", "reward": "J", "train": "T"}
_COLOURS = {"rollout": "#56b4e9", "reward": "#e69f00", "train": "#009e73"}
"""Of Okabe and Ito, those that are seen on dark and on light ground."""
_STATE_LETTERS = {
    "evaluate": "E",
    "publish": "P",
    "save": "C",
    "update": "L",
    "shift": "X",
    "start": "S",
    "nobody": ".",
}
_INK, _MOVING, _NOTHING = "#000000", "#bbbbbb", "dim"
_KEY = "R rollout  J judge  T train; small: idle; E evaluate  P publish  C save  L load  X shift  S start"
_CELL = 24
"""Columns that a slot needs where several stand side by side."""
_BARS = "▁▂▃▄▅▆▇█"
_CURVE = 24
_RATE_ROWS = 8
"""Steps by which the rest of the run is reckoned."""
_NUM_SHIFTS, _NUM_TROUBLES = 4, 5
_WIDE, _NARROW = 100, 60


def screen(name: str, status: Status, rows: Sequence[MetricRow], size: ConsoleDimensions | None, now: float) -> Group:
    """`size`: of the terminal, None where there is none: then nothing is left out. `now`: seconds since the epoch."""
    width = size.width if size else _WIDE
    above = [*_head(name, status, rows, width, now), *_steps(status, now), *_figures(status, rows, width)]
    below = [*_shifts(status), *_troubles(status, rows, now)]
    slots = status.get("slots") or []
    room = max(4, size.height - _height([*above, *below], width) - 1) if size else len(slots) + 1
    return Group(*above, *_slots(slots, width, room), *below)


def _height(parts: Iterable[Any], width: int) -> int:
    """Lines that they take, a table with its header."""
    found = 0
    for part in parts:
        match part:
            case Text():
                found += ceil(max(1, cell_len(part.plain)) / width)
            case Table():
                found += part.row_count + 1
            case _:
                found += 1
    return found


# --- the run


def _head(name: str, status: Status, rows: Sequence[MetricRow], width: int, now: float) -> Iterator[Any]:
    done, steps = max((row["step"] or 0 for row in rows), default=0), status.get("total_steps", 0)
    state = how_it_stands(status)
    line = Text.assemble((visible(name), "bold"), "  ", (state, "bold green" if state == "running" else "bold"))
    line.append(f"  {done:g} of {steps} steps")
    if attempt := status.get("attempt", 1) - 1:
        line.append(f"  attempt {attempt + 1}")
    if status.get("started"):
        end = now if status.get("live") else status.get("updated", now)
        line.append(f"  {seconds(max(0.0, end - status['started']))}")
    if status.get("live") and (left := _left_s(rows, steps - done)) is not None:
        line.append(f"  about {seconds(left)} to go")
    yield line
    if steps:
        long = min(width, _WIDE)
        part = round(long * min(1.0, done / steps))
        yield Text.assemble(("━" * part, "bold"), ("─" * (long - part), "dim"))


def _left_s(rows: Sequence[MetricRow], num_left: float) -> float | None:
    times = [at for row in rows[-_RATE_ROWS - 1 :] if (at := row.get("time")) is not None]
    return num_left * (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def _steps(status: Status, now: float) -> Iterator[Text]:
    for step in status.get("steps") or () if status.get("live") else ():
        num, took_s = step["sequences"], max(0.0, now - step["began"])
        line = Text(f"step {step['step']}  rolled out {step['rolled_out']}/{num}, judged {step['scored']}/{num}")
        if others := [stage for stage in step["running"] if stage not in ("rollout", "reward")]:
            line.append(f", {visible(', '.join(others))}")
        line.append(f"  {seconds(took_s)}")
        if expected_s := step.get("expected_s"):
            rest_s = expected_s - took_s
            line.append(
                f", about {seconds(rest_s)} to go" if rest_s >= 0 else f", {seconds(-rest_s)} longer than before"
            )
        yield line


def _figures(status: Status, rows: Sequence[MetricRow], width: int) -> Iterator[Text]:
    if queues := status.get("queues"):
        lengths = (f"{role} {queue['waiting']} wait, {queue['running']} run" for role, queue in queues.items())
        yield Text(f"queues  {'; '.join(lengths)}")
    curve = _CURVE if width >= _NARROW else 0
    for label, key, form in (("reward", "critic/score/mean", ".3f"), ("accuracy", "val/acc", ".3f")):
        values = [value for row in rows if (value := row.get(key)) is not None]
        if values:
            yield Text(f"{label:10}{format(values[-1], form)}  {_curve(values, curve)}")
    if rows:
        last = rows[-1]
        shown = (
            ("tokens/s", "perf/throughput", ",.0f"),
            ("s/step", "timing_s/step", ".2f"),
            ("tokens each", "response_length/mean", ",.0f"),
            ("staleness", "staleness/mean", ".2f"),
        )
        parts = [f"{number(last[key], form)} {label}" for label, key, form in shown if last.get(key) is not None]
        failed = sum(value or 0 for key, value in last.items() if key.startswith(FAILED))
        yield Text(", ".join([*parts, *([f"{failed:g} judge failures"] if failed else [])]))


def _curve(values: Sequence[float], width: int) -> str:
    """The values, squeezed into so many characters."""
    if width <= 0 or len(values) < 2:
        return ""
    num = min(width, len(values))
    cuts = [len(values) * i // num for i in range(num + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    return "".join(_BARS[round((len(_BARS) - 1) * (v - low) / ((high - low) or 1.0))] for v in means)


# --- slots


def _slots(slots: Sequence[Slot], width: int, room: int) -> Iterator[Any]:
    """A row each, where there is room for all; else several side by side; else a letter each."""
    if not slots:
        return
    has_nodes = len({slot["node"] for slot in slots}) > 1
    across = max(1, width // _CELL)
    if len(slots) + 1 <= room:
        yield _rows(slots, has_nodes, width)
    elif ceil(len(slots) / across) <= room:
        yield _grid(slots, has_nodes, across)
    else:
        lines, room = list(_letters(slots, width)), room - 1
        shown = lines if len(lines) <= room else lines[: room - 1]
        yield from shown
        if len(lines) > len(shown):
            yield Text(f"... {len(lines) - len(shown)} more lines", style="dim")
        yield Text(_KEY, style="dim", overflow="ellipsis", no_wrap=True)


def _rows(slots: Sequence[Slot], has_nodes: bool, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("SLOT")
    table.add_column("ROLE")
    table.add_column("STATE")
    table.add_column("RUNS", justify="right")
    table.add_column("TOKENS/S", justify="right")
    if width >= _NARROW:
        table.add_column("")
    most = max((slot["tokens_per_s"] for slot in slots), default=0.0) or 1.0
    for slot in slots:
        bar = Text("█" * round((min(width, _WIDE) - _NARROW) / 2 * slot["tokens_per_s"] / most), style=_bar_style(slot))
        cells = (_name(slot, has_nodes), _role(slot), _state(slot), _running(slot), _rate(slot), bar)
        table.add_row(*cells[: len(table.columns)])
    return table


def _grid(slots: Sequence[Slot], has_nodes: bool, across: int) -> Table:
    """Column by column, so that neighbours stand below each other."""
    table = Table.grid(padding=(0, 2, 0, 0))
    num = ceil(len(slots) / across)
    for row in range(num):
        cells: list[Text] = []
        for slot in slots[row::num]:
            name = _name(slot, has_nodes)
            name.truncate(10)
            cells.append(Text.assemble(name, " ", _role(slot, is_short=True), f" {slot['tokens_per_s']:,.0f}"))
        table.add_row(*cells)
    return table


def _letters(slots: Sequence[Slot], width: int) -> Iterator[Text]:
    for node, found in groupby(slots, key=lambda slot: str(slot["node"])):
        there = list(found)
        line = Text(visible(node))
        line.truncate(width // 3)
        line.append("  ")
        for slot in there:
            if cell_len(line.plain) >= width:
                yield line
                line = Text("  ")
            line.append(letter(slot), style=_style(slot))
        rate = f"  {sum(slot['tokens_per_s'] for slot in there):,.0f} tokens/s"
        if cell_len(line.plain) + len(rate) <= width:
            line.append(rate, style="dim")
        yield line


def letter(slot: Slot) -> str:
    """What a slot does: that of its role, small where it has nothing to do."""
    if slot["state"] in _STATE_LETTERS:
        return _STATE_LETTERS[slot["state"]]
    found = _LETTERS.get(slot["role"], "?")
    return found.lower() if slot["state"] == "idle" else found


def _name(slot: Slot, has_nodes: bool) -> Text:
    return Text(visible(f"{slot['node']}:{slot['slot']}" if has_nodes else str(slot["slot"])))


def _role(slot: Slot, is_short: bool = False) -> Text:
    words = f" {letter(slot)} " if is_short else f" {letter(slot)} {slot['role'] or slot['state']} "
    return Text(visible(words), style=_style(slot))


def _style(slot: Slot) -> str:
    if slot["state"] in ("idle", "nobody"):
        return _NOTHING
    return f"{_INK} on {_COLOURS.get(slot['role'], _MOVING)}"


def _bar_style(slot: Slot) -> str:
    return _COLOURS.get(slot["role"], _NOTHING)


def _state(slot: Slot) -> Text:
    return Text(visible(str(slot["state"])), style="" if slot["state"] == "work" else "dim")


def _running(slot: Slot) -> Text:
    return Text(str(slot["running"]) if slot["running"] else "-")


def _rate(slot: Slot) -> Text:
    return Text(f"{slot['tokens_per_s']:,.0f}" if slot["tokens_per_s"] else "-")


# --- shifts and troubles


def _shifts(status: Status) -> Iterator[Any]:
    shifts = (status.get("shifts") or [])[-_NUM_SHIFTS:]
    if not shifts:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("SHIFT AT", "STEP", "SLOTS", "", "TOOK", "GAIN S", "MEASURED"):
        table.add_column(name, justify="right" if name in ("STEP", "SLOTS", "TOOK", "GAIN S", "MEASURED") else "left")
    for one in shifts:
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(one["wall"])),
            str(one["step"]),
            str(one["slots"]),
            visible(f"{one['old']} ▶ {one['new']}"),
            seconds(one["took_s"]),
            number(one["predicted_gain_s"], "+.2f"),
            number(one["measured_gain_s"], "+.2f"),
        )
    yield table


def _troubles(status: Status, rows: Sequence[MetricRow], now: float) -> Iterator[Text]:
    found = troubles(status, rows, now)
    for text in found[:_NUM_TROUBLES]:
        yield Text.assemble(("! ", "bold #d55e00"), visible(" ".join(text.split())))
    if len(found) > _NUM_TROUBLES:
        yield Text(f"! and {len(found) - _NUM_TROUBLES} more")
