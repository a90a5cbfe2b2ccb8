"""One live run of emulated engines, looked at by everybody who should not see into it.

It is started in the worst way: with umask 0, from a folder whose packages have our names, into a path of spaces,
quotes and `#SBATCH`, with a secret of the user's in its settings.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from pipeline.run_folder import RunFolder, read_json
from slurm.names import gps_base
from tests.cli.conftest import environment
from tests.security import seen

NAME = 'it\'s "mine" #SBATCH --uid=0 $(reboot) %n ;*'
USERS_SECRET = "hunter2-of-the-user"
SETTINGS = (
    "trainer.total_training_steps=5000",
    "trainer.options.step_seconds=0.3",
    "tracking.uri=",
    f"cluster.env={{API_KEY: {USERS_SECRET}}}",
    "run.code_path=.",
)
LAUNCHER = "import sys\nfrom pipeline.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
"""What pip makes of the entry point: Python puts its folder, not the working directory, on the path."""
STRANGERS = ("pipeline", "stages", "slurm")


@dataclass(frozen=True)
class Live:
    run: RunFolder
    process: "subprocess.Popen[str]"
    folder: Path
    """Where it was started."""

    @property
    def pids(self) -> list[int]:
        return seen.tree(self.process.pid)

    @property
    def secrets(self) -> dict[str, bytes]:
        return {
            path.name: path.read_bytes() for path in self.run.secrets.iterdir() if path.suffix in (".secret", ".key")
        }

    def shared_memory(self) -> list[Path]:
        return sorted(Path("/dev/shm").glob(f"{gps_base(self.run, 1, 'local-0')}*"))


def until(condition: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("where users work")
    for name in STRANGERS:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('a stranger was imported')")
    (folder / "bin").mkdir()
    launcher = folder / "bin" / "pivot-pipeline"
    launcher.write_text(LAUNCHER)
    run = RunFolder(folder / "runs" / "of me" / NAME)
    process = subprocess.Popen(
        [sys.executable, str(launcher), "submit", "configs/emulated.yaml", "--run-dir", str(run.path), *SETTINGS],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        umask=0,
    )
    try:
        until(lambda: any(run.checkpoints.glob("step_*/MANIFEST.json")), process)
        until(lambda: any(run.path.glob("mlartifacts/*/artifacts/config.yaml")), process)
        yield Live(run, process, folder)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def ended(live: Live) -> Live:
    live.process.send_signal(signal.SIGINT)
    live.process.wait(60)
    return live


# --- files ----------------------------------------------------------------------------------------------------------


def open_to_others(root: Path) -> list[str]:
    """What is not its owner's alone: folders 0700, files 0600, and no links."""
    found = []
    below = (Path(folder, name) for folder, folders, files in os.walk(root) for name in (*folders, *files))
    for path in (root, *below):
        try:
            info = path.lstat()
        except FileNotFoundError:  # a live run replaces and removes files
            continue
        wanted = 0o700 if stat.S_ISDIR(info.st_mode) else 0o600
        if stat.S_ISLNK(info.st_mode) or stat.S_IMODE(info.st_mode) & ~wanted or info.st_uid != os.getuid():
            found.append(f"{stat.filemode(info.st_mode)} {path.relative_to(root)}")
    return found


def test_nothing_of_a_run_is_open_to_others_whatever_the_umask(live: Live) -> None:
    wanted = {"config.yaml", "status.json", "metrics.jsonl", "mlflow.db", "secrets", "tasks", "queue"}
    assert wanted <= set(os.listdir(live.run.path))
    assert open_to_others(live.run.path) == []
    for parent in (live.run.path.parent, live.run.path.parent.parent):  # made on the way
        assert parent.stat().st_mode & 0o022 == 0


def test_shared_memory_is_its_users_alone(live: Live) -> None:
    files = live.shared_memory()
    assert {path.name.rpartition("-")[2] for path in files} >= {"policy.0", "policy.1", "policy.meta", "genrm.0"}
    assert {(stat.S_IMODE(path.lstat().st_mode), path.lstat().st_uid) for path in files} == {(0o600, os.getuid())}


# --- processes ------------------------------------------------------------------------------------------------------


def test_no_secret_is_in_arguments_or_environments(live: Live) -> None:
    pids = live.pids
    assert len(pids) >= 8  # the command, controller, queue server, agent, zygote, three workers
    every = [form for secret in live.secrets.values() for form in seen.forms(secret)]
    said = {pid: (seen.arguments(pid), seen.environment(pid)) for pid in pids}
    assert [pid for pid, texts in said.items() for form in every for text in texts if form in text] == []
    assert all(texts[0] and texts[1] for texts in said.values())
    # The user's own goes where it was asked to go, and the command that they typed is theirs.
    own = USERS_SECRET.encode()
    assert [pid for pid, texts in said.items() if own in texts[0]] == [live.process.pid]
    with_it = {pid for pid, texts in said.items() if own in texts[1]}
    assert with_it and all(b"slurm.zygote" in said[pid][0] for pid in with_it)


