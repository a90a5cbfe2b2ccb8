import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from pipeline.checkpoint import MANIFEST, Checkpoint, CheckpointStore
from pipeline.core.errors import RunError


def files_of(step: int) -> Iterator[tuple[str, bytes]]:
    yield "model/model.safetensors", bytes([step]) * 1000
    yield "trainer/optimizer.safetensors", bytes([step]) * 2000
    yield "state.json", json.dumps({"version": step}).encode()


@pytest.fixture(params=["local", "file", "memory", "s3"])
def uri(request, tmp_path) -> str:
    """A plain path (with a space), a file URL, and two that cannot rename: one is an object store."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    return {
        "local": f"{tmp_path}/my run",
        "file": f"file://{tmp_path}/run",
        "memory": f"memory:/{tmp_path}",
        "s3": f"s3://bucket{tmp_path}",
    }[request.param]


@pytest.fixture
def store(uri) -> CheckpointStore:
    return CheckpointStore(uri)


def copy(store: CheckpointStore, source: str, target: str) -> str:
    """As a user would, file by file."""
    fs, folder = fsspec.url_to_fs(store.path(0))
    root = folder.rsplit("/", 1)[0]
    for path in fs.find(f"{root}/{source}"):
        name = path.removeprefix(f"{root}/{source}/")
        fs.makedirs(f"{root}/{target}/{name}".rsplit("/", 1)[0], exist_ok=True)
        fs.pipe_file(f"{root}/{target}/{name}", fs.cat_file(path))
    return f"{root}/{target}"


def names_in(store: CheckpointStore) -> list[str]:
    fs, folder = fsspec.url_to_fs(store.path(0))
    return sorted(path.rsplit("/", 1)[-1] for path in fs.ls(folder.rsplit("/", 1)[0], detail=False))


def test_what_was_saved_is_read(store):
    path = store.save(3, files_of(3))
    assert path == store.path(3)
    assert CheckpointStore(path.rsplit("/", 1)[0]).newest_complete() == (3, path, [])
    found = Checkpoint(path)
    assert found.read("model/model.safetensors") == b"\3" * 1000
    assert found.read_json("state.json") == {"version": 3}
    assert "state.json" in found and "trainer/master.safetensors" not in found
    with pytest.raises(RunError, match=r"has no x; it has model/model.safetensors"):
        found.read("x")


def test_none_yet(store):
    assert store.newest_complete() == (0, "", [])
    assert store.prune(1) == []


def test_relative_paths_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CheckpointStore("runs/a").path(1) == str(tmp_path / "runs/a/step_1")


def test_a_complete_step_is_not_written_again(store):
    path = store.save(3, files_of(3))

    def never() -> Iterator[tuple[str, bytes]]:
        pytest.fail("the files were asked for")
        yield

    assert store.save(3, never()) == path


def test_newest_is_by_number_and_at_most(store):
    for step in (2, 10, 9):
        store.save(step, files_of(step))
    assert store.newest_complete().step == 10
    assert store.newest_complete(at_most=9) == (9, store.path(9), [])
    assert store.newest_complete(at_most=1) == (0, "", [])


def test_r16_a_copy_that_lacks_a_file_is_skipped_and_named(store):
    path = store.save(4, files_of(4))
    fs, _ = fsspec.url_to_fs(path)
    fs.rm_file(copy(store, "step_4", "step_9") + "/trainer/optimizer.safetensors")
    assert store.newest_complete() == (4, path, [("step_9", "its manifest is that of step 4")])


DAMAGES = {
    "trainer/optimizer.safetensors": (None, "trainer/optimizer.safetensors is missing"),
    "model/model.safetensors": (b"short", "model/model.safetensors has 5 bytes, not 1000"),
    "state.json": (b'{"version": 7}', "state.json has another content than the manifest says"),
    MANIFEST: (None, "MANIFEST.json is missing"),
    f"{MANIFEST} ": (b'{"format": 1, "st', "MANIFEST.json cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_r16_a_damaged_checkpoint_is_skipped_named_and_saved_anew(store, damage):
    older = store.save(4, files_of(4))
    path = store.save(9, files_of(9))
    fs, folder = fsspec.url_to_fs(path)
    content, reason = DAMAGES[damage]
    if content is None:
        fs.rm_file(f"{folder}/{damage.strip()}")
    else:
        fs.pipe_file(f"{folder}/{damage.strip()}", content)
    step, found, ((name, why),) = store.newest_complete()
    assert (step, found, name) == (4, older, "step_9") and why.startswith(reason)
    assert store.save(9, files_of(9)) == path
    assert store.newest_complete() == (9, path, [])
    assert Checkpoint(path).read_json("state.json") == {"version": 9}


def test_reading_checks_the_content(store):
    path = store.save(1, files_of(1))
    fs, folder = fsspec.url_to_fs(path)
    fs.pipe_file(f"{folder}/model/model.safetensors", b"\2" * 1000)
    with pytest.raises(RunError, match="damaged"):
        Checkpoint(path).read("model/model.safetensors")


def test_a_store_that_does_not_answer_is_no_reason_for_an_older_checkpoint(tmp_path):
    store = CheckpointStore(str(tmp_path))
    store.save(1, files_of(1))
    store.save(2, files_of(2))
    manifest = tmp_path / "step_2" / MANIFEST
    manifest.unlink()
    manifest.symlink_to(manifest)  # an error of the store that is not "there is no such file"
    with pytest.raises(OSError, match="symbolic links") as caught:
        store.newest_complete()
    assert caught.value.__cause__ is None  # who follows causes comes to an end


def test_r17_at_every_instant_of_a_failing_second_save_the_first_is_there(store):
    first = store.save(1, files_of(1))
    seen = []

    def failing() -> Iterator[tuple[str, bytes]]:
        for file in files_of(2):
            seen.append(CheckpointStore(first.rsplit("/", 1)[0]).newest_complete().step)
            yield file
        raise OSError(28, "No space left on device")

    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            store.save(2, failing())
        if not store.path(0).startswith(("memory", "s3")):
            assert names_in(store) == ["step_1"]  # the failed save removed its own remains
        store.prune(1)
        assert store.newest_complete().step == 1
    assert seen == [1] * 6
    store.save(2, files_of(2))
    assert store.prune(1) == ["step_1"]
    assert store.newest_complete() == (2, store.path(2), [])
    assert names_in(store) == ["step_2"]


def test_prune_keeps_the_newest_complete_ones(store):
    for step in (1, 2, 3, 4):
        store.save(step, files_of(step))
    copy(store, "step_4", "step_9")
    assert store.prune(2) == ["step_1", "step_2"]
    assert names_in(store) == ["step_3", "step_4", "step_9"]  # a stranger's folder is not ours to remove
    with pytest.raises(ValueError, match="at least one"):
        store.prune(0)


def test_r17_a_damaged_newest_does_not_count_as_kept(store):
    store.save(1, files_of(1))
    fs, folder = fsspec.url_to_fs(store.save(2, files_of(2)))
    fs.pipe_file(f"{folder}/model/model.safetensors", b"\7" * 1000)  # of the right size
    assert store.prune(1) == []
    assert store.newest_complete().step == 1


KILLS = ["file:2", "before_manifest", "before_rename", "after_rename", "prune"]


@pytest.mark.parametrize("scheme", ["local", "memory"])
def test_all_files_are_there_before_the_manifest(scheme, tmp_path):
    """Also where there is no rename, and where a damaged checkpoint is replaced: who sees the manifest sees all."""
    store = CheckpointStore(str(tmp_path) if scheme == "local" else f"memory:/{tmp_path}")
    fs, folder = fsspec.url_to_fs(store.path(1))

    def watched() -> Iterator[tuple[str, bytes]]:
        for file in files_of(1):
            assert not fs.exists(f"{folder}/{MANIFEST}")
            yield file
        assert not fs.exists(f"{folder}/{MANIFEST}")

    store.save(1, watched())
    assert fs.exists(f"{folder}/{MANIFEST}")
    if scheme == "memory":
        fs.pipe_file(f"{folder}/state.json", b"{}")
        store.save(1, watched())
        assert store.newest_complete().step == 1


@pytest.mark.parametrize("kill", KILLS)
def test_r16_r17_killed_anywhere_a_complete_checkpoint_is_left(tmp_path, kill):
    """kill -9 in the second save (keep=1), for real; then the same again without a kill cleans up."""
    root = str(tmp_path)
    script = (
        "import sys; from pipeline.checkpoint import CheckpointStore as S\n"
        "store = S(sys.argv[1])\n"
        "store.save(2, [('a', b'2' * 10), ('b/c', b'2' * 10)]); store.prune(1)\n"
    )
    CheckpointStore(root).save(1, files_of(1))

    def run(kill_point: str) -> int:
        environment = os.environ | {"PIVOT_KILL_POINT": kill_point}
        return subprocess.run(
            [sys.executable, "-c", script, root], env=environment, cwd=Path(__file__).parents[1]
        ).returncode

    assert run(f"checkpoint.{kill}") == -9
    left = CheckpointStore(root).newest_complete()
    assert left.step == (2 if kill in ("after_rename", "prune") else 1)
    if left.step == 1:
        assert [(name.split(".tmp-")[0], why) for name, why in left.skipped] == [("step_2", "a save that did not end")]
    else:
        assert left.skipped == []
    assert run("") == 0
    assert os.listdir(root) == ["step_2"]
    assert Checkpoint(f"{root}/step_2").read("b/c") == b"2" * 10


def test_the_remains_of_a_prune_without_rename_are_removed(tmp_path):
    """Where there is no rename the manifest goes first: a death after it leaves a folder that vouches for nothing."""
    store = CheckpointStore(f"memory:/{tmp_path}")
    for step in (1, 2):
        store.save(step, files_of(step))
    fs, folder = fsspec.url_to_fs(store.path(1))
    fs.rm_file(f"{folder}/{MANIFEST}")
    assert store.prune(2) == ["step_1"]
    assert names_in(store) == ["step_2"]


def test_a_moved_checkpoint_is_still_whole(tmp_path):
    path = CheckpointStore(str(tmp_path / "a")).save(3, files_of(3))
    shutil.move(path, tmp_path / "b" / "step_3")
    assert CheckpointStore(str(tmp_path / "b")).newest_complete().step == 3
