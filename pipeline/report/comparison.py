"""Runs beside each other on one page: what each achieved, and its curves."""

from collections.abc import Iterator, Mapping, Sequence

from pipeline.comparison import IDLE, Outcome, Row
from pipeline.report.charts import STEP, TIME, Chart, Curve, Lines
from pipeline.report.looks import MODE_LOOKS, SERIES_LOOKS
from pipeline.report.page import Section, page
from pipeline.report.tables import Cell, table, words
from pipeline.wording import number

Rows = Sequence[Row]
_HEADER = (
    *("runs", "sequences/s", "of best", "tokens/s", "a step", "idle"),
    *(f"in {state}" + ("s" if state == "shift" else "") for state in IDLE),
    *("shifts a step", "reward", "accuracy"),
)
_NOTE = (
    '<p class="note">Idle: the share of the time of all slots in which they computed nothing, and who had them then; '
    "in shifts: nobody, mostly on the way to a role. A step: from one version to the next.</p>"
)


def comparison_page(title: str, runs: Mapping[str, Sequence[Rows]], means: Mapping[str, Outcome]) -> str:
    """`runs`: of each name the metric rows of its runs, of which the first is drawn; `means`: over them."""
    drawn = {name: [row for row in found[0] if row.get("time") is not None] for name, found in runs.items()}
    longest = max(drawn.values(), key=_took_s, default=[])
    steps = [(int(row["step"] or 0), (row["time"] or 0.0) - _began(longest)) for row in longest]
    return page(title, "", _sections(drawn, {name: len(found) for name, found in runs.items()}, means), steps)


def _sections(
    drawn: Mapping[str, Rows], num_runs: Mapping[str, int], means: Mapping[str, Outcome]
) -> Iterator[Section]:
    yield Section(id="achieved", heading="What each achieved", html=_table(num_runs, means), below=_NOTE)
    yield Section(
        id="speed",
        heading="Speed",
        charts=[
            ("steps", _over_time(drawn, "step", "step"), "Steps over time."),
            ("step-time", _by_step(drawn, "timing_s/step", "s", 0.0), "From its admission to its end, each step."),
        ],
        is_abreast=True,
    )
    yield Section(
        id="learning",
        heading="Learning",
        charts=[
            ("reward-steps", _by_step(drawn, "critic/score/mean", "reward"), "Reward by step."),
            ("reward-time", _over_time(drawn, "critic/score/mean", "reward"), "Reward over time."),
            ("accuracy-steps", _by_step(drawn, "val/acc", "accuracy"), "Right answers to held-out prompts, by step."),
            ("accuracy-time", _over_time(drawn, "val/acc", "accuracy"), "The same over time."),
        ],
        is_abreast=True,
    )


def _table(num_runs: Mapping[str, int], means: Mapping[str, Outcome]) -> str:
    best = max((mean.sequences_per_s or 0.0 for mean in means.values()), default=0.0)
    rows = []
    for name, mean in means.items():
        speed = mean.sequences_per_s
        cells = (
            str(num_runs[name]),
            number(speed, ".3g"),
            number(speed / best if speed and best else None, ".0%"),
            number(mean.tokens_per_s, ",.0f"),
            "-" if mean.step_s is None else f"{mean.step_s:.3g} s",
            number(sum(mean.idle.values()) if mean.idle else None, ".0%"),
            *(number(mean.idle.get(state), ".0%") for state in IDLE),
            f"{mean.shifts_per_step:.1f}",
            number(mean.reward),
            number(mean.accuracy, ".1%"),
        )
        rows.append([words(name), *map(Cell, cells)])
    return table(
        [words(""), *map(Cell, _HEADER)], rows, best=[(mean.sequences_per_s or 0.0) == best for mean in means.values()]
    )


def _by_step(drawn: Mapping[str, Rows], metric: str, unit: str, low: float | None = None) -> Chart | None:
    return _lines(drawn, metric, unit, STEP, low)


def _over_time(drawn: Mapping[str, Rows], metric: str, unit: str) -> Chart | None:
    return _lines(drawn, metric, unit, TIME, None)


def _lines(drawn: Mapping[str, Rows], metric: str, unit: str, axis: str, low: float | None) -> Chart | None:
    curves: dict[str, Curve] = {}
    for index, (name, rows) in enumerate(drawn.items()):
        known = [row for row in rows if row.get(metric) is not None]
        if not known:
            continue
        began = _began(rows)
        x = [(row["step"] or 0.0) if axis == STEP else (row["time"] or 0.0) - began for row in known]
        look = MODE_LOOKS.get(name, SERIES_LOOKS[index % len(SERIES_LOOKS)])
        curves[name] = Curve(x=x, y=[row[metric] or 0.0 for row in known], look=look)
    return Lines(curves=curves, axis=axis, unit=unit, low=low) if curves else None


def _began(rows: Rows) -> float:
    return (rows[0]["time"] or 0.0) - (rows[0].get("timing_s/step") or 0.0) if rows else 0.0


def _took_s(rows: Rows) -> float:
    return (rows[-1]["time"] or 0.0) - _began(rows) if rows else 0.0
