"""Intervals: known values, coverage, and inputs that make no sense."""

import numpy as np
import pytest

from t1_agent.eval.statistics import bootstrap_mean, paired_difference, wilson


def test_wilson_known_value() -> None:
    # Newcombe (1998), table I: 81 of 263 -> 0.2553 to 0.3662.
    interval = wilson(81, 263)
    assert interval.low == pytest.approx(0.2553, abs=2e-4)
    assert interval.high == pytest.approx(0.3662, abs=2e-4)


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (10, 10)])
def test_wilson_is_not_degenerate_at_the_ends(successes: int, n: int) -> None:
    interval = wilson(successes, n)
    assert 0.0 <= interval.low < interval.high <= 1.0


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="wilson"):
        wilson(successes, n)


def test_bootstrap_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        interval = bootstrap_mean(rng.normal(1.0, 1.0, size=60), seed=trial, resamples=400)
        hits += interval.low <= 1.0 <= interval.high
    assert 175 <= hits <= 200


def test_bootstrap_of_equal_values_has_no_width() -> None:
    interval = bootstrap_mean([2.0] * 5)
    assert (interval.mean, interval.low, interval.high, interval.n) == (2.0, 2.0, 2.0, 5)


def test_paired_difference_uses_the_pairing() -> None:
    rng = np.random.default_rng(1)
    difficulty = rng.normal(0.0, 10.0, size=100)
    interval = paired_difference(difficulty, difficulty + 1.0)
    assert interval.excludes_zero
    assert interval.mean == pytest.approx(1.0)


def test_seeds_that_disagree_widen_the_interval() -> None:
    zeros = np.zeros((3, 50))
    agreeing = paired_difference(zeros, np.full((3, 50), 0.2))
    disagreeing = paired_difference(zeros, np.repeat([[0.6], [0.2], [-0.2]], 50, axis=1))
    assert agreeing.excludes_zero
    assert not disagreeing.excludes_zero


def test_shapes_must_match() -> None:
    with pytest.raises(ValueError, match="shapes"):
        paired_difference([1.0, 2.0], [1.0])
