"""Reports in a real browser: it asks for nothing, complains of nothing, and does what a hand wants."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.report.build import build
from tests.fakes.chromium import Chromium
from tests.fakes.run_files import RunFiles
from tests.report.test_charts import HOSTILE

STEPS, SLOTS = 40, 8
READY_MS = 2000
"""Of the time that a page may take until a hand can use it."""


@dataclass(frozen=True)
class Figure:
    """A chart on the page; `left` and `right` of its plot, `y` in its middle, on the screen."""

    browser: Chromium
    id: str

    @property
    def box(self) -> tuple[float, float, float, float]:
        script = f"""(() => {{
            const canvas = document.querySelector('#{self.id} canvas:not(.keys canvas)');
            canvas.scrollIntoView({{block: 'center'}});
            const box = document.querySelector('#{self.id} > canvas').getBoundingClientRect();
            return [box.left + 78, box.right - 14, box.top + 20, box.bottom - 24];
        }})()"""
        left, right, top, bottom = self.browser.evaluate(script)
        return left, right, top, bottom

    def at(self, share: float) -> tuple[float, float]:
        left, right, top, bottom = self.box
        return left + share * (right - left), (top + bottom) / 2

    @property
    def shown(self) -> tuple[float, float]:
        """What of the axis is to be seen, once it is drawn."""
        self.browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found = self.browser.evaluate(f"(({{from, to}}) => [+from, +to])(document.getElementById('{self.id}').dataset)")
        return found[0], found[1]

    @property
    def drawn(self) -> int:
        _ = self.shown
        return int(self.browser.evaluate(f"+document.getElementById('{self.id}').dataset.drawn"))

    @property
    def picture(self) -> str:
        _ = self.shown
        return str(self.browser.evaluate(f"document.querySelector('#{self.id} > canvas').toDataURL()"))

    @property
    def tip(self) -> str:
        return str(self.browser.evaluate(f"document.querySelector('#{self.id} > .tip').textContent"))

    def drag(self, start: float, end: float) -> None:
        (x0, y), (x1, _) = self.at(start), self.at(end)
        self.browser.drag(x0, x1, y)

    def point(self, share: float, row: float | None = None) -> str:
        x, y = self.at(share)
        if row is not None:
            _, _, top, bottom = self.box
            y = top + row * (bottom - top)
        self.browser.mouse("mouseMoved", x, y)
        return self.tip

    def click_key(self, name: str) -> None:
        script = (
            f"[...document.querySelectorAll('#{self.id} button.key')].find((k) => k.textContent === '{name}').click()"
        )
        self.browser.evaluate(script)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    files = RunFiles(folder / "run", STEPS, SLOTS, "placement.mode=shiftable")
    page = folder / "report.html"
    page.write_text(build(files.run), encoding="utf-8")
    return page


@pytest.fixture
def page(browser: Chromium, path: Path) -> Iterator[Chromium]:
    browser.open(path)
    browser.until("document.documentElement.dataset.ready")
    yield browser
    assert browser.errors == []
    assert browser.requests == [path.as_uri()], "the page needs nothing but itself"


def test_a_page_is_soon_of_use_and_all_is_drawn(page: Chromium) -> None:
    assert page.evaluate("+document.documentElement.dataset.ready") < READY_MS
    drawn = page.evaluate("[...document.querySelectorAll('figure.chart')].map((f) => [f.id, +f.dataset.drawn])")
    assert len(drawn) > 10 and all(number > 0 for _, number in drawn), drawn


def test_a_hand_that_drags_looks_closer_at_all_charts_and_a_double_click_at_all_of_them(page: Chromium) -> None:
    slots, reward = Figure(page, "slots"), Figure(page, "reward")
    whole = slots.shown
    assert whole[0] == 0 and whole[1] == pytest.approx(10.0 * (STEPS + 1), abs=1) and reward.shown == whole
    before, drawn = slots.picture, slots.drawn
    slots.drag(0.25, 0.5)
    closer = slots.shown
    assert closer == pytest.approx((whole[1] / 4, whole[1] / 2), abs=3) and reward.shown == closer
    assert slots.drawn < 0.4 * drawn and slots.picture != before
    steps = page.evaluate("[document.getElementById('first').value, document.getElementById('last').value].map(Number)")
    assert steps[0] == pytest.approx(STEPS / 4, abs=1) and steps[1] == pytest.approx(STEPS / 2, abs=1)
    page.click(*reward.at(0.5), times=2)
    assert slots.shown == reward.shown == whole and slots.picture == before


def test_keys_and_buttons_look_closer_too(page: Chromium) -> None:
    slots = Figure(page, "slots")
    low, high = slots.shown
    page.click(*slots.at(0.5))
    for key, wanted in (("+", (0.25, 0.75)), ("ArrowRight", (0.375, 0.875)), ("-", (0.0, 1.0)), ("0", (0.0, 1.0))):
        page.press(key)
        share = tuple((at - low) / (high - low) for at in slots.shown)
        assert share == pytest.approx(wanted, abs=0.13), key
    page.evaluate("document.getElementById('closer').click()")
    assert slots.shown[1] - slots.shown[0] == pytest.approx((high - low) / 2)
    page.evaluate("document.getElementById('whole').click()")
    assert slots.shown == (low, high)


def test_steps_that_are_named_are_shown(page: Chromium) -> None:
    set_steps = """(([first, last]) => {
        document.getElementById('first').value = first;
        document.getElementById('last').value = last;
        document.getElementById('last').dispatchEvent(new Event('change'));
    })"""
    page.evaluate(f"{set_steps}([11, 20])")
    assert Figure(page, "slots").shown == pytest.approx((110.0, 210.0), abs=0.2), "from the end of step 10 on"
    assert Figure(page, "spent").drawn in (10, 11, 12)


def test_roles_are_shown_and_hidden(page: Chromium) -> None:
    slots, lines = Figure(page, "slots"), Figure(page, "throughput")
    before, drawn, curve = slots.picture, slots.drawn, lines.picture
    slots.click_key("reward")
    assert slots.drawn < 0.9 * drawn and slots.picture != before
    pressed = "document.querySelectorAll('#slots button.key[aria-pressed=false]').length"
    assert page.evaluate(pressed) == 1 and lines.picture == curve
    slots.click_key("shift")
    slots.click_key("reward")
    slots.click_key("shift")
    assert slots.picture == before and page.evaluate(pressed) == 0
    lines.click_key("rollout")
    assert lines.picture != curve


def test_a_hand_on_a_slot_is_told_who_had_it_and_what_a_shift_was_worth(page: Chromium) -> None:
    slots = Figure(page, "slots")
    slots.drag(0.25, 0.3)
    seen = {slots.point(share / 100, row=0.31) for share in range(2, 98)}
    assert any(re.match(r"node-0:2: .*, step \d+\nrollout, [\d.]+ s", text) for text in seen)
    shifts = [text for text in seen if "▶" in text]
    assert shifts and all(
        re.search(r"rollout ▶ reward: 0\.3 s \(down 0\.1 s, up 0\.2 s\)\ndecision \d+", t) for t in shifts
    )
    assert all(re.search(r"gain \+\d\.\d\d s predicted, [+-]\d\.\d\d s measured", text) for text in shifts)
    page.mouse("mouseMoved", 5, 5)
    assert slots.tip == ""


def test_a_hand_on_a_curve_is_told_its_values(page: Chromium) -> None:
    text = Figure(page, "reward").point(0.5)
    assert re.search(r"step 2\d\nmean: 0\.\d+ reward\nleast: 0 reward\nmost: 1 reward", text), text
    text = Figure(page, "spent").point(0.5)
    assert re.match(r"step \d+, 10 s\nrollout: [\d.]+ slots, [\d.]+ %", text), text
    text = Figure(page, "response-lengths").point(0.5)
    assert re.search(r"\d+ to \d+ tokens\nall steps: [\d.]+ % of responses", text), text


def visible(page: Chromium, selector: str) -> int:
    return int(page.evaluate(f"[...document.querySelectorAll('{selector}')].filter((e) => !e.hidden).length"))


TABLE = "document.querySelector('table.listed')"


def write(page: Chromium, place: str, text: str, event: str = "input") -> None:
    """As a hand does it: into an input, or a choice."""
    page.evaluate(f"(({{e}}) => {{ e.value = '{text}'; e.dispatchEvent(new Event('{event}')); }})({{e: {place}}})")


def test_tables_show_some_rows_find_and_sort(page: Chromium) -> None:
    rows = "table.listed tbody tr"
    assert visible(page, rows) == 25
    page.evaluate(f"{TABLE}.parentElement.querySelector('.more').click()")
    assert visible(page, rows) == 3 * STEPS, "all three decisions of each step"
    wanted = page.evaluate(f"{TABLE}.tBodies[0].rows[70].cells[0].textContent")
    write(page, f"{TABLE}.previousElementSibling.querySelector('input')", wanted)
    assert 1 <= visible(page, rows) < 10
    write(page, f"{TABLE}.previousElementSibling.querySelector('input')", "")
    column = f"[...{TABLE}.tBodies[0].rows].map((row) => parseFloat(row.cells[6].textContent))"
    head = f"{TABLE}.tHead.rows[0].cells[6].click()"
    page.evaluate(head)
    up = page.evaluate(column)
    page.evaluate(head)
    down = page.evaluate(column)
    assert up == sorted(up) and down == sorted(down, reverse=True) and down[0] > up[0]


def test_samples_are_found(page: Chromium) -> None:
    assert visible(page, "#samples > article") == 6
    bar = "document.getElementById('samples').previousElementSibling"
    write(page, f"{bar}.querySelector('select')", "failed", "change")
    shown = "[...document.querySelectorAll('#samples > article')].filter((e) => !e.hidden).map((e) => e.className)"
    assert page.evaluate(shown) == ["sample failed"] * 6
    write(page, f"{bar}.querySelector('select')", "all", "change")
    write(page, f"{bar}.querySelector('input')", f"prompt of step {STEPS}")
    assert visible(page, "#samples > article") == 4


def test_on_paper_it_is_all_there(page: Chromium) -> None:
    printed = page.as_pdf()
    assert printed.startswith(b"%PDF") and len(printed) > 100_000


def test_a_narrow_window_is_filled(page: Chromium) -> None:
    page.size(420, 800)
    try:
        assert page.evaluate("document.documentElement.scrollWidth") <= 420
        assert Figure(page, "slots").drawn > 0
    finally:
        page.size(1280, 900)


def test_what_models_say_does_nothing(browser: Chromium, tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "r", 3, 4, "placement.mode=shiftable", text=HOSTILE)
    page = tmp_path / "hostile.html"
    page.write_text(build(files.run), encoding="utf-8")
    browser.open(page)
    browser.until("document.documentElement.dataset.ready")
    assert browser.errors == [] and browser.requests == [page.as_uri()]
    assert "onerror=alert(1)" in browser.evaluate("document.querySelector('article pre').textContent")
    assert browser.evaluate("document.images.length + document.scripts.length") == 2
    text = Figure(browser, "slots").point(0.5, row=0.5)
    assert text and browser.evaluate("document.images.length") == 0


def test_a_script_that_got_in_would_not_run(browser: Chromium, path: Path, tmp_path: Path) -> None:
    """Were something not escaped, the page's policy would still stand before it."""
    page = tmp_path / "bad.html"
    bad = "<script>document.title = 'owned'</script><img src='https://example.com/x.png' onerror='document.title = 1'>"
    page.write_text(path.read_text(encoding="utf-8").replace("<h1>", f"{bad}<h1>", 1), encoding="utf-8")
    browser.open(page)
    browser.until("document.documentElement.dataset.ready")
    assert browser.evaluate("document.title") == "run"
    assert any("Content Security Policy" in error for error in browser.errors)
