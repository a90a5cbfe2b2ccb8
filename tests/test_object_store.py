"""Checkpoints and data on an object store, where there is no rename: a real S3 server, and real kills."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from pipeline import checks
from pipeline.checkpoint import Checkpoint, CheckpointStore, local_model
from pipeline.config import load_files
from pipeline.core.errors import ConfigError, DataError, RunError
from pipeline.data_files import read_digest, read_rows
from pipeline.remote import Files, check_store
from pipeline.resume import check_changes, keep_inputs
from pipeline.run_folder import RunFolder
from pipeline.stage import current_task
from tests.fakes.s3 import S3Server
from tests.fakes.scripted import make_config

ROOT = Path(__file__).parents[1]
FILES = [("model/a", b"1" * 10), ("state.json", b"{}")]
KILLS = {  # point: the newest complete checkpoint then, and what is left of others
    "file:1": (2, ["step_1", "step_2", "step_3"]),
    "before_manifest": (2, ["step_1", "step_2", "step_3"]),
    "after_manifest": (3, ["step_1", "step_2", "step_3"]),
    "prune": (3, ["step_1", "step_2", "step_3"]),
}
SAVE = (
    "import sys; from pipeline.checkpoint import CheckpointStore as S\n"
    "store = S(sys.argv[1])\n"
    "store.save(int(sys.argv[2]), [('model/a', b'3' * 10), ('state.json', b'{}')]); store.prune(2)\n"
)


class Task:
    """What a stage task shows of its worker: the limits."""

    def __init__(self, save_s: float) -> None:
        self.worker = self
        self.config = make_config(limits={"save_s": save_s})


@pytest.fixture
def uri(s3: S3Server, tmp_path: Path) -> str:
    return f"s3://bucket{tmp_path}/checkpoints"


def save_and_die(uri: str, step: int, kill_point: str) -> None:
    environment = os.environ | {"PIVOT_KILL_POINT": f"checkpoint.{kill_point}"}
    done = subprocess.run([sys.executable, "-c", SAVE, uri, str(step)], env=environment, cwd=ROOT)
    assert done.returncode == -9


@pytest.mark.parametrize("kill", KILLS)
def test_r16_r17_killed_anywhere_a_checkpoint_is_complete_or_absent(uri: str, kill: str) -> None:
    for step in (1, 2):
        CheckpointStore(uri).save(step, FILES)
    save_and_die(uri, 3, kill)

    store, (newest, names) = CheckpointStore(uri), KILLS[kill]
    assert store.newest_complete().step == newest
    assert all(Checkpoint(store.path(step)).read_json("state.json") == {} for step in store.complete())
    assert store.complete() == {"after_manifest": [1, 2, 3], "prune": [2, 3]}.get(kill, [1, 2])
    fs, folder = fsspec.url_to_fs(uri)
    assert sorted(name.rpartition("/")[2] for name in fs.ls(folder, detail=False, refresh=True)) == names

    store.save(3, FILES)  # the same again, undisturbed
    store.prune(2)
    assert store.complete() == [2, 3]
    assert {name.rpartition("/")[2] for name in fs.ls(folder, detail=False, refresh=True)} == {"step_2", "step_3"}


def test_r16_a_damaged_checkpoint_vouches_for_nothing_while_it_is_replaced(uri: str) -> None:
    path = CheckpointStore(uri).save(1, FILES)
    fs, folder = fsspec.url_to_fs(path)
    fs.pipe_file(f"{folder}/model/a", b"0" * 10)
    save_and_die(uri, 1, "manifest_removed")
    assert CheckpointStore(uri).newest_complete() == (0, "", [("step_1", "MANIFEST.json is missing")])
    CheckpointStore(uri).save(1, FILES)
    assert Checkpoint(path).read("model/a") == b"1" * 10


def test_a_model_is_copied_whole_and_checked(uri: str, tmp_path: Path) -> None:
    path = CheckpointStore(uri).save(4, [*FILES, ("trainer/o", b"o")])
    first = local_model(path, str(tmp_path / "cache"))
    assert os.listdir(first) == ["a"] and Path(first, "a").read_bytes() == b"1" * 10
    assert local_model(path, str(tmp_path / "cache")) == first  # and does not nest
    assert os.listdir(first) == ["a"]
    fs, folder = fsspec.url_to_fs(path)
    fs.pipe_file(f"{folder}/model/a", b"0" * 10)
    with pytest.raises(RunError, match="model/a is damaged"):
        local_model(path, str(tmp_path / "other"))
    assert os.listdir(tmp_path / "other") == []


# --- a store that does not answer -----------------------------------------------------------------------------------


def test_a_save_to_a_stalled_store_fails_in_time_and_names_it(s3: S3Server, uri: str) -> None:
    store = CheckpointStore(uri)
    store.save(1, FILES)
    token = current_task.set(Task(save_s=1.0))  # type: ignore[arg-type]
    s3.stall()
    began = time.monotonic()
    try:
        for save in (lambda: store.save(2, FILES), lambda: store.prune(1)):  # together they have one limit
            with pytest.raises(RunError, match=rf"{uri}: .* no answer within limits.save_s \(1 s\)"):
                save()
        assert 0.8 < time.monotonic() - began < 1.5
    finally:
        s3.go_on()
        current_task.reset(token)
    assert CheckpointStore(uri).newest_complete().step == 1


def test_a_store_that_is_gone_is_no_reason_for_an_older_checkpoint(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.remote.CALL_S", 0.5)
    files = Files("s3://bucket/x")
    nobody = type(files.fs)(endpoint_url="http://127.0.0.1:9", skip_instance_cache=True)
    store = CheckpointStore(uri)
    store._files.fs = nobody
    for call in (store.newest_complete, store.complete, lambda: store.prune(1), lambda: store.save(1, FILES)):
        with pytest.raises(RunError, match="s3://bucket/"):
            call()


def test_trouble_is_not_taken_for_absence(uri: str) -> None:
    """fsspec's own `exists` says no to whatever is raised; prune would remove what is complete."""

    class Broken:
        def info(self, path: str) -> None:
            raise PermissionError(13, "Access Denied")

    files = Files(uri)
    files.fs = Broken()
    with pytest.raises(RunError, match=r"s3://bucket.*PermissionError: .*Access Denied"):
        files.is_there("bucket/x")


