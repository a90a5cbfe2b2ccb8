"""The machine: memory, disk, limits of processes, GPUs, the tracking server."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from pipeline.doctor.finding import Finding, State, absent, fault, ok, warning

_SHM = Path("/dev/shm")
_GIB = 1 << 30
_LEAST_SHM, _LEAST_DISK, _LEAST_TEMPORARY = 1 * _GIB, 5 * _GIB, 1 * _GIB
_LEAST_FILES, _LEAST_PROCESSES = 4096, 4096
_ASK_S = 5.0


def look_at_machine(root: Path) -> Iterator[Finding]:
    """`root`: where run folders are made."""
    yield shared_memory(_SHM)
    yield disk("run folders", root, _LEAST_DISK)
    yield disk("temporary files", Path(tempfile.gettempdir()), _LEAST_TEMPORARY)
    yield from limits()
    found = gpus()
    yield found
    if found.state is State.OK:
        yield nccl()


def shared_memory(folder: Path) -> Finding:
    """Weights lie there."""
    try:
        found = os.statvfs(folder)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="pivot-doctor-"):
            pass
    except OSError as error:
        return fault(str(folder), f"cannot be used: {error.strerror}", "mount a tmpfs there: weights are shared in it")
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    said = f"{_text(free)} of {_text(size)} free"
    if free < _LEAST_SHM:
        return warning(
            str(folder),
            said,
            "each node holds the policy twice and the judge once there: enlarge it (docker: --shm-size), or free it",
        )
    return ok(str(folder), said)


def disk(what: str, folder: Path, least: int) -> Finding:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return fault(what, f"{existing} cannot be written", "choose another folder (run.root, TMPDIR)")
    free = shutil.disk_usage(existing).free
    said = f"{_text(free)} free in {existing}"
    if free < least:
        return warning(
            what, said, "checkpoints hold the model and three times as much; free space, or elsewhere: run.root"
        )
    return ok(what, said)


def limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _LEAST_FILES:
        yield warning("open files", f"at most {soft}", f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}")
    else:
        yield ok("open files", f"at most {soft}")
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if 0 <= soft < _LEAST_PROCESSES:
        yield warning("processes", f"at most {soft}", "ulimit -u: threads count, and a node may have hundreds")
    else:
        yield ok("processes", "not limited" if soft < 0 else f"at most {soft}")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft >= 0 and Path("/dev/nvidiactl").exists():
        yield warning("locked memory", f"at most {_text(soft)}", "ulimit -l unlimited: GPUs read pinned memory faster")


def gpus() -> Finding:
    if shutil.which("nvidia-smi") is None:
        return absent("GPUs", "no nvidia-smi: runs use the CPU")
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=4 * _ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return fault("GPUs", f"nvidia-smi does not answer: {error}", "look at the driver: dmesg | grep -i nvrm")
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not lines:
        return fault("GPUs", (done.stderr or done.stdout).strip()[:200] or "none", "look at the driver: nvidia-smi")
    return ok("GPUs", f"{len(lines)} x {lines[0]}")


def nccl() -> Finding:
    """Of the torch that is installed; it is asked in a process of its own, which may take CUDA's first seconds."""
    code = "import torch; print(torch.cuda.device_count(), '.'.join(map(str, torch.cuda.nccl.version())))"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return fault("NCCL", "torch does not see the GPUs within 120 s", "look at the driver: nvidia-smi")
    num, _, version = done.stdout.strip().partition(" ")
    if done.returncode or not num.isdigit() or num == "0":
        why = (done.stderr.strip().splitlines() or ["torch sees no GPU"])[-1]
        return fault(
            "NCCL", why[:200], "this torch is not built for the driver's CUDA: pip install 'pivot-pipeline[cuda]'"
        )
    return ok("NCCL", f"{version}, torch sees {num} GPUs")


def tracking(uri: str) -> Finding:
    """An MLflow server says so at /health."""
    if not uri.startswith(("http://", "https://")):
        return ok("MLflow", f"{uri or 'the run folder'}: no server is needed")
    shown = uri.partition("://")[0] + "://" + uri.partition("://")[2].rpartition("@")[2]
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=_ASK_S):
            return ok("MLflow", f"{shown} answers")
    except (OSError, ValueError):  # an answer that is an error is an OSError, too
        pass
    return warning(
        "MLflow", f"{shown} does not answer", "runs go on without it and send their rows later; check the URI"
    )


def _text(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
