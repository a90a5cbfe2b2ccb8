"""Reports of runs: the page says what the folder says, whatever is missing there, and however long the run was."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from pipeline.report import figures
from pipeline.report.build import build
from pipeline.report.figures import quantile
from pipeline.report.run import read_run
from pipeline.report.sample_list import sample_list
from pipeline.watching.history import BINS_PER_OCTAVE, length_bin
from tests.cli.conftest import Pivot, pivot
from tests.fakes.run_files import RunFiles
from tests.report.test_charts import HOSTILE

__all__ = ["pivot"]

STEPS, SLOTS = 12, 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    return RunFiles(tmp_path_factory.mktemp("report") / "a run", STEPS, SLOTS, "placement.mode=shiftable")


@pytest.fixture(scope="module")
def text(files: RunFiles) -> str:
    return build(files.run)


def data_of(text: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    data: dict[str, Any] = json.loads(found[0])
    return data


def table_after(text: str, heading: str) -> list[list[str]]:
    part = text[text.index(f">{heading}</h2>") :]
    part = part[: part.index("</section>")]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", part)
    return [[unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in rows]


def test_the_page_has_all_that_a_run_left(text: str) -> None:
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", text)
    assert headings == [
        *("What to change first", "Slots", "Time", "Learning", "Lengths", "Shifts", "Judge failures", "Samples"),
        *("Environment", "Configuration"),
    ]
    charts = data_of(text)["charts"]
    drawn = {"slots", "throughput", "queues", "spent", "stages", "reward", "accuracy", "tokens", "staleness"}
    assert drawn | {"response-lengths", "verdict-lengths", "entropy", "useless"} == charts.keys()
    assert {*re.findall(r'<figure class="chart" id="([\w-]+)">', text)} == charts.keys()
    assert all(re.findall(r'aria-label="([^"]{8,})"', text))


def test_slots_stand_with_each_shift_and_what_it_was_worth(text: str, files: RunFiles) -> None:
    slots = data_of(text)["charts"]["slots"]
    assert [row["name"] for row in slots["rows"]] == [f"node-0:{i}" for i in range(SLOTS)]
    assert all(len(row["times"]) == len(row["codes"]) for row in slots["rows"])
    assert len(slots["marks"]) == 4 * 3 * STEPS and len(slots["notes"]) == 3 * STEPS
    at, until, rows, told, note = slots["marks"][0]
    assert until - at == pytest.approx(0.3, abs=0.02) and told == "rollout ▶ reward: 0.3 s (down 0.1 s, up 0.2 s)"
    assert re.search(r"gain \+\d\.\d\d s predicted, [+-]\d\.\d\d s measured", slots["notes"][note])
    first = read_run(files.run).shifting[0]
    assert at == pytest.approx(10.0, abs=0.1) and rows == [first.shifts[0]["block"]]


def test_the_tables_say_what_the_files_say(text: str, files: RunFiles) -> None:
    record = read_run(files.run)
    shifts = table_after(text, "Shifts")
    assert len(shifts) == 1 + 3 * STEPS
    worth = record.shifting[0].worth
    assert worth is not None
    assert shifts[1][4:7] == [f"{worth[n]:+.2f}" for n in ("predicted_gain_s", "measured_gain_s", "regret_s")]
    failures = table_after(text, "Judge failures")
    assert failures[1:] == [["empty", f"{7 * STEPS}", "0.68%"], ["truncated", f"{24 * STEPS}", "2.34%"]]
    stages = {row[0]: row[1:] for row in table_after(text, "Time")[1:] if len(row) == 4}
    assert stages["rollout"] == ["6.00", "-", "60%"] and stages["control"] == ["0.10", "-", "1%"]
    shares = {row[0]: float(row[1].rstrip("%")) for row in table_after(text, "Time")[1:] if len(row) == 2}
    assert sum(shares.values()) == pytest.approx(100, abs=0.5) and shares["rollout"] > 35
    assert "<b>done</b>status" in text and f"<b>{STEPS} of {STEPS}</b>steps" in text


def test_time_is_where_the_slots_say_it_was(text: str) -> None:
    spent = data_of(text)["charts"]["spent"]
    for i in range(1, STEPS):
        assert sum(series["y"][i] for series in spent["series"]) == pytest.approx(SLOTS, abs=0.01)
    assert spent["titles"][0] == "step 1" and len(spent["edges"]) == STEPS + 1


def test_samples_stand_with_their_critiques(text: str) -> None:
    assert text.count("<article") == 4 * STEPS and text.count('class="sample failed"') == STEPS
    assert "step 12, score 1; 400 tokens" in text and "failed: truncated" in text
    assert text.index("step 12, ") < text.index("step 11, ")
    assert text.count('class="sample best"') == text.count('class="sample worst"') == STEPS


def test_samples_of_an_older_run_are_shown_too() -> None:
    old = {"step": 3, "id": "000003-00001-0002", "prompt": "why?", "response": "so", "critique": "well", "score": 1.0}
    text = sample_list([old, {"torn": 1}])
    assert text.count("<article") == 1 and "step 3, score 1; ? tokens" in text and "so</pre>" in text


def test_lengths_are_counted(files: RunFiles, text: str) -> None:
    bars = data_of(text)["charts"]["response-lengths"]
    assert [series["name"] for series in bars["series"]] == ["all steps", "steps 1 to 3", "steps 10 to 12"]
    assert all(sum(series["y"]) == pytest.approx(100, abs=0.1) for series in bars["series"])
    from collections import Counter

    counted = Counter({length_bin(100): 90, length_bin(4000): 10})
    assert 100 <= quantile(counted, 0.9) <= 100 * 2 ** (1 / BINS_PER_OCTAVE)
    assert 4000 <= quantile(counted, 0.91) <= 4000 * 2 ** (1 / BINS_PER_OCTAVE)


def test_the_page_of_a_long_run_of_many_slots_is_small(tmp_path: Path) -> None:
    """How long it takes is measured by benchmarks/report.py."""
    files = RunFiles(tmp_path / "r", 200, 32, "placement.mode=shiftable")
    assert len(build(files.run).encode()) < 8e6


def test_slots_that_change_very_often_are_drawn_less_closely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RunFiles(tmp_path / "r", 20, 8)
    monkeypatch.setattr(figures, "_MOST_CHANGES", 300)
    rows = data_of(build(files.run))["charts"]["slots"]["rows"]
    assert 50 < sum(len(row["times"]) for row in rows) <= 310
    assert all(row["end"] == pytest.approx(210, abs=1) for row in rows), "to the end"


# --- what is missing, and what is hostile -----------------------------------------------------------------------------


FILES = ("timeline", "decisions", "judge_samples", "metrics", "summary", "environment", "status")


@pytest.mark.parametrize("gone", FILES)
def test_a_page_can_do_without_any_file(tmp_path: Path, gone: str) -> None:
    files = RunFiles(tmp_path / "r", 3, 4, "placement.mode=shiftable")
    getattr(files.run, gone).unlink()
    text = build(files.run)
    assert ("<h1>r</h1>" in text and data_of(text)["steps"]) or gone == "metrics"


def test_a_run_that_left_nothing_is_a_page(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "r", 1, 1)
    for name in FILES:
        getattr(files.run, name).unlink()
    files.run.config.write_text("{")
    text = build(files.run)
    assert "<h1>r</h1>" in text and data_of(text) == {"charts": {}, "steps": []}


def test_text_of_models_is_only_text(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "r", 3, 4, "placement.mode=shiftable", text=HOSTILE)
    text = build(files.run)
    assert text.count("<script") == 2 and "<img" not in text and "\x1b" not in text
    assert "&lt;img src=x onerror=alert(1)&gt; \\x1b[2J\\u202e" in text


def test_secrets_are_not_on_the_page(tmp_path: Path) -> None:
    changes = ("cluster.env.MY_TOKEN=hunter2hunter2", "tracking.uri=http://me:hunter3hunter3@host:5000")
    files = RunFiles(tmp_path / "r", 2, 2, *changes)
    text = build(files.run)
    assert "MY_TOKEN" in text and "hunter" not in text


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_where_it_is_told(pivot: Pivot, files: RunFiles) -> None:
    done = pivot("report", str(files.run.path), "-o", "page.html")
    assert (done.code, done.out) == (0, f"page.html: {Path('page.html').stat().st_size / 1e6:.1f} MB\n")
    assert Path("page.html").stat().st_mode & 0o077 == 0, "what models and users wrote is the user's alone"
    assert pivot("report", str(files.run.path)).code == 0 and Path("a run.html").is_file()


def test_what_cannot_be_written_is_refused(pivot: Pivot, files: RunFiles) -> None:
    Path("folder.html").mkdir()
    for out, why in (
        ("folder.html", "is a folder"),
        ("none/page.html", "no folder none"),
        ("page.txt", "ends in .html"),
    ):
        done = pivot("report", str(files.run.path), "-o", out)
        assert done.code == 2 and why in done.err and done.out == ""
    assert pivot("report", "nothing").code == 2


def test_neither_the_queue_nor_a_pickle_is_opened(files: RunFiles) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from pipeline.report.build import build; "
        "from pipeline.run_folder import RunFolder; build(RunFolder(Path(sys.argv[1]))); "
        "print([m for m in ('sqlite3', 'pickle', 'cloudpickle', 'pyarrow', 'torch', 'mlflow', 'rich', 'matplotlib') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(files.run.path)], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    assert done.stdout.strip() in ("[]", "['pickle']"), done.stdout
