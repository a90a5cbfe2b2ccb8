"""Metric rows to metrics.jsonl and MLflow. Nothing here can stop or delay training.

Rows are durable in the queue's index; both exports are keyed by step, so that each step stands there once, whatever
happened in between. MLflow lives in a thread of its own: it is imported and opened there, and while its server does
not answer the rows wait here (and stand in metrics.jsonl) until it does. This module alone imports mlflow.

Exactly once: before anything is sent, at the start and after every failure, the highest step that MLflow has is read
back. A call that was given up may still be performed by a server that stood still, after that; so a row that is sent
again is the same in all its parts, its time too, and MLflow's databases keep one of two equal points.
"""

import json
import math
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pipeline.config import Config, without_passwords, without_secrets
from pipeline.core.errors import RunError
from pipeline.metrics import Row, only_finite
from pipeline.node_load import NodeLoad
from pipeline.processes import say
from pipeline.run_facts import key_params, make_tags
from pipeline.run_folder import RunFolder, read_json, write_atomic, write_json
from pipeline.samples import Choice

_STEP = "training/global_step"
"""Its highest value says up to which step MLflow has the rows."""
_END_STATUS = {"done": "FINISHED", "failed": "FAILED", "cancelled": "KILLED", "requeued": "SCHEDULED"}
_ENVIRONMENT = {
    # A call fails within seconds; the rows wait here, not in the client.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # it would print a password
}
_BATCH = 1000
"""MLflow takes no more metrics in one call."""
_LONGEST_NAME = 250
_REFUSED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
_LONGEST_TROUBLE = 300
_SAMPLES_AT_ONCE = 100
_JUDGED = "judge_samples.json"
_MOST_JUDGED = 128
"""Rows of that table: it is written anew with each step."""
_MOST_SAMPLES = 720
"""Two hours of the nodes' load may wait; of a longer outage, every second sample is kept, then every fourth, ..."""


