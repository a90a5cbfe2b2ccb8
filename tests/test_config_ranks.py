"""A replica's slots are its engine's ranks: said once, in either place, and refused where that cannot be."""

import json
from pathlib import Path

import pytest

from pipeline.config import load_files, load_resolved, save_resolved
from pipeline.config_ranks import check_ranks
from pipeline.core.errors import ConfigError

MODES = ("disaggregated", "colocated", "rollout_reward_colocated", "trainer_pool", "shiftable")


def load(*overrides: str):  # type: ignore[no-untyped-def]
    return load_files(["quickstart.yaml"], ["cluster.slots_per_node=4", *overrides])


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


@pytest.mark.parametrize(("model", "role"), [("policy", "rollout"), ("genrm", "reward")])
@pytest.mark.parametrize("is_model_said", [True, False])
def test_who_says_one_of_the_two_has_said_the_other(model: str, role: str, is_model_said: bool, tmp_path: Path) -> None:
    said = f"model.{model}.tensor_parallel=2" if is_model_said else f"placement.roles.{role}.slots=2"
    config = load(said)
    save_resolved(config, tmp_path / "config.yaml")
    for found in (config, load_resolved(tmp_path / "config.yaml")):
        assert getattr(found.model, model).tensor_parallel == getattr(found.placement.roles, role).slots == 2
    others = ({"policy", "genrm"} - {model}, {"rollout", "reward"} - {role})
    assert [getattr(config.model, other).tensor_parallel for other in others[0]] == [1]
    assert [getattr(config.placement.roles, other).slots for other in others[1]] == [1]


def test_a_contradiction_names_both() -> None:
    said = problem("model.policy.tensor_parallel=2", "placement.roles.rollout.slots=1")
    assert "placement.roles.rollout.slots is 1, but model.policy.tensor_parallel is 2" in said and "valid" in said
    said = problem("model.genrm.tensor_parallel=1", "placement.roles.reward.slots=2")
    assert "placement.roles.reward.slots is 2, but model.genrm.tensor_parallel is 1" in said


@pytest.mark.parametrize("mode", MODES)
def test_a_replica_fits_into_a_node(mode: str) -> None:
    """Whatever the slots of all nodes are together."""
    two_nodes = ("cluster.nodes=2", "cluster.slots_per_node=3", f"placement.mode={mode}")
    said = problem(*two_nodes, "model.policy.tensor_parallel=4")
    assert "model.policy.tensor_parallel is 4" in said and "stays on one node" in said and "valid is 1 to 3" in said


def test_slots_that_are_scattered_are_no_room() -> None:
    many = ("cluster.nodes=3", "cluster.slots_per_node=3", "model.policy.tensor_parallel=2")
    load(*many, "placement.roles.rollout.replicas=2", "model.genrm.tensor_parallel=2")
    said = problem(*many, "placement.roles.rollout.replicas=3", "model.genrm.tensor_parallel=2")
    assert "each replica needs its own on one node" in said and "rollout-2" in said


def test_options_do_not_say_it_again() -> None:
    said = problem("rollout.engine.options.tensor_parallel_size=2")
    assert "rollout.engine.options.tensor_parallel_size" in said and "model.policy.tensor_parallel" in said


def test_a_judge_behind_a_url_has_neither() -> None:
    endpoint = "reward.genrm.endpoint={url: http://localhost:1/v1, model: m}"
    assert load(endpoint, "placement.roles.reward.slots=2").judge_model is None


@pytest.mark.parametrize(
    ("sizes", "valid"),
    [
        ({"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864}, [1, 2]),
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 64}, [1, 2, 4, 8]),
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 6}, [1, 2]),
        ({"num_attention_heads": 6, "num_key_value_heads": 6, "moe_intermediate_size": 9}, [1, 3]),
        ({"text_config": {"num_attention_heads": 4, "num_key_value_heads": 4}}, [1, 2, 4]),
    ],
)
def test_a_model_is_cut_into_equal_parts_or_refused(tmp_path: Path, sizes: dict, valid: list[int]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    for ranks in range(1, 9):
        model = load(f"model.policy.path={tmp_path}").model.policy.model_copy(update={"tensor_parallel": ranks})
        if ranks in valid:
            check_ranks("model.policy", model)
        else:
            with pytest.raises(ConfigError, match=rf"model\.policy\.tensor_parallel is {ranks}, .*valid") as caught:
                check_ranks("model.policy", model)
            assert str([n for n in valid if n < ranks])[1:-1] in str(caught.value)
