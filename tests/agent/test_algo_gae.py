"""Advantage estimation against hand-computed answers."""

from __future__ import annotations

import numpy as np
import pytest

from t1_agent.algo.gae import (
    Discount,
    action_positions,
    bootstrap_value,
    episode_gae,
    gae,
    monte_carlo_returns,
    place_rewards,
    state_values,
)
from t1_agent.types import Trajectory


def make_trajectory(layout, rewards, *, terminated=True, truncated=False, end_reason="submitted"):
    """``layout`` is a list of (turn, n_tokens, trainable)."""
    turn = np.concatenate([np.full(n, t, dtype=np.int32) for t, n, _ in layout])
    mask = np.concatenate([np.full(n, m, dtype=bool) for _, n, m in layout])
    return Trajectory(
        task_id="toy",
        token_ids=np.arange(len(turn), dtype=np.int32) % 50,
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        turn_index=turn,
        rewards=np.asarray(rewards, dtype=np.float32),
        terminated=terminated,
        truncated=truncated,
        end_reason=end_reason,
        verifiers_passed=0,
        verifiers_total=1,
    )


# Turn 1: 3 action tokens; 1,000 observation tokens; turn 2: 3 action tokens; 5 final observation tokens. V = 0.5 everywhere, R = 1.
TABLE_LAYOUT = [(-1, 1, False), (0, 3, True), (0, 1000, False), (1, 3, True), (1, 5, False)]
LAST_OF_TURN_1, LAST_OF_TURN_2 = 3, 1006


def dense_gae(mask, rewards, lam, rule):
    """The three rules found in public trainers, over every position; ours is not among them."""
    values = np.full(len(mask), 0.5)
    if rule == "zeroed":  # values and rewards of observation tokens are zeroed, the carry decays through them
        values, rewards = values * mask, rewards * mask
    advantages = np.zeros(len(mask))
    running, next_value = 0.0, 0.0
    for t in range(len(mask) - 1, -1, -1):
        if rule == "carry skip":  # observation tokens hand the carry on untouched, with the reward they hold lost
            if not mask[t]:
                continue
            running = rewards[t] + next_value - values[t] + lam * running
            next_value = values[t]
        else:
            following = values[t + 1] if t + 1 < len(mask) else 0.0
            running = rewards[t] + following - values[t] + lam * running
        advantages[t] = running
    return advantages


def ours(trajectory, reward_position, lam):
    # The rule moves a reward from wherever it fell in the turn to its last action, so both positions must give one answer.
    assert reward_position in (LAST_OF_TURN_2, len(trajectory.token_ids) - 1)
    advantages, _ = episode_gae(trajectory, np.full(len(trajectory.token_ids), 0.5, dtype=np.float32), Discount(lam=lam))
    return advantages[2], advantages[5]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # (R on the last action: lambda 1, .95; R on the last position: lambda 1, .95) as (turn 1's last token, turn 2's last token)
        ("plain", [(0.5, 0.5), (0.0, 0.613), (0.5, 0.5), (0.0, 0.387)]),
        ("zeroed", [(0.5, 0.5), (-0.5, 0.5), (-0.5, -0.5), (-0.5, -0.5)]),
        ("carry skip", [(0.5, 0.5), (0.429, 0.5), (-0.5, -0.5), (-0.429, -0.5)]),
        ("compressed", [(0.5, 0.5), (0.429, 0.5), (0.5, 0.5), (0.429, 0.5)]),
    ],
)
def test_four_rules_on_a_long_observation(rule, expected):
    trajectory = make_trajectory(TABLE_LAYOUT, [0.0, 1.0])
    cases = [(position, lam) for position in (LAST_OF_TURN_2, len(trajectory.token_ids) - 1) for lam in (1.0, 0.95)]
    for (position, lam), answer in zip(cases, expected, strict=True):
        if rule == "compressed":
            got = ours(trajectory, position, lam)
        else:
            rewards = np.zeros(len(trajectory.token_ids))
            rewards[position] = 1.0
            advantages = dense_gae(trajectory.loss_mask, rewards, lam, rule)
            got = advantages[LAST_OF_TURN_1], advantages[LAST_OF_TURN_2]
        assert got == pytest.approx(answer, abs=6e-4), (position, lam)


def test_value_is_read_before_the_action_token():
    trajectory = make_trajectory([(-1, 2, False), (0, 2, True), (0, 2, False)], [1.0])
    values = np.array([10, 20, 30, 40, 50, 60], dtype=np.float32)
    np.testing.assert_array_equal(state_values(values, trajectory.loss_mask), [20, 30])
    advantages, returns = episode_gae(trajectory, values, Discount(lam=0.0))
    # One-step errors: V(next) - V(s) for the first, R - V(s) for the last. Reading V *at* the action token would give 10 and -39.
    np.testing.assert_allclose(advantages, [10.0, 1.0 - 30.0])
    np.testing.assert_allclose(returns, [30.0, 1.0])


