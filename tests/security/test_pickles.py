"""Pickles are loaded only from files that are surely the user's own, and only in one place."""

import ast
import contextvars
import os
import pickle
import queue
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import wire
from pipeline.pickles import load_own
from slurm.executor import ElasticExecutor
from stages.task import Task
from tests.architecture.sources import modules, relative

NOBODY = 65534


class Trap:
    """Loading it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._path, "w")


def given_away(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, NOBODY, -1)


DOUBTS: dict[str, Callable[[Path], None]] = {
    "others may write": lambda path: path.chmod(0o666),
    "the group may write": lambda path: path.chmod(0o660),
    "another user's": given_away,
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_a_doubtful_pickle_is_not_loaded(tmp_path: Path, doubt: str) -> None:
    path, sprung = tmp_path / "p.pkl", tmp_path / "sprung"
    path.write_bytes(pickle.dumps(Trap(sprung)))
    path.chmod(0o600)
    load_own(path).close()
    assert sprung.exists()  # the trap works
    sprung.unlink()
    DOUBTS[doubt](path)
    with pytest.raises(PermissionError, match="not loaded"):
        load_own(path)
    assert not sprung.exists()


@pytest.mark.parametrize("doubt", DOUBTS)
def test_a_doubtful_result_is_a_failed_task(tmp_path: Path, doubt: str) -> None:
    """In the controller, which reads what workers wrote."""
    sprung = tmp_path / "sprung"
    executor = ElasticExecutor(tmp_path / "tasks", lambda worker, task, folder: None)
    job = executor.submit_to("w", "t", int)
    job.paths.result_pickle.write_bytes(pickle.dumps(("success", Trap(sprung))))
    job.paths.result_pickle.chmod(0o600)
    DOUBTS[doubt](job.paths.result_pickle)
    job.finish()
    ok, _, error = job.outcome()
    assert not ok and "not loaded" in error
    DOUBTS[doubt](job.paths.submitted_pickle)
    with pytest.raises(PermissionError, match="not loaded"):
        job.submission()
    assert not sprung.exists()


@pytest.mark.parametrize("doubt", DOUBTS)
def test_a_doubtful_task_is_not_run(tmp_path: Path, doubt: str) -> None:
    """In the worker, which reads what the controller wrote."""
    sprung = tmp_path / "sprung"
    ElasticExecutor(tmp_path / "tasks", lambda worker, task, folder: None).submit_to("w", "t", sprung.touch)
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    worker: Any = SimpleNamespace(name="w", attempt=1, queue_waited_s=0.0)

    def run() -> tuple[str, str]:
        task = Task(worker, wire.RunTask(worker="w", task="t", folder=str(tmp_path / "tasks")), said.put)
        contextvars.copy_context().run(task.run)
        kind, value = pickle.loads(task.paths.result_pickle.read_bytes())
        return kind, str(value)

    assert run()[0] == "success" and sprung.exists()
    sprung.unlink()
    DOUBTS[doubt](tmp_path / "tasks" / "t_submitted.pkl")
    kind, trace = run()
    assert kind == "error" and "not loaded" in trace and not sprung.exists()


def unpickling(source: str) -> list[int]:
    """Lines that load a pickle, or something that may hold one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = ast.unparse(node.func.value), node.func.attr
        if (owner in ("pickle", "cloudpickle", "marshal", "shelve", "joblib") and name != "dumps") or (
            (owner, name)
            in {("torch", "load"), ("torch", "save"), ("DelayedSubmission", "load"), ("utils", "pickle_load")}
        ):
            found.append(node.lineno)
        if any(k.arg == "allow_pickle" for k in node.keywords):
            found.append(node.lineno)
    return found


def test_one_place_loads_pickles_and_no_checkpoint_holds_one() -> None:
    found = {relative(path) for path in modules() if unpickling(path.read_text(encoding="utf-8"))}
    assert found == {"pipeline/pickles.py"}
    for source in ("torch.save(x, f)", "pickle.loads(b)", "np.load(f, allow_pickle=True)", "DelayedSubmission.load(p)"):
        assert unpickling(source)
