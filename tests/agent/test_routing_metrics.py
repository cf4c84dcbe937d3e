"""Route agreement and log-prob mismatch, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from t1_agent.algo.mismatch import mismatch_metrics
from t1_agent.routing.metrics import compare_routes


def routes(*rows):
    return np.array(rows, dtype=np.uint8)


def test_agreement_by_hand():
    first = routes([[0, 1], [2, 3]], [[0, 1], [2, 3]], [[4, 5], [0, 1]], [[0, 1], [0, 1]])
    second = routes([[1, 0], [2, 4]], [[0, 1], [4, 5]], [[4, 5], [0, 1]], [[2, 3], [0, 1]])
    agreement = compare_routes(first, second)
    assert agreement.rows == 4
    np.testing.assert_allclose(agreement.disagreement, [0.25, 0.5])
    np.testing.assert_allclose(agreement.overlap, [0.75, 0.625])
    assert agreement.any_layer == 0.75
    assert agreement.disjoint == 0.25
    assert agreement.mean_disagreement == 0.375
    scalars = agreement.as_dict("x/")
    assert scalars["x/disagreement/layer_1"] == 0.5
    assert scalars["x/overlap/layer_0"] == 0.75
    only_third = compare_routes(first, second, np.array([False, False, True, False]))
    assert (only_third.rows, only_third.any_layer, only_third.disjoint) == (1, 0.0, 0.0)


def test_agreement_of_nothing_is_perfect_and_shapes_must_match():
    nothing = compare_routes(np.zeros((0, 2, 2), dtype=np.uint8), np.zeros((0, 2, 2), dtype=np.uint8))
    assert (nothing.rows, nothing.mean_disagreement, nothing.any_layer) == (0, 0.0, 0.0)
    np.testing.assert_array_equal(nothing.overlap, [1.0, 1.0])
    with pytest.raises(ValueError, match=r"\(1, 2, 2\) and \(1, 1, 2\)"):
        compare_routes(np.zeros((1, 2, 2)), np.zeros((1, 1, 2)))
    with pytest.raises(ValueError, match="got length 3, expected 1"):
        compare_routes(np.zeros((1, 2, 2)), np.zeros((1, 2, 2)), np.ones(3, dtype=bool))


SAMPLER = np.array([[-1.0, -2.0, 0.0, 0.0], [-3.0, 0.0, 0.0, -1.0]], dtype=np.float32)
TRAINER = np.array([[-1.5, -2.0, 99.0, np.nan], [-2.0, 7.0, 7.0, -1.1]], dtype=np.float32)
MASK = np.array([[True, True, False, False], [True, False, False, True]])


def test_mismatch_by_hand():
    metrics = mismatch_metrics(TRAINER, SAMPLER, MASK)
    deltas = np.array([-0.5, 0.0, 1.0, -0.1])
    assert metrics["tokens"] == 4
    assert metrics["non_finite"] == 0
    assert metrics["mean_abs_delta_logp"] == pytest.approx(0.4, abs=1e-6)
    assert metrics["mean_abs_delta_logp_seq"] == pytest.approx((0.25 + 0.55) / 2, abs=1e-6)
    assert metrics["max_abs_delta_logp"] == pytest.approx(1.0)
    assert metrics["p99_abs_delta_logp"] == pytest.approx(np.quantile(np.abs(deltas), 0.99), abs=1e-6)
    assert metrics["share_over_ln2"] == 0.25
    assert metrics["k1"] == pytest.approx(-0.1, abs=1e-6)
    assert metrics["k3"] == pytest.approx(np.mean(np.exp(deltas) - 1 - deltas), abs=1e-6)


def test_sequence_mean_weighs_sequences_not_tokens():
    trainer, sampler = np.array([0.0, 0.0, 0.0, -0.8]), np.zeros(4)
    mask = np.ones(4, dtype=bool)
    assert mismatch_metrics(trainer, sampler, mask)["mean_abs_delta_logp_seq"] == pytest.approx(0.2)
    packed = mismatch_metrics(trainer, sampler, mask, sequence_index=np.array([5, 5, 5, 9]))
    assert packed["mean_abs_delta_logp_seq"] == pytest.approx(0.4)
    assert packed["mean_abs_delta_logp"] == pytest.approx(0.2)


def test_buckets_hold_only_what_they_should():
    turns = np.array([[0, 2, -1, -1], [3, 3, 3, 70]])
    routed = np.array([[True, False, False, False], [True, True, True, False]])
    metrics = mismatch_metrics(TRAINER, SAMPLER, MASK, turn_index=turns, routes_valid=routed)
    assert metrics["mean_abs_delta_logp/turn_0"] == pytest.approx(0.5)
    assert metrics["mean_abs_delta_logp/turn_1_3"] == pytest.approx(0.5)
    assert metrics["mean_abs_delta_logp/turn_64_up"] == pytest.approx(0.1, abs=1e-6)
    assert "mean_abs_delta_logp/turn_4_15" not in metrics
    assert metrics["mean_abs_delta_logp/routed"] == pytest.approx(0.75)
    assert metrics["mean_abs_delta_logp/unrouted"] == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_faults_are_counted_and_do_not_pass_for_zero(fault):
    trainer = TRAINER.copy()
    trainer[0, 0] = fault
    metrics = mismatch_metrics(trainer, SAMPLER, MASK)
    assert (metrics["tokens"], metrics["non_finite"]) == (4, 1)
    assert metrics["mean_abs_delta_logp"] == pytest.approx(1.1 / 3, abs=1e-6)


def test_no_loss_tokens_give_nan():
    metrics = mismatch_metrics(TRAINER, SAMPLER, np.zeros_like(MASK))
    assert metrics["tokens"] == 0
    assert math.isnan(metrics["mean_abs_delta_logp"])


def test_small_differences_survive_in_k3():
    delta = 1e-6
    metrics = mismatch_metrics(np.array([delta]), np.array([0.0]), np.array([True]))
    assert metrics["k3"] == pytest.approx(delta**2 / 2, rel=1e-3)


def test_one_shifted_position_is_visible():
    rng = np.random.default_rng(0)
    logprobs = -rng.exponential(2.0, (4, 50))
    mask = np.ones((4, 50), dtype=bool)
    assert mismatch_metrics(logprobs, logprobs, mask)["mean_abs_delta_logp"] == 0.0
    assert mismatch_metrics(np.roll(logprobs, 1, axis=1), logprobs, mask)["mean_abs_delta_logp"] > 1.0


def test_shapes_and_mask_are_checked():
    with pytest.raises(ValueError, match="expected bool"):
        mismatch_metrics(TRAINER, SAMPLER, MASK.astype(int))
    with pytest.raises(ValueError, match="sampler_logprobs has shape"):
        mismatch_metrics(TRAINER, SAMPLER[:, 1:], MASK)
    with pytest.raises(ValueError, match="turn_index has shape"):
        mismatch_metrics(TRAINER, SAMPLER, MASK, turn_index=np.zeros(3))


@pytest.mark.torch
def test_tensors_of_any_float_dtype_are_fine():
    torch = pytest.importorskip("torch")
    from_tensors = mismatch_metrics(torch.tensor(TRAINER, requires_grad=True), torch.tensor(SAMPLER), torch.tensor(MASK))
    assert from_tensors == mismatch_metrics(TRAINER, SAMPLER, MASK)
    half = mismatch_metrics(torch.tensor(TRAINER).bfloat16(), torch.tensor(SAMPLER), torch.tensor(MASK))
    assert half["mean_abs_delta_logp"] == pytest.approx(0.4, abs=0.01)
