"""Outages of a real MLflow server, a process of its own: nothing waits for it, and in the end it has all, once."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.cli.show import describe
from pipeline.node_load import NodeLoad
from pipeline.run_folder import RunFolder, read_json
from pipeline.tracking import Tracking
from tests.fakes.mlflow_server import MlflowServer
from tests.scenarios.runs import begin, pivot, rows, succeed, wait_for_end
from tests.test_tracking import LIMIT_S, client_of, make_config, make_run, row, steps_of, until

_BURN = "b = bytearray(64 << 20)\nwhile True: pass"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """It has its database, and is down."""
    made = MlflowServer(tmp_path_factory.mktemp("mlflow"))
    made.start()
    made.kill()
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")


def node(name: str, script: str) -> Iterator[str]:
    """A process that looks like the agent of a node, and does what the script says."""
    process = subprocess.Popen([sys.executable, "-c", script, "slurm.agent", "--node", name], stdin=subprocess.PIPE)
    yield name
    process.kill()
    process.communicate()


@pytest.fixture
def busy_node() -> Iterator[str]:
    yield from node("node-7", _BURN)


@pytest.fixture
def idle_node() -> Iterator[str]:
    yield from node("node-8", "input()")


def test_r38_a_server_that_is_down_killed_stalled_full_or_refusing_gets_each_point_once(
    tmp_path: Path, server: MlflowServer, impatient: None, idle_node: str
) -> None:
    tracking = Tracking(make_run(tmp_path / "run"), make_config(server.uri), attempt=1, retry_s=0.05, load_s=0.2)
    last = 0

    def outage(end: Callable[[], None], num_steps: int = 2) -> None:
        """Steps while it lasts; then it ends."""
        nonlocal last
        for step in range(last + 1, last + num_steps + 1):
            began = time.monotonic()
            tracking.log(step, row(step))
            assert time.monotonic() - began < 0.05, "logging waited for the server"
        last += num_steps
        until(lambda: tracking.location and tracking.location["trouble"])
        assert tracking.location["unsent_steps"] == num_steps
        assert tracking.location["unsent_points"] >= 3 * num_steps
        end()
        until(lambda: not tracking.location["trouble"])
        assert tracking.location["unsent_steps"] == 0

    tracking.open()
    outage(server.start)
    server.kill()
    outage(server.start)
    server.stall()
    outage(server.go_on)
    server.fill()
    outage(server.free)
    server.refuse()
    outage(server.accept)
    tracking.log(last + 1, row(last + 1))
    assert tracking.close("done", LIMIT_S)
    assert tracking.location["unsent_steps"] == 0 and tracking.location["trouble"] == ""

    run_id = tracking.location["run_id"]
    points = server.points(run_id)
    assert set(points.values()) == {1}
    for metric in ("critic/score/mean", "training/global_step"):
        assert [step for name, step, _ in sorted(points) if name == metric] == list(range(1, last + 2))
    loads = [at for name, _, at in points if name == f"system/{idle_node}/cpu_cores"]
    assert len(loads) == len(set(loads)) > 5
    server.kill()


def test_r39_a_row_that_comes_right_before_the_end_is_sent(
    tmp_path: Path, server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes, and with it the end, when all before it was just sent."""
    server.start()
    tracking = Tracking(make_run(tmp_path), make_config(server.uri), attempt=1)
    send_all, ending = Tracking._send_all, threading.Thread(target=tracking.close, args=("done", LIMIT_S))

    def then_the_end_comes(self: Tracking, session: object) -> None:
        send_all(self, session)  # type: ignore[arg-type]
        if self._end is None:
            tracking.log(2, row(2))
            ending.start()
            until(lambda: self._end)

    monkeypatch.setattr(Tracking, "_send_all", then_the_end_comes)
    tracking.log(1, row(1))
    tracking.open()
    until(lambda: ending.ident)
    ending.join()
    client, run_id = client_of(tracking, server.uri)
    assert steps_of(client, run_id) == [1, 2]
    assert client.get_run(run_id).info.status == "FINISHED"
    server.kill()