class MetricsLog:
    """metrics.jsonl: one line per step, ascending. The first row of a step holds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = max((step for step, _ in self.rows()), default=-1)

    def rows(self) -> list[tuple[int, Row]]:
        """All rows; a torn last line (its writer was killed) is none. Raises RunError for any other damaged one."""
        rows = []
        lines = self._path.read_bytes().split(b"\n") if self._path.exists() else []
        for number, line in enumerate(lines[:-1], 1):
            try:
                row = json.loads(line)
                rows.append((row.pop("step"), row))
            except (ValueError, KeyError) as error:
                raise RunError(f"{self._path}, line {number}, is no row of metrics: {error!r}") from error
        return rows

    def append(self, step: int, row: Row) -> None:
        """Gives the row its time, if it has none: that of every export."""
        row.setdefault("time", time.time())
        if step > self._last:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(_line(step, row))
            self._last = step

    def rewrite(self, rows: Iterable[tuple[int, Row]]) -> None:
        """Make the file what the durable rows say, in one step. A row without a time gets the one that it has here."""
        times = {step: row["time"] for step, row in self.rows() if "time" in row}
        ordered = sorted(dict(rows).items())
        for step, row in ordered:
            row.setdefault("time", times.get(step, time.time()))
        write_atomic(self._path, "".join(_line(step, row) for step, row in ordered))
        self._last = ordered[-1][0] if ordered else -1


def _line(step: int, row: Row) -> str:
    return json.dumps({"step": step, "time": row["time"], **only_finite(row)}, allow_nan=False) + "\n"


class Tracking:
    """The run's side of MLflow. Every method returns at once (`close` within its limit) and none raises.

    `retry_s`: first wait after a failure; it doubles up to 32 times that. `load_s`: between samples of the nodes' load.
    """

    def __init__(
        self, run: RunFolder, config: Config, attempt: int, retry_s: float = 1.0, load_s: float = 10.0
    ) -> None:
        self._run, self._config, self._attempt = run, config, attempt
        self._retry_s, self._load_s = retry_s, load_s
        self._is_off = config.tracking.uri == "none"
        self._pending: deque[tuple[int, Row]] = deque()
        self._samples: list[tuple[float, dict[str, float]]] = []
        self._choice = Choice()
        self._has_judged = False
        self._num_points = 0
        """Of all that waits."""
        self._wake = threading.Condition()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._where = {"uri": without_passwords(config.tracking.uri or _database(run.mlflow_db)), "run_id": ""}
        self._trouble = ""
        self._end: str | None = None
        self._deadline = math.inf

    @property
    def location(self) -> dict[str, Any] | None:
        """Where the run is found, and what is not there yet; None while MLflow is not used.

        `uri` (without a password), `run_id` ("" before the first answer), `unsent_steps`, `unsent_points`, and the
        `trouble` that they wait for, if there is any.
        """
        if self._thread is None:
            return None
        unsent = {"unsent_steps": len(self._pending), "unsent_points": self._num_points, "trouble": self._trouble}
        return self._where | unsent

    def resume(self, rows: Iterable[tuple[int, Row]]) -> None:
        """The durable rows of earlier attempts: what MLflow does not have yet is sent."""
        for step, row in rows:
            self.log(step, row)

    def log(self, step: int, row: Row) -> None:
        """The row's time is from now on what it is, however often it has to be sent."""
        row = {"time": time.time(), **row}
        with self._wake:
            self._pending.append((step, row))
            self._num_points += len(row)
            self._wake.notify()

    def log_judged(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Of these verdicts of the step some: into the run's folder, and from there the newest ones into a table of
        MLflow."""
        chosen = self._choice.take(step, samples, self._config.data.train_batch_size)
        if not chosen:
            return
        with suppress(OSError):  # of a disk that is full the rows say so
            with open(self._run.judge_samples, "a", encoding="utf-8") as file:
                file.writelines(json.dumps({"step": step, **sample}) + "\n" for sample in chosen)
            with self._wake:
                self._has_judged = True
                self._wake.notify()

    def open(self) -> None:
        """Start the thread. Importing and opening MLflow takes seconds of one core: call it once the engines are up."""
        if self._thread is None and not self._is_off:
            self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
            self._thread.start()
            threading.Thread(target=self._watch_load, name="node load", daemon=True).start()

    def close(self, status: str, timeout_s: float = 30.0) -> bool:
        """Send what waits and the run's true end; True if all arrived within `timeout_s`.

        A run that neither has rows nor was ever opened (a failed start) is not opened for its end.
        """
        self._is_over.set()
        with self._wake:
            self._end, self._deadline = _END_STATUS[status], time.monotonic() + timeout_s
            self._wake.notify()
        if self._pending or self._run.mlflow_run.exists():
            self.open()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        if self._pending or self._thread.is_alive():
            _say(f"{len(self._pending)} rows did not reach MLflow; they stand in {self._run.metrics}")
            return False
        return True

    def _work(self) -> None:
        """Consumes rows, produces calls to MLflow; ends after the run's end was sent. Waits for rows, and after a
        failure for the next try; `close` unblocks both."""
        session: _Session | None = None
        failures = 0
        while time.monotonic() < self._deadline:
            try:
                session = session or _Session(self._run, self._config, self._attempt)
                self._where = session.location
                end = self._end  # no row is logged after it: what is sent from here on is all
                self._send_all(session)
                if failures:
                    _say("MLflow answers again; everything was sent")
                failures, self._trouble = 0, ""
                if end is not None:
                    session.client.set_terminated(session.run_id, end)
                    return
            except Exception as error:  # the border: tracking never raises into training
                session = None  # a new one reads back what arrived
                failures += 1
                self._trouble = without_passwords(f"{type(error).__name__}: {error}")[:_LONGEST_TROUBLE]
                if failures == 1:
                    _say(f"MLflow does not answer; rows wait until it does: {type(error).__name__}: {error}")
            with self._wake:
                if failures:
                    self._wake.wait_for(lambda: self._end, min(self._retry_s * 2 ** min(failures - 1, 5), 60))
                    if self._end is not None:
                        self._wake.wait(min(self._retry_s, 0.5))
                else:
                    self._wake.wait_for(lambda: self._pending or self._samples or self._end or self._has_judged)

    def _send_all(self, session: "_Session") -> None:
        while self._pending:
            step, row = self._pending[0]
            if step > session.last_step:
                session.send(step, row)
            with self._wake:
                self._pending.popleft()
                self._num_points -= len(row)
        session.describe()
        if self._has_judged:
            self._has_judged = False
            session.send_judged()
        while samples := self._samples[:_SAMPLES_AT_ONCE]:
            session.send_load(samples)
            with self._wake:
                sent = {at for at, _ in samples}
                self._samples = [sample for sample in self._samples if sample[0] not in sent]
                self._num_points -= sum(len(row) for _, row in samples)

    def _watch_load(self) -> None:
        """Consumes nothing, produces samples of the nodes' load; ends with the run. Waits for time to pass."""
        try:
            load = NodeLoad(os.getpid())
            while not self._is_over.wait(self._load_s):
                at, row = time.time(), load.sample()
                with self._wake:
                    self._samples.append((at, row))
                    if len(self._samples) > _MOST_SAMPLES:
                        self._samples = self._samples[::2]
                    self._num_points = sum(len(row) for _, row in self._pending)
                    self._num_points += sum(len(sample) for _, sample in self._samples)
                    self._wake.notify()
        except Exception as error:  # the border: whatever /proc may hold
            _say(f"the nodes' load is not logged any more: {type(error).__name__}: {error}")


class _Session:
    """One run of one MLflow server, found or made. Every call may raise."""

    def __init__(self, run: RunFolder, config: Config, attempt: int) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import mlflow

        uri = config.tracking.uri or _database(run.mlflow_db)
        self._mlflow, self._run, self._config = mlflow, run, config
        with _without_stray_folder(uri):
            self.client = mlflow.MlflowClient(tracking_uri=uri)
            known = self._find_or_make(uri)
        self.run_id = str(known.info.run_id)
        self.location = {"uri": without_passwords(uri), "run_id": self.run_id}
        self.last_step = int(known.data.metrics.get(_STEP, -1))
        self._began_ms = int(known.info.start_time)
        self._is_described = bool(known.data.params)
        self._refused: set[str] = set()
        if known.info.status != "RUNNING":
            self.client.update_run(self.run_id, status="RUNNING")
        self.client.set_tag(self.run_id, "attempt", str(attempt))

    def _find_or_make(self, uri: str) -> Any:
        """The run is found by its own key, so a lost reply to its making does not make a second one. Where the
        database was deleted it is made again."""
        path = self._run.mlflow_run
        note = read_json(path) or {"key": uuid.uuid4().hex}
        if "run_id" in note:
            try:
                return self.client.get_run(note["run_id"])
            except self._mlflow.MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                _say(f"MLflow knows run {note['run_id']} no more, and gets it anew")
                del note["run_id"]
        write_json(path, note)
        experiment = self._experiment(uri)
        found = self.client.search_runs([experiment], f"tags.pivot_run = '{note['key']}'")
        tags = {"pivot_run": note["key"], **make_tags(self._run, self._config)}
        made = found[0] if found else self.client.create_run(experiment, run_name=self._run.name, tags=tags)
        write_json(path, note | {"run_id": made.info.run_id})
        return self.client.get_run(made.info.run_id)

    def _experiment(self, uri: str) -> str:
        name = self._config.tracking.experiment
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        # MLflow's own default is ./mlruns, wherever the process happens to stand
        folder = Path(unquote(uri.removeprefix("sqlite:///"))).parent if uri.startswith("sqlite:///") else None
        place = (folder / "mlartifacts").as_uri() if folder else None
        return str(self.client.create_experiment(name, artifact_location=place))

    def send(self, step: int, row: Row) -> None:
        at = int((row.get("time") or 0) * 1000)
        values = {metric_name(k): v for k, v in only_finite(row).items() if k != "time" and v is not None}
        values[_STEP] = values.pop(_STEP, float(step))  # last: it says that the row is complete
        self._log([self._mlflow.entities.Metric(name, value, at, step) for name, value in values.items()])
        self.last_step = step

    def send_load(self, samples: list[tuple[float, dict[str, float]]]) -> None:
        """Samples have no step of training: theirs is the second since the MLflow run began."""
        metrics = []
        for at, row in samples:
            at_ms = int(at * 1000)
            step = (at_ms - self._began_ms) // 1000
            metrics += [self._mlflow.entities.Metric(metric_name(k), v, at_ms, step) for k, v in row.items()]
        self._log(metrics)

    def send_judged(self) -> None:
        """The newest of the run's samples of verdicts, as a table."""
        try:
            lines = self._run.judge_samples.read_bytes().split(b"\n")[:-1][-_MOST_JUDGED:]
            rows = [json.loads(line) for line in lines]
            columns = list(dict.fromkeys(name for row in rows for name in row))
            table = {"columns": columns, "data": [[row.get(name) for name in columns] for row in rows]}
            self.client.log_dict(self.run_id, table, _JUDGED)
            shown = json.dumps([{"path": _JUDGED, "type": "table"}])
            self.client.set_tag(self.run_id, "mlflow.loggedArtifacts", shown)
        except Exception as error:  # as of config.yaml
            if _JUDGED not in self._refused:
                self._refused.add(_JUDGED)
                _say(f"{_JUDGED} is not among MLflow's artifacts: {type(error).__name__}: {error}")

    def _log(self, metrics: list[Any]) -> None:
        for start in range(0, len(metrics), _BATCH):
            self._log_batch(metrics[start : start + _BATCH])

    def _log_batch(self, metrics: list[Any]) -> None:
        """A value that MLflow refuses is given up, with one message for its name; all others are sent."""
        try:
            self.client.log_batch(self.run_id, metrics=metrics)
        except self._mlflow.MlflowException as error:
            if error.error_code not in _REFUSED:
                raise
            if len(metrics) > 1:
                half = len(metrics) // 2
                self._log_batch(metrics[:half])
                self._log_batch(metrics[half:])
            elif metrics[0].key not in self._refused:
                self._refused.add(metrics[0].key)
                _say(f"MLflow refused {metrics[0].key} of step {metrics[0].step}: {error}")

    def describe(self) -> None:
        """Once per run, after its first rows: the main parameters, and the whole configuration as an artifact."""
        if self._is_described:
            return
        params = [self._mlflow.entities.Param(name, str(value)) for name, value in key_params(self._config).items()]
        self.client.log_batch(self.run_id, params=params)
        self._is_described = True
        try:
            self.client.log_text(self.run_id, without_secrets(self._config), "config.yaml")
        except Exception as error:  # an artifact store of its own may be out of reach: the metrics are not
            _say(f"config.yaml is not among MLflow's artifacts: {type(error).__name__}: {error}")


def _database(path: Path) -> str:
    """As SQLAlchemy reads it, which takes `?` for the begin of a query, and unquotes the rest."""
    return f"sqlite:///{str(path).replace('%', '%25').replace('?', '%3F')}"


@contextmanager
def _without_stray_folder(uri: str) -> Iterator[None]:
    """MLflow makes the folder of the database as the URI spells it, also where SQLAlchemy reads another from it."""
    folder = Path(uri.removeprefix("sqlite:///")).parent
    is_there = folder.exists() or not uri.startswith("sqlite:///")
    yield
    if not is_there:
        with suppress(OSError):
            os.removedirs(folder)  # up to the first that is not empty


def metric_name(name: str) -> str:
    """The name as MLflow takes it: letters, digits and `_-. :/`; no leading or double slash."""
    name = re.sub(r"[^A-Za-z0-9_.:/ -]", "_", name.replace("@", "_at_"))
    parts = [p for p in name.split("/") if p not in ("", ".", "..")]
    return "/".join(parts)[:_LONGEST_NAME] or "_"


def _say(text: str) -> None:
    say(f"tracking: {without_passwords(text)}")
