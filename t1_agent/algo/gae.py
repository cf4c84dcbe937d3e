"""Generalised advantage estimation for episodes in which most tokens are observations.

The rule (DESIGN: GAE runs on the compressed sequence of trainable tokens). Let ``p_0 < p_1 < ...`` be the positions of the trainable
tokens of one episode. They alone are actions, so they alone are time steps:

* ``V_i`` is the critic's output at position ``p_i - 1``: the state in which token ``p_i`` was chosen.
* the reward of turn ``k`` belongs to the last trainable token at or before the end of turn ``k``.
* ``delta_i = r_i + gamma_i V_{i+1} - V_i`` and ``A_i = delta_i + gamma_i lambda_i A_{i+1}``. Past the end stands the bootstrap value: 0
  when the task really ended, the critic's output at the very last position when the episode was cut.

Running the recursion over observation tokens instead decays credit through them (Schulman et al. 2015, arXiv:1506.02438, gives the
recursion; the tests hold the comparison of four public rules).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from t1_agent.types import BoolArray, FloatArray, IntArray, Trajectory, require_length

Level = Literal["token", "turn"]
"""Whether a decay applies between all neighbouring trainable tokens or only where a new turn begins."""


@dataclass(frozen=True, slots=True)
class Discount:
    """Decay factors of one estimator.

    Args:
        gamma: Discount in [0, 1]; 1 values a verifier the same whenever it passes.
        lam: GAE lambda in [0, 1]; 1 gives Monte-Carlo returns.
        gamma_level: Where gamma applies: after every trainable token or only from one turn to the next.
        lam_level: The same for lambda.
    """

    gamma: float = 1.0
    lam: float = 1.0
    gamma_level: Level = "token"
    lam_level: Level = "token"

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"Discount.{name}: got {value!r}, expected a number in [0, 1]")


def place_rewards(rewards: FloatArray, turn_index: IntArray, loss_mask: BoolArray) -> FloatArray:
    """Move each turn's reward to the last trainable token at or before the end of that turn.

    Args:
        rewards: float32 [N], one a turn.
        turn_index: int32 [T], non-decreasing; -1 for the initial prompt.
        loss_mask: bool [T].

    Returns:
        float32 [n], n = trainable tokens; sums to ``rewards.sum()``.

    Raises:
        ValueError: A non-zero reward precedes every trainable token (no action can have earned it).
    """
    require_length("place_rewards: loss_mask", len(loss_mask), len(turn_index))
    action_turns = turn_index[loss_mask]
    if np.any(np.diff(action_turns) < 0):
        raise ValueError("place_rewards: turn_index decreases along the trainable tokens, expected it sorted")
    placed = np.zeros(len(action_turns), dtype=np.float32)
    # searchsorted(right) - 1: index of the last trainable token whose turn is <= k.
    owner = np.searchsorted(action_turns, np.arange(len(rewards)), side="right") - 1
    if np.any(rewards[owner < 0] != 0.0):
        turn = int(np.flatnonzero((owner < 0) & (rewards != 0.0))[0])
        raise ValueError(f"place_rewards: the reward of turn {turn} ({float(rewards[turn])}) comes before the first trainable token")
    np.add.at(placed, owner[owner >= 0], rewards[owner >= 0])
    return placed


def action_positions(loss_mask: BoolArray) -> npt.NDArray[np.int64]:
    """Positions of the trainable tokens.

    Raises:
        ValueError: Position 0 is trainable: no state precedes it, so it has neither a log-prob nor a value.
    """
    positions = np.flatnonzero(loss_mask)
    if len(positions) and positions[0] == 0:
        raise ValueError("loss_mask: position 0 is trainable, expected at least one prompt token before the first action")
    return positions


def state_values(values: FloatArray, loss_mask: BoolArray) -> FloatArray:
    """V(s_t) for each trainable token: the critic's output at the position *before* it.

    Args:
        values: float32 [T], critic output at every position (having read the token there).
        loss_mask: bool [T].

    Returns:
        float32 [n].
    """
    require_length("state_values: values", len(values), len(loss_mask))
    return values[action_positions(loss_mask) - 1]


def _step_factors(action_turns: IntArray, factor: float, level: Level) -> npt.NDArray[np.float64]:
    """Factor from each trainable token to the next; the step past the end always counts as a new turn."""
    if level == "token":
        return np.full(len(action_turns), factor, dtype=np.float64)
    crosses = np.append(np.diff(action_turns) != 0, True)
    return np.where(crosses, factor, 1.0)


def gae(values: FloatArray, rewards: FloatArray, action_turns: IntArray, bootstrap: float, discount: Discount) -> FloatArray:
    """GAE over one episode's trainable tokens.

    Args:
        values: float32 [n], V(s_t) as from ``state_values``.
        rewards: float32 [n], as from ``place_rewards``.
        action_turns: int32 [n], turn of each trainable token.
        bootstrap: Value of the state after the last one; 0 for a terminated episode.
        discount: Decay factors.

    Returns:
        float32 [n], advantages.
    """
    n_actions = len(values)
    require_length("gae: rewards", len(rewards), n_actions)
    require_length("gae: action_turns", len(action_turns), n_actions)
    if n_actions == 0:
        return np.zeros(0, dtype=np.float32)
    gamma = _step_factors(action_turns, discount.gamma, discount.gamma_level)
    carry = gamma * _step_factors(action_turns, discount.lam, discount.lam_level)
    next_values = np.append(values[1:], np.float32(bootstrap)).astype(np.float64)
    deltas = rewards + gamma * next_values - values
    advantages = np.empty(n_actions, dtype=np.float64)
    running = 0.0
    for i in range(n_actions - 1, -1, -1):
        running = deltas[i] + carry[i] * running
        advantages[i] = running
    return advantages.astype(np.float32)


def bootstrap_value(trajectory: Trajectory, values: FloatArray) -> float:
    """Value past the end of an episode: 0 if it terminated, the critic's output at its last position if it was cut.

    Args:
        trajectory: The episode.
        values: float32 [T], critic output at every position.

    Raises:
        ValueError: The episode is an infra failure (it must have been dropped) or has no end at all.
    """
    if trajectory.infra_failure:
        raise ValueError(f"{trajectory.task_id}: an infra failure has no value to bootstrap from; drop the episode before the estimator")
    if trajectory.terminated:
        return 0.0
    if not trajectory.truncated:
        raise ValueError(f"{trajectory.task_id}: neither terminated nor truncated, expected a finished episode")
    return float(values[-1])


def episode_gae(trajectory: Trajectory, values: FloatArray, discount: Discount) -> tuple[FloatArray, FloatArray]:
    """Advantages and returns of one episode.

    Args:
        trajectory: A finished episode that is not an infra failure.
        values: float32 [T], critic output at every position.
        discount: Decay factors; call it twice to give actor and critic different lambdas.

    Returns:
        (advantages, returns), float32 [n] each, over trainable tokens; returns = advantages + V(s_t).
    """
    state = state_values(values, trajectory.loss_mask)
    placed = place_rewards(trajectory.rewards, trajectory.turn_index, trajectory.loss_mask)
    turns = trajectory.turn_index[trajectory.loss_mask]
    advantages = gae(state, placed, turns, bootstrap_value(trajectory, values), discount)
    return advantages, advantages + state


def monte_carlo_returns(trajectory: Trajectory, gamma: float = 1.0, gamma_level: Level = "token") -> FloatArray:
    """Discounted reward-to-go at each trainable token, float32 [n]: the target of the offline critic warm start.

    A cut episode's return is what it had earned when it was cut (there is no critic yet to bootstrap from).
    """
    placed = place_rewards(trajectory.rewards, trajectory.turn_index, trajectory.loss_mask)
    turns = trajectory.turn_index[trajectory.loss_mask]
    zeros = np.zeros(len(placed), dtype=np.float32)
    return gae(zeros, placed, turns, 0.0, Discount(gamma=gamma, lam=1.0, gamma_level=gamma_level))
