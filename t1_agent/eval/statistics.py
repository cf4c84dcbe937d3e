"""Intervals for evaluations: proportions, means, and paired differences over tasks and training seeds.

Tasks are the unit that is resampled: attempts at one task are not independent draws. With fewer than about 20 tasks every interval
here is wide and should be read as such; the report prints the number of tasks beside each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Interval:
    """A point estimate with a confidence interval.

    Args:
        mean: The estimate.
        low: Lower end.
        high: Upper end.
        n: Number of units (tasks, or task x seed pairs) behind it.
    """

    mean: float
    low: float
    high: float
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside the interval."""
        return self.low > 0.0 or self.high < 0.0

    def as_dict(self) -> dict[str, float]:
        """Plain numbers for JSON."""
        return asdict(self)


_Z_95 = 1.959963984540054


def wilson(successes: int, n: int, z: float = _Z_95) -> Interval:
    """Wilson score interval of a proportion (E. B. Wilson, 1927); right near 0 and 1, where the normal interval is not.

    Args:
        successes: Number of successes, 0 <= successes <= n.
        n: Number of trials, > 0.
        z: Normal quantile; the default gives 95%.

    Raises:
        ValueError: If the counts make no proportion.
    """
    if n <= 0 or not 0 <= successes <= n:
        raise ValueError(f"wilson: got {successes} successes of {n} trials")
    p = successes / n
    denominator = 1.0 + z * z / n
    centre = (p + z * z / (2 * n)) / denominator
    half = z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / denominator
    return Interval(p, max(0.0, float(centre - half)), min(1.0, float(centre + half)), n)


def bootstrap_mean(values: Sequence[float] | npt.ArrayLike, *, seed: int = 0, resamples: int = 4000, level: float = 0.95) -> Interval:
    """Percentile bootstrap interval of a mean.

    Args:
        values: float [n], one value a task.
        seed: Seed of the resampling, so that a report can be reproduced.
        resamples: Number of bootstrap samples.
        level: Confidence level.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"bootstrap_mean: got shape {array.shape}, expected [n] with n > 0")
    rng = np.random.default_rng(seed)
    means = array[rng.integers(0, array.size, size=(resamples, array.size))].mean(axis=1)
    tail = (1.0 - level) / 2
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Interval(float(array.mean()), float(low), float(high), int(array.size))


def paired_difference(
    before: npt.ArrayLike, after: npt.ArrayLike, *, seed: int = 0, resamples: int = 4000, level: float = 0.95
) -> Interval:
    """Mean of ``after - before`` over the same tasks, and over training seeds when given two axes.

    With shape [tasks] the tasks are resampled. With shape [seeds, tasks] both levels are: training seeds first, then tasks within the
    drawn seeds, so that the interval speaks about a new training run and not only about new tasks. Three seeds make that a wide
    interval, honestly so.

    Args:
        before: float [tasks] or [seeds, tasks].
        after: Same shape.
        seed: Seed of the resampling.
        resamples: Number of bootstrap samples.
        level: Confidence level.
    """
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if first.shape != second.shape or first.ndim not in (1, 2) or first.size == 0:
        raise ValueError(f"paired_difference: got shapes {first.shape} and {second.shape}, expected two equal [tasks] or [seeds, tasks]")
    difference = second - first
    if difference.ndim == 1:
        return bootstrap_mean(difference, seed=seed, resamples=resamples, level=level)
    n_seeds, n_tasks = difference.shape
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    for index in range(resamples):
        seeds = np.asarray(rng.integers(0, n_seeds, size=n_seeds))
        tasks = np.asarray(rng.integers(0, n_tasks, size=(n_seeds, n_tasks)))
        means[index] = np.take_along_axis(difference[seeds], tasks, axis=1).mean()
    tail = (1.0 - level) / 2
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Interval(float(difference.mean()), float(low), float(high), int(difference.size))
