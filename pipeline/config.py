"""The configuration tree. The models below are the documentation: one field, one line.

A run's YAML files are composed from left to right, then dotted overrides (`trainer.lr=1e-6`) are applied, then
everything is validated once. A wrong key or value stops at submit with its path and what is valid.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from pipeline.compose import Sources, Tree, dump, leaves, merge, nest, parse_override, read_tree
from pipeline.config_engine import EngineOptions
from pipeline.config_errors import explain
from pipeline.config_gps import Gps
from pipeline.config_outputs import Checkpoint, Evaluate, Tracking
from pipeline.config_paths import find_config, packaged_configs, with_absolute_inputs
from pipeline.config_placement import Placement
from pipeline.config_ranks import with_ranks
from pipeline.config_reward import Reward
from pipeline.config_rollout import Rollout
from pipeline.config_room import room_faults
from pipeline.config_slurm import Slurm
from pipeline.config_stages import OwnStage
from pipeline.config_strict import strict_faults, with_strict_defaults
from pipeline.config_trainer import Trainer
from pipeline.config_types import Dtype, Float, Int, Paths, Section
from pipeline.core.dag import Own, step_graph
from pipeline.gps.placement import num_piles
from pipeline.run_folder import write_atomic
from pipeline.simulator.profiles import GPUS


class Run(Section):
    name: str = Field(default="run", min_length=1, description="Name of the run; its folder is `root/name`")
    root: str = Field(default="runs", description="Where run folders are made")
    seed: Int = Field(
        default=0, ge=0, lt=2**31, description="Seeds the sampler, the sampling and the order of training"
    )
    determinism: Literal["default", "strict"] = Field(
        default="default", description="strict: bit-for-bit repeatable (needs float32 and one replica per role), slower"
    )
    code_path: Paths = Field(default=[], description="Folders added to sys.path of workers, for the user's own modules")

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if "/" in name or name in (".", "..") or not name.isprintable():
            raise ValueError("a name is one line without '/', and not '.' or '..'")
        return name


class Cluster(Section):
    kind: Literal["local", "slurm"] = Field(default="local", description="This machine, or a job of a Slurm cluster")
    nodes: Int = Field(default=1, ge=1, description="Number of nodes (local: agents on this host)")
    min_nodes: Int = Field(default=0, ge=0, description="The run goes on with so many of them; 0: needs all")
    gpu: str = Field(
        default="",
        description="Kind of GPU, as `simulate --gpu` knows it: what the planner believes of costs until they are "
        "measured; empty: not known",
    )
    slots_per_node: Int = Field(default=3, ge=1, description="GPUs per node; on a CPU machine worker threads")
    slot_memory: Int = Field(
        default=0, ge=0, description="Bytes that who is awake on a slot may hold; 0: as many as the device has"
    )
    env: dict[str, str] = Field(default={}, description="Environment variables of workers")
    slurm: Slurm = Slurm()

    @field_validator("gpu")
    @classmethod
    def _is_known(cls, gpu: str) -> str:
        if gpu and gpu not in GPUS:
            raise ValueError(f"no GPU {gpu!r}; valid: {', '.join(GPUS)}")
        return gpu


class Model(Section):
    path: str = Field(description="Folder with config.json, *.safetensors and a tokenizer; or `emulated`")
    dtype: Dtype = Field(default="bfloat16", description="Type that weights are stored and served in")
    tensor_parallel: Int = Field(default=1, ge=1, description="Ranks of an engine, a slot for each, on one node")


class Models(Section):
    policy: Model
    genrm: Model | None = Field(default=None, description="The judge's, where it is not behind a URL")
    trust_remote_code: bool = Field(default=False, description="Models may bring Python code, which is run")


class Data(Section):
    train_files: Paths = Field(min_length=1, description="jsonl or parquet, local or any fsspec URL")
    weights: list[Float] = Field(
        default=[],
        description="Share of the prompts that each of train_files gives; empty: all rows come once per epoch",
    )
    val_files: Paths = Field(default=[], description="What is evaluated on: prompts that training never sees")
    prompt_key: str = Field(default="prompt", description="Column with the prompt")
    max_prompt_length: Int = Field(default=1024, ge=1, description="Tokens; a longer prompt fails the first step")
    train_batch_size: Int = Field(default=16, ge=1, description="Prompts per step")
    shuffle: bool = Field(default=True, description="Rows in a random order, another one in each epoch")

    @model_validator(mode="after")
    def _weighs_each_file(self) -> "Data":
        if self.weights and (len(self.weights) != len(self.train_files) or min(self.weights) <= 0):
            raise ValueError(
                f"weights {self.weights} for {len(self.train_files)} train_files: valid is one above 0 for each"
            )
        return self


class KL(Section):
    coef: Float = Field(default=0.0, ge=0, description="Weight of the KL term to the base model; 0: no reference model")
    estimator: Literal["k2", "k3"] = Field(default="k3", description="k2: half the squared log ratio; k3: unbiased")


class Algorithm(Section):
    adv_estimator: Literal["grpo"] = Field(default="grpo", description="A response against the others to its prompt")
    norm_adv_by_std: bool = Field(default=True, description="Advantages are divided by their group's deviation")
    clip_ratio_low: Float = Field(default=0.2, ge=0, lt=1, description="A token's ratio counts down to 1 minus this")
    clip_ratio_high: Float = Field(default=0.28, ge=0, description="A token's ratio counts up to 1 plus this")
    kl: KL = KL()
    loss_agg_mode: Literal["token-mean"] = Field(default="token-mean", description="Each token counts alike")
    staleness: Int = Field(default=0, ge=0, le=1, description="Largest lag, in versions, of a trained token")
    correction: Literal["auto", "decoupled", "ppo", "none"] = Field(
        default="auto",
        description="How the loss treats tokens of older versions: decoupled (clip around the policy at the step's "
        "start, truncated importance weights), ppo (clip around the policy that sampled), none (as if on-policy); "
        "auto: ppo at staleness 0, else decoupled",
    )
    tis_imp_ratio_cap: Float = Field(default=2.0, gt=0, description="correction: decoupled; largest importance weight")
    filter_groups: bool = Field(default=True, description="Groups whose scores are all equal do not count in the mean")
    max_logprob_diff: Float = Field(
        default=0.0, ge=0, description="Stop if trainer and engine differ by more on a token; 0: only measured"
    )


class Limits(Section):
    heartbeat_s: Float = Field(default=5.0, gt=0, description="A silent node is lost after this")
    engine_start_s: Float = Field(default=180.0, gt=0, description="A worker, from its start to its first report")
    engine_s: Float = Field(
        default=120.0, gt=0, description="An engine that has work and makes no token for this long is started anew"
    )
    request_s: Float = Field(default=30.0, gt=0, description="One call to the queue server")
    stage_s: Float = Field(default=3600.0, gt=0, description="One stage task")
    publish_s: Float = Field(default=120.0, gt=0, description="The wait for a version in shared memory; a copy: twice")
    shift_s: Float = Field(default=120.0, gt=0, description="One worker going to sleep, or waking up")
    save_s: Float = Field(default=600.0, gt=0, description="One checkpoint being saved")
    restarts: Int = Field(default=3, ge=0, description="Deaths of one worker without progress in between")


class Config(Section):
    run: Run = Run()
    cluster: Cluster = Cluster()
    model: Models
    data: Data
    rollout: Rollout = Rollout()
    reward: Reward
    algorithm: Algorithm = Algorithm()
    trainer: Trainer
    placement: Placement = Placement()
    gps: Gps = Gps()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    tracking: Tracking = Tracking()
    limits: Limits = Limits()
    stages: list[OwnStage] = Field(default=[], description="Stages of the user's own, in any order")

    @model_validator(mode="before")
    @classmethod
    def _says_all(cls, tree: Any) -> Any:
        return with_ranks(with_strict_defaults(tree)) if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _is_strictly_strict(self) -> "Config":
        if self.is_strict and (wrong := list(strict_faults(self))):
            raise ValueError(f"run.determinism is strict, but {'; '.join(wrong)}")
        return self

    @model_validator(mode="after")
    def _keeps_only_what_runs(self) -> "Config":
        if self.rollout.on_update == "keep_kv" and self.rollout.engine.enable_prefix_caching:
            raise ValueError(
                "rollout.on_update is keep_kv, which needs rollout.engine.enable_prefix_caching: false: else new "
                "sequences would begin with what old weights computed"
            )
        return self

    @model_validator(mode="after")
    def _knows_its_stages(self) -> "Config":
        step_graph(own=self.own_stages)
        return self

    @property
    def own_stages(self) -> tuple[Own, ...]:
        return tuple(stage.own for stage in self.stages)

    @model_validator(mode="after")
    def _has_room(self) -> "Config":
        if wrong := next(room_faults(self), None):
            raise ValueError(wrong)
        return self

    @model_validator(mode="after")
    def _groups_suffice(self) -> "Config":
        if self.trainer.updates_per_step > self.data.train_batch_size:
            raise ValueError(
                f"trainer.updates_per_step {self.trainer.updates_per_step} exceeds data.train_batch_size "
                f"{self.data.train_batch_size}: an update needs at least one whole group"
            )
        return self

    @model_validator(mode="after")
    def _has_its_judge(self) -> "Config":
        if self.judge_engine is not None and self.model.genrm is None:
            raise ValueError("model.genrm is missing: reward.genrm needs a model, or an endpoint")
        genrm = self.reward.genrm
        if genrm is not None and genrm.mode == "pairwise" and self.placement.admission != "barrier":
            raise ValueError(
                "reward.genrm.mode pairwise needs placement.admission: barrier, so that all responses to a prompt are "
                "there when the first of them is judged"
            )
        return self

    @property
    def judge_engine(self) -> EngineOptions | None:
        """Of the judge that has slots. None: it is behind a URL, or there is none; then reward has none."""
        genrm = self.reward.genrm
        return genrm.engine if genrm is not None and genrm.endpoint is None else None

    @property
    def judge_model(self) -> Model | None:
        """Of the judge that has slots."""
        return self.model.genrm if self.judge_engine is not None else None

    @property
    def engines(self) -> dict[str, EngineOptions]:
        """By the path of their options."""
        judge = {} if self.judge_engine is None else {"reward.genrm.engine": self.judge_engine}
        return {"rollout.engine": self.rollout.engine, **judge}

    @property
    def num_piles(self) -> int:
        """Into how many the tensors of a model are dealt among nodes."""
        return num_piles(self.cluster.nodes, self.gps.replication)

    @property
    def correction(self) -> str:
        """How the loss treats tokens of older versions: decoupled, ppo or none."""
        chosen = self.algorithm.correction
        return chosen if chosen != "auto" else "decoupled" if self.algorithm.staleness else "ppo"

    @property
    def is_strict(self) -> bool:
        return self.run.determinism == "strict"

    @property
    def sequences_per_step(self) -> int:
        return self.data.train_batch_size * self.rollout.n

    @property
    def by_steps(self) -> bool:
        """Workers are steps of their job, not forks of a zygote."""
        return self.cluster.kind == "slurm" and self.cluster.slurm.launcher == "step"

    @property
    def is_emulated(self) -> bool:
        """No part of the run needs torch or vLLM."""
        names = {self.trainer.strategy, *(engine.name for engine in self.engines.values())}
        return names == {"emulated"}


def load_files(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """Compose YAML files from left to right, then overrides `a.b=c`; validate once. Paths become absolute.

    A relative path of a file, model or template is looked for in the working directory, then in the folder of the
    YAML file that names it, then among the packaged configs; a template's file is replaced by its text. Raises
    ConfigError with one line for each wrong key, type or value.
    """
    tree: Tree = {}
    sources: Sources = {}
    for file in (find_config(path) for path in paths):
        part = with_absolute_inputs(read_tree(file), [Path.cwd(), file.parent, packaged_configs()])
        tree = merge(tree, part)
        sources |= {path: file.name for path, _ in leaves(part)}
    tree, sources = _overridden(tree, sources, overrides)
    config = _validated(tree, sources, " + ".join(str(path) for path in paths) or "(no file)")
    return _with_absolute_outputs(config, config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI", ""))


def _overridden(tree: Tree, sources: Sources, overrides: Sequence[str]) -> tuple[Tree, Sources]:
    for override in overrides:
        path, value = parse_override(override)
        tree = merge(tree, with_absolute_inputs(nest(path, value), [Path.cwd(), packaged_configs()]))
        sources = sources | {path: "override"}
    return tree, sources


def save_resolved(config: Config, path: Path) -> None:
    """Write the whole configuration, so that a resume needs neither the files nor the folder it was made from."""
    write_atomic(path, dump(config.model_dump(mode="json")))


def load_resolved(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read what `save_resolved` wrote. Nothing is looked for, nothing depends on the working directory: only relative
    paths in `overrides` do, as in `load_files`."""
    tree, sources = _overridden(read_tree(path), {}, overrides)
    config = _validated(tree, sources, str(path))
    return _with_absolute_outputs(config, config.tracking.uri) if overrides else config


