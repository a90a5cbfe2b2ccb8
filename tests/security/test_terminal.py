"""Text that a model, a log or a file name holds is shown by the commands and never obeyed by the terminal."""

import io
import os
from pathlib import Path

import pytest

from pipeline.cli.live import LiveView
from pipeline.cli.runs import read_status
from pipeline.run_folder import RunFolder
from pipeline.status import start_ticks
from pipeline.wording import visible
from tests.cli.conftest import Pivot, pivot
from tests.cli.test_commands import make_run

__all__ = ["pivot"]

HOSTILE = {
    "title": "\x1b]0;owned\x07",
    "clear": "\x1b[2J\x1b[H",
    "8-bit": "\x9b31m\x90q\x9c",
    "back": "safe\x08\x08\x08\x08\x7frm",
    "return": "an error\rall is well",
    "right to left": "\u202egnp.exe\u2066\u200f",
    "hidden": "a\u200bb\u2060c\ufeff",
    "lines": "one\u2028two\u2029three\x0b\x0c",
}


def is_tame(text: str) -> bool:
    return not any(c in text for hostile in HOSTILE.values() for c in hostile if not c.isprintable())


@pytest.mark.parametrize("name", HOSTILE)
def test_logs_and_status_show_it(pivot: Pivot, tmp_path: Path, name: str) -> None:
    text = HOSTILE[name]
    error = {"reason": text, "role": text, "node": text, "log_tail": f"{text}\n<script>alert(1)</script>"}
    workers = [{"name": text, "role": text, "node": text, "state": text}]
    alive = {"pid": os.getpid(), "pid_start": start_ticks(os.getpid())}
    run = make_run(tmp_path, "r", status="failed", stage=text, error=error, workers=workers, **alive)
    (run.tasks(1) / "rollout-1-2_0_log.out").write_text(f"the response: {text}")
    (run.logs(1) / f"local-0-{text}.log").write_text("x")
    for command in (
        ["status", "r"],
        ["status"],
        ["status", "r", "--json"],
        ["logs", "r"],
        ["logs", "r", "--step", "1"],
    ):
        done = pivot(*command)
        assert done.code == 0 and is_tame(done.out + done.err), command
    assert f"cause ({visible(text)} on {visible(text)}): {visible(text)}" in pivot("status", "r").out
    assert visible(f"==> attempt_1/local-0-{text}.log <==") in pivot("logs", "r").out
    assert f"the response: {visible(text)}" in pivot("logs", "r", "--step", "1").out


@pytest.mark.parametrize("name", HOSTILE)
def test_a_folder_with_such_a_name_is_no_run(pivot: Pivot, tmp_path: Path, name: str) -> None:
    """Somebody's archive may hold one; no command of ours makes one."""
    run = make_run(tmp_path, "r")
    run.path.rename(run.path.with_name(HOSTILE[name]))
    assert "no runs in" in pivot("status").out
    for command in ("status", "logs", "resume", "cancel"):
        done = pivot(command, HOSTILE[name])
        assert (done.code, done.out) == (2, "") and is_tame(done.err)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("name", HOSTILE)
def test_the_live_view_shows_it_as_text(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    text = HOSTILE[name]
    run = make_run(tmp_path, "[red]r[bold] [link=x]", status="running", stage=text, sequences={text: 3})
    out = Terminal()
    view = LiveView(RunFolder(tmp_path / text), out)
    view.show(read_status(run), [])
    view.close()
    shown = out.getvalue()
    assert visible(text).split("\\u2028")[0] in shown and text not in shown
    out = Terminal()
    view = LiveView(run, out)
    view.show(read_status(run), [])
    view.close()
    assert "run [red]r[bold] [link=x]" in out.getvalue()  # no markup of the display's either
