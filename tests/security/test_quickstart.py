"""The same questions to a run with real engines and a real trainer."""

import signal
import subprocess
from pathlib import Path

import pytest

from pipeline.run_folder import RunFolder
from tests.cli.conftest import COMMAND, environment
from tests.security import seen
from tests.security.test_run import open_to_others, until


@pytest.mark.slow
@pytest.mark.vllm
def test_the_quickstart_listens_on_loopback_only_and_leaves_nothing_open(tmp_path: Path) -> None:
    """torch.distributed and vLLM open ports of their own."""
    run = RunFolder(tmp_path / "run")
    process = subprocess.Popen(
        [*COMMAND, "submit", "configs/quickstart.yaml", "--run-dir", str(run.path), "checkpoint.save_freq=1"],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        umask=0,
    )
    try:
        until(lambda: any(run.checkpoints.glob("step_*/MANIFEST.json")), process)
        pids = seen.tree(process.pid)
        found = seen.listening(pids)
        workers = [pid for pid in pids if b"slurm.zygote" in seen.arguments(pid)]
        assert len(workers) == 4 and {pid for pid, _ in found} & set(workers)  # engines do listen
        assert {address for _, address in found} <= {"127.0.0.1", "::1"}, found
        secrets = [(run.secrets / name).read_bytes() for name in ("server.secret", "agent.secret", "queue.key")]
        said = b"".join(seen.arguments(pid) + seen.environment(pid) for pid in pids)
        assert [form for secret in secrets for form in seen.forms(secret) if form in said] == []
        assert open_to_others(run.path) == []
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    kinds = {path.suffix for path in run.checkpoints.rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors", ".jinja"}
    assert open_to_others(run.path) == []
