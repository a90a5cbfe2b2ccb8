"""Names and paths that users choose, or that others chose for them."""

import os
import shlex
from pathlib import Path

import pytest

from pipeline.checkpoint import CheckpointStore
from pipeline.cli.runs import as_argument
from pipeline.core.errors import ConfigError
from pipeline.run_folder import RunFolder, read_json, write_json
from pipeline.status import start_ticks
from tests.cli.conftest import Pivot, pivot
from tests.cli.test_commands import make_run

__all__ = ["pivot"]

NOBODY = 65534
SUBMIT = ("submit", "configs/emulated.yaml")
UNPRINTABLE = ["a\nb", "#SBATCH\n#SBATCH --uid=0", "a\x1b[2J", "\u202ea", "a\u200bb", "a\u2028b", "\udcff"]
STRANGE = ["it's", '"', "#SBATCH --uid=0", "$(reboot)", "`id`", "; rm -rf *", "*", "r[1]", "a::b", "{a,b}", "%n", "é日"]


@pytest.mark.parametrize("name", [*UNPRINTABLE, "..", ".", "", "a/b", "../a", "/a"])
def test_a_name_that_is_not_one_plain_word_is_refused(pivot: Pivot, tmp_path: Path, name: str) -> None:
    done = pivot(*SUBMIT, "--name", name)
    assert done.code == 2 and "run.name" in done.err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", UNPRINTABLE)
@pytest.mark.parametrize("place", ["{}", "{}/run"])
def test_a_folder_whose_path_cannot_be_shown_is_refused(pivot: Pivot, tmp_path: Path, name: str, place: str) -> None:
    done = pivot(*SUBMIT, "--run-dir", place.format(name))
    assert done.code == 2 and "control or invisible characters" in done.err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_name_is_only_a_name(tmp_path: Path, name: str) -> None:
    """Neither a pattern, nor a chain of file systems, nor words of a shell: the neighbours stay as they are."""
    stores = {}
    for run in (RunFolder(tmp_path / of) for of in (name, "a", "r1", "it", "b")):
        run.create()
        stores[run.name] = CheckpointStore(str(run.checkpoints))
        (run.checkpoints / "step_1").mkdir()  # a save that was cut off
        for step in (2, 3):
            stores[run.name].save(step, [("state.json", b"{}")])
    assert stores[name].prune(keep=1) == ["step_2", "step_1"]
    assert stores[name].newest_complete().step == 3
    assert Path(stores[name].path(3)) == tmp_path / name / "checkpoints" / "step_3"
    for other in set(stores) - {name}:
        assert sorted(os.listdir(tmp_path / other / "checkpoints")) == ["step_1", "step_2", "step_3"]
    assert sorted(os.listdir(tmp_path)) == sorted(stores)
    assert shlex.split(as_argument(RunFolder(tmp_path / name))) == [str(tmp_path / name)]


# --- folders that are not one's own ---------------------------------------------------------------------------------


def anybody_may_write(path: Path) -> None:
    path.chmod(0o777)


def the_group_may_write(path: Path) -> None:
    path.chmod(0o770)


def another_users(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(path, NOBODY, -1)


NOT_OWN = [anybody_may_write, the_group_may_write, another_users]


@pytest.mark.parametrize("spoil", NOT_OWN)
def test_no_run_is_made_in_a_folder_of_others(pivot: Pivot, tmp_path: Path, spoil) -> None:
    folder = tmp_path / "given"
    folder.mkdir(0o700)
    spoil(folder)
    before = folder.stat().st_mode
    done = pivot(*SUBMIT, "--run-dir", "given")
    assert done.code == 2 and "nobody else may write to it" in done.err
    assert list(folder.iterdir()) == [] and folder.stat().st_mode == before


@pytest.mark.parametrize("spoil", NOT_OWN)
@pytest.mark.parametrize("command", ["resume", "cancel"])
def test_a_run_that_others_may_write_is_not_believed(pivot: Pivot, tmp_path: Path, spoil, command: str) -> None:
    """Its configuration may name their code, and its status a process of ours."""
    run = make_run(tmp_path, "r", pid=os.getpid(), pid_start=start_ticks(os.getpid()))
    spoil(run.path)
    done = pivot(command, "r")
    assert done.code == 2 and "nobody else may write to it" in done.err
    assert run.attempts() == [1]
    assert pivot("status", "r").code == 0  # it may be looked at


def test_what_is_made_is_closed_whatever_the_umask(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "r")
    before = os.umask(0)
    try:
        run.create()
        write_json(run.status, {})
        attempt = run.begin_attempt()
    finally:
        os.umask(before)
    assert run.logs(attempt).is_dir() and run.tasks(attempt).is_dir()
    wide = [path for path in (run.path, *run.path.rglob("*")) if path.stat().st_mode & 0o077]
    assert wide == [] and run.path.parent.stat().st_mode & 0o777 == 0o755


def test_files_are_not_written_through_links(tmp_path: Path) -> None:
    victim = tmp_path / "thesis"
    victim.write_text("dear to its owner")
    for name, link in (("a.json", f".a.json.{os.getpid()}.tmp"), ("b.json", "b.json")):
        (tmp_path / link).symlink_to(victim)
        if name == link:
            write_json(tmp_path / name, 1)
            assert read_json(tmp_path / name) == 1 and not (tmp_path / name).is_symlink()
        else:
            with pytest.raises(OSError, match="symbolic links"):
                write_json(tmp_path / name, 1)
        assert victim.read_text() == "dear to its owner"


def test_a_runs_folder_is_closed_before_anything_is_put_into_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(0o755)
    RunFolder(tmp_path / "run").create()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="control or invisible"):
        RunFolder(tmp_path / "a\tb").create()
    assert not (tmp_path / "a\tb").exists()
