"""Who may import what. Read from the sources, so a rule holds also for what no test runs."""

import ast
import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT, imports, is_within, modules, relative

OWNERS = {
    "vllm": ("stages/engines/vllm",),
    "torch": ("stages/",),
    "transformers": ("stages/",),
    "accelerate": ("stages/rl/",),
    "peft": ("stages/rl/lora.py",),
    "safetensors": ("stages/", "pipeline/gps/", "pipeline/checkpoint.py"),
    "mlflow": ("pipeline/tracking.py",),
    "submitit": ("slurm/executor.py", "slurm/allocation.py", "stages/task.py"),
    "pyarrow": ("pipeline/queue/", "pipeline/data_files.py"),
    "sqlite3": ("pipeline/queue/",),
    "zmq": ("pipeline/channel.py",),
    "fsspec": ("pipeline/remote.py",),
    "yaml": ("pipeline/compose.py",),
    "click": ("pipeline/cli/",),
    "rich": ("pipeline/cli/",),
    "jinja2": ("stages/",),
    "matplotlib": ("pipeline/simulator/plots.py",),
}
"""Heavy or telling libraries, and the one place of each."""
LATE = {"torch", "vllm", "accelerate", "mlflow", "submitit", "transformers", "peft", "matplotlib"}
"""Never imported by the import of the control plane."""
IMPURE = {
    *("os", "io", "sys", "time", "datetime", "pathlib", "shutil", "tempfile", "random", "secrets", "uuid"),
    *("socket", "subprocess", "threading", "multiprocessing", "asyncio", "signal", "sqlite3", "logging"),
}
ENVIRONMENT = {
    "pipeline/config.py",  # what a user may set
    "pipeline/processes.py",  # what a child inherits
    "pipeline/cli/doctor.py",  # what a run would find there
    "pipeline/kill_points.py",  # where a test kills
    "pipeline/tracking.py",  # MLflow's own limits
    "stages/engines/vllm_ranks.py",  # how vLLM starts processes
    "slurm/again.py",  # how often the job was started again
    "slurm/agent.py",
    "slurm/allocation.py",  # what a submission must not inherit
    "slurm/commands.py",
    "slurm/held.py",  # which allocation this is
    "slurm/job.py",  # which job this is
    "slurm/launcher.py",  # how many CPUs it has
    "slurm/stub.py",  # which devices Slurm gave its step
    "slurm/zygote.py",
    "slurm/workers.py",
    "stages/ballast.py",  # which devices an emulated worker says that it is on
    "stages/scoring/endpoint.py",  # the key of a judge behind a URL
    "stages/start.py",
    "stages/worker.py",
    "stages/engines/vllm_start.py",
    "stages/engines/vllm_extension.py",
    "stages/engines/torch_start.py",
}


def faults(path: str, source: str) -> list[str]:
    """What the file at `path` (from the root) does against the rules."""
    package = path.split("/")[0]
    found = []
    for module, line, is_top in imports(source):
        top = module.split(".")[0]
        where = f"{path}:{line}: imports {module}"
        if top in OWNERS and not path.startswith(OWNERS[top]):
            found.append(f"{where}, which belongs to {', '.join(OWNERS[top])}")
        if package == "pipeline" and is_top and top in LATE:
            found.append(f"{where} at module level")
        if (package, top) in {("stages", "slurm"), ("slurm", "stages"), ("pipeline", "stages")}:
            found.append(f"{where}: a stage is named by its dotted path")
        if package == "pipeline" and top == "slurm" and not path.startswith("pipeline/cli/"):
            found.append(f"{where}: only pipeline/cli wires it in")
        if path.startswith("pipeline/core/") and not _is_pure(path, module):
            found.append(f"{where}: the core is pure")
        if package == "stages" and is_within(module, "pipeline.core") and not _is_vocabulary(module):
            found.append(f"{where}: the data plane knows only the core's events and errors")
        if package in ("stages", "slurm") and is_within(module, "pipeline.cli"):
            found.append(f"{where}: nothing imports the command line")
    if path.startswith("pipeline/core/") and any(_opens_a_file(node) for node in ast.walk(ast.parse(source))):
        found.append(f"{path}: the core opens no file")
    if ("os.environ" in source or "os.getenv" in source) and path not in ENVIRONMENT:
        found.append(f"{path}: reads the environment")
    return found


def _opens_a_file(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"


def _is_pure(path: str, module: str) -> bool:
    top = module.split(".")[0]
    if top == "numpy":
        return path.startswith("pipeline/core/planner/")
    return is_within(module, "pipeline.core") or (top in sys.stdlib_module_names and top not in IMPURE)


def _is_vocabulary(module: str) -> bool:
    return module == "pipeline.core" or module.startswith(("pipeline.core.events", "pipeline.core.errors"))


def test_each_file_keeps_the_rules() -> None:
    found = [fault for path in modules() for fault in faults(relative(path), path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pipeline/shell.py", "import torch"),
        ("pipeline/shell.py", "def f():\n    import mlflow.entities"),
        ("pipeline/tracking.py", "from mlflow import MlflowClient"),
        ("pipeline/tracking.py", "class A:\n    import mlflow"),
        ("pipeline/shell.py", "def f():\n    from stages.rollout import rollout"),
        ("pipeline/shell.py", "def f():\n    import slurm.local"),
        ("stages/worker.py", "import slurm"),
        ("slurm/agent.py", "from stages import worker"),
        ("stages/worker.py", "from pipeline.core.core import Core"),
        ("stages/worker.py", "import pipeline.cli.main"),
        ("pipeline/core/core.py", "import time"),
        ("pipeline/core/core.py", "import numpy"),
        ("pipeline/core/core.py", "from pipeline.wire import Join"),
        ("pipeline/core/core.py", "x = open('f')"),
        ("pipeline/queue/rows.py", "import os\nx = os.environ['A']"),
        ("stages/rollout.py", "import vllm.engine"),
        ("slurm/local.py", "import sqlite3"),
        ("pipeline/cli/simulate.py", "def f():\n    import matplotlib"),
    ],
)
def test_what_breaks_a_rule_is_found(path: str, source: str) -> None:
    assert faults(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pipeline/tracking.py", "def f():\n    import mlflow"),
        ("pipeline/tracking.py", "if TYPE_CHECKING:\n    import mlflow"),
        ("pipeline/cli/submit.py", "def f():\n    from slurm.local import start_controller"),
        ("pipeline/core/planner/score.py", "import numpy as np"),
        ("stages/engines/vllm_start.py", "import vllm, torch"),
        ("stages/worker.py", "from pipeline.core.errors import RunError"),
    ],
)
def test_what_keeps_the_rules_is_left_alone(path: str, source: str) -> None:
    assert faults(path, source) == []


def _loaded_by(names: list[str], asked: set[str]) -> list[str]:
    code = f"import sys, {', '.join(names)}; print(*sorted({asked!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def _names(*packages: str) -> list[str]:
    paths = [path.relative_to(ROOT).with_suffix("") for path in modules(*packages)]
    return [".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__"]


def test_the_import_of_the_whole_control_plane_loads_nothing_heavy() -> None:
    assert _loaded_by(_names("pipeline"), LATE | {"stages", "slurm"}) == []


def test_the_import_of_the_resource_edge_loads_nothing_of_the_data_plane() -> None:
    assert _loaded_by(_names("slurm"), (LATE | {"stages"}) - {"submitit"}) == []
