"""What happens to advantages between the estimator and the loss, and the critic-free baselines offered for comparison."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from t1_agent.types import FloatArray, require_length

GroupBaseline = Literal["rloo", "grpo"]


def normalise(advantages: Sequence[FloatArray], eps: float = 1e-6) -> list[FloatArray]:
    """Shift and scale to zero mean and unit variance over all trainable tokens of the batch (not per episode).

    Args:
        advantages: One float32 [n_e] array an episode.
        eps: Added to the standard deviation; a batch of equal advantages becomes zeros.

    Returns:
        New arrays of the same lengths.
    """
    if not advantages:
        return []
    flat = np.concatenate(advantages).astype(np.float64)
    if flat.size == 0:
        return [np.zeros(0, dtype=np.float32) for _ in advantages]
    mean, std = flat.mean(), flat.std()
    return [((a - mean) / (std + eps)).astype(np.float32) for a in advantages]


def group_advantages(episode_returns: FloatArray, groups: Sequence[Hashable], kind: GroupBaseline, eps: float = 1e-6) -> FloatArray:
    """Advantage of each episode against the others of its group (episodes of one task instance).

    ``rloo``: return minus the mean of the *other* episodes (Ahmadian et al. 2024, arXiv:2402.14740).
    ``grpo``: return minus the group mean, over the group's standard deviation (Shao et al. 2024, arXiv:2402.03300).
    A group of one has nothing to compare with and gets 0.

    Args:
        episode_returns: float32 [E].
        groups: Group key of each episode.
        kind: Which baseline.
        eps: Added to the standard deviation (``grpo``).

    Returns:
        float32 [E].
    """
    require_length("group_advantages: groups", len(groups), len(episode_returns))
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    result = np.zeros(len(episode_returns), dtype=np.float64)
    for indices in members.values():
        size = len(indices)
        if size < 2:
            continue
        returns = episode_returns[indices].astype(np.float64)
        centred = returns - returns.mean()
        if kind == "rloo":
            # x - mean(others) = n / (n - 1) * (x - mean(all))
            result[indices] = centred * size / (size - 1)
        else:
            result[indices] = centred / (returns.std() + eps)
    return result.astype(np.float32)
