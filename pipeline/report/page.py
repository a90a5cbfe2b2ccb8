"""A page that needs nothing but itself: sections with charts, its style and its script in it, nothing from elsewhere.

What models say in it cannot do anything: all of it is text, and the page allows no script but its own, by digest.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from pipeline.report.charts import Chart
from pipeline.report.tables import shown
from pipeline.wording import visible

_HERE = Path(__file__).parent
_SCRIPTS = ("axis", "looks", "chart", "kinds", "page")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """`html` stands above its charts, `below` under them. A chart is (id, chart, caption). `is_abreast`: two charts
    stand side by side where there is room."""

    id: str
    heading: str
    html: str = ""
    charts: Sequence[tuple[str, Chart | None, str]] = field(default=())
    below: str = ""
    is_abreast: bool = False

    @property
    def drawn(self) -> list[tuple[str, Chart, str]]:
        """The charts that there are."""
        return [(id, chart, caption) for id, chart, caption in self.charts if chart is not None]


def style() -> str:
    """Of all pages, those of the simulator too."""
    return (_HERE / "style.css").read_text(encoding="utf-8")


def page(title: str, head: str, sections: Iterable[Section], steps: Sequence[tuple[int, float]] = ()) -> str:
    """The page. `head`: HTML under its title; `steps`: when each was recorded, in seconds of the time axis."""
    found = [section for section in sections if section.html or section.below or section.drawn]
    script = "\n".join((_HERE / "script" / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}\n}})();'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    charts = {id: chart.spec() for section in found for id, chart, _ in section.drawn}
    return Template((_HERE / "page.html").read_text(encoding="utf-8")).substitute(
        title=shown(title),
        head=head,
        style=style() + (_HERE / "charts.css").read_text(encoding="utf-8"),
        digest=f"sha256-{digest}",
        links=" ".join(f'<a href="#{section.id}">{shown(section.heading)}</a>' for section in found),
        sections="\n".join(map(_section, found)),
        data=as_data({"charts": charts, "steps": [[step, round(at, 2)] for step, at in steps]}),
        script=script,
    )


def as_data(value: object) -> str:
    """JSON that may stand in a page: nothing in it ends the element that holds it, and control characters in texts are
    spelt out."""
    text = json.dumps(_visible(value), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _visible(value: object) -> object:
    match value:
        case str():
            return visible(value)
        case dict():
            return {_visible(name): _visible(found) for name, found in value.items()}
        case list() | tuple() if value and not isinstance(value[0], int | float):
            return [_visible(found) for found in value]
    return value


def _section(section: Section) -> str:
    figures = "\n".join(
        f'<figure class="chart" id="{id}"><canvas role="img" aria-label="{shown(caption)}"></canvas>'
        f"<figcaption>{shown(caption)}</figcaption></figure>"
        for id, _, caption in section.drawn
    )
    heading = f'<h2 id="{section.id}">{shown(section.heading)}</h2>'
    kind = "charts abreast" if section.is_abreast else "charts"
    return f'<section>\n{heading}\n{section.html}\n<div class="{kind}">{figures}</div>\n{section.below}\n</section>'
