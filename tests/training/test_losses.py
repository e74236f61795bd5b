"""Losses against numbers worked by hand."""

import math

import pytest
import torch

from agentenv.training.algorithm.losses import (
    LossOptions,
    PolicyInputs,
    clipped_surrogate,
    kl_estimate,
    log_ratio,
    policy_loss,
    sequence_log_ratio,
    token_weights,
    value_loss,
)

AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def logs(*numbers):
    return torch.tensor(numbers).log()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.5, 2.0, -2.4, True),  # 1.2·2
        (0.5, 2.0, -1.0, False),  # the ratio is under the band, but the advantage pulls up
        (1.5, -2.0, 3.0, False),
        (0.5, -2.0, 1.6, True),  # 0.8·-2
    ],
)
def test_ppo_clips_on_the_side_the_advantage_pulls_to(ratio, advantage, loss, clipped):
    leaf = logs(ratio).requires_grad_()
    loss_n, clipped_n = clipped_surrogate(leaf, torch.tensor([advantage]))
    loss_n.sum().backward()
    assert loss_n.item() == pytest.approx(loss)
    assert clipped_n.item() is clipped
    assert leaf.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_the_two_sides_of_the_band_are_their_own():
    loss_n, _ = clipped_surrogate(logs(2.0, 0.1), torch.tensor([1.0, -1.0]), low=0.3, high=0.5)
    assert loss_n.tolist() == pytest.approx([-1.5, 0.7])


def test_the_dual_clip_bounds_the_loss_of_bad_actions_that_became_likely():
    leaf = logs(10.0, 2.0, 10.0).requires_grad_()
    loss_n, clipped_n = clipped_surrogate(leaf, torch.tensor([-1.0, -1.0, 1.0]), dual_clip=3.0)
    loss_n.sum().backward()
    assert loss_n.tolist() == pytest.approx([3.0, 2.0, -1.2])
    assert clipped_n.tolist() == [True, False, True]
    assert leaf.grad.tolist() == pytest.approx([0.0, 2.0, 0.0])


def test_on_policy_the_gradient_is_that_of_reinforce():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    clipped_surrogate(log_ratio(logprobs, logprobs.detach()), torch.tensor([3.0, -4.0]))[0].sum().backward()
    assert logprobs.grad.tolist() == [-3.0, 4.0]


def test_gspo_has_one_ratio_for_a_sequence():
    """Two tokens of ρ 2 and 8 make √16 = 4, the other sequence 0.5."""
    new, old = logs(0.2, 0.8, 0.1).requires_grad_(), logs(0.1, 0.1, 0.2)
    found = sequence_log_ratio(new, old, torch.tensor([0, 0, 1]))
    assert found.exp().tolist() == pytest.approx([4.0, 4.0, 0.5])
    found[:2].exp().mean().backward()
    assert new.grad.tolist() == pytest.approx([2.0, 2.0, 0.0])  # s/n each


def test_gspo_has_the_papers_gradient_where_a_sequence_has_one_advantage():
    """Of a loss that is a mean over each sequence's tokens, then over sequences; unclipped."""
    sequence = torch.tensor([0, 0, 0, 1, 1])
    advantages = torch.tensor([2.0, -3.0])[sequence]
    old, start = logs(0.1, 0.3, 0.2, 0.6, 0.5), logs(0.2, 0.2, 0.3, 0.5, 0.9)
    new, again = start.clone().requires_grad_(), start.clone().requires_grad_()
    inputs = PolicyInputs(
        new, old, advantages, token_weights(sequence, "seq-mean-token-mean", limit_tokens=1), sequence
    )
    policy_loss(inputs, LossOptions("gspo", clip_low=0.99, clip_high=99.0))[0].backward()
    paper = [-(again - old)[sequence == s].mean().exp() * advantages[sequence == s][0] for s in sequence.unique()]
    torch.stack(paper).mean().backward()
    torch.testing.assert_close(new.grad, again.grad)
    assert again.grad.abs().min() > 0.1


def test_gspo_credits_each_turn_with_its_own_advantage():
    """A sequence of a good turn and a bad one: a ratio they share would leave them no gradient at all."""
    logprobs = torch.tensor([-1.0, -2.0, -1.5, -0.5], requires_grad=True)
    inputs = PolicyInputs(
        logprobs, logprobs.detach().clone(), torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.full((4,), 0.25),
        torch.zeros(4, dtype=torch.int64),
    )  # fmt: skip
    policy_loss(inputs, LossOptions("gspo"))[0].backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.25, -0.25, 0.25, 0.25])


def test_ratios_that_overflow_are_cut():
    assert log_ratio(torch.tensor([0.0]), torch.tensor([-1000.0])).item() == 20.0


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5))],
)
def test_kl_estimates_are_schulmans(estimator, value, gradient):
    leaf = torch.tensor([-1.0], requires_grad=True)
    found = kl_estimate(leaf, torch.tensor([-1.5]), estimator)
    found.sum().backward()
    assert (found.item(), leaf.grad.item()) == pytest.approx((value, gradient))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_unbiased_gradient_is_the_weighted_log_ratio_regardless_of_the_estimator(estimator):
    leaf = torch.tensor([-1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0 - math.log(2), -20.0])
    kl_estimate(
        leaf, torch.tensor([-1.5, -1.5]), estimator, old_logprobs_n=old, unbiased_gradient=True
    ).sum().backward()
    assert leaf.grad.tolist() == pytest.approx([2 * 0.5, 10 * 0.5])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("distance", [-500.0, 500.0])
def test_kl_estimates_and_gradients_stay_finite(estimator, distance):
    leaf = torch.tensor([distance], requires_grad=True)
    found = kl_estimate(leaf, torch.zeros(1), estimator)
    found.sum().backward()
    assert abs(found.item()) <= 10
    assert math.isfinite(leaf.grad.item())


def test_the_value_loss_is_half_the_square_and_clipped_the_larger():
    values, old, returns = torch.tensor([3.0, 0.5]), torch.tensor([1.0, 1.0]), torch.tensor([4.0, 1.0])
    assert value_loss(values, old, returns).tolist() == [0.5, 0.125]
    assert value_loss(values, old, returns, clip=0.2).tolist() == pytest.approx([2.8**2 / 2, 0.125])


# --- aggregation ----------------------------------------------------------------------------------------------------


def test_the_three_aggregations_by_hand():
    """Losses 1, 2, 3 of one episode and 10 of another; at most 5 tokens an episode."""
    episodes, losses = torch.tensor([4, 4, 4, 9]), torch.tensor([1.0, 2.0, 3.0, 10.0])
    sums = [(losses * token_weights(episodes, kind, limit_tokens=5)).sum().item() for kind in AGGREGATIONS]
    assert sums == pytest.approx([16 / 4, (2 + 10) / 2, 16 / (2 * 5)])


def test_kl_and_entropy_are_added_with_their_coefficients():
    one = torch.zeros(1)
    inputs = PolicyInputs(
        one, one, torch.tensor([2.0]), torch.ones(1), one.long(),
        ref_logprobs_n=torch.tensor([-1.0]), entropy_n=torch.tensor([3.0]),
    )  # fmt: skip
    options = LossOptions(kl_coef=0.1, kl_estimator="k1", entropy_coef=0.01)
    loss, metrics = policy_loss(inputs, options)
    assert loss.item() == pytest.approx(-2 + 0.1 * 1 - 0.01 * 3)
    assert metrics["policy_loss"].item() == -2.0
    assert (metrics["kl_loss"].item(), metrics["entropy"].item()) == (1.0, 3.0)
