"""What is believed before anything was measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.beliefs import SMALL_ENGINE, believe
from pipeline.config import Config, load_files
from pipeline.core.errors import ConfigError
from pipeline.core.events import INFERENCE, Role
from pipeline.core.planner.planner import decide
from pipeline.core.planner.settings import DEFAULT
from pipeline.core.snapshot import BlockView, Crowd, Snapshot
from pipeline.simulator.cost import cost_model
from pipeline.simulator.forecast import setup_of
from tests.fakes.plan import make_plan

ROOT = Path(__file__).parents[1]
GPUS = (
    "cluster.gpu=h800",
    "cluster.slots_per_node=8",
    "model.policy.path=qwen2.5-7b",
    "model.genrm.path=qwen3-30b-a3b",
    "placement.roles.reward.slots=4",
    "rollout.engine.name=vllm",
    "reward.genrm.engine.name=vllm",
    "rollout.max_response_length=16384",
    "reward.genrm.max_tokens=4096",
)


def config_of(name: str, *changes: str) -> Config:
    return load_files([ROOT / f"configs/{name}.yaml"], list(changes))


def believed(config: Config, block_slots: int = 1) -> Snapshot:
    plan = make_plan(sequences_per_step=config.sequences_per_step, total_steps=10, staleness=1)
    return believe(config, plan, at_s=5.0, version=2, train_blocks=(3,), block_slots=block_slots)


def test_of_a_known_gpu_and_known_models_it_is_what_the_simulator_reckons_with() -> None:
    config = config_of("emulated", *GPUS)
    found, setup = believed(config, block_slots=4), setup_of(config, gpu="h800", num_gpus=8)
    assert (found.version, found.num_admitted, found.at_s, found.num_steps) == (2, 2, 5.0, 10)
    for role in INFERENCE:
        assert found.role(role).cost == setup.role(role).iteration
        assert found.role(role).kv_tokens == setup.role(role).kv_tokens
    assert (found.rollout.num_slots, found.reward.num_slots) == (1, 4)
    assert found.train.step_s == pytest.approx(setup.train_s(4))
    assert found.shift_s[Role.REWARD] == pytest.approx(setup.shift_s(Role.ROLLOUT, Role.REWARD, 4))
    assert found.release_s > 0


def test_a_gpu_that_does_not_fit_the_run_is_said_and_nothing_more(capsys: pytest.CaptureFixture[str]) -> None:
    found = believed(config_of("emulated", *GPUS, "cluster.slots_per_node=6"))
    assert found.rollout.cost == SMALL_ENGINE and "hold no blocks of 4" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no GPU 'tpu'; valid: a100, "):
        config_of("emulated", "cluster.gpu=tpu")


def test_of_an_emulated_engine_it_is_what_its_options_say() -> None:
    options = "{median_tokens: 10, sigma: 0.1, profile: 'h800:qwen2.5-7b', time_scale: 2.0, step_s: 0.5}"
    found = believed(config_of("emulated", f"rollout.engine.options={options}"))
    engine = cost_model("h800:qwen2.5-7b").slower(2.0)
    assert found.rollout.cost.overhead_s == pytest.approx(engine.overhead_s + 0.5)
    assert found.rollout.cost.weights_s == engine.weights_s
    at = {i * found.rollout.bin_tokens: share for i, share in enumerate(found.rollout.survival)}
    assert at[6] == 1.0 and at[14] < 0.01, "10 tokens, most of them"
    assert found.reward.cost == SMALL_ENGINE, "an instant engine has no proportions that could be scaled"


@pytest.mark.parametrize("name", ["emulated", "quickstart"])
def test_the_planner_can_decide_by_it(name: str) -> None:
    config = config_of(name)
    found = believed(config)
    assert Snapshot.from_json(found.to_json()) == found, "all is finite"
    none = [0.0] * (len(found.reward.survival) - 1)
    some = [4.0, *[0.0] * (len(found.rollout.survival) - 2)]
    crowds = {
        "rollout": (Crowd(step=2, num_waiting=12.0, ages=tuple(some)),),
        "reward": (Crowd(step=2, num_waiting=0.0, ages=tuple(none)),),
    }
    blocks = tuple(BlockView(index=i, node=0, role=INFERENCE[i % 2]) for i in range(4))
    seen = replace(
        found,
        num_admitted=3,
        blocks=blocks,
        rollout=replace(found.rollout, crowds=crowds["rollout"]),
        reward=replace(found.reward, crowds=crowds["reward"]),
    )
    plan = decide(seen, DEFAULT)
    assert plan.candidates and all(0 < c.value_s < 1e4 for c in plan.candidates)
    assert plan.candidates[plan.chosen].num_rollout >= 2
