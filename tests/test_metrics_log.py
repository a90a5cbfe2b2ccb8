"""metrics.jsonl: each step once, whatever was killed while it was written; and names of metrics elsewhere."""

import json
import time
from pathlib import Path

import pytest

from pipeline.core.errors import RunError
from pipeline.tracking import MetricsLog, metric_name


def test_metrics_jsonl_holds_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(1, {"a": 1.0})
    log.append(2, {"a": float("nan"), "b": 2.0})
    log.append(2, {"a": 9.0})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["a"]) for r in rows] == [(1, 1.0), (2, None)]
    assert rows[1]["tracking/nonfinite"] == 1 and abs(rows[1]["time"] - time.time()) < 60


def test_metrics_jsonl_is_made_again_from_the_durable_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).append(1, {"a": 1.0, "time": 3.0})
    with open(path, "a") as file:
        file.write('{"step": 2, "a":')  # the writer was killed here
    log = MetricsLog(path)
    assert [step for step, _ in log.rows()] == [1]
    log.rewrite([(2, {"a": 2.0, "time": 5.0}), (1, {"a": 1.0})])
    log.append(2, {"a": 7.0})
    log.append(3, {"a": 3.0})
    assert [(step, r["a"]) for step, r in log.rows()] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [r["time"] for _, r in log.rows()][:2] == [3.0, 5.0]


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2, is no row of metrics"):
        MetricsLog(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("critic/score/mean", "critic/score/mean"),
        ("val-core/gsm8k/acc/mean@k", "val-core/gsm8k/acc/mean_at_k"),
        ("//a//b/", "a/b"),
        ("a/../b", "a/b"),
        ("größe[0]", "gr__e_0_"),
        ("@", "_at_"),
        ("/", "_"),
        ("x" * 300, "x" * 250),
    ],
)
def test_metric_names_become_what_mlflow_takes(name: str, expected: str) -> None:
    assert metric_name(name) == expected
