"""Losses, baselines and statistics against analytic answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from t1_agent.algo.advantages import group_advantages, normalise  # noqa: E402
from t1_agent.algo.losses import kl_estimate, ppo_policy_loss, tis_weights, token_logprobs, value_loss  # noqa: E402
from t1_agent.algo.mismatch import episode_mismatch  # noqa: E402
from t1_agent.algo.statistics import explained_variance  # noqa: E402


def ratio_loss(ratio, advantage, **kwargs):
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    result = ppo_policy_loss(logprobs, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64), **kwargs)
    result.losses.sum().backward()
    return result.losses.item(), logprobs.grad.item(), bool(result.clipped[0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.1, 2.0, -2.2, -2.2, False),
        (1.5, 2.0, -2.56, 0.0, True),  # above 1 + clip_high with a good action: no further push
        (0.5, 2.0, -1.0, -1.0, False),  # below the bound with a good action: pushed back up
        (0.5, -2.0, 1.8, 0.0, True),  # below 1 - clip_low with a bad action
        (1.5, -2.0, 3.0, 3.0, False),
    ],
)
def test_ppo_clip(ratio, advantage, loss, grad, clipped):
    got = ratio_loss(ratio, advantage, clip_low=0.1, clip_high=0.28)
    assert got == (pytest.approx(loss), pytest.approx(grad), clipped)


def test_dual_clip_bounds_the_loss_of_a_bad_action_that_became_likely():
    assert ratio_loss(5.0, -1.0, dual_clip=3.0) == (pytest.approx(3.0), 0.0, True)
    assert ratio_loss(2.0, -1.0, dual_clip=3.0) == (pytest.approx(2.0), pytest.approx(2.0), False)
    assert ratio_loss(5.0, 1.0, dual_clip=3.0)[0] == pytest.approx(-1.2)
    with pytest.raises(ValueError, match="dual_clip"):
        ratio_loss(1.0, 1.0, dual_clip=1.0)


def test_weights_scale_losses_and_carry_no_gradient():
    old, rollout = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([0.0, -5.0, 5.0])
    weights = tis_weights(old, rollout, cap=2.0, floor=0.5)
    assert weights.tolist() == [1.0, 2.0, 0.5]
    logprobs = torch.zeros(3, requires_grad=True)
    ppo_policy_loss(logprobs, old, torch.ones(3), weights=weights).losses.sum().backward()
    assert logprobs.grad.tolist() == [-1.0, -2.0, -0.5]
    with pytest.raises(ValueError, match="cap"):
        tis_weights(old, rollout, cap=0.5)


def test_token_logprobs_and_entropy():
    logits = torch.tensor([[0.0, math.log(3.0)], [1.0, 1.0]])
    logprobs, entropy = token_logprobs(logits, torch.tensor([1, 0]))
    assert logprobs.tolist() == pytest.approx([math.log(0.75), math.log(0.5)])
    assert entropy.tolist() == pytest.approx([-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), math.log(2)])
    hot, _ = token_logprobs(logits, torch.tensor([1, 0]), temperature=2.0)
    assert hot[0].item() == pytest.approx(math.log(math.sqrt(3) / (1 + math.sqrt(3))))
    greedy, _ = token_logprobs(logits, torch.tensor([1, 0]), temperature=0.0)
    assert greedy.tolist() == pytest.approx(logprobs.tolist())


def test_kl_estimates_agree_with_the_exact_kl_in_expectation():
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    exact = (p * (p / q).log()).sum().item()
    for kind in ("k1", "k3"):
        assert (p * kl_estimate(p.log(), q.log(), kind)).sum().item() == pytest.approx(exact)
    assert kl_estimate(p.log(), q.log(), "k2").sum().item() == pytest.approx(0.5 * ((p / q).log() ** 2).sum().item())
    assert (kl_estimate(p.log(), q.log(), "k3") >= 0).all()
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(p, q, "k4")


def test_value_loss_and_clip():
    values = torch.tensor([3.0, 0.4], requires_grad=True)
    losses, clipped = value_loss(values, torch.tensor([1.0, 1.0]))
    assert losses.tolist() == pytest.approx([2.0, 0.18])
    assert not clipped.any()
    # The value moved from 0 towards its target further than the clip: the bounded loss is larger and has no gradient.
    losses, clipped = value_loss(values, torch.tensor([3.0, 1.0]), torch.tensor([0.0, 0.0]), clip=0.5)
    assert losses.tolist() == pytest.approx([0.5 * 2.5**2, 0.18])
    assert clipped.tolist() == [True, False]
    losses.sum().backward()
    assert values.grad.tolist() == pytest.approx([0.0, -0.6])
    with pytest.raises(ValueError, match="old_values"):
        value_loss(values, values, clip=0.5)


def test_normalise_runs_over_the_whole_batch_not_per_episode():
    episodes = [np.array([1.0, 1.0], np.float32), np.array([3.0], np.float32), np.zeros(0, np.float32)]
    result = normalise(episodes)
    flat = np.concatenate(result)
    assert flat.mean() == pytest.approx(0.0, abs=1e-6)
    assert flat.std() == pytest.approx(1.0, abs=1e-4)
    assert result[0][0] == result[0][1] < result[1][0]
    assert [len(a) for a in result] == [2, 1, 0]
    np.testing.assert_array_equal(normalise([np.ones(4, np.float32)])[0], 0.0)
    assert normalise([]) == []


def test_group_baselines():
    returns, groups = np.array([1.0, 3.0, 7.0, 5.0], np.float32), ["a", "a", "b", "a"]
    np.testing.assert_allclose(group_advantages(returns, groups, "rloo"), [1 - 4, 3 - 3, 0.0, 5 - 2])
    grpo = group_advantages(returns, groups, "grpo")
    np.testing.assert_allclose(grpo, [-math.sqrt(1.5), 0.0, 0.0, math.sqrt(1.5)], atol=1e-5)
    with pytest.raises(ValueError, match="groups"):
        group_advantages(returns, ["a"], "rloo")


def test_explained_variance():
    targets = np.array([0.0, 1.0, 2.0], np.float32)
    assert explained_variance(targets + 5, targets) == pytest.approx(1.0)
    assert explained_variance(np.zeros(3, np.float32), targets) == pytest.approx(0.0)
    assert explained_variance(-targets, targets) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(targets, np.ones(3, np.float32)))


def test_mismatch_of_episodes():
    train = [np.array([-1.0, -2.0], np.float32), np.array([-0.5], np.float32)]
    rollout = [np.array([-1.1, -2.0], np.float32), np.array([-1.5], np.float32)]
    metrics = episode_mismatch(train, rollout, [np.array([0, 1], np.int32), np.array([0], np.int32)])
    assert metrics["tokens"] == 3
    assert metrics["mean_abs_delta_logp"] == pytest.approx(1.1 / 3, rel=1e-5)
    assert metrics["mean_abs_delta_logp_seq"] == pytest.approx((0.05 + 1.0) / 2, rel=1e-5)
    assert metrics["mean_abs_delta_logp/turn_0"] == pytest.approx(0.55, rel=1e-5)
    assert metrics["max_abs_delta_logp"] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="episode 0"):
        episode_mismatch([np.zeros(1, np.float32)], [np.zeros(2, np.float32)])
    assert episode_mismatch([], [])["tokens"] == 0
