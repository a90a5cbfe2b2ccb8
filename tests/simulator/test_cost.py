"""The cost model against figures worked out by hand, and published ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.iteration import IterationCost
from pipeline.simulator.cost import TrainCost, cost_model, iteration_cost, role_cost
from pipeline.simulator.profiles import GPUS, known_model, model_shape


def test_one_stream_is_bound_by_reading_the_weights() -> None:
    # 2 x 7.616e9 bytes / (3.35e12 x 0.82) = 5.545 ms, 1,000 tokens x 57,344 bytes / (3.35e12 x 0.6) = 0.029 ms,
    # and 2.5 ms + 10 us of overhead.
    assert cost_model("h100:qwen2.5-7b").iteration_s(1, 1000) == pytest.approx(5.545e-3 + 0.029e-3 + 2.51e-3, rel=1e-3)


def test_a_large_batch_is_bound_by_computing() -> None:
    # 2 x 7.616e9 x 4,000 / (989e12 x 0.6) = 102.7 ms of computing hide the reads; 4,000 x 10 us come on top.
    assert cost_model("h100:qwen2.5-7b").iteration_s(4000, 1000) == pytest.approx(102.7e-3 + 42.5e-3, rel=1e-3)


def test_prefill_is_computing() -> None:
    assert cost_model("a100:qwen2.5-1.5b").prefill_s == pytest.approx(2 * 1.5437e9 / (312e12 * 0.45), rel=1e-3)


def test_a_published_single_stream() -> None:
    """vLLM's Llama 8B in BF16 on an A100: 75 tokens per second; we are 13 % below."""
    assert 1 / cost_model("a100:llama3.1-8b").iteration_s(1, 1000) == pytest.approx(75, rel=0.15)


def test_instant_is_nothing() -> None:
    assert cost_model("instant") == IterationCost()
    assert IterationCost().iteration_s(100, 10_000) == 0.0
    assert IterationCost().num_iterations(1.0, 100, 10_000) == float("inf")


@pytest.mark.parametrize("profile", ["", "h100", "h100:unknown", "slow:qwen2.5-7b"])
def test_another_name_is_refused_with_what_is_valid(profile: str) -> None:
    with pytest.raises(ValueError, match=r"valid: instant, or one of a100.*qwen2\.5-7b"):
        cost_model(profile)


@pytest.mark.parametrize(
    ("model", "billions", "active", "kv"),
    [
        ("qwen2.5-1.5b", 1.54, 1.54, 28_672),
        ("qwen2.5-7b", 7.62, 7.62, 57_344),
        ("qwen2.5-32b", 32.8, 32.8, 262_144),
        ("qwen2.5-72b", 72.7, 72.7, 327_680),
        ("glm-z1-9b", 9.4, 9.4, 40_960),
        ("qwen3-30b-a3b", 30.5, 3.3, 98_304),
        ("qwen3.5-122b-a10b", 122, 10, 24_576),
    ],
)
def test_a_models_parameters_follow_from_its_config(model: str, billions: float, active: float, kv: int) -> None:
    shape = known_model(model)
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.005)
    assert shape.active == pytest.approx(active * 1e9, rel=0.03)
    assert shape.kv_bytes_per_token == kv


def test_a_config_of_a_multimodal_model_names_its_text_model() -> None:
    text = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    assert model_shape({"text_config": {**text, "vocab_size": 10}}) == model_shape({**text, "vocab_size": 10})


def test_a_small_batch_reads_few_experts_and_a_large_one_all() -> None:
    cost = iteration_cost(GPUS["h800"], known_model("qwen3-30b-a3b"), 4)
    assert cost.iteration_s(1, 0) < 0.5 * cost.iteration_s(200, 0)
    # One token touches 8 of 128 experts: 1.8e9 of 29e9 parameters.
    reads = cost.weights_s + cost.experts_s / 16
    assert cost.iteration_s(1, 0) == pytest.approx(reads + cost.overhead_s + cost.per_sequence_s, rel=1e-9)


def test_more_gpus_are_faster_but_not_in_proportion() -> None:
    model, gpu = known_model("qwen2.5-32b"), GPUS["h800"]
    four, eight = (iteration_cost(gpu, model, g).iteration_s(64, 300_000) for g in (4, 8))
    assert 0.5 * four < eight < four


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        role_cost(GPUS["h800"], known_model("qwen2.5-72b"), 1)
    assert role_cost(GPUS["h200"], known_model("qwen2.5-7b"), 1).kv_tokens > 1e6


def test_training_by_hand() -> None:
    # 6e6 tokens x 10 x (7.616e9 + 28 x 3584 x 3000) / (16 x 989e12 x .38) + 4 s
    cost = TrainCost(gpu=GPUS["h800"], model=known_model("qwen2.5-7b"))
    seconds = cost.step_s(num_tokens=6e6, mean_context=3000, num_gpus=16)
    assert seconds == pytest.approx(6e7 * (7.616e9 + 28 * 3584 * 3000) / (16 * 989e12 * 0.38) + 4, rel=1e-3)


def test_72b_does_not_train_on_eight_gpus() -> None:
    cost = TrainCost(gpu=GPUS["h800"], model=known_model("qwen2.5-72b"))
    assert not cost.fits(8) and cost.fits(32)


COSTS = st.builds(
    IterationCost,
    weights_s=st.floats(1e-4, 0.1),
    experts_s=st.floats(0, 0.1),
    miss=st.floats(0, 1),
    kv_s=st.floats(0, 1e-7),
    compute_s=st.floats(0, 1e-3),
    overhead_s=st.floats(0, 0.01),
    per_sequence_s=st.floats(0, 1e-4),
)


@given(COSTS, st.integers(1, 300), st.integers(0, 1_000_000), st.integers(1, 50))
def test_iterations_in_a_row_are_the_sum_of_single_ones(
    cost: IterationCost, batch: int, context: int, num: int
) -> None:
    single = [cost.iteration_s(batch, context + batch * i) for i in range(num)]
    # The closed form takes the context at a real-valued time: half an iteration's growth apart at most.
    growth = batch * batch * cost.kv_s
    assert cost.iterations_s(num, batch, context) == pytest.approx(sum(single), rel=1e-6, abs=num * growth)


@given(COSTS, st.integers(1, 300), st.floats(0, 1_000_000), st.floats(0.01, 20_000))
def test_the_inverse_undoes(cost: IterationCost, batch: int, context: float, num: float) -> None:
    seconds = cost.iterations_s(num, batch, context)
    assert cost.num_iterations(seconds, batch, context) == pytest.approx(num, rel=1e-6)


@given(COSTS, st.integers(1, 300), st.floats(0, 1_000_000), st.floats(0.5, 3))
def test_a_slower_engine_is_slower_throughout(cost: IterationCost, batch: int, context: float, factor: float) -> None:
    assert cost.slower(factor).iteration_s(batch, context) == pytest.approx(factor * cost.iteration_s(batch, context))
