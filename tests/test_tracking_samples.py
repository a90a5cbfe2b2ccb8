"""The samples of verdicts of a whole run, as a real MLflow server has them."""

import json
from pathlib import Path

import pytest

from tests.fakes.mlflow_server import MlflowServer
from tests.scenarios.runs import submit, succeed


def test_the_table_of_judged_samples_stands_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    server, run = MlflowServer(tmp_path), tmp_path / "run"
    server.start()
    try:
        succeed(submit(run, f"tracking.uri={server.uri}", "trainer.total_training_steps=3"))
        run_id = json.loads((run / "mlflow_run.json").read_text())["run_id"]
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)  # load_table looks for runs there and nowhere else
        client = mlflow.MlflowClient()
        experiment = client.get_run(run_id).info.experiment_id
        table = client.load_table(experiment, "judge_samples.json", [run_id])
    finally:
        server.close()
    lines = [json.loads(line) for line in (run / "judge_samples.jsonl").read_text().splitlines()]
    found = table.to_dict("records")
    assert {line["step"] for line in lines} == {1, 2, 3} and all(line["critique"] for line in lines)
    assert [{name: row[name] for name in lines[0]} for row in found] == lines
