"""The pictures of docs/: `python docs/screenshots.py [--run FOLDER]`. A quickstart whose slots change hands runs for
real (two minutes); `watch` is looked at in tmux meanwhile, its report in Chromium afterwards. With --run, of a run that
is there, the report alone.

Writes docs/watch.png and docs/report.png. Needs tmux, chromium and a monospaced font.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from PIL import Image  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.terminal_theme import SVG_EXPORT_THEME  # noqa: E402
from rich.text import Text  # noqa: E402

from tests.fakes.chromium import Chromium, program  # noqa: E402

DOCS = ROOT / "docs"
COMMAND = [sys.executable, "-P", "-m", "pipeline.cli.main"]
SUBMIT = ["submit", "configs/quickstart.yaml", "placement/shiftable.yaml", "tracking.uri=none"]
COLUMNS, LINES = 104, 24
LOOK_AT = 30
"""Step at which `watch` is looked at."""
WIDTH, HEIGHT = 1160, 1500
MOST_BYTES = 300_000
LIMIT_S = 600
_PAGE = """<meta charset="utf-8"><body style="margin:0;background:{background}"><pre id="screen" style="margin:0;
padding:14px;font:15px/1.25 'DejaVu Sans Mono',monospace;color:{foreground};display:inline-block">{code}</pre>"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="the folder of a run that is over")
    run: Path | None = parser.parse_args().run
    path = program()
    if path is None:
        raise SystemExit("no Chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="pivot-screenshots-") as folder, Chromium(path, WIDTH, HEIGHT) as browser:
        if run is None:
            run = Path(folder) / "quickstart"
            save(DOCS / "watch.png", terminal(watched(run), browser, Path(folder)))
        save(DOCS / "report.png", report(run, browser, Path(folder)))
    return 0


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def watched(run: Path) -> str:
    """Run, and what `watch` shows in the middle of it, with its colours."""
    submitted = subprocess.Popen(
        [*COMMAND, *SUBMIT, "--run-dir", str(run)], env=environment(), stdout=subprocess.DEVNULL
    )
    socket = f"pivot-{os.getpid()}"
    tmux = ["tmux", "-L", socket]
    try:
        wait_for(lambda: step_of(run) >= LOOK_AT, submitted)
        size = ["-x", str(COLUMNS), "-y", str(LINES)]
        command = " ".join([*COMMAND, "watch", str(run)])
        subprocess.run([*tmux, "new-session", "-d", *size, command], env=environment(), check=True)
        wait_for(lambda: "tokens/s" in captured(tmux), submitted)
        time.sleep(2)
        return captured(tmux, "-e")
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, stderr=subprocess.DEVNULL)
        if submitted.wait(LIMIT_S) != 0:
            raise SystemExit(f"the run failed: {run}")


def captured(tmux: list[str], *how: str) -> str:
    return subprocess.run([*tmux, "capture-pane", "-p", *how], check=True, capture_output=True, text=True).stdout


def step_of(run: Path) -> int:
    try:
        return int(json.loads((run / "status.json").read_text())["step"])
    except (OSError, ValueError, KeyError):
        return 0


def wait_for(condition: object, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():  # type: ignore[operator]
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the run ended before it could be looked at")
        time.sleep(0.1)


def terminal(text: str, browser: Chromium, folder: Path) -> bytes:
    """What a terminal shows, drawn by the browser."""
    console = Console(record=True, file=io.StringIO(), width=COLUMNS, force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(text.rstrip()), soft_wrap=True)
    page = folder / "screen.html"
    html = console.export_html(inline_styles=True, code_format=_PAGE, theme=SVG_EXPORT_THEME)
    page.write_text(html, encoding="utf-8")
    browser.open(page)
    return browser.screenshot(browser.evaluate("document.getElementById('screen').getBoundingClientRect().toJSON()"))


def report(run: Path, browser: Chromium, folder: Path) -> bytes:
    """The upper part of the page, looked at more closely, with a hand on a shift."""
    page = folder / "report.html"
    subprocess.run([*COMMAND, "report", str(run), "-o", str(page)], env=environment(), check=True)
    browser.open(page)
    browser.until("document.documentElement.dataset.ready")
    browser.evaluate(_CLOSER)
    box = browser.evaluate("document.querySelector('#slots > canvas').getBoundingClientRect().toJSON()")
    places = ((x, y) for y in (28, 44, 60, 76) for x in range(260, int(box["width"]) - 400, 2))
    for x, y in places:
        browser.mouse("mouseMoved", box["x"] + x, box["y"] + y)
        told = browser.evaluate("document.querySelector('#slots > .tip').textContent")
        if "predicted" in told and "- s measured" not in told:
            break
    return browser.screenshot({"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT})


_CLOSER = """(() => {
    const [first, last] = ['first', 'last'].map((id) => document.getElementById(id));
    [first.value, last.value] = [25, 36];
    last.dispatchEvent(new Event('change'));
})()"""


def save(path: Path, png: bytes) -> None:
    """As few colours as needed."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    for colours in (256, 128, 64, 32):
        image.quantize(colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size < MOST_BYTES:
            break
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
