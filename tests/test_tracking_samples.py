"""The samples of verdicts of a whole run, as a real MLflow server has them."""

import json
from pathlib import Path

from tests.fakes.mlflow_server import MlflowServer
from tests.scenarios.runs import submit, succeed


def test_the_table_of_judged_samples_stands_in_mlflow(tmp_path: Path) -> None:
    """Read as mlflow.load_table does, which looks for runs only where the whole process does."""
    import mlflow

    server, run = MlflowServer(tmp_path), tmp_path / "run"
    server.start()
    try:
        succeed(submit(run, f"tracking.uri={server.uri}", "trainer.total_training_steps=3"))
        run_id = json.loads((run / "mlflow_run.json").read_text())["run_id"]
        client = mlflow.MlflowClient(tracking_uri=server.uri)
        (shown,) = json.loads(client.get_run(run_id).data.tags["mlflow.loggedArtifacts"])
        table = json.loads(Path(client.download_artifacts(run_id, shown["path"])).read_text())
    finally:
        server.close()
    lines = [json.loads(line) for line in (run / "judge_samples.jsonl").read_text().splitlines()]
    assert shown == {"path": "judge_samples.json", "type": "table"}
    found = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert {line["step"] for line in lines} == {1, 2, 3} and all(line["critique"] for line in lines)
    assert [{name: row[name] for name in lines[0]} for row in found] == lines
