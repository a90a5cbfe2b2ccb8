"""What emulated engines and trainers take: the cost model's seconds, whatever stands for a token."""

import pytest
from pydantic import ValidationError

from pipeline.emulation import EVEN, Timing, TrainTiming, Unevenness
from pipeline.simulator.cost import cost_model, train_cost

PROFILE = "h800:qwen2.5-7b"


@pytest.mark.parametrize("grain", [1, 8, 32])
def test_a_token_that_stands_for_many_takes_the_time_of_them_all(grain: int) -> None:
    there, here = cost_model(PROFILE), Timing(profile=PROFILE, grain=grain, time_scale=0.1).cost()
    num, batch, context = 320, 20, 100_000
    expected = 0.1 * there.iterations_s(num, batch, context)
    assert here.iterations_s(num / grain, batch, context / grain) == pytest.approx(expected, rel=0.02)
    assert here.prefill_s * 6000 / grain == pytest.approx(0.1 * there.prefill_s * 6000)


def test_a_replica_of_several_gpus_is_faster() -> None:
    one, four = (Timing(profile="h800:qwen3-30b-a3b", num_gpus=n).cost() for n in (1, 4))
    assert four.iteration_s(32, 50_000) < one.iteration_s(32, 50_000)


def test_training_takes_what_the_cost_model_says_of_the_batch() -> None:
    timing = TrainTiming(profile=PROFILE, num_gpus=16, grain=16, time_scale=0.1)
    batch = [(20, 300), (20, 500), (20, 100)]
    tokens, mean = 16 * 960, 16 * (300**2 + 500**2 + 100**2) / (2 * 900)
    expected = train_cost(PROFILE).step_s(num_tokens=tokens, mean_context=mean, num_gpus=16)
    assert timing.step_s(batch, 0.0) == pytest.approx(0.1 * expected)
    assert TrainTiming(step_seconds=0.5).step_s(batch, 0.0) == 0.5
    assert timing.step_s([], 0.0) == 0.0


def test_speeds_swing_within_their_share_and_each_in_its_own_way() -> None:
    uneven = Unevenness(speed=0.3, period_s=60.0)
    factors = {name: [uneven.slower(name, at) for at in range(0, 120, 2)] for name in ("rollout-0", "rollout-1")}
    for found in factors.values():
        assert 0.7 <= min(found) < 0.75 and 1.25 < max(found) <= 1.3
    assert factors["rollout-0"] != factors["rollout-1"]
    assert EVEN.slower("rollout-0", 17.0) == EVEN.longer(3) == 1.0


def test_lengths_swing_with_the_version_whoever_generates() -> None:
    found = [Unevenness(length=0.3).longer(version) for version in range(8)]
    assert 0.7 <= min(found) < 0.75 and 1.25 < max(found) <= 1.3 and found[:4] == pytest.approx(found[4:])


def test_what_is_wrong_is_refused() -> None:
    with pytest.raises(ValidationError, match="do not add up to 1"):
        Timing(lengths=[(0.5, 100.0, 0.5)])
    with pytest.raises(ValidationError, match="profil"):
        Timing.model_validate({"profil": PROFILE})
    with pytest.raises(ValueError, match="no cost profile 'h900:x'"):
        Timing(profile="h900:x").cost()
    assert Timing.of({"script": "judge", "grain": 4}).grain == 4, "what is not about time is left out"
