import os
from pathlib import Path

import pytest

from pipeline.environment import describe_environment, write_environment
from pipeline.run_folder import RunFolder, read_json


def test_a_run_says_on_what_it_runs_and_nothing_of_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2hunter2")
    run = RunFolder(tmp_path / "r")
    run.create()
    write_environment(run, 3)
    found = read_json(run.environment)
    assert (found["attempt"], found["cores"]) == (3, os.cpu_count())
    assert {"numpy", "pyarrow", "msgspec"} <= found["packages"].keys() and found["memory_bytes"] > 2**28
    assert found["python"].startswith("3.11") and isinstance(found["gpus"], list)
    assert "hunter2" not in run.environment.read_text()


def test_what_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "r")
    run.create()
    run.environment.mkdir()
    write_environment(run, 1)
    assert not list(run.path.glob(".environment*")) and describe_environment()["host"]
