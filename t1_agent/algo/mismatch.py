"""How far the trainer's log-probs are from the sampler's on the very same tokens and weights.

``delta_t = log p_train(t) - log p_rollout(t)`` over loss tokens. The headline figure is the mean of ``|delta|``; the tail matters as much,
because one token off by ``ln 2`` doubles its importance weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from t1_agent.types import FloatArray, require_length


def mismatch_metrics(train: Sequence[FloatArray], rollout: Sequence[FloatArray]) -> dict[str, float]:
    """Compare two sets of log-probs, one array an episode.

    Args:
        train: float32 [n_e] each, recomputed by the trainer with the weights that sampled.
        rollout: float32 [n_e] each, as the sampler returned them.

    Returns:
        ``abs_mean`` (over tokens), ``abs_mean_sequence`` (mean of episode means), ``abs_p99``, ``abs_max``, ``over_ln2`` (share of tokens),
        ``k1`` and ``k3`` (estimators of KL(rollout || train)), ``nonfinite`` (count; those tokens enter nothing else) and ``tokens``.
    """
    require_length("mismatch_metrics: rollout", len(rollout), len(train))
    deltas = []
    for index, (ours, theirs) in enumerate(zip(train, rollout, strict=True)):
        require_length(f"mismatch_metrics: rollout of episode {index}", len(theirs), len(ours))
        deltas.append(ours.astype(np.float64) - theirs.astype(np.float64))
    flat = np.concatenate(deltas) if deltas else np.zeros(0)
    finite = flat[np.isfinite(flat)]
    if finite.size == 0:
        return {"tokens": float(flat.size), "nonfinite": float(flat.size)}
    size = np.abs(finite)
    episode_means = [float(np.abs(d[np.isfinite(d)]).mean()) for d in deltas if np.isfinite(d).any()]
    return {
        "tokens": float(flat.size),
        "nonfinite": float(flat.size - finite.size),
        "abs_mean": float(size.mean()),
        "abs_mean_sequence": float(np.mean(episode_means)),
        "abs_p99": float(np.quantile(size, 0.99)),
        "abs_max": float(size.max()),
        "over_ln2": float((size > math.log(2)).mean()),
        "k1": float(-finite.mean()),
        # Clamped so that one broken token cannot turn the exponential into inf; abs_max shows it anyway.
        "k3": float((np.expm1(np.clip(finite, -20.0, 20.0)) - np.clip(finite, -20.0, 20.0)).mean()),
    }
