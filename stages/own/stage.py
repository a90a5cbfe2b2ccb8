"""The task of a user's stage: its work is done in a process of its own, which this one starts, stops and hears out.

What it has saved, and in the end its result, lie in the run's folder: a stage whose result is there is not run again.
"""

import json
import os
import select
import socket
import subprocess
import time
from typing import Any

from pipeline.core.errors import StageFailed
from pipeline.processes import describe_exit, log_tail, python_command, python_environment
from pipeline.queue.schema import sequence_id
from pipeline.run_folder import read_json, write_json
from pipeline.stage import StageResult, StageSpec, TaskContext

_LOOK_S = 0.1
_GRACE_S = 10.0
"""From being asked to end to being killed."""
_START_S = 120.0
READY, STOP = b"ready\n", b"stop\n"


def own_stage(task: TaskContext, spec: StageSpec) -> StageResult:
    """Raises StageFailed with what the user's code raised, or if it takes too long or its process dies."""
    worker, config = task.worker, task.worker.config
    stage = next(stage for stage in config.stages if stage.name == spec.stage)
    result_path = worker.run.stage_result(stage.name, spec.step)
    result_path.parent.mkdir(parents=True, exist_ok=True)
    if (known := read_json(result_path)) is not None:
        return _result(stage.name, known)
    told = {
        "path": stage.path,
        "code_path": config.run.code_path,
        "run": str(worker.run.path),
        "name": stage.name,
        "step": spec.step,
        "attempt": spec.attempt,
        "options": stage.options,
        "queue": worker.options["queue"],
        "request_s": config.limits.request_s,
        "policy": [config.model.policy.path, config.model.trust_remote_code],
        "ids": [
            sequence_id(spec.step, prompt, member)
            for prompt in range(config.data.train_batch_size)
            for member in range(config.rollout.n)
        ],
    }
    said = _Process(task, told).hear_out(stage.timeout_s)
    if "error" in said:
        raise StageFailed(f"stage {stage.name} of step {spec.step} raised: {said['error']}")
    if said.get("is_stopped"):
        if said["is_late"]:
            raise StageFailed(
                f"stage {stage.name} of step {spec.step} took longer than its timeout_s, {stage.timeout_s:g} s; what "
                "it saved is kept, and resume goes on from there"
            )
        return {"metrics": {}, "is_stopped": True}
    write_json(result_path, said)
    return _result(stage.name, said)


def _result(name: str, said: dict[str, Any]) -> StageResult:
    drop = {id: f"{name}:{reason}" for id, reason in said["drop"].items()}
    metrics = {f"{name}/{key}": float(value) for key, value in said["metrics"].items()}
    return {"metrics": metrics | {f"{name}/num_dropped": float(len(drop))}, "drop": drop}


class _Process:
    """It dies with the thread of the task that starts it."""

    def __init__(self, task: TaskContext, told: dict[str, Any]) -> None:
        self._task, self._name = task, told["name"]
        mine, its = socket.socketpair()
        self._sock = mine
        with its, open(task.log_path, "ab") as log:
            self._process = subprocess.Popen(
                python_command("stages.own.stage_process", str(its.fileno()), str(os.getpid()), json.dumps(told)),
                env=python_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[its.fileno()],
            )

    def hear_out(self, timeout_s: float) -> dict[str, Any]:
        """What it said at its end: a result, an error, or that it was stopped; with `is_late`, because of the time."""
        deadline, killed_at, is_late = time.monotonic() + _START_S, float("inf"), False
        data = b""
        try:
            while True:
                readable, _, _ = select.select([self._sock], [], [], _LOOK_S)
                if readable:
                    piece = self._sock.recv(1 << 20)
                    if not piece:
                        break
                    data += piece
                if data.startswith(READY):  # the time is the function's, not the interpreter's
                    deadline, data = time.monotonic() + timeout_s, data.removeprefix(READY)
                now = time.monotonic()
                order = self._task.next_order(0.0)
                if killed_at == float("inf") and (
                    now > deadline or (order is not None and order.kind in ("end", "leave"))
                ):
                    is_late, killed_at = now > deadline, now + _GRACE_S
                    self._sock.sendall(STOP)
                if now > killed_at:
                    self._process.kill()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it is dead: its last words are in `data`
        finally:
            self._process.kill()
            self._sock.close()
            code = self._process.wait()
        if data.endswith(b"\n"):
            said: dict[str, Any] = json.loads(data)
            return said | {"is_late": is_late}
        if killed_at < float("inf"):
            return {"is_stopped": True, "is_late": is_late}
        raise StageFailed(
            f"the process of stage {self._name} ended: {describe_exit(code)}\n{log_tail(self._task.log_path)}"
        )
