"""What a page's script is given to draw: no more than can be seen, and nothing lost that can."""

import base64
import hashlib
import json
import random
import re
from html import unescape

from pipeline.report.charts import TIME, Bars, Curve, Lines, Mark, Stack, Stretches, decimated, rounded
from pipeline.report.looks import MODE_LOOKS, ROLE_LOOKS, SERIES_LOOKS, Look
from pipeline.report.page import Section, as_data, page
from pipeline.report.tables import Cell, shown, table, words
from pipeline.wording import visible


def test_curves_lose_no_spike_and_no_end() -> None:
    rng = random.Random(3)
    x = [float(i) for i in range(100_000)]
    y = [rng.random() for _ in x]
    y[31_415], y[27_182], y[0], y[-1] = 9.0, -9.0, 0.5, 0.25
    kept_x, kept_y = decimated(x, y, 1000)
    assert len(kept_x) <= 1000 and kept_x == sorted(set(kept_x))
    assert (31_415.0, 9.0) in zip(kept_x, kept_y, strict=True) and (27_182.0, -9.0) in zip(kept_x, kept_y, strict=True)
    assert (kept_x[0], kept_y[0], kept_x[-1], kept_y[-1]) == (0.0, 0.5, 99_999.0, 0.25)
    assert decimated(x[:900], y[:900], 1000) == (x[:900], y[:900])


def test_numbers_are_as_short_as_they_can_be_read() -> None:
    assert json.dumps(rounded([1.0, 0.123456789, 1234.5678, 1e-7, -2.50000001, 86_400.123, 123_456_789.0])) == (
        "[1, 0.12346, 1234.57, 1e-07, -2.5, 86400.12, 123456789]"
    )


def test_a_gap_between_stretches_is_nothing() -> None:
    chart = Stretches(
        rows=[("a", [(0.0, 1.0, "R"), (1.0, 2.0, "J"), (5.001, 6.0, "R")]), ("b", [])],
        words={"R": "rollout"},
        looks={"R": ROLE_LOOKS[next(iter(ROLE_LOOKS))]},
        groups={},
        axis=TIME,
        marks=[Mark(at=1.001, until=1.25, rows=[0], text="shift", note=0)],
        notes=["why"],
    )
    spec = chart.spec()
    assert spec["rows"][0] == {"name": "a", "times": [0, 1, 2, 5], "codes": "RJ R", "end": 6}
    assert spec["rows"][1] == {"name": "b", "times": [], "codes": "", "end": 0}
    assert spec["marks"] == [[1, 1.25, [0], "shift", 0]]


def test_every_chart_is_json() -> None:
    look = Look("#000000")
    charts = [
        Lines(curves={str(i): Curve(x=[0, 1], y=[1, 2]) for i in range(9)}, axis=TIME, unit="s"),
        Stack(edges=[0, 1, 2], parts={"a": [1, 2]}, looks={"a": look}, axis=TIME, unit="slots"),
        Bars(edges=[1, 2, 4], parts={"a": [1, 2]}, unit="%", x_unit="tokens", marks={"50%": 2.0}),
    ]
    for chart in charts:
        assert json.loads(json.dumps(chart.spec(), allow_nan=False))["kind"]


def test_looks_differ_without_colour_too() -> None:
    for looks in (ROLE_LOOKS, MODE_LOOKS):
        assert len({look.hatch for look in looks.values()}) == len(looks)
        assert len({look.dashes for look in looks.values()}) == len(looks)
    assert len(set(SERIES_LOOKS)) == len({look.dashes for look in SERIES_LOOKS}) == len(SERIES_LOOKS)


# --- the page ---------------------------------------------------------------------------------------------------------

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> \x1b[2J\u202e $title ${x}"


def test_a_page_holds_its_sections_and_allows_no_script_but_its_own() -> None:
    chart = Lines(curves={HOSTILE: Curve(x=[0], y=[1])}, axis=TIME, unit=HOSTILE)
    sections = [
        Section(id="one", heading="One", html=f"<p>{shown(HOSTILE)}</p>", charts=[("c", chart, "It goes up.")]),
        Section(id="none", heading="None", charts=[("d", None, "There is none.")]),
    ]
    text = page(HOSTILE, "<p>head</p>", sections, [(1, 12.3456)])
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1 and "alert(1)" not in scripts[0]
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text and "default-src 'none'" in text
    assert text.count("<script") == 2 and "<img" not in text and "\x1b" not in text and "\u202e" not in text
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[0])
    assert data["charts"]["c"]["series"][0]["name"] == visible(HOSTILE) and data["steps"] == [[1, 12.35]]
    assert '<h2 id="one">' in text and 'id="none"' not in text and list(data["charts"]) == ["c"]
    assert not re.search(r"https?:|@import|url\(", text), "nothing is loaded from elsewhere"
    assert unescape(re.findall(r"<title>(.*?)</title>", text)[0]).startswith("</script>")


def test_data_can_stand_in_a_page_and_be_read_again() -> None:
    text = as_data({"a": ["<", ">", "&", 1], "b": [1, 2.5], "c": HOSTILE})
    assert not set("<>&\x1b\u202e") & set(text)
    assert json.loads(text) == {"a": ["<", ">", "&", 1], "b": [1, 2.5], "c": visible(HOSTILE)}


def test_tables_hold_text() -> None:
    text = table([words("name"), Cell("value")], [[words("<b>"), Cell("1.5")]], best=[True], is_listed=True)
    assert '<td class="text">&lt;b&gt;</td><td>1.5</td>' in text and 'class="figures listed"' in text
    assert '<tr class="best">' in text and text.count("<tr") == 2
