"""The process of a user's stage: one function, called once.

    python -m stages.own.stage_process FD PARENT JSON

What the code prints goes to the task's log. It dies with its parent, whatever it is doing.
"""

import json
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.processes import die_with_parent
from pipeline.queue.schema import SequenceRow
from pipeline.run_folder import RunFolder, read_json, write_json
from stages.own.code import load_function
from stages.own.stage import READY

_MOST_TEXT = 8000


class Stopped(BaseException):
    """The run stops, and what the stage has saved is durable. Let it pass."""


class Stage:
    """What a user's stage is given. `options` are those of the configuration."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.name: str = told["name"]
        self.step: int = told["step"]
        self.options: dict[str, Any] = told["options"]
        self._told = told
        self._run = RunFolder(Path(told["run"]))
        self._state = self._run.stage_state(self.name, self.step)
        self.is_stopping = threading.Event()

    def sequences(self) -> list[SequenceRow]:
        """All of the step, in order of submission, with all that is known of them by now."""
        from pipeline.queue.client import QueueClient

        secret = (self._run.secrets / "queue.key").read_bytes()
        client = QueueClient(self._told["queue"], secret, self._told["attempt"], self._told["request_s"])
        try:
            return client.get(self._told["ids"])
        finally:
            client.close()

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's: `decode(ids)`, `encode(text)`."""
        from stages.text import load_tokenizer

        return load_tokenizer(*self._told["policy"])

    def load(self) -> Any:
        """What was saved last in this step, also by an earlier life of the run; None if nothing was."""
        return read_json(self._state)

    def save(self, state: Any) -> None:
        """Make `state`, a value of JSON, durable. Where the run is stopping, the stage ends here, by Stopped."""
        write_json(self._state, state)
        if self.is_stopping.is_set():
            raise Stopped


def _outcome(function: Callable[..., Any], stage: Stage) -> dict[str, Any]:
    """The border to the user's code."""
    try:
        found = function(stage) or {}
        if not isinstance(found, dict) or not found.keys() <= {"metrics", "drop"}:
            raise TypeError(f"a stage returns None or a dict of `metrics` and `drop`, not {found!r:.200}")
        metrics = {str(name): float(value) for name, value in found.get("metrics", {}).items()}
        drop = {str(id): str(reason) for id, reason in found.get("drop", {}).items()}
        if unknown := drop.keys() - set(stage._told["ids"]):
            raise ValueError(f"drop: {min(unknown)} is no sequence of step {stage.step}")
        return {"metrics": metrics, "drop": drop}
    except Stopped:
        return {"is_stopped": True}
    except BaseException:
        return {"error": traceback.format_exc()[-_MOST_TEXT:]}


def _listen(sock: socket.socket, stage: Stage) -> None:
    while sock.recv(64):
        stage.is_stopping.set()


def main(fd: int, parent: int, told: dict[str, Any]) -> None:
    die_with_parent(signal.SIGKILL, parent)
    sock = socket.socket(fileno=fd)
    sys.path.extend(told["code_path"])  # at the end: nothing of the user's may hide ours
    stage = Stage(told)
    threading.Thread(target=_listen, args=(sock, stage), daemon=True).start()
    try:
        function = load_function(told["path"])
    except BaseException:
        said = {"error": traceback.format_exc()[-_MOST_TEXT:]}
    else:
        sock.sendall(READY)
        said = _outcome(function, stage)
    if "error" in said:
        print(said["error"], file=sys.stderr)
    sock.sendall(json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