def without_secrets(config: Config) -> str:
    """The configuration as YAML that may be shown: no passwords in URIs, no values of secret-looking variables."""
    tree = config.model_dump(mode="json")
    env = tree["cluster"]["env"]
    tree["cluster"]["env"] = {key: "***" if SECRET_NAME.search(key) else value for key, value in env.items()}
    return without_passwords(dump(tree))


def without_passwords(text: str) -> str:
    """The text with the user and password of each URI in it masked."""
    return CREDENTIALS.sub("://***@", text)


def is_set(variable: str) -> bool:
    """Whether this process has a variable of that name in its environment."""
    return bool(os.environ.get(variable))


SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL", re.IGNORECASE)
CREDENTIALS = re.compile(r"://[^/@\s]+@")


def _validated(tree: Tree, sources: Sources, name: str) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise explain(error, Config, sources, name) from None


def _with_absolute_outputs(config: Config, uri: str) -> Config:
    """What the run writes lies where it was submitted, whoever resumes it from elsewhere. `uri`: MLflow's."""
    sqlite = re.fullmatch(r"(sqlite:///)([^/].*)", uri)
    checkpoints = config.checkpoint.uri
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"root": os.path.abspath(Path(config.run.root).expanduser())}),
            "tracking": config.tracking.model_copy(
                update={"uri": sqlite[1] + os.path.abspath(sqlite[2]) if sqlite else uri}
            ),
            "checkpoint": config.checkpoint.model_copy(
                update={
                    "uri": os.path.abspath(checkpoints) if checkpoints and "://" not in checkpoints else checkpoints
                }
            ),
        }
    )
