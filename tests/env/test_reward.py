"""Rewards are pure functions of verifier reports."""

import math
from itertools import pairwise
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t1_env.errors import ConfigError
from t1_env.protocol import EndReason, VerifierOutcome, VerifierReport, VerifierStatus
from t1_env.reward import REWARDS, RewardInput, make_reward, total

PASSED, FAILED = VerifierOutcome(VerifierStatus.PASSED), VerifierOutcome(VerifierStatus.FAILED)


def report(bits):
    return VerifierReport(outcomes=MappingProxyType({f"v{i}": PASSED if bit else FAILED for i, bit in enumerate(bits)}))


def play(spec, gamma, states, end_reason):
    """Rewards of the episode that walks through ``states`` (the first is the baseline)."""
    reward = make_reward(spec, gamma)
    reports = [report(bits) for bits in states]
    last = len(reports) - 2
    return [
        total(reward(RewardInput(reports[0], before, after, end_reason if index == last else None)))
        for index, (before, after) in enumerate(pairwise(reports))
    ]


trajectories = st.integers(1, 6).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=2, max_size=12)
)
ends = st.sampled_from([EndReason.SUBMITTED, EndReason.SOLVED, EndReason.TURN_LIMIT, EndReason.TIME_LIMIT])


@given(trajectories, ends)
def test_delta_returns_the_final_count_above_the_baseline(states, end):
    assert math.isclose(sum(play("delta", None, states, end)), sum(states[-1]) - sum(states[0]), abs_tol=1e-9)


@given(trajectories, ends, st.floats(0.5, 1.0))
def test_potential_delta_returns_the_discounted_final_count(states, end, gamma):
    rewards = play("delta", gamma, states, end)
    discounted = sum(gamma**t * r for t, r in enumerate(rewards))
    assert math.isclose(discounted, gamma ** len(rewards) * (sum(states[-1]) - sum(states[0])), abs_tol=1e-9)


@given(trajectories, ends, st.floats(0.5, 1.0), st.sampled_from(["final", "solved", "level"]))
def test_shaping_telescopes_to_the_last_potential(states, end, gamma, spec):
    plain, shaped = play(spec, None, states, end), play(spec, gamma, states, end)
    difference = sum(gamma**t * (b - a) for t, (a, b) in enumerate(zip(plain, shaped, strict=True)))
    scale = len(states[0]) if spec == "solved" else 1
    expected = 0.0 if end.terminates else gamma ** len(plain) * (sum(states[-1]) - sum(states[0])) / scale
    assert math.isclose(difference, expected, abs_tol=1e-9)


@given(trajectories, ends)
def test_final_and_delta_have_the_same_return(states, end):
    assert sum(play("final", None, states, end)) == sum(play("delta", None, states, end))


@given(trajectories, ends)
def test_level_pays_the_count_after_each_step(states, end):
    assert play("level", None, states, end) == [sum(bits) - sum(states[0]) for bits in states[1:]]


@pytest.mark.parametrize("spec", REWARDS)
@pytest.mark.parametrize("gamma", [None, 0.9])
def test_a_task_that_passes_untouched_is_never_paid(spec, gamma):
    states = [[True, True]] * 4
    rewards = play(spec, gamma, states, EndReason.SUBMITTED)
    assert rewards == pytest.approx([0.0] * 3)


def test_delta_shows_a_swap_in_its_terms():
    terms = make_reward("delta")(RewardInput(report([0, 0]), report([1, 0]), report([0, 1])))
    assert terms == {"gained": 1.0, "lost": -1.0}
    assert total(terms) == 0.0


def test_solved_is_paid_once_at_the_end():
    assert play("solved", None, [[0, 0], [1, 1], [1, 1]], EndReason.SUBMITTED) == [0.0, 1.0]
    assert play("solved", None, [[0, 0], [1, 1], [1, 0]], EndReason.TURN_LIMIT) == [0.0, 0.0]


@pytest.mark.parametrize("spec", [*REWARDS, lambda step: 5.0])
@pytest.mark.parametrize("gamma", [None, 0.9])
def test_an_infrastructure_failure_pays_nothing(spec, gamma):
    good, broken = report([1, 1]), VerifierReport(infra_error="clone failed")
    reward = make_reward(spec, gamma)
    for step in (
        RewardInput(report([0, 0]), good, broken, EndReason.INFRA_FAILURE),
        RewardInput(report([0, 0]), good, broken),
        RewardInput(report([0, 0]), good, good, EndReason.INFRA_FAILURE),
    ):
        assert reward(step) == {"infra_failure": 0.0}


def test_a_callable_gives_a_number_or_terms():
    step = RewardInput(report([0]), report([0]), report([1]))
    assert make_reward(lambda step: step.current.passed)(step) == {"custom": 1.0}
    assert make_reward(lambda step: {"a": 1, "b": -0.5})(step) == {"a": 1.0, "b": -0.5}
    assert make_reward(lambda step: 2.0, gamma=0.5)(step) == {"custom": 2.0, "shaping": 0.5}


@pytest.mark.parametrize("value", [None, "x", [1], float("nan"), {"a": float("inf")}, {"a": "y"}])
def test_a_callable_that_returns_nonsense_is_refused(value):
    with pytest.raises(ConfigError, match="reward callable returned"):
        make_reward(lambda step: value)(RewardInput(report([0]), report([0]), report([1])))


def test_unknown_specs_are_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'delta'"):
        make_reward("detla")
    with pytest.raises(ConfigError, match="expected one of delta, level, final, solved"):
        make_reward("zzz")
    with pytest.raises(ConfigError, match="a callable"):
        make_reward(3)


@pytest.mark.parametrize("gamma", [0.0, 1.5, -1, True, "0.9", float("nan")])
def test_gamma_out_of_range_is_refused(gamma):
    with pytest.raises(ConfigError, match="gamma"):
        make_reward("delta", gamma)
