"""MLflow's own server application on its sqlite store: a process of its own, which can be stopped, continued, killed,
started again on its port, told to refuse, and denied any room on its disk."""

import json
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

from pipeline.run_folder import RunFolder

_SERVE = """
import logging, os, sys
from mlflow.server import app
import mlflow.server.fastapi_app
from mlflow.server.handlers import _get_tracking_store
from werkzeug.serving import make_server
logging.disable()
refusal = b'{"error_code": "PERMISSION_DENIED", "message": "not today"}'

def serve(environ, start_response):
    if os.path.exists("refuse"):
        start_response("403 Forbidden", [("Content-Type", "application/json"), ("Content-Length", str(len(refusal)))])
        return [refusal]
    return app(environ, start_response)

for line in sys.stdin:
    ready, its = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(0)
        _get_tracking_store().search_experiments()  # its database is made now
        server = make_server("127.0.0.1", int(sys.argv[1]), serve, threaded=True)
        os.write(its, b"up")
        server.serve_forever()
    os.close(its)
    print(pid if os.read(ready, 2) else 0, flush=True)
    os.close(ready)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


class MlflowServer:
    """`uri` is there from the begin, the server from `start` on. It is a fork of a process that has imported all: that
    takes seconds, and is done once."""

    def __init__(self, folder: Path) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            self._port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self._port}"
        self.database = folder / "mlflow.db"
        self._refuses = folder / "refuse"
        store = {
            "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{self.database}",
            "_MLFLOW_SERVER_ARTIFACT_ROOT": str(folder / "artifacts"),
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        self._parent = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SERVE, str(self._port)],
            env=kept | store,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._pid = 0

    def start(self) -> None:
        """Returns when it answers."""
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write("start\n")
        self._parent.stdin.flush()
        self._pid = int(self._parent.stdout.readline())
        assert self._pid, "the server ended"

    def kill(self) -> None:
        if self._pid:
            assert self._parent.stdout is not None
            self._signal(signal.SIGKILL)
            assert self._parent.stdout.readline() == "ended\n"
            self._pid = 0

    def close(self) -> None:
        self.kill()
        self._parent.communicate()

    def stall(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def refuse(self) -> None:
        """Every call is answered: no."""
        self._refuses.touch()

    def accept(self) -> None:
        self._refuses.unlink()

    def fill(self) -> None:
        """No file of it can be written any further."""
        self._allow(0)

    def free(self) -> None:
        self._allow(resource.RLIM_INFINITY)

    # --- what arrived ------------------------------------------------------------------------------------------------

    def points(self, run_id: str) -> Counter[tuple[str, int, int]]:
        """How often each (metric, step, time) stands in the database, server or not."""
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as database:
            found = database.execute("SELECT key, step, timestamp FROM metrics WHERE run_uuid = ?", (run_id,))
            return Counter(found.fetchall())

    def steps(self, run: Path) -> list[int]:
        """The steps of the run in this folder that arrived whole, as often as they are there."""
        points = self.points(self._run_id(run))
        return sorted(step for name, step, _ in points.elements() if name == "training/global_step")

    def account(self, run: Path) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """Of what the run's metrics.jsonl says: the (metric, step) that are missing here, and those there twice."""
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        said = {
            (name, int(row["step"]))
            for row in lines
            for name, value in row.items()
            if name not in ("step", "time") and value is not None
        }
        points = self.points(self._run_id(run))
        times = Counter((name, step) for name, step, _ in points.elements() if not name.startswith("system/"))
        return sorted(said - times.keys()), sorted(point for point, number in times.items() if number > 1)

    @staticmethod
    def _run_id(run: Path) -> str:
        note = RunFolder(run).mlflow_run
        return str(json.loads(note.read_text()).get("run_id", "")) if note.exists() else ""

    def _signal(self, number: int) -> None:
        assert self._pid
        os.kill(self._pid, number)

    def _allow(self, num_bytes: int) -> None:
        assert self._pid
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
