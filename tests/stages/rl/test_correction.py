"""The corrections against formulas written once more, number by number, in float64."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.rl.correction import Correction, importance_weights
from stages.rl.tally import Tally, update_metrics
from tests.fakes.tiny_policy import make_config

LOW, HIGH = 0.2, 0.28
KINDS = ("ppo", "decoupled", "none")


@dataclass(frozen=True)
class Tokens:
    """One number of each kind for each token."""

    present: list[float]
    start: list[float]
    behaviour: list[float]
    advantages: list[float]
    cap: float

    def __getitem__(self, order: list[int]) -> "Tokens":
        kept = ([values[i] for i in order] for values in (self.present, self.start, self.behaviour, self.advantages))
        return Tokens(*kept, self.cap)


@st.composite
def tokens(draw) -> Tokens:
    """Logprobs from nearly certain to hopeless, near each other and far apart."""
    num_tokens = draw(st.integers(1, 12))

    def between(low: float, high: float):
        return st.floats(low, high, allow_subnormal=False)  # torch may flush them to zero

    def several(strategy) -> list[float]:
        return draw(st.lists(strategy, min_size=num_tokens, max_size=num_tokens))

    start = several(between(-9, -0.01))
    steps = several(st.one_of(st.just(0.0), between(-0.5, 0.5), between(-3, 3)))
    moves = several(st.one_of(st.just(0.0), between(-0.1, 0.1), between(-3, 3)))
    return Tokens(
        present=[s + step for s, step in zip(start, steps, strict=True)],
        start=start,
        behaviour=[s - move for s, move in zip(start, moves, strict=True)],
        advantages=several(between(-3, 3)),
        cap=draw(between(0.5, 4)),
    )


def terms(kind: str, given: Tokens, *, cap: float | None = None, low: float = LOW, high: float = HIGH, shift=0.0):
    """(terms, gradient of the sum of losses by each present logprob)."""
    lists = (given.present, given.start, given.behaviour)
    present, start, behaviour = (torch.tensor(values, dtype=torch.float64) + shift for values in lists)
    present.requires_grad_()
    correction = Correction(kind, low, high, given.cap if cap is None else cap)
    found = correction.terms(present, start, behaviour, torch.tensor(given.advantages, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(found.loss_T.sum(), present)
    return found, gradient


def by_hand(kind: str, given: Tokens) -> tuple[list[float], list[float]]:
    """(losses, gradients). A token's gradient is -w A r, or nothing where the clip holds it."""
    losses, gradients = [], []
    for cur, prox, mu, advantage in zip(given.present, given.start, given.behaviour, given.advantages, strict=True):
        ratio = math.exp(cur - (mu if kind == "ppo" else prox))
        weight = min(math.exp(prox - mu), given.cap) if kind == "decoupled" else 1.0
        is_held = ratio > 1 + HIGH if advantage > 0 else ratio < 1 - LOW
        bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
        losses.append(-weight * advantage * (bounded if is_held else ratio))
        gradients.append(0.0 if is_held else -weight * advantage * ratio)
    return losses, gradients


def close(found, expected) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(given=tokens(), kind=st.sampled_from(KINDS))
def test_loss_and_gradient_are_the_formulas(given, kind):
    found, gradient = terms(kind, given)
    losses, gradients = by_hand(kind, given)
    close(found.loss_T, losses)
    close(gradient, gradients)


