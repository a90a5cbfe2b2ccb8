"""What is told of a run beside its metrics: tags that find it, and parameters that it is compared by."""

import subprocess
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.run_folder import RunFolder, read_json


def make_tags(run: RunFolder, config: Config) -> dict[str, str]:
    sha = git_sha()
    tags = {"run_name": run.name, "deployment_mode": config.placement.mode, **_origin(run)}
    return tags | ({"git_sha": sha} if sha else {})


def key_params(config: Config) -> dict[str, Any]:
    """What one compares runs by; everything else is in the artifact."""
    return {
        "run.seed": config.run.seed,
        "run.determinism": config.run.determinism,
        "cluster.kind": config.cluster.kind,
        "model.policy.path": config.model.policy.path,
        "model.policy.dtype": config.model.policy.dtype,
        "model.genrm.path": config.judge_model.path if config.judge_model else "",
        "data.train_batch_size": config.data.train_batch_size,
        "rollout.n": config.rollout.n,
        "rollout.temperature": config.rollout.temperature,
        "rollout.max_response_length": config.rollout.max_response_length,
        "algorithm.adv_estimator": config.algorithm.adv_estimator,
        "algorithm.clip_ratio_low": config.algorithm.clip_ratio_low,
        "algorithm.clip_ratio_high": config.algorithm.clip_ratio_high,
        "algorithm.kl.coef": config.algorithm.kl.coef,
        "algorithm.staleness": config.algorithm.staleness,
        "trainer.total_training_steps": config.trainer.total_training_steps,
        "trainer.updates_per_step": config.trainer.updates_per_step,
        "trainer.lr": config.trainer.lr,
        "placement.mode": config.placement.mode,
    }


def _origin(run: RunFolder) -> dict[str, str]:
    """Of a fork: where it comes from. Its parent may stand in another database."""
    origin = read_json(run.origin)
    if origin is None:
        return {}
    tags = {"resumed_from": origin["name"], "resume_step": str(origin["step"])}
    return tags | ({"mlflow.parentRunId": origin["mlflow_run_id"]} if origin["mlflow_run_id"] else {})


def git_sha() -> str:
    """The commit of the checkout that this package lies in; "" if it lies in none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
