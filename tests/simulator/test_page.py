"""`pivot-pipeline simulate --html --png`: what is written, and what is refused before anything is simulated."""

import base64
import os
import re
import struct
import zlib
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from pipeline.cli.commands import USER_FAULT
from pipeline.core.modes import ModeName
from pipeline.simulator.forecast import Candidate, Forecast, best_of
from pipeline.simulator.modes import Schedule
from pipeline.simulator.page import page, pictures
from pipeline.simulator.plots import DPI, WIDTH_IN, as_png, as_svg, size_px, throughput_figure
from pipeline.simulator.result import Result, simulate
from pipeline.simulator.setup import Setup, paper_setup
from pipeline.simulator.study import Study, growth, idle_text
from tests.cli.conftest import Pivot, pivot

__all__ = ["pivot"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    sections = {
        "model": {"policy": {"path": "qwen2.5-1.5b"}, "genrm": {"path": "glm-z1-9b"}},
        "cluster": {"kind": "local", "nodes": 1, "slots_per_node": 4},
        "data": {"train_files": str(tmp_path / "x.jsonl"), "train_batch_size": 4},
        "rollout": {"n": 4, "max_response_length": 512},
        "reward": {"genrm": {"template": "{{ prompt }}{{ response }}", "max_tokens": 128}},
        "trainer": {"total_training_steps": 1},
    }
    (tmp_path / "x.jsonl").write_text("{}\n")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    return tmp_path / "run.yaml"


class _Page(HTMLParser):
    """What a browser would load, and the text of cells; every tag must be closed by its own."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.alternatives: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loads += [found[name] or "" for name in ("src", "href", "srcset", "action", "data") if name in found]
        self.alternatives += [found.get("alt") or ""] if tag == "img" else []
        assert tag not in ("script", "iframe", "link")
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.cells += [""] if tag in ("td", "th") else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def _svgs(text: str) -> list[str]:
    return [base64.b64decode(load.partition(",")[2]).decode() for load in _Page(text).loads]


def _png_size(data: bytes) -> tuple[int, int]:
    """Read as a decoder reads: signature, checksums, and pixels of the promised number."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, []
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        chunks.append((kind, body))
        at += 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", chunks[0][1][:10])
    assert chunks[-1][0] == b"IEND" and (depth, colour) == (8, 6)
    pixels = zlib.decompress(b"".join(body for kind, body in chunks if kind == b"IDAT"))
    assert len(pixels) == height * (1 + 4 * width)
    return width, height


def test_the_page_needs_nothing_but_itself(config: Path, pivot: Pivot) -> None:
    done = pivot("simulate", str(config), "--html", "forecast.html", "--png", "plots/new")
    assert done.code == 0 and "page: forecast.html" in done.out and "plots: 7 in plots/new" in done.out
    text = Path("forecast.html").read_text()
    found = _Page(text)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text), "nothing is loaded from elsewhere"
    assert len(found.loads) == 7 and all(load.startswith("data:image/svg+xml;base64,") for load in found.loads)
    for svg in _svgs(text):
        assert not re.search(r'(href|src)="(?!#)|url\((?!#)|<(script|image|text|style>@)', svg)
    assert all(len(alternative) > 40 for alternative in found.alternatives)
    assert {path.stem for path in Path("plots/new").iterdir()} == {
        "throughput",
        "utilisation-4",
        *(f"timeline-4-{mode.value}" for mode in ModeName),
    }
    for path in Path("plots/new").iterdir():
        assert _png_size(path.read_bytes())[0] == WIDTH_IN * DPI
    rows = [re.split(r"  +", row) for row in done.out.splitlines()[1:6]]
    assert [row[1].split()[0] for row in rows] == list(ModeName)
    for row in rows:
        start = found.cells.index(row[1])
        assert found.cells[start + 2] == row[2], "the page says what the terminal says"


def test_several_numbers_of_gpus_say_what_more_bring(config: Path, pivot: Pivot) -> None:
    done = pivot("simulate", str(config), "--gpus", "4,8", "--modes", "colocated", "--html", "forecast.html")
    growing = next(line for line in done.out.splitlines() if line.startswith("4 to 8 GPUs, 2 times as many"))
    text = Path("forecast.html").read_text()
    assert growing in unescape(text) and "name several" not in text
    assert [load[:26] for load in _Page(text).loads] == ["data:image/svg+xml;base64,"] * 5


def test_json_stays_json_beside_a_page(config: Path, pivot: Pivot) -> None:
    done = pivot("simulate", str(config), "--modes", "colocated", "--json", "--html", "forecast.html")
    assert done.out.startswith("[{") and done.out.count("\n") == 1
    assert "page: forecast.html" in done.err and Path("forecast.html").stat().st_size > 10_000