def test_r38_r39_a_run_killed_while_the_server_is_down_has_each_step_once_after_its_resume(
    tmp_path: Path, server: MlflowServer
) -> None:
    """And the run that goes on finds the server still down at its start."""
    run = tmp_path / "run"
    server.start()
    settings = (f"tracking.uri={server.uri}", "checkpoint.save_freq=5")
    process = begin(
        *("submit", "configs/emulated.yaml", "--run-dir", str(run), "--wait"),
        *("trainer.total_training_steps=10000", *settings),
        MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
    )
    try:
        until(lambda: process.poll() is not None or server.steps(run))
        server.kill()
        arrived = server.steps(run)
        assert arrived and process.poll() is None
        until(lambda: rows(run)[-1]["step"] > arrived[-1] + 5)
        until(lambda: (read_json(RunFolder(run).status) or {})["mlflow"]["trouble"])
        status = succeed(pivot("status", str(run)))
        assert "wait to be sent: " in status, status
        controller = (read_json(RunFolder(run).status) or {})["pid"]
        assert NodeLoad(controller).sample()["system/local-0/memory_gib"] > 0.01
    finally:
        process.kill()
        process.communicate()
    wait_for_end(run)
    last = int(rows(run)[-1]["step"])
    assert server.steps(run) == arrived

    more = f"trainer.total_training_steps={last + 30}"
    resumed = begin("resume", str(run), more, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    try:
        until(lambda: rows(run)[-1]["step"] > last)
        server.start()
        out, _ = resumed.communicate(timeout=LIMIT_S)
    finally:
        resumed.kill()
        resumed.wait()
        server.kill()
    assert resumed.returncode == 0, out
    every = list(range(1, last + 31))
    assert [r["step"] for r in rows(run)] == every
    assert server.account(run) == ([], [])
    assert json.loads((run / "status.json").read_text())["mlflow"]["unsent_points"] == 0


# --- the nodes' load ------------------------------------------------------------------------------------------------


def test_the_load_of_a_node_is_that_of_its_processes(busy_node: str) -> None:
    load = NodeLoad(os.getpid())
    found: dict[str, float] = {}

    def is_busy() -> bool:
        nonlocal found
        time.sleep(0.2)  # a sample is of the time since the one before
        found = load.sample()
        return found.get(f"system/{busy_node}/cpu_cores", 0.0) > 0.2

    until(is_busy)
    assert set(found) == {
        f"system/{busy_node}/{name}" for name in ("cpu_cores", "memory_gib", "host_cpu_percent", "host_memory_percent")
    }
    assert 0.06 < found[f"system/{busy_node}/memory_gib"] < 0.2
    assert 0 < found[f"system/{busy_node}/host_cpu_percent"] <= 100.0
    assert 0 < found[f"system/{busy_node}/host_memory_percent"] < 100.0
    began = time.process_time()
    for _ in range(10):
        load.sample()
    assert (time.process_time() - began) / 10 < 0.1  # of one core, every ten seconds


def test_samples_that_wait_are_bounded_and_span_the_whole_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle_node: str
) -> None:
    monkeypatch.setattr("pipeline.tracking._MOST_SAMPLES", 8)
    tracking = Tracking(make_run(tmp_path), make_config("http://127.0.0.1:9"), attempt=1, load_s=0.01)
    tracking.open()
    until(lambda: len(tracking._samples) == 8)
    first = tracking._samples[0][0]
    until(lambda: len(tracking._samples) > 1 and tracking._samples[1][0] - first > 0.2)
    assert tracking._samples[0][0] == first and len(tracking._samples) <= 8
    tracking.close("done", 0.0)


def test_status_tells_what_is_unsent_and_why(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    status = {"status": "running", "attempt": 1, "live": True, "step": 7, "total_steps": 9}
    mlflow = {"uri": "http://h", "run_id": "r", "unsent_steps": 2, "unsent_points": 80, "trouble": "ConnectionError: x"}
    assert "80 points, 2 steps among them, wait to be sent: ConnectionError: x" in describe(
        run, status | {"mlflow": mlflow}
    )
    sent = mlflow | {"unsent_steps": 0, "unsent_points": 0, "trouble": ""}
    assert "everything was sent" in describe(run, status | {"mlflow": sent})
    assert "not used" in describe(run, status | {"mlflow": None})
