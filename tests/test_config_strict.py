from pathlib import Path

import pytest

from pipeline.config import Config, load_files, load_resolved, save_resolved
from pipeline.core.dag import Edge, step_graph
from pipeline.core.errors import ConfigError

STRICT = ("run.determinism=strict", "cluster.slots_per_node=9")


def load(*overrides: str) -> Config:
    return load_files(["configs/emulated.yaml"], [*STRICT, *overrides])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.policy.dtype=bfloat16", "model.policy.dtype is bfloat16"),
        ("model.genrm.dtype=float16", "model.genrm.dtype is float16"),
        ("placement.roles.rollout.replicas=2", "placement.roles.rollout.replicas is 2"),
        ("placement.roles.reward.replicas=2", "placement.roles.reward.replicas is 2"),
        ("rollout.engine.enable_prefix_caching=true", "rollout.engine.enable_prefix_caching is true"),
        ("reward.genrm.engine.enable_prefix_caching=true", "reward.genrm.engine.enable_prefix_caching is true"),
        ("rollout.engine.options.enable_prefix_caching=true", "rollout.engine.options.enable_prefix_caching"),
        ("rollout.engine.options.async_scheduling=true", "rollout.engine.options.async_scheduling"),
        ("reward.genrm.engine.options.speculative_config={model: x}", "reward.genrm.engine.options.speculative_config"),
        ("rollout.engine.options.dtype=half", "rollout.engine.options.dtype is 'half'"),
        ("cluster.env.OMP_NUM_THREADS='2'", "cluster.env.OMP_NUM_THREADS is '2'"),
    ],
)
def test_what_depends_on_time_or_load_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.determinism is strict, but") as caught:
        load(override)
    assert words in str(caught.value)
    load(override, "run.determinism=default")


def test_no_engine_of_a_strict_run_caches_prefixes(tmp_path: Path) -> None:
    config = load()
    assert not config.rollout.engine.enable_prefix_caching and not config.reward.genrm.engine.enable_prefix_caching
    assert load("run.determinism=default").rollout.engine.enable_prefix_caching
    save_resolved(config, tmp_path / "config.yaml")
    assert load_resolved(tmp_path / "config.yaml") == config


def test_every_stage_waits_for_the_whole_stage_before() -> None:
    """So what is computed together does not depend on time."""
    assert {after.edge for stage in step_graph() for after in stage.after} == {Edge.BARRIER}
