"""The executor's folder protocol, without a worker. (tests/stages/test_worker.py runs its jobs.)"""

import os
import pickle
import stat
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import cloudpickle
import pytest
import submitit
from submitit.core import plugins
from submitit.core.utils import DelayedSubmission, UncompletedJobError

from pipeline.pickles import load_own
from slurm.executor import ElasticExecutor, ElasticJob, ElasticJobEnvironment


@pytest.fixture
def launched() -> list[tuple[str, str, str]]:
    return []


@pytest.fixture
def executor(tmp_path: Path, launched: list[tuple[str, str, str]]) -> ElasticExecutor:
    def launch(worker: str, task: str, folder: str) -> None:
        assert load_own(Path(folder) / f"{task}_submitted.pkl").result() == 42  # the pickle is there before
        launched.append((worker, task, folder))

    return ElasticExecutor(tmp_path / "tasks", launch)


def test_a_job_is_launched_in_its_worker_with_its_pickle_in_place(
    executor: ElasticExecutor, launched: list[tuple[str, str, str]]
) -> None:
    job = executor.submit_to("rollout-0", "rollout-3-17", lambda: 42)
    assert launched == [("rollout-0", "rollout-3-17", str(job.paths.folder))]
    assert job.job_id == "rollout-3-17" and job.state == "RUNNING" and not job.done()
    assert stat.S_IMODE(job.paths.submitted_pickle.stat().st_mode) == 0o600
    assert isinstance(job.submission(), DelayedSubmission)


def test_a_tasks_id_is_used_once(executor: ElasticExecutor, launched: list[tuple[str, str, str]]) -> None:
    executor.submit_to("rollout-0", "t", lambda: 42)
    with pytest.raises(FileExistsError):
        executor.submit_to("rollout-0", "t", lambda: 42)
    assert len(launched) == 1


def test_a_job_without_a_worker_is_refused(executor: ElasticExecutor, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="controller of a run"):
        executor.submit(lambda: 42)
    with pytest.raises(RuntimeError, match="controller of a run"):
        ElasticExecutor(tmp_path).submit_to("rollout-0", "t", lambda: 42)


def end_with(job: ElasticJob, outcome: object) -> None:
    with open(os.open(job.paths.result_pickle, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
        cloudpickle.dump(outcome, file)
    job.finish()


def test_outcomes(executor: ElasticExecutor) -> None:
    good, bad, dead, lost = (executor.submit_to("w", f"t-{n}", lambda: 42) for n in range(4))
    end_with(good, ("success", {"metrics": {}}))
    end_with(bad, ("error", "Traceback: boom"))
    dead.fail("killed by SIGKILL")
    dead.finish()  # the first end counts
    lost.finish()
    assert good.outcome() == (True, {"metrics": {}}, "") and good.result() == {"metrics": {}}
    assert bad.outcome() == (False, None, "Traceback: boom") and "boom" in str(bad.exception())
    assert dead.outcome() == (False, None, "killed by SIGKILL") and dead.state == "FAILED"
    with pytest.raises(UncompletedJobError, match="SIGKILL"):
        dead.result()
    assert "unreadable: FileNotFoundError" in lost.outcome()[2]


def test_a_result_that_others_may_write_is_not_loaded(executor: ElasticExecutor) -> None:
    job = executor.submit_to("w", "t", lambda: 42)
    end_with(job, ("success", 1))
    job.paths.result_pickle.chmod(0o620)
    ok, _, error = job.outcome()
    assert not ok and "not loaded" in error


def test_a_job_survives_pickling(executor: ElasticExecutor) -> None:
    job = executor.submit_to("w", "t", lambda: 42)
    assert not pickle.loads(pickle.dumps(job)).done()
    end_with(job, ("success", 7))
    assert pickle.loads(pickle.dumps(job)).result() == 7


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """submitit sees the entry points that pyproject.toml declares, whether or not the package is installed."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [EntryPoint(n, v, "submitit") for n, v in project["entry-points"]["submitit"].items()]
    monkeypatch.setattr(plugins, "_iter_submitit_entrypoints", lambda: declared)
    caches = (plugins._get_plugins, plugins.get_executors, plugins.get_job_environments)
    for cache in caches:
        cache.cache_clear()
    yield declared
    for cache in caches:
        cache.cache_clear()


def test_submitit_finds_the_plugin_and_never_chooses_it(
    entry_points: list[EntryPoint], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert plugins.get_executors()["pivot"] is ElasticExecutor
    assert isinstance(plugins.get_job_environments()["pivot"], ElasticJobEnvironment)
    assert isinstance(submitit.AutoExecutor(tmp_path, cluster="pivot")._executor, ElasticExecutor)
    assert submitit.AutoExecutor(tmp_path).cluster != "pivot"
    assert not ElasticJobEnvironment().activated()
    assert caplog.records == []