@settings(max_examples=50, deadline=None)
@given(given=tokens(), kind=st.sampled_from(KINDS), data=st.data())
def test_only_differences_of_logprobs_matter_and_each_token_counts_for_itself(given, kind, data):
    found, gradient = terms(kind, given)
    shifted, shifted_gradient = terms(kind, given, shift=data.draw(st.floats(-5, 5)))
    torch.testing.assert_close(shifted.loss_T, found.loss_T, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(shifted_gradient, gradient, rtol=1e-9, atol=1e-12)
    order = data.draw(st.permutations(range(len(given.present))))
    permuted, permuted_gradient = terms(kind, given[order])
    assert torch.equal(permuted.loss_T, found.loss_T[order]) and torch.equal(permuted_gradient, gradient[order])


@settings(max_examples=50, deadline=None)
@given(given=tokens())
def test_on_policy_all_corrections_are_one(given):
    """Where the policy at the step's start sampled the tokens: also after some updates."""
    fresh = Tokens(given.present, given.start, given.start, given.advantages, max(given.cap, 1.0))
    expected, gradient = terms("ppo", fresh)
    for kind in ("decoupled", "none"):
        found, found_gradient = terms(kind, fresh)
        assert torch.equal(found.loss_T, expected.loss_T) and torch.equal(found_gradient, gradient)
        assert torch.equal(found.drift_T, expected.drift_T)


@settings(max_examples=50, deadline=None)
@given(given=tokens())
def test_without_bounds_the_two_ratios_make_the_whole_one(given):
    """start / behaviour x present / start = present / behaviour: the decoupled loss then is importance sampling."""
    whole, gradient = terms("ppo", given, low=1.0, high=math.inf)
    parts, parts_gradient = terms("decoupled", given, low=1.0, high=math.inf, cap=math.inf)
    torch.testing.assert_close(parts.loss_T, whole.loss_T, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(parts_gradient, gradient, rtol=1e-9, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(given=tokens())
def test_the_cap_bounds_what_one_old_token_can_do(given):
    """At the step's start, where the ratio is 1, its gradient is at most cap x |advantage|."""
    at_start = Tokens(given.start, given.start, given.behaviour, given.advantages, given.cap)
    found, gradient = terms("decoupled", at_start)
    limits = torch.tensor(given.advantages, dtype=torch.float64).abs() * given.cap
    assert (gradient.abs() <= limits * (1 + 1e-12)).all()
    assert (found.weights_T <= given.cap).all() and (found.weights_T > 0).all()
    ratios = [math.exp(start - behaviour) for start, behaviour in zip(given.start, given.behaviour, strict=True)]
    assert found.cut_T.tolist() == [ratio > given.cap for ratio in ratios]


@pytest.mark.parametrize("gap", [120.0, -120.0, 3e38, -3e38])
@pytest.mark.parametrize("kind", KINDS)
def test_r32_extreme_gaps_stay_finite(kind, gap):
    present = torch.tensor([-1.0, -1.0], requires_grad=True)
    start, behaviour = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0 - gap, -1.0])
    found = Correction(kind, LOW, HIGH, 2.0).terms(present, start, behaviour, torch.ones(2))
    found.loss_T.sum().backward()
    assert found.loss_T.isfinite().all() and present.grad.isfinite().all()
    assert present.grad[1].item() == -1  # the other token's gradient is untouched


def test_a_weight_that_is_no_number_spoils_the_loss_and_is_not_hidden_by_the_cap():
    weights, _ = importance_weights(torch.tensor([-1.0]), torch.tensor([math.nan]), 2.0)
    assert weights.isnan().all()


def test_weights_in_numbers():
    """Weights 3 (cut to 2), 1, 0.5 and 0.5 over two updates; a skipped update does not count."""
    tallies = []
    for ratios in ([3.0, 1.0], [0.5, 0.5]):
        start = torch.zeros(len(ratios))
        found = Correction("decoupled", LOW, HIGH, 2.0).terms(start, start, -torch.tensor(ratios).log(), start + 1)
        tallies.append(Tally(num_tokens=len(ratios)))
        tallies[-1].add(found, start)
    metrics = update_metrics([*tallies, None])
    assert metrics["actor/tis_weight_mean"] == pytest.approx(4 / 4)
    assert metrics["actor/tis_clipfrac"] == 1 / 4
    assert metrics["actor/tis_ess"] == pytest.approx(4**2 / (4 * (4 + 1 + 0.25 + 0.25)))
    assert metrics["actor/pg_loss"] == pytest.approx(-4 / 4)


@pytest.mark.parametrize("kind", ["ppo", "none"])
def test_without_weights_there_are_no_numbers_of_them(kind):
    zeros = torch.zeros(2)
    tally = Tally(num_tokens=2)
    tally.add(Correction(kind, LOW, HIGH, 2.0).terms(zeros, zeros, zeros, zeros), zeros)
    assert not [name for name in update_metrics([tally]) if "tis" in name]


def test_what_a_config_says():
    assert Correction.of(make_config("emulated")) == Correction("ppo", 0.2, 0.28, 2.0)
    stale = make_config("emulated", algorithm={"staleness": 1, "tis_imp_ratio_cap": 3.0, "clip_ratio_low": 0.1})
    assert Correction.of(stale) == Correction("decoupled", 0.1, 0.28, 3.0)
    assert Correction.of(make_config("emulated", algorithm__correction="none")).kind == "none"
