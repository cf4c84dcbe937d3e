"""What is made of samples: summaries, percentiles and ratios of things that were measured side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from t1_env.errors import ConfigError

PERCENTILES: Final = (5, 50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Summary:
    """What is kept of a set of samples; all but ``count`` in the unit of the samples.

    Args:
        count: Number of samples.
        mean: Arithmetic mean.
        std: Standard deviation (of the population).
        low: Smallest sample.
        high: Largest sample.
        percentiles: ``"p50"`` and so on -> value, linearly interpolated (NumPy's default).
    """

    count: int
    mean: float
    std: float
    low: float
    high: float
    percentiles: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"count": self.count, "mean": self.mean, "std": self.std, "min": self.low, "max": self.high, **self.percentiles}


def summarise(samples: Sequence[float]) -> Summary:
    """Summarise samples.

    Args:
        samples: At least one finite number.

    Returns:
        The summary.

    Raises:
        ConfigError: If there are no samples, or one is not finite.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise ConfigError(f"cannot summarise {values.size} samples: expected at least one, and only finite numbers")
    quantiles = {f"p{q}": percentile(samples, q) for q in PERCENTILES}
    return Summary(values.size, float(values.mean()), float(values.std()), float(values.min()), float(values.max()), quantiles)


def percentile(samples: Sequence[float], q: float) -> float:
    """Return the ``q``-th percentile (0 to 100), linearly interpolated between the two nearest samples.

    Args:
        samples: At least one number.
        q: Which percentile.

    Returns:
        The percentile, in the unit of the samples.

    Raises:
        ConfigError: If there are no samples.
    """
    if not samples:
        raise ConfigError(f"no samples to take percentile {q} of")
    return float(np.percentile(np.asarray(samples, dtype=np.float64), q))


def median(samples: Sequence[float]) -> float:
    """Return the median; see ``percentile``."""
    return percentile(samples, 50)


def paired_ratio(numerator: Sequence[Sequence[float]], denominator: Sequence[Sequence[float]]) -> float:
    """Return how many times larger one thing is than another that was measured in turn with it.

    Blocks with the same index were measured right after one another, so whatever slowed the machine down at that time slowed both. The
    ratio of the two blocks' medians is taken for each pair, and the median of these ratios is returned.

    Args:
        numerator: Blocks of samples of one thing.
        denominator: As many blocks of samples of the other.

    Returns:
        The ratio.

    Raises:
        ConfigError: If the blocks do not pair.
    """
    if len(numerator) != len(denominator) or not numerator:
        raise ConfigError(f"blocks do not pair: {len(numerator)} against {len(denominator)}, expected the same number and at least one")
    return median([median(over) / median(under) for over, under in zip(numerator, denominator, strict=True)])
