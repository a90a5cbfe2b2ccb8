"""The cost model against figures worked out by hand."""

import pytest

from pipeline.simulator.cost_model import CostModel, cost_model


def test_one_stream_is_bound_by_reading_the_weights() -> None:
    # 2 x 7.6e9 bytes / (3.35e12 x 0.82) = 5.533 ms, 1,000 tokens x 57,344 bytes / (3.35e12 x 0.6) = 0.029 ms,
    # and 2.5 ms + 10 us of overhead.
    seconds = cost_model("h100:qwen2.5-7b").step_seconds(num_sequences=1, context_tokens=1000)
    assert seconds == pytest.approx(5.533e-3 + 0.029e-3 + 2.51e-3, rel=1e-3)


def test_a_large_batch_is_bound_by_computing() -> None:
    # 2 x 7.6e9 x 4,000 / (989e12 x 0.6) = 102.5 ms of computing hide the reads; 4,000 x 10 us come on top.
    seconds = cost_model("h100:qwen2.5-7b").step_seconds(num_sequences=4000, context_tokens=1000)
    assert seconds == pytest.approx(102.5e-3 + 2.5e-3 + 40e-3, rel=1e-3)


def test_prefill_is_added() -> None:
    model = cost_model("a100:qwen2.5-1.5b")
    without, with_it = (model.step_seconds(num_sequences=8, context_tokens=80, prefill_tokens=n) for n in (0, 10_000))
    assert with_it - without == pytest.approx(2 * 1.54e9 * 10_000 / (312e12 * 0.45), rel=1e-6)


def test_instant_is_nothing() -> None:
    assert cost_model("instant") == CostModel()
    assert CostModel().step_seconds(num_sequences=100, context_tokens=10_000, prefill_tokens=10_000) == 0.0


@pytest.mark.parametrize("profile", ["", "h100", "h100:unknown", "slow:qwen2.5-7b"])
def test_another_name_is_refused_with_what_is_valid(profile: str) -> None:
    with pytest.raises(ValueError, match=r"valid: instant, or one of a100.*qwen2\.5-7b"):
        cost_model(profile)
