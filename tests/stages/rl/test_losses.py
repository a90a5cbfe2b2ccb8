import math

import pytest
import torch

from stages.rl.losses import kl_loss, policy_loss, token_logprobs


def test_token_logprobs_and_entropy():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(3.0), 0.0, -100.0, -100.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([2, 0]))
    torch.testing.assert_close(logprobs, torch.tensor([-math.log(4), math.log(0.75)]))
    torch.testing.assert_close(entropy, torch.tensor([math.log(4), 0.25 * math.log(4) + 0.75 * math.log(4 / 3)]))
    assert logprobs.requires_grad and not entropy.requires_grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "is_clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.2, 1.0, -1.2, False),
        (1.5, 1.0, -1.28, True),  # enough already: no push further up
        (1.5, -1.0, 1.5, False),  # wrong way: pushed back in full
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.8, True),
    ],
)
def test_clipping(ratio, advantage, loss, is_clipped):
    logprob = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    loss_T, clipped_T = policy_loss(
        logprob, torch.tensor([-1.0]), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28
    )
    loss_T.sum().backward()
    assert loss_T.item() == pytest.approx(loss, rel=1e-5)
    assert clipped_T.item() is is_clipped
    assert logprob.grad.item() == pytest.approx(0.0 if is_clipped else -ratio * advantage, rel=1e-5)


@pytest.mark.parametrize("log_ratio", [120.0, -120.0, 3e38])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_r32_extreme_ratios_stay_finite(log_ratio, advantage):
    logprob = torch.tensor([-1.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-1.0 - log_ratio, -1.0])
    loss_T, _ = policy_loss(logprob, behaviour, torch.full((2,), advantage), clip_low=0.2, clip_high=0.28)
    loss_T.sum().backward()
    assert loss_T.isfinite().all() and logprob.grad.isfinite().all()
    assert logprob.grad[1].item() == -advantage  # the other token's gradient is untouched


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("difference", [120.0, -120.0])
def test_r32_extreme_kl_stays_finite(estimator, difference):
    logprob = torch.tensor([-1.0], requires_grad=True)
    loss_T = kl_loss(logprob, torch.tensor([-1.0 + difference]), estimator)
    loss_T.sum().backward()
    assert loss_T.isfinite().all() and logprob.grad.isfinite().all()


@pytest.mark.parametrize(("estimator", "at_half"), [("k2", 0.125), ("k3", math.exp(0.5) - 1.5)])
def test_kl_estimators(estimator, at_half):
    values = kl_loss(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.5]), estimator)
    torch.testing.assert_close(values, torch.tensor([0.0, at_half]))


def test_k2_has_the_gradient_of_the_kl():
    """Averaged over the policy's own distribution, exactly; k3's value, not its gradient, is the KL's."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    weights = logprobs.exp().detach()
    (found,) = torch.autograd.grad((weights * kl_loss(logprobs, reference, "k2")).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close((weights * kl_loss(logprobs, reference, "k3")).sum(), kl)