# --- at submit ------------------------------------------------------------------------------------------------------


def refusal(check: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        check()
    return str(caught.value)


def test_memory_is_refused_at_submit(s3: S3Server) -> None:
    config = load_files(["configs/emulated.yaml"], ["checkpoint.uri=memory://a", "data.train_files=[memory://t.jsonl]"])
    text = refusal(lambda: checks.check_all(config))
    assert "checkpoint.uri 'memory://a': memory:// lives in one process" in text
    assert "data.train_files 'memory://t.jsonl': memory:// lives in one process" in text
    assert "memory://" in refusal(lambda: check_store("checkpoint.uri", "simplecache::memory://a"))


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("nosuch://b/a", ["fsspec knows no protocol 'nosuch'"]),
        ("adl://b/a", ["a package is missing"]),
        ("s3://no-such-bucket-here/a", ["a file cannot be written there", "bucket does not exist"]),
    ],
)
def test_a_place_for_checkpoints_that_cannot_be_used_is_refused(s3: S3Server, uri: str, parts: list[str]) -> None:
    text = refusal(lambda: checks.check_checkpoints(uri))
    assert all(part in text for part in [f"checkpoint.uri {uri!r}", *parts]), text


def test_a_place_that_can_be_used_is_left_as_it_was(uri: str, tmp_path: Path) -> None:
    checks.check_checkpoints(uri)
    assert fsspec.url_to_fs(uri)[0].find(f"bucket{tmp_path}") == []
    checks.check_checkpoints(f"file://{tmp_path}/new")
    assert os.listdir(tmp_path / "new") == []


def test_credentials_that_are_missing_or_refused_are_found_at_submit(s3: S3Server, uri: str) -> None:
    def submit(**changed: str) -> str:
        environment = {k: v for k, v in {**os.environ, **changed}.items() if v}
        command = [sys.executable, "-P", "-m", "pipeline.cli.main", "submit", "--dry-run", "configs/emulated.yaml"]
        done = subprocess.run(
            [*command, f"checkpoint.uri={uri}"], env=environment, cwd=ROOT, capture_output=True, text=True
        )
        assert "Traceback" not in done.stderr
        return f"{done.returncode} {done.stderr}"

    nothing = submit(AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
    assert nothing.startswith("2 ") and f"checkpoint.uri '{uri}'" in nothing and "redentials" in nothing
    s3.trust_nobody()
    try:
        refused = submit()
    finally:
        s3.trust_all()
    assert refused.startswith("2 ") and f"checkpoint.uri '{uri}'" in refused and "PermissionError" in refused
    assert submit().startswith("0 ")


# --- data files -----------------------------------------------------------------------------------------------------


def test_data_files_on_an_object_store(s3: S3Server, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": f"{number}" * 50} for number in range(3000)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    for name in ("t.jsonl", "t.parquet"):
        file = f"s3://bucket{tmp_path}/{name}"
        fsspec.filesystem("s3").put_file(str(tmp_path / name), f"bucket{tmp_path}/{name}")
        assert [value for _, value in read_rows(file)] == rows
        assert read_digest(file) == read_digest(str(tmp_path / name))
    with pytest.raises(DataError, match=r"s3://bucket/absent.jsonl: no such file"):
        list(read_rows("s3://bucket/absent.jsonl"))


def test_a_data_file_that_cannot_be_looked_at_is_not_taken_for_gone(s3: S3Server, tmp_path: Path) -> None:
    """At a resume: it may be the same as at submit."""
    file = f"s3://bucket{tmp_path}/t.jsonl"
    fsspec.filesystem("s3").pipe_file(file.removeprefix("s3://"), b'{"prompt": "x"}\n')
    run = RunFolder(tmp_path / "run")
    run.create()
    config = make_config(data={"train_files": [file]})
    keep_inputs(run, config)
    check_changes(run, config, config)
    s3.trust_nobody()
    try:
        assert "PermissionError" in refusal(lambda: check_changes(run, config, config))
    finally:
        s3.trust_all()
    fsspec.filesystem("s3").rm_file(file.removeprefix("s3://"))
    assert f"{file} is gone" in refusal(lambda: check_changes(run, config, config))


def test_a_data_file_of_a_store_that_stalls_ends_in_its_name(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.remote.CALL_S", 0.5)
    file = f"s3://bucket{tmp_path}/t.jsonl"
    fsspec.filesystem("s3").pipe_file(file.removeprefix("s3://"), b'{"prompt": "x"}\n')
    s3.stall()
    try:
        with pytest.raises(DataError, match=rf"{file}: cannot be opened: .*no answer within 0.5 s"):
            list(read_rows(file))
    finally:
        s3.go_on()