def test_all_listen_on_loopback_only(live: Live) -> None:
    found = seen.listening(live.pids)
    assert len(found) >= 2  # the channel and the queue server
    assert {address for _, address in found} <= {"127.0.0.1", "::1"}, found


def test_a_users_own_packages_do_not_shadow_ours(live: Live) -> None:
    """They are where it was started, and even on the workers' path: the run goes on all the same."""
    status = read_json(live.run.status)
    assert status["status"] == "running" and len(status["workers"]) == 3
    until(lambda: read_json(live.run.status)["step"] > status["step"], live.process)
    shadowed = subprocess.run(
        [sys.executable, "-c", "import pipeline"], cwd=live.folder, capture_output=True, text=True, check=False
    )
    assert "a stranger was imported" in shadowed.stderr  # they would


# --- readers --------------------------------------------------------------------------------------------------------

AUDITED = """
import json, os, sys
told = []
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)):
        told.append(["open", os.fsdecode(args[0])])
    elif event.startswith(("pickle.", "sqlite3.", "marshal.loads/")):
        told.append([event, ""])
sys.addaudithook(hook)
from pipeline.cli.main import run
codes = [run(command) for command in json.loads(sys.argv[1])]
loaded = [name for name in ("sqlite3", "pyarrow", "cloudpickle", "submitit") if name in sys.modules]
print(json.dumps({"codes": codes, "told": told, "loaded": loaded}), file=sys.stderr)
"""


def test_readers_neither_unpickle_nor_open_the_index(live: Live) -> None:
    run = str(live.run.path)
    commands = [["status", run], ["status", run, "--json"], ["status"], ["logs", run], ["logs", run, "--step", "1"]]
    done = subprocess.run(
        [sys.executable, "-P", "-c", AUDITED, json.dumps(commands)],
        cwd=live.folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    heard = json.loads(done.stderr.splitlines()[-1])
    assert heard["codes"] == [0] * len(commands), done.stderr
    assert heard["loaded"] == [] and {event for event, _ in heard["told"]} == {"open"}
    opened = {path.removeprefix(f"{run}/") for _, path in heard["told"] if path.startswith(run)}
    assert {"status.json", "logs/controller.log"} <= opened
    assert any(path.startswith("tasks/") for path in opened)
    assert [p for p in opened if not (p in ("status.json", "metrics.jsonl") or p.endswith((".log", "_log.out")))] == []


# --- afterwards -----------------------------------------------------------------------------------------------------


def holding(folder: Path, wanted: list[bytes], *, but: tuple[str, ...] = ()) -> list[str]:
    """Files below the folder that hold one of these."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] not in but]
    assert files
    return [str(path.relative_to(folder)) for path in files if any(form in path.read_bytes() for form in wanted)]


def test_secrets_stand_in_no_other_file(ended: Live) -> None:
    """Nor in what goes to MLflow: its parameters, tags and artifacts are files here."""
    run = ended.run.path
    assert set(ended.secrets) == {"server.secret", "agent.secret", "queue.key"}
    every = [form for secret in ended.secrets.values() for form in seen.forms(secret)]
    assert holding(run, every, but=("secrets",)) == []
    assert len(holding(run / "secrets", every)) == len(ended.secrets)
    # What a user gives to the workers' environment is kept for `resume`, and shown nowhere.
    assert holding(run, [USERS_SECRET.encode()]) == ["config.yaml"]
    artifact = next(run.glob("mlartifacts/*/artifacts/config.yaml")).read_text()
    assert "API_KEY: '***'" in artifact


def test_what_remains_of_a_run_is_closed_too(ended: Live) -> None:
    assert read_json(ended.run.summary)["status"] == "cancelled"
    assert open_to_others(ended.run.path) == []
    assert ended.shared_memory() == []


def test_checkpoints_are_safetensors_and_json(ended: Live) -> None:
    newest = max(ended.run.checkpoints.glob("step_*/MANIFEST.json"), key=lambda path: path.stat().st_mtime).parent
    kinds = set()
    for path in newest.rglob("*"):
        if path.is_file():
            kinds.add(path.suffix)
            {".json": lambda p: json.loads(p.read_text()), ".safetensors": load_file}[path.suffix](path)
    assert kinds == {".json", ".safetensors"}