def test_perfect_critic_leaves_no_advantage_and_an_off_by_one_critic_does():
    trajectory = make_trajectory([(-1, 3, False), (0, 2, True), (0, 4, False), (1, 2, True)], [2.0, 1.0])
    to_go = {4: 3.0, 3: 3.0, 9: 1.0, 10: 1.0}  # action position -> reward-to-go
    values = np.zeros(11, dtype=np.float32)
    for position, value in to_go.items():
        values[position - 1] = value
    advantages, _ = episode_gae(trajectory, values, Discount(lam=0.95))
    np.testing.assert_allclose(advantages, 0.0, atol=1e-6)
    shifted, _ = episode_gae(trajectory, np.roll(values, 1), Discount(lam=0.95))
    assert np.abs(shifted).max() > 0.5


def test_rewards_go_to_the_last_action_at_or_before_their_turn():
    trajectory = make_trajectory([(-1, 1, False), (0, 2, True), (0, 3, False), (1, 1, False), (2, 2, True)], [1.0, 2.0, 4.0])
    # Turn 1 sampled nothing (its reward belongs to turn 0's last token).
    np.testing.assert_array_equal(place_rewards(trajectory.rewards, trajectory.turn_index, trajectory.loss_mask), [0.0, 3.0, 0.0, 4.0])


def test_reward_before_any_action_raises():
    trajectory = make_trajectory([(-1, 1, False), (0, 1, False), (1, 2, True)], [1.0, 0.0])
    with pytest.raises(ValueError, match="turn 0"):
        place_rewards(trajectory.rewards, trajectory.turn_index, trajectory.loss_mask)


def test_trainable_first_position_raises():
    with pytest.raises(ValueError, match="position 0"):
        action_positions(np.array([True, False]))


def test_ends():
    layout = [(-1, 2, False), (0, 2, True), (0, 1, False)]
    values = np.array([0, 1, 1, 9, 7], dtype=np.float32)
    done = make_trajectory(layout, [1.0])
    cut = make_trajectory(layout, [1.0], terminated=False, truncated=True, end_reason="turn_limit")
    assert bootstrap_value(done, values) == 0.0
    assert bootstrap_value(cut, values) == 7.0
    np.testing.assert_allclose(episode_gae(done, values, Discount(lam=1.0))[0], [0.0, 0.0])
    np.testing.assert_allclose(episode_gae(cut, values, Discount(lam=1.0))[0], [7.0, 7.0])
    with pytest.raises(ValueError, match="infra failure"):
        bootstrap_value(make_trajectory(layout, [1.0], terminated=False, truncated=True, end_reason="infra_failure"), values)
    with pytest.raises(ValueError, match="neither"):
        bootstrap_value(make_trajectory(layout, [1.0], terminated=False), values)


def test_gamma_per_turn_and_per_token():
    turns = np.array([0, 0, 0, 1, 1], dtype=np.int32)
    rewards = np.array([0, 0, 0, 0, 1], dtype=np.float32)
    zeros = np.zeros(5, dtype=np.float32)
    per_turn = gae(zeros, rewards, turns, 0.0, Discount(gamma=0.5, lam=1.0, gamma_level="turn"))
    np.testing.assert_allclose(per_turn, [0.5, 0.5, 0.5, 1.0, 1.0])
    per_token = gae(zeros, rewards, turns, 0.0, Discount(gamma=0.5, lam=1.0))
    np.testing.assert_allclose(per_token, 0.5 ** np.arange(4, -1, -1))


def test_gamma_per_turn_discounts_the_bootstrap():
    turns = np.array([0, 0], dtype=np.int32)
    zeros = np.zeros(2, dtype=np.float32)
    np.testing.assert_allclose(gae(zeros, zeros, turns, 4.0, Discount(gamma=0.5, lam=1.0, gamma_level="turn")), [2.0, 2.0])


def test_monte_carlo_returns_are_rewards_to_go():
    trajectory = make_trajectory([(-1, 1, False), (0, 2, True), (0, 2, False), (1, 1, True), (2, 1, True)], [1.0, -2.0, 5.0])
    np.testing.assert_allclose(monte_carlo_returns(trajectory), [4.0, 4.0, 3.0, 5.0])


def test_lambda_one_equals_monte_carlo_whatever_the_critic_says():
    trajectory = make_trajectory([(-1, 1, False), (0, 3, True), (0, 9, False), (1, 2, True)], [1.0, 2.0])
    values = np.random.default_rng(0).normal(size=len(trajectory.token_ids)).astype(np.float32)
    _, returns = episode_gae(trajectory, values, Discount(lam=1.0))
    np.testing.assert_allclose(returns, monte_carlo_returns(trajectory), atol=1e-5)


@pytest.mark.parametrize("bad", [{"gamma": 1.5}, {"lam": -0.1}])
def test_discount_out_of_range(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Discount(**bad)


def test_length_mismatch_names_what():
    with pytest.raises(ValueError, match="rewards"):
        gae(np.zeros(3, np.float32), np.zeros(2, np.float32), np.zeros(3, np.int32), 0.0, Discount())


def test_episode_without_actions():
    assert gae(np.zeros(0, np.float32), np.zeros(0, np.float32), np.zeros(0, np.int32), 1.0, Discount()).shape == (0,)
