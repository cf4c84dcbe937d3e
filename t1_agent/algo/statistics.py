"""Small statistics that are logged beside the losses."""

from __future__ import annotations

import numpy as np

from t1_agent.types import FloatArray, require_length


def explained_variance(predictions: FloatArray, targets: FloatArray) -> float:
    """1 - Var[targets - predictions] / Var[targets]: 1 is perfect, 0 is no better than a constant, negative is worse than one.

    Args:
        predictions: float32 [n].
        targets: float32 [n].

    Returns:
        NaN when the targets do not vary (or are fewer than two): the quantity is undefined then.
    """
    require_length("explained_variance: predictions", len(predictions), len(targets))
    if len(targets) < 2:
        return float("nan")
    variance = float(np.var(targets, dtype=np.float64))
    if variance < 1e-12:
        return float("nan")
    return 1.0 - float(np.var(targets.astype(np.float64) - predictions.astype(np.float64))) / variance
