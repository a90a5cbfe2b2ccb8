"""`export` and `eval`: a version of a run's policy as a folder that others load, and how good it is."""

import importlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click

from pipeline.checkpoint import Checkpoint, store_of
from pipeline.checks import EMULATED
from pipeline.cli.runs import find_run
from pipeline.cli.terminal import table
from pipeline.config import Config, load_resolved
from pipeline.core.errors import ConfigError, RunError
from pipeline.own_code import CHECKER, check_function
from pipeline.processes import python_command, python_environment
from pipeline.run_folder import RunFolder, write_json
from pipeline.wording import visible


def export(name: str, step: int | None, to: str | None, *, with_engine: bool) -> int:
    run, _, checkpoint, step = _checkpoint(name, step)
    folder = Path(to) if to else run.path / "exports" / f"step_{step}"
    if folder.exists():
        raise ConfigError(f"{folder} exists: choose another folder with --to")
    aside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        _copy(checkpoint, aside)
        told = {"what": "check", "config": str(run.config), "folder": str(aside), "engine": with_engine}
        found = _offline(told, run)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    click.echo(visible(f"step {step} of {run.name} lies in {folder}"))
    if with_engine:
        click.echo(
            f"transformers and vLLM load it; {found['num_same']} of {found['num_prompts']} greedy answers are the "
            f"same, with logprobs that differ by at most {found['largest']:.1e}"
        )
    else:
        click.echo("transformers loads it")
    return 0


def evaluate(
    name: str,
    step: int | None,
    *,
    data: tuple[str, ...],
    samples: int,
    num_prompts: int,
    function: str,
    temperature: float | None,
    as_json: bool,
) -> int:
    run, config, checkpoint, step = _checkpoint(name, step)
    files = [str(Path(file).absolute()) if "://" not in file else file for file in data] or config.data.val_files
    if not files:
        raise ConfigError("name a file with --data: the run's data.val_files is empty")
    function = function or config.evaluate.function
    if not function:
        raise ConfigError("name the checker with --function, module:name: the run's evaluate.function is empty")
    check_function("--function", function, config.run.code_path, CHECKER)
    with tempfile.TemporaryDirectory(prefix="pivot-eval-") as folder:
        _copy(checkpoint, Path(folder, "model"))
        told = {
            "what": "eval",
            "config": str(run.config),
            "folder": f"{folder}/model",
            "data": files,
            "samples": samples,
            "num_prompts": num_prompts,
            "function": function,
            "temperature": config.rollout.temperature if temperature is None else temperature,
            "seed": config.evaluate.seed,
        }
        found = {"run": run.name, "step": step, "data": files, **_offline(told, run)}
    (run.path / "evals").mkdir(exist_ok=True)
    write_json(run.path / "evals" / f"step_{step}.json", found)
    if as_json:
        click.echo(json.dumps(found))
    else:
        rows = [(key, f"{value:.4f}") for key, value in found.items() if isinstance(value, float)]
        click.echo(visible(f"{run.name}, step {step}: {found['num_prompts']} prompts, {samples} answers to each"))
        click.echo(table(rows))
    return 0


def _checkpoint(name: str, step: int | None) -> tuple[RunFolder, Config, Checkpoint, int]:
    run = find_run(name)
    run.check_own()
    config = load_resolved(run.config)
    if config.model.policy.path == EMULATED:
        raise ConfigError(f"{run.name} has an emulated policy: there is no model to load")
    store = store_of(run, config)
    complete = store.complete()
    chosen = max(complete, default=0) if step is None else step
    if chosen not in complete:
        kept = ", ".join(map(str, sorted(complete))) or "none"
        raise ConfigError(
            f"{run.name} has no checkpoint of step {chosen}; there are {kept} (checkpoint.save_freq, checkpoint.keep)"
        )
    return run, config, Checkpoint(store.path(chosen)), chosen


def _copy(checkpoint: Checkpoint, folder: Path) -> None:
    """The model's files, each as the manifest says."""
    for file in checkpoint.files:
        if file.startswith("model/"):
            checkpoint.copy(file, str(folder / file.removeprefix("model/")))


def _offline(told: dict[str, Any], run: RunFolder) -> dict[str, Any]:
    """What stages.offline answers. Raises RunError with its last words."""
    engine_env = importlib.import_module("stages.engines.vllm_start").environment(str(run.cache))
    done = subprocess.run(
        python_command("stages.offline", json.dumps(told)),
        env=python_environment(**engine_env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RunError(f"{told['folder']} does not load:\n" + "\n".join(done.stderr.strip().splitlines()[-12:]))
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
