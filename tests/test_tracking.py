"""Tracking against a real MLflow: its sqlite store, and its HTTP server behind a door that can be shut."""

import io
import json
import os
import shutil
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.run_folder import RunFolder, read_json, write_json
from pipeline.tracking import Tracking

LIMIT_S = 60.0


def make_config(uri: str = "", **env: str) -> Config:
    return Config.model_validate(
        {
            "cluster": {"env": env},
            "model": {"policy": {"path": "emulated"}, "genrm": {"path": "emulated"}},
            "data": {"train_files": ["x.jsonl"]},
            "reward": {"genrm": {"template": "{{ response }}"}},
            "trainer": {"total_training_steps": 5},
            "tracking": {"uri": uri},
        }
    )


def make_run(path: Path) -> RunFolder:
    run = RunFolder(path)
    run.create()
    return run


def row(step: int) -> dict[str, float | None]:
    return {"time": 1000.0 + step, "training/global_step": float(step), "critic/score/mean": step / 10}


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def client_of(tracking: Tracking, uri: str):
    import mlflow

    assert tracking.location is not None
    return mlflow.MlflowClient(tracking_uri=uri), tracking.location["run_id"]


def steps_of(client, run_id: str, name: str = "critic/score/mean") -> list[int]:
    return sorted(m.step for m in client.get_metric_history(run_id, name))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Tracking]:
    """A run whose database did not exist before; its folder's name holds what a URI would misread."""
    run = make_run(tmp_path_factory.mktemp("my runs") / "50% of?it")
    tracking = Tracking(run, make_config(MY_TOKEN="hunter2", PLAIN="seen"), attempt=1)
    tracking.open()
    for step in range(1, 4):
        bad = {"actor/pg_loss": float("nan"), "actor/kl_loss": None, "reward@gsm8k//acc (k)": float("-inf")}
        tracking.log(step, {**row(step), **bad, "val@gsm8k//acc (k)": 0.5})
    assert tracking.close("done", LIMIT_S)
    return run, tracking


@pytest.fixture
def database(first: tuple[RunFolder, Tracking], tmp_path: Path) -> Path:
    """An initialised database: making one takes MLflow seconds."""
    return Path(shutil.copy(first[0].mlflow_db, tmp_path / "mlflow.db"))


def test_a_run_stands_in_the_run_folders_database(first: tuple[RunFolder, Tracking]) -> None:
    run, tracking = first
    assert run.mlflow_db.is_file()
    client, run_id = client_of(tracking, tracking.location["uri"])
    found = client.get_run(run_id)
    assert found.info.status == "FINISHED"
    assert steps_of(client, run_id) == [1, 2, 3]
    assert [m.timestamp for m in client.get_metric_history(run_id, "critic/score/mean")] == [1001000, 1002000, 1003000]
    assert found.data.params["trainer.lr"] == "1e-06"
    assert found.data.tags["deployment_mode"] == "disaggregated"
    assert (found.data.tags["attempt"], found.data.tags["run_name"]) == ("1", run.name)
    assert read_json(run.path / "mlflow_run.json")["run_id"] == run_id


def test_what_is_not_finite_is_left_out_and_counted(first: tuple[RunFolder, Tracking]) -> None:
    client, run_id = client_of(first[1], first[1].location["uri"])
    metrics = client.get_run(run_id).data.metrics
    assert metrics["tracking/nonfinite"] == 3
    assert "actor/pg_loss" not in metrics and "actor/kl_loss" not in metrics
    assert metrics["val_at_gsm8k/acc _k_"] == 0.5


def test_the_configuration_is_an_artifact_without_its_secrets(first: tuple[RunFolder, Tracking]) -> None:
    artifact = next((first[0].path / "mlartifacts").rglob("config.yaml"))
    text = artifact.read_text()
    assert "total_training_steps: 5" in text and "PLAIN: seen" in text and "hunter2" not in text