def test_what_cannot_be_written_is_refused_before_the_simulation(config: Path, pivot: Pivot) -> None:
    Path("folder.html").mkdir()
    Path("file").write_text("mine")

    def refused(*options: str) -> str:
        # So many GPUs would take minutes.
        done = pivot("simulate", str(config), "--gpus", "512", "--seeds", "50", *options)
        assert done.code == USER_FAULT and done.out == ""
        return done.err

    assert "folder.html: is a folder; valid: a file in it" in refused("--html", "folder.html")
    assert "there is no folder none" in refused("--html", "none/page.html")
    assert "valid: a file that ends in .html" in refused("--html", "run.yaml")
    assert "is no folder and cannot be made" in refused("--png", "file")
    assert "cannot be made" in refused("--png", "file/plots")
    assert "cannot be written: " in refused("--html", "/proc/page.html")
    assert Path("file").read_text() == "mine" and yaml.safe_load(config.read_text())["model"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(config: Path, pivot: Pivot) -> None:
    Path("closed").mkdir(mode=0o500)
    done = pivot("simulate", str(config), "--html", "closed/page.html")
    assert done.code == USER_FAULT and "closed/page.html: cannot be written: Permission denied" in done.err


def test_a_refusal_leaves_no_file_and_keeps_an_old_page(config: Path, pivot: Pivot) -> None:
    Path("old.html").write_text("old")
    Path("taken").write_text("")
    for page_file in ("old.html", "new.html"):
        assert pivot("simulate", str(config), "--html", page_file, "--png", "taken").code == USER_FAULT
    assert Path("old.html").read_text() == "old" and not Path("new.html").exists()


# --- studies made by hand


def _study(rows: dict[int, list[Forecast]], setups: dict[int, Setup]) -> Study:
    return Study(title="A <b>policy</b> & $judge", setups=setups, rows=rows, inputs=[("lengths", "<i>")])


def _row(setup: Setup, mode: str, schedule: Schedule) -> Forecast:
    def run(*, seed: int, is_traced: bool = False) -> Result:
        return simulate(setup, schedule, seed=seed, is_traced=is_traced)

    row = best_of([Candidate(mode=mode, schedule=f"{mode} <4>", staleness=0, run=run)], 1)
    assert row is not None
    return row


@pytest.fixture(scope="module")
def study() -> Study:
    """A mode that nobody knows yet, and a number of GPUs on which nothing fits."""
    setup = paper_setup(1, "h800", num_gpus=8, num_sequences=32)
    known = Schedule(mode=ModeName.COLOCATED, rollout=8, train=8, staleness=0)
    rows = [_row(setup, "colocated", known), _row(setup, "shiftable", known)]
    return _study({8: rows, 4: []}, {8: setup, 4: setup})


def test_any_mode_is_drawn_and_texts_are_only_text(study: Study) -> None:
    shown = list(pictures(study))
    assert [picture.name for picture in shown] == [
        "throughput",
        "utilisation-8",
        "timeline-8-colocated",
        "timeline-8-shiftable",
    ]
    text = page(study, shown)
    cells = _Page(text).cells
    assert "shiftable <4>" in cells and "<i>" in cells
    assert "A &lt;b&gt;policy&lt;/b&gt; &amp; $judge" in text
    assert "No mode fits on 4 GPUs" in text and "name several" in text


def test_numbers_on_the_page_are_those_of_the_rows(study: Study) -> None:
    cells = _Page(page(study, [])).cells
    row, start = study.rows[8][1], cells.index("shiftable <4>")
    assert cells[start - 1 : start + 6] == [
        "8",
        "shiftable <4>",
        "0",
        f"{row.sequences_per_s:.2f}",
        f"{row.step_s:.3g} s",
        f"{row.idle:.0%}",
        f"{row.shifts_per_step:.1f}",
    ]
    start = cells.index("shiftable <4>", start + 1)
    shares = [abs(row.idle_by[state]) for state in ("rollout", "reward", "train", "shift")]
    assert cells[start + 1 : start + 6] == [f"{share:.0%}" for share in (row.idle, *shares)]


def test_nothing_that_fits_is_a_page_without_plots(study: Study) -> None:
    nothing = _study({4: []}, {4: study.setups[4]})
    assert list(pictures(nothing)) == [] and "No mode fits on 4 GPUs" in page(nothing, [])


def test_growth_goes_from_best_to_best_in_ascending_order(study: Study) -> None:
    slow, fast = study.rows[8][0], study.rows[8][1]
    slow, fast = (
        Forecast(
            **{**{name: getattr(row, name) for name in row.__slots__}, "sequences_per_s": rate, "step_s": 32 / rate}
        )
        for row, rate in ((slow, 2.0), (fast, 3.0))
    )
    found = growth({32: [slow, fast], 4: [], 16: [slow]})
    assert [(step.fewer, step.more, step.gain) for step in found] == [(16, 32, 1.5)]
    assert "16 to 32 GPUs, 2 times as many: 1.50 times the sequences/s, a step of 10.7 instead of 16 s" in str(found[0])


def test_idle_time_is_told_with_the_largest_part_first(study: Study) -> None:
    row = study.rows[8][0]
    text = idle_text(row)
    first = max(row.idle_by, key=lambda state: row.idle_by[state])
    assert text.startswith(f"{row.idle:.0%} of GPU time: {'in shifts' if first == 'shift' else f'{first} GPUs'}")


# --- figures


def test_panels_for_groups_of_models_have_scales_of_their_own() -> None:
    """What benchmarks draw: modes by group of models, which differ by an order of magnitude."""
    groups = {f"group {n}": {"colocated": 10.0 / n, "shiftable": 12.0 / n} for n in (1, 2, 3, 4, 5)}
    figure = throughput_figure(groups, shares_scale=False)
    drawn = [panel for panel in figure.axes if panel.get_visible()]
    assert [panel.get_title(loc="left") for panel in drawn] == list(groups)
    assert [[bar.get_width() for bar in panel.patches] for panel in drawn] == [
        list(g.values()) for g in groups.values()
    ]
    assert [panel.get_xlim()[1] for panel in drawn] == pytest.approx([1.3 * 12 / n for n in (1, 2, 3, 4, 5)])
    shared = throughput_figure(groups)
    assert {panel.get_xlim()[1] for panel in shared.axes if panel.get_visible()} == {1.3 * 12}
    assert _png_size(as_png(figure)) == size_px(figure)


def test_the_same_figure_gives_the_same_bytes() -> None:
    def made() -> bytes:
        return as_svg(throughput_figure({"8 GPUs": {"colocated": 1.0}, "16 GPUs": {}}))

    assert made() == made()
