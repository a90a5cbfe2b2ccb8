"""What MLflow shows of a run that was killed and resumed: a real SQLite store."""

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from pipeline.run_folder import read_json
from tests.scenarios.runs import begin, pivot, rows, succeed, wait_for_end

SETTINGS = (
    *("tracking.uri=", "checkpoint.save_freq=2", "checkpoint.keep=100", "trainer.options.step_seconds=0.05"),
    "trainer.total_training_steps=500",
)


def ask(run: Path, sql: str, *values: object) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(run / "mlflow.db")) as db:
        return db.execute(sql, values).fetchall()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


def has_history(run: Path, step: int) -> bool:
    try:
        return bool(ask(run, "SELECT 1 FROM metrics WHERE key = 'critic/score/mean' AND step = ?", step))
    except sqlite3.OperationalError:  # MLflow has not made its tables yet, or is writing
        return False


def check_history(run: Path) -> None:
    """One run, in which each metric has each step once, with the value of metrics.jsonl."""
    assert len(ask(run, "SELECT run_uuid FROM runs")) == 1
    stored = ask(run, "SELECT step, key, value FROM metrics")
    written = [(row["step"], *item) for row in rows(run) for item in row.items() if item[0] not in ("step", "time")]
    assert sorted(stored) == sorted(written)


def test_r39_after_a_kill_between_checkpoints_each_metric_has_each_step_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = begin("submit", "configs/emulated.yaml", "--run-dir", str(run), "--wait", *SETTINGS)
    until(lambda: has_history(run, 3))
    os.kill(read_json(run / "status.json")["pid"], signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == 1
    wait_for_end(run)

    reached = int(rows(run)[-1]["step"])
    assert reached >= 3
    last = reached + 3  # one may be begun
    succeed(pivot("resume", str(run), f"trainer.total_training_steps={last}"))
    assert [row["step"] for row in rows(run)] == list(range(1, last + 1))
    check_history(run)