def test_r39_after_a_resume_each_step_stands_once_in_one_run(tmp_path: Path, database: Path) -> None:
    run = make_run(tmp_path)
    killed = Tracking(run, make_config(), attempt=1)
    killed.open()
    for step in (0, 1, 2, 3):
        killed.log(step, row(step))
    until(lambda: killed.location and not killed._pending)  # the kill: it is never closed

    resumed = Tracking(run, make_config(), attempt=2)
    resumed.resume([(step, row(step)) for step in (0, 1, 2, 3, 4)])  # step 4 was durable, and not sent
    resumed.open()
    resumed.log(3, {**row(3), "time": 2000.0, "critic/score/mean": 0.9})  # a step trained again
    resumed.log(5, row(5))
    assert resumed.close("cancelled", LIMIT_S)
    client, run_id = client_of(resumed, f"sqlite:///{database}")
    assert run_id == killed.location["run_id"]
    assert steps_of(client, run_id) == steps_of(client, run_id, "training/global_step") == [0, 1, 2, 3, 4, 5]
    assert [m.value for m in client.get_metric_history(run_id, "critic/score/mean")][3] == 0.3
    found = client.get_run(run_id)
    assert (found.info.status, found.data.tags["attempt"]) == ("KILLED", "2")


def test_r39_a_fork_is_a_child_with_the_history_up_to_its_step(tmp_path: Path, database: Path) -> None:
    uri = f"sqlite:///{database}"
    parent = Tracking(make_run(tmp_path / "parent"), make_config(uri), attempt=1)
    fork = make_run(tmp_path / "parent-from2")
    parent.resume([(step, row(step)) for step in range(1, 5)])
    assert parent.close("done", LIMIT_S)
    client, parent_id = client_of(parent, uri)
    origin = {"run": str(tmp_path / "parent"), "name": "parent", "step": 2, "mlflow_run_id": parent_id}
    write_json(fork.origin, origin)

    child = Tracking(fork, make_config(uri), attempt=1)
    child.resume([(step, row(step)) for step in (1, 2)])
    child.log(3, row(3))
    assert child.close("done", LIMIT_S)
    _, child_id = client_of(child, uri)
    assert child_id != parent_id
    assert steps_of(client, child_id) == [1, 2, 3] and steps_of(client, parent_id) == [1, 2, 3, 4]
    tags = client.get_run(child_id).data.tags
    assert (tags["mlflow.parentRunId"], tags["resumed_from"], tags["resume_step"]) == (parent_id, "parent", "2")


class Door:
    """MLflow's own server application in a thread. `mode`: serve, refuse (503), close (no answer), the end of a path
    (such calls are performed and their answers are lost), `value NAME` (metrics of this name are refused), or `late`:
    the next batch is kept and not answered; `perform_late` performs it."""

    def __init__(self, folder: Path, database: Path) -> None:
        os.environ["_MLFLOW_SERVER_FILE_STORE"] = f"sqlite:///{database}"
        os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = str(folder / "artifacts")
        from mlflow.server import app, handlers
        from werkzeug.serving import make_server

        with warnings.catch_warnings(action="ignore"):
            import mlflow.server.fastapi_app  # noqa: F401 - imported by its first search, with a warning of its own
        handlers._tracking_store = None
        self.mode, self.calls, self.lost, self.late = "serve", 0, 0, {}
        self._app = app
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self.uri = f"http://user:hunter2@127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="door", daemon=True).start()

    def __call__(self, environ, start_response):
        self.calls += 1
        if self.mode == "refuse":
            start_response("503 Service Unavailable", [("Content-Length", "0")])
            return [b""]
        if self.mode == "close":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return [b""]
        if self.mode.startswith(("value ", "late")) and environ["PATH_INFO"].endswith("runs/log-batch"):
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            environ["wsgi.input"] = io.BytesIO(body)
            if self.mode == "late":
                self.late, self.mode = environ, "serve"
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                return [b""]
            if any(metric["key"] == self.mode[6:] for metric in json.loads(body).get("metrics", ())):
                answer = json.dumps({"error_code": "INVALID_PARAMETER_VALUE", "message": "not this one"}).encode()
                length = str(len(answer))
                start_response("400 Bad Request", [("Content-Type", "application/json"), ("Content-Length", length)])
                return [answer]
        answer = self._app(environ, start_response)
        if environ["PATH_INFO"].endswith(self.mode):
            self.lost += 1
            b"".join(answer)
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return answer

    def perform_late(self) -> None:
        b"".join(self._app(self.late, lambda *_: None))

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def door(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("_MLFLOW_SERVER_FILE_STORE", "")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "")
    opened = Door(tmp_path, database)
    yield opened
    opened.stop()


