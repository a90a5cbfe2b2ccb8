"""The screen of `watch`: of a live run, of one that is over, on terminals of any size, and on none."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, ConsoleDimensions

from pipeline.cli.watch_screen import letter, screen
from pipeline.run_folder import RunFolder, write_json
from pipeline.status import start_ticks
from tests.cli.conftest import COMMAND, Pivot, environment

NOW = 1_000_000.0
ROLES = ("rollout", "reward", "train")


def slot(number: int, role: str | None = None, state: str = "work", node: str = "n0", **more: Any) -> dict[str, Any]:
    role = ROLES[number % 3] if role is None else role
    told = {"node": node, "slot": number, "role": role, "state": state, "worker": f"{role}-{number}"}
    return told | {"running": 3 + number, "tokens_per_s": 1000.0 + number} | more


def status_of(num_slots: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "run": "r",
        "status": "running",
        "live": True,
        "attempt": 1,
        "started": NOW - 100,
        "updated": NOW,
        "step": 6,
        "total_steps": 20,
        "nodes": {"n0": "ready"},
        "workers": [],
        "slots": [slot(number) for number in range(num_slots)],
        "queues": {"rollout": {"waiting": 12, "running": 20}, "reward": {"waiting": 3, "running": 17}},
        "steps": [
            {
                "step": 6,
                "sequences": 128,
                "rolled_out": 96,
                "scored": 60,
                "running": ["rollout", "reward"],
                "began": NOW - 3.0,
                "expected_s": 10.0,
            }
        ],
        "shifts": [
            {
                "wall": NOW - 7,
                "step": 5,
                "old": "rollout",
                "new": "reward",
                "slots": 2,
                "took_s": 0.25,
                "decision": 9,
                "predicted_gain_s": 1.25,
                "measured_gain_s": -0.5,
            }
        ],
    } | more


def rows_of(num: int = 5, **more: float) -> list[dict[str, float | None]]:
    return [
        {
            "step": float(step),
            "time": NOW - 4.0 * (num - step),
            "critic/score/mean": step / 10,
            "val/acc": 0.25 if step == 2 else None,
            "perf/throughput": 1234.0,
            "timing_s/step": 4.0,
            "queue/num_trained": 100.0,
            **more,
        }
        for step in range(1, num + 1)
    ]


def drawn(
    status: dict[str, Any], rows: list[dict[str, float | None]], width: int = 100, height: int | None = 40, **more: Any
) -> str:
    size = ConsoleDimensions(width, height) if height else None
    console = Console(width=width, color_system=None, **more)
    with console.capture() as capture:
        console.print(screen("my run", status, rows, size, NOW))
    return capture.get()


# --- what stands on it ------------------------------------------------------------------------------------------------


def test_a_live_run_says_where_it_is_and_when_it_will_be_done() -> None:
    text = drawn(status_of(), rows_of())
    assert "my run  running  5 of 20 steps  1 min 40 s  about 1 min 00 s to go" in text
    assert "step 6  rolled out 96/128, judged 60/128  3.0 s, about 7.0 s to go" in text
    assert "queues  rollout 12 wait, 20 run; reward 3 wait, 17 run" in text
    assert re.search(r"reward +0\.500  ▁.*█", text) and re.search(r"accuracy +0\.250", text)
    assert "1,234 tokens/s, 4.00 s/step" in text
    late = status_of()
    late["steps"][0]["began"] = NOW - 15
    assert "15.0 s, 5.0 s longer than before" in drawn(late, rows_of())


def test_each_slot_has_a_row_with_what_it_does() -> None:
    slots = [slot(0), slot(1, state="idle", running=0, tokens_per_s=0.0), slot(2), slot(3, role="", state="shift")]
    lines = [line.split() for line in drawn(status_of(slots=slots), rows_of()).splitlines()]
    assert ["0", "R", "rollout", "work", "3", "1,000", "█" * 20] in lines
    assert ["1", "j", "reward", "idle", "-", "-"] in lines
    assert [line[:6] for line in lines if line[:2] == ["2", "T"]] == [["2", "T", "train", "work", "5", "1,002"]]
    assert any(line[:4] == ["3", "X", "shift", "shift"] for line in lines)


def test_the_last_shifts_stand_with_their_gains() -> None:
    at = time.strftime("%H:%M:%S", time.localtime(NOW - 7))
    lines = [line.split() for line in drawn(status_of(), rows_of()).splitlines()]
    assert [at, "5", "2", "rollout", "▶", "reward", "0.2", "s", "+1.25", "-0.50"] in lines
    unknown = status_of()
    unknown["shifts"][0]["measured_gain_s"] = None
    assert "+1.25         -" in drawn(unknown, rows_of())


def test_what_needs_a_look_is_said() -> None:
    worse = {"genrm/num_verdicts": 100.0, "genrm/num_failed": 7.0, "genrm/failed_timeout": 7.0}
    status = status_of(
        nodes={"n0": "ready", "n1": "lost"},
        updated=NOW - 60,
        workers=[{"name": "reward-3", "state": "dead"}],
        mlflow={"trouble": "it is away", "unsent_points": 9, "unsent_steps": 1, "uri": ""},
    )
    text = drawn(status, rows_of(**worse))
    for said in (
        "! the controller has said nothing for 1 min 00 s",
        "! node n1 is lost",
        "! without a process that works: reward-3",
        "! MLflow: 9 points wait: it is away",
        "! the judge failed on 7% of the last responses (timeout 35)",
    ):
        assert said in text
    assert "! " not in drawn(status_of(), rows_of())


def test_a_run_that_is_over_has_its_last_screen() -> None:
    error = {"reason": "worker reward-0 died", "role": "reward", "node": "n0"}
    text = drawn(status_of(status="failed", live=False, error=error, updated=NOW - 40), rows_of())
    assert "my run  failed  5 of 20 steps  1 min 00 s" in text and "to go" not in text
    assert "! failed (reward on n0): worker reward-0 died" in text


def test_a_run_that_has_not_begun_is_a_screen_too() -> None:
    assert "my run  new" in drawn({"run": "r", "status": "new", "attempt": 0, "live": False}, [])


# --- on any terminal --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_slots", "num_nodes"), [(1, 1), (4, 1), (32, 4), (128, 16)])
@pytest.mark.parametrize(("width", "height"), [(40, 12), (60, 20), (80, 24), (132, 43), (250, 70)])
def test_nothing_is_wider_or_longer_than_the_terminal(num_slots: int, num_nodes: int, width: int, height: int) -> None:
    slots = [slot(i % 8, node=f"node-{i * num_nodes // num_slots:03}") for i in range(num_slots)]
    text = drawn(status_of(slots=slots, steps=[], shifts=[]), rows_of(), width, height)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width and len(lines) <= height
    letters = "".join(letter(one) for one in slots)
    told = sum(text.count(f"{a}") for a in ("R", "J", "T"))
    assert told >= min(len(letters), 60) or "more lines" in text


def test_many_slots_stand_side_by_side_and_very_many_as_letters() -> None:
    slots = [slot(i, node=f"n{i // 8}") for i in range(32)]
    beside = drawn(status_of(slots=slots), rows_of(), 100, 30)
    assert "n0:0  R  1,000" in beside and "n3:31  J  1,031" in beside and "RUNS" not in beside
    short = drawn(status_of(slots=slots), rows_of(), 80, 20)
    assert "n0  RJTRJTRJ  8,028 tokens/s" in short and "R rollout  J judge  T train" in short
    plain = drawn(status_of(slots=slots), rows_of(), height=None)
    assert sum(bool(re.match(r"n\d:\d+ ", line)) for line in plain.splitlines()) == 32, "without a terminal all of them"


def test_letters_tell_roles_and_states_apart() -> None:
    found = [letter(slot(0, role=role, state=state)) for role in ROLES for state in ("work", "idle")]
    found += [letter(slot(0, role="train", state=state)) for state in ("publish", "save")]
    found += [letter(slot(0, role="", state=state)) for state in ("shift", "start", "nobody")]
    assert found == ["R", "r", "J", "j", "T", "t", "P", "C", "X", "S", "."]


def test_roles_are_coloured_as_in_plots() -> None:
    console = Console(width=100, force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(screen("r", status_of(), rows_of(), None, NOW))
    text = capture.get()
    assert all(f"48;2;{rgb}" in text for rgb in ("86;180;233", "230;159;0", "0;158;115"))


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "my run")
    made.create()
    made.config.touch()
    rows = [{**row, "time": time.time()} for row in rows_of()]
    made.metrics.write_text("".join(f"{json.dumps(row | {'step': int(row['step'] or 0)})}\n" for row in rows))
    return made


def tell(run: RunFolder, pid: int | None, **more: Any) -> None:
    alive: dict[str, Any] = {"pid": pid, "pid_start": start_ticks(pid)} if pid else {"pid": None}
    steps = [step | {"began": time.time() - 3} for step in status_of()["steps"]]
    alive["steps"] = steps
    write_json(run.status, status_of(updated=time.time(), started=time.time() - 5) | alive | more, durable=False)


def test_without_a_terminal_it_is_one_plain_screen(pivot: Pivot, run: RunFolder) -> None:
    tell(run, os.getpid())
    done = pivot("watch", str(run.path))
    assert done.code == 0 and "\x1b" not in done.out and "my run  running  5 of 20 steps" in done.out
    assert sum(line.startswith(f"{n}  ") for line in done.out.splitlines() for n in range(4)) == 4


def test_hostile_text_is_shown_and_not_obeyed(pivot: Pivot, run: RunFolder) -> None:
    bad = "\x1b[2J\x1b]0;owned\x07\u202e"
    slots = [slot(0, node=bad, role=bad, state=bad, worker=bad)]
    shifts = [status_of()["shifts"][0] | {"old": bad, "new": bad}]
    tell(run, None, status="failed", slots=slots, shifts=shifts, error={"reason": bad, "role": bad, "node": bad})
    out = pivot("watch", str(run.path)).out
    assert "\\x1b[2J" in out and not any(c in out for c in "\x1b\x07\u202e")


def on_terminal(run: RunFolder, width: int = 90, height: int = 30) -> tuple["subprocess.Popen[bytes]", int]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    kept = {name: value for name, value in environment().items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    kept["TERM"] = "xterm-256color"
    command = [*COMMAND, "watch", str(run.path)]
    process = subprocess.Popen(command, env=kept, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    return process, master


def read_until(fd: int, wanted: bytes) -> bytes:
    found, deadline = b"", time.monotonic() + 30
    while wanted not in found:
        assert time.monotonic() < deadline, found[-2000:]
        try:
            found += os.read(fd, 1 << 16)
        except OSError:  # the other end is closed
            break
    return found


def test_on_a_terminal_it_goes_on_until_the_run_ends(run: RunFolder) -> None:
    tell(run, os.getpid())
    process, master = on_terminal(run)
    first = read_until(master, b"rolled out 96/128")
    assert b"\x1b[?1049h" in first, "a screen of its own"
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 6, "critic/score/mean": 0.987}) + "\n")
    assert b"0.987" in read_until(master, b"0.987")
    tell(run, None, status="done", steps=[])
    left = read_until(master, b"\x1b[?1049l").rpartition(b"\x1b[?1049l")[2]
    assert b"done" in left + read_until(master, b"done"), "the last screen stays"
    assert process.wait(30) == 0
    os.close(master)


def test_ctrl_c_leaves_the_run_alone(run: RunFolder) -> None:
    tell(run, os.getpid())
    process, master = on_terminal(run)
    read_until(master, b"rolled out 96/128")
    process.send_signal(signal.SIGINT)
    assert b"\x1b[?1049l" in read_until(master, b"\x1b[?1049l")
    assert process.wait(30) == 0
    os.close(master)
