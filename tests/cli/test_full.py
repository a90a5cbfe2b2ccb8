"""A full disk, a full /dev/shm, files that cannot be written: how a run says so, and that it goes on afterwards."""

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from pipeline.config import save_resolved
from pipeline.run_folder import RunFolder, read_json
from tests.cli.conftest import COMMAND, environment
from tests.cli.private import free_bytes, small_disk
from tests.cli.test_submit import metric_steps, step_of, until
from tests.fakes.scripted import make_config
from tests.scenarios.runs import pids_of, sequences

CONFIG = str(Path(__file__).parents[2] / "configs" / "emulated.yaml")
STEPS = ("trainer.total_training_steps=12", "trainer.options.step_seconds=0.1", "evaluate.freq=0")
ENDLESS = ("trainer.total_training_steps=5000", "trainer.options.step_seconds=0.1")


def ended(process: "subprocess.Popen[str]") -> str:
    return process.communicate(timeout=60)[0]


def causes(run: Path) -> set[str]:
    """What the run's folder says on why it ended: status, summary, marker."""
    summary, marker = read_json(run / "summary.json"), read_json(run / "ENDED")
    return {read_json(run / "status.json")["error"]["reason"], summary["reason"], marker["reason"]}


def test_a_run_ends_in_order_on_a_full_disk_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "24m") as disk:
        run, seen = disk.path / "my run", disk.outside / "my run"
        process = disk.begin(tmp_path, "submit", CONFIG, "--run-dir", str(run), *STEPS)
        until(lambda: step_of(seen) >= 4, process)
        assert (seen / ".reserve").stat().st_blocks * 512 >= 4 << 20
        filler = disk.fill()
        out = ended(process)
        assert process.returncode == 1, out
        (cause,) = causes(seen)
        assert cause.startswith(f"no space left on {run}: ") and cause.endswith("\nfree space, then resume")
        assert f"cause: no space left on {run}: " in out and "pivot-pipeline resume" in out
        assert not (seen / ".reserve").exists() and pids_of(run) == []
        had = {row.id: row.tokens for step in sequences(seen).values() for row in step if row.tokens}

        filler.unlink()
        process = disk.begin(tmp_path, "resume", str(run))
        out = ended(process)
        assert process.returncode == 0, out
        assert metric_steps(seen) == list(range(1, 13))
        have = {row.id: row.tokens for step in sequences(seen).values() for row in step}
        assert had and len(have) == 12 * 16
        assert all(have[id][: len(tokens)] == tokens for id, tokens in had.items())


def test_a_run_that_finds_a_full_disk_says_so(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "3m") as disk:
        process = disk.begin(tmp_path, "submit", CONFIG, "--run-dir", str(disk.path / "r"), *STEPS)
        out = ended(process)
        assert process.returncode == 1 and "no space left on " in out and "Traceback" not in out
        assert causes(disk.outside / "r") and pids_of(disk.path / "r") == []


def test_a_run_that_cannot_even_write_its_end_is_explained_by_the_command(tmp_path: Path) -> None:
    """Something else has taken the run's reserve, too."""
    with small_disk(tmp_path / "disk", "24m") as disk:
        run, seen = disk.path / "r", disk.outside / "r"
        process = disk.begin(tmp_path, "submit", CONFIG, "--run-dir", str(run), *STEPS)
        until(lambda: step_of(seen) >= 2, process)
        (seen / ".reserve").unlink()
        disk.fill()
        out = ended(process)
        assert process.returncode == 1 and "Traceback" not in out, out
        assert f"no space left on {run}: the controller ended without a word: exit code 1" in out
        assert "free space first" in out and f"pivot-pipeline resume {run}" in out
        assert read_json(seen / "status.json")["status"] == "running" and not (seen / "ENDED").exists()
        until(lambda: pids_of(run) == [])


def test_a_run_that_does_not_fit_into_shared_memory_does_not_begin(tmp_path: Path) -> None:
    with small_disk(Path("/dev/shm"), "12k") as disk:
        process = disk.begin(tmp_path, "submit", CONFIG, "--run-dir", str(tmp_path / "r"))
        out = ended(process)
        assert process.returncode == 2 and "of shared memory" in out and "/dev/shm has 0.01 MiB free" in out, out
        assert not (tmp_path / "r").exists()


def test_a_run_does_not_care_when_shared_memory_fills_but_a_lost_node_says_so(tmp_path: Path) -> None:
    run = tmp_path / "r"
    with small_disk(Path("/dev/shm"), "1m") as disk:
        process = disk.begin(tmp_path, "submit", CONFIG, "--run-dir", str(run), *ENDLESS, "limits.restarts=1")
        until(lambda: step_of(run) >= 2, process)
        disk.fill()
        assert free_bytes(disk) == 0
        begun = step_of(run)
        until(lambda: step_of(run) >= begun + 2, process)

        is_over = threading.Event()

        def fill() -> None:  # what the dead agent had goes to somebody else
            while not is_over.wait(0.0005):
                disk.fill()

        filler = threading.Thread(target=fill)
        filler.start()
        os.kill(agent_of(run), signal.SIGKILL)
        out = ended(process)
        is_over.set()
        filler.join()
        assert process.returncode == 1, out
        assert "node local-0 was lost 2 times without progress" in out
        assert "bytes, but /dev/shm has " in out


def agent_of(run: Path) -> int:
    (pid,) = (pid for pid in pids_of(run) if b"slurm.agent" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return pid


@pytest.mark.parametrize("name", ["metrics.jsonl", "journal/attempt_1.jsonl"])
def test_a_file_that_cannot_be_written_is_the_cause(tmp_path: Path, name: str) -> None:
    run = RunFolder(tmp_path / "r")
    run.create()
    save_resolved(make_config(), run.config)
    (run.path / name).mkdir()
    controller = subprocess.run(
        [*COMMAND, "_controller", str(run.path)], cwd=tmp_path, env=environment(), capture_output=True, timeout=60
    )
    assert controller.returncode == 1
    (cause,) = causes(run.path)
    assert cause == f"controller: IsADirectoryError: [Errno 21] Is a directory: '{run.path / name}'"