def test_r38_a_server_that_refuses_costs_nothing_and_gets_every_point_later(
    tmp_path: Path, door: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    tracking = Tracking(make_run(tmp_path / "run"), make_config(door.uri), attempt=1, retry_s=0.02)

    def in_mode(mode: str, steps: list[int]) -> None:
        door.mode, before = mode, door.calls
        for step in steps:
            began = time.monotonic()
            tracking.log(step, {"critic/score/mean": 0.5})  # no time: sent twice it would stand there twice
            assert time.monotonic() - began < 0.05, "logging waited for the server"
        until(lambda: door.calls >= before + 2)  # it was tried, and tried again

    door.mode = "refuse"
    tracking.open()
    in_mode("refuse", [1])
    door.mode = "serve"
    until(lambda: not tracking._pending)
    in_mode("refuse", [2, 3])
    in_mode("close", [4])
    in_mode("runs/log-batch", [5])
    until(lambda: door.lost)
    door.mode = "serve"
    tracking.log(6, row(6))
    assert tracking.close("failed", LIMIT_S)

    said = capfd.readouterr()
    assert said.err.count("rows wait until it does") == said.err.count("answers again") >= 1
    assert "hunter2" not in said.out + said.err + str(tracking.location)
    client, run_id = client_of(tracking, door.uri)
    assert steps_of(client, run_id) == [1, 2, 3, 4, 5, 6]
    assert client.get_run(run_id).info.status == "FAILED"
    same = client.search_runs([client.get_run(run_id).info.experiment_id], "tags.run_name = 'run'")
    assert len(same) == 1


def test_r38_a_value_that_is_refused_is_given_up_alone_with_one_warning(
    tmp_path: Path, door: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    door.mode = "value actor/kl"
    tracking = Tracking(make_run(tmp_path / "run"), make_config(door.uri), attempt=1, retry_s=0.02)
    tracking.open()
    for step in (1, 2):
        tracking.log(step, {**row(step), "actor/kl": 0.5, **{f"m/{number}": float(number) for number in range(20)}})
    assert tracking.close("done", LIMIT_S)
    client, run_id = client_of(tracking, door.uri)
    assert steps_of(client, run_id) == steps_of(client, run_id, "m/19") == [1, 2]
    assert steps_of(client, run_id, "actor/kl") == []
    said = capfd.readouterr().err
    assert said.count("MLflow refused") == said.count("MLflow refused actor/kl of step 1") == 1


def test_r38_a_call_that_was_given_up_and_is_performed_later_doubles_nothing(tmp_path: Path, door: Door) -> None:
    """As by a server that stood still, which finds the call among those that wait for it."""
    door.mode = "late"
    tracking = Tracking(make_run(tmp_path / "run"), make_config(door.uri), attempt=1, retry_s=0.02)
    tracking.open()
    tracking.log(1, {"critic/score/mean": 0.5})
    assert tracking.close("done", LIMIT_S)
    client, run_id = client_of(tracking, door.uri)
    client.update_run(run_id, status="RUNNING")
    assert door.late and steps_of(client, run_id) == [1]
    door.perform_late()
    assert steps_of(client, run_id) == steps_of(client, run_id, "training/global_step") == [1]


def test_r38_a_run_is_made_once_though_the_answer_to_its_making_is_lost(tmp_path: Path, door: Door) -> None:
    door.mode = "runs/create"
    tracking = Tracking(make_run(tmp_path / "lost"), make_config(door.uri), attempt=1, retry_s=0.02)
    tracking.open()
    tracking.log(1, row(1))
    until(lambda: door.lost)
    door.mode = "serve"
    assert tracking.close("done", LIMIT_S)
    client, run_id = client_of(tracking, door.uri)
    runs = client.search_runs([client.get_run(run_id).info.experiment_id], "tags.run_name = 'lost'")
    assert [r.info.run_id for r in runs] == [run_id]
    assert steps_of(client, run_id) == [1]


def test_r38_the_end_of_a_run_waits_for_a_dead_server_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as nobody:  # bound, never listening: every connection is refused
        nobody.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        tracking = Tracking(make_run(tmp_path), make_config(uri), attempt=1, retry_s=0.02)
        tracking.log(1, row(1))
        began = time.monotonic()
        assert not tracking.close("done", 1.0)
        assert time.monotonic() - began < 2.0
    assert "1 rows did not reach MLflow" in capfd.readouterr().err


def test_a_row_that_mlflow_refuses_is_given_up_and_the_next_goes_on(tmp_path: Path, database: Path) -> None:
    tracking = Tracking(make_run(tmp_path), make_config(), attempt=1)
    tracking.open()
    tracking.log(1, {**row(1), "time": -5.0})
    tracking.log(2, row(2))
    assert tracking.close("done", LIMIT_S)
    client, run_id = client_of(tracking, f"sqlite:///{database}")
    assert steps_of(client, run_id) == [2]


def test_without_mlflow_nothing_is_started(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    tracking = Tracking(run, make_config("none"), attempt=1)
    tracking.open()
    tracking.log(1, row(1))
    assert tracking.close("done", 0.0)
    assert tracking.location is None and not run.mlflow_db.exists()


@pytest.mark.parametrize(
    "name", ["my runs/exp 1", 'it\'s "q"', "-x", "ünï-日本", "a#b", "p%41q", "50% of?it", "a;b&c=d+e", "a::b\\c"]
)
def test_r07_a_run_of_any_name_has_its_database_and_leaves_no_folder_beside_it(
    tmp_path: Path, database: Path, name: str
) -> None:
    run = make_run(tmp_path / "of me" / name)
    shutil.copy(database, run.mlflow_db)
    tracking = Tracking(run, make_config(), attempt=1)
    tracking.log(1, row(1))
    assert tracking.close("done", LIMIT_S)
    client, run_id = client_of(tracking, tracking.location["uri"])
    assert client.get_run(run_id).info.status == "FINISHED" and steps_of(client, run_id) == [1]
    assert os.listdir(tmp_path / "of me") == [name.split("/")[0]]
    assert len(list(run.path.glob("mlartifacts/*/artifacts/config.yaml"))) <= 1


def test_an_empty_folder_of_the_users_stays_beside_a_database(tmp_path: Path, database: Path) -> None:
    run = make_run(tmp_path / "50%")
    shutil.copy(database, run.mlflow_db)
    (tmp_path / "50%25").mkdir()
    tracking = Tracking(run, make_config(), attempt=1)
    tracking.log(1, row(1))
    assert tracking.close("done", LIMIT_S)
    assert (tmp_path / "50%25").is_dir()


def test_a_deleted_database_is_made_again_at_the_next_attempt(tmp_path: Path, database: Path) -> None:
    run = make_run(tmp_path)  # the new database is there already: making one takes seconds
    write_json(run.mlflow_run, {"key": "k", "run_id": "0" * 32})
    again = Tracking(run, make_config(), attempt=2)
    again.resume([(step, row(step)) for step in (1, 2)])
    assert again.close("done", LIMIT_S)
    client, run_id = client_of(again, again.location["uri"])
    assert run_id != "0" * 32 and read_json(run.mlflow_run) == {"key": "k", "run_id": run_id}
    assert steps_of(client, run_id) == [1, 2] and client.get_run(run_id).data.params["trainer.lr"] == "1e-06"
