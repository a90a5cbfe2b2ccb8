"""A study as one HTML page that needs nothing else: its style is in it, and its plots are, as SVG."""

import base64
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

from pipeline.report.page import style
from pipeline.report.tables import Cell, table, words
from pipeline.simulator.forecast import Forecast
from pipeline.simulator.plots import Picture, as_svg, size_px, throughput_figure, timeline_figure, utilisation_figure
from pipeline.simulator.series import timeline, utilisation
from pipeline.simulator.study import (
    IDLE_STATES,
    Study,
    best,
    growth,
    idle_text,
    seconds_text,
    speed_text,
    why_none,
)

_TEMPLATE = Path(__file__).parent / "page.html"
_SHOWN_STEPS = 4
_KEY = (
    " Above: what each role processes, its tokens per second by their mean number in a sequence. Below: GPUs ready for "
    "each role, and in grey those on their way to one. Dashed lines: GPUs set out for another role; triangles: a "
    "version of the policy is published."
)


def pictures(study: Study) -> Iterator[Picture]:
    """One by one: each mode's best schedule runs once more, traced. None where no mode fits."""
    if any(study.rows.values()):
        yield Picture(
            name="throughput",
            heading="Throughput by mode and number of GPUs",
            caption="Sequences per second of each mode at its best split, mean over the seeds.",
            figure=throughput_figure(
                {f"{n} GPUs": {row.mode: row.sequences_per_s for row in rows} for n, rows in study.rows.items()}
            ),
        )
    for num_gpus, rows in study.rows.items():
        yield from _pictures_of(study, num_gpus, rows)


def _pictures_of(study: Study, num_gpus: int, rows: Sequence[Forecast]) -> Iterator[Picture]:
    if not rows:
        return
    setup, used = study.setups[num_gpus], {}
    drawn: list[Picture] = []
    heading = f"{num_gpus} GPUs over time"
    for row in rows:
        result = row.run(seed=0, is_traced=True)
        used[row.mode] = utilisation(setup, result)
        drawn.append(
            Picture(
                name=f"timeline-{num_gpus}-{row.mode}",
                heading=heading,
                caption=f"{row.schedule} on {num_gpus} GPUs, {_SHOWN_STEPS} steps with seed 0.{'' if drawn else _KEY}",
                figure=timeline_figure(
                    timeline(setup, result, num_steps=_SHOWN_STEPS), title=f"{num_gpus} GPUs: {row.schedule}"
                ),
            )
        )
    yield Picture(
        name=f"utilisation-{num_gpus}",
        heading=heading,
        caption=f"How much of the time {num_gpus} GPUs give how little, seed 0: the higher a curve on the left, the "
        "more time at low throughput per GPU. 100 % is what GPUs give when each works for its role at its most "
        "efficient batch; young responses can bring it above for a while.",
        figure=utilisation_figure(used, title=f"{num_gpus} GPUs: share of time at low throughput"),
    )
    yield from drawn


def page(study: Study, shown: Sequence[Picture]) -> str:
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(study.title),
        answer=_answer(study),
        table=_table(study),
        idle_table=_idle_table(study),
        idle=_paragraphs(
            f"{n} GPUs, {row.schedule}: {idle_text(row)}." for n, rows in study.rows.items() if (row := best(rows))
        ),
        growth=_paragraphs(f"{step}." for step in growth(study.rows))
        or "<p>One number of GPUs was asked for: name several, such as <code>--gpus 32,64</code>.</p>",
        figures="\n".join(_figures(shown)),
        inputs=table([], [[words(name), words(text)] for name, text in study.inputs]),
        style=style(),
    )


def _answer(study: Study) -> str:
    found = []
    for num_gpus, rows in study.rows.items():
        row = best(rows)
        if row is None:
            found.append(f"No mode fits on {num_gpus} GPUs: {why_none(study.setups[num_gpus])}.")
        else:
            found.append(
                f"Best on {num_gpus} GPUs: {escape(row.schedule)}, {speed_text(row.sequences_per_s)} sequences/s, "
                f"a step of {seconds_text(row.step_s)} s."
            )
    return "<br>\n".join(found)


def _table(study: Study) -> str:
    names = ("staleness", "sequences/s", "step", "idle", "shifts/step", "of bound")
    return _modes(
        study,
        names,
        lambda row: (
            str(row.staleness),
            speed_text(row.sequences_per_s),
            f"{seconds_text(row.step_s)} s",
            f"{row.idle:.0%}",
            f"{row.shifts_per_step:.1f}",
            f"{row.of_tail_bound:.0%}",
        ),
    )


def _idle_table(study: Study) -> str:
    return _modes(
        study,
        ("idle", *IDLE_STATES),
        lambda row: (f"{row.idle:.0%}", *(f"{abs(row.idle_by.get(state, 0.0)):.0%}" for state in IDLE_STATES)),
    )


def _modes(study: Study, names: Sequence[str], figures: Callable[[Forecast], Sequence[str]]) -> str:
    """One line per row of the study. `figures` has as many texts as there are `names`."""
    header = [Cell("GPUs"), words("mode, best split"), *map(Cell, names)]
    rows = [(num_gpus, row) for num_gpus, rows in study.rows.items() for row in rows]
    cells = [[Cell(str(n)), words(row.schedule), *map(Cell, figures(row))] for n, row in rows]
    return table(header, cells, best=[row is best(study.rows[n]) for n, row in rows])


def _figures(shown: Sequence[Picture]) -> Iterator[str]:
    heading = ""
    for picture in shown:
        if picture.heading != heading:
            heading = picture.heading
            yield f"<h2>{escape(heading)}</h2>"
        width, height = size_px(picture.figure)
        data, caption = base64.b64encode(as_svg(picture.figure)).decode(), escape(picture.caption)
        yield (
            f'<figure id="{picture.name}"><img alt="{caption}" width="{width}" height="{height}" '
            f'src="data:image/svg+xml;base64,{data}"><figcaption>{caption}</figcaption></figure>'
        )


def _paragraphs(lines: Iterator[str]) -> str:
    return "\n".join(f"<p>{escape(line)}</p>" for line in lines)
