"""Budgets and the order in which reasons to end are given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t1_env.episode import Budget, Episode
from t1_env.errors import ConfigError
from t1_env.protocol import EndReason


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_an_episode_goes_on_until_its_turn_limit():
    episode = Episode(Budget(max_turns=3))
    assert episode.finish_turn() is None
    assert not episode.will_reach_a_limit()
    assert episode.finish_turn() is None
    assert episode.will_reach_a_limit()
    assert not episode.terminated
    assert not episode.truncated
    assert episode.finish_turn() is EndReason.TURN_LIMIT
    assert episode.truncated
    assert not episode.terminated


def test_the_default_is_300_turns():
    episode = Episode(Budget())
    assert [episode.finish_turn() for _ in range(300)] == [None] * 299 + [EndReason.TURN_LIMIT]


@pytest.mark.parametrize(
    ("facts", "reason", "terminated"),
    [
        ({"solved": True}, EndReason.SOLVED, True),
        ({"submitted": True}, EndReason.SUBMITTED, True),
        ({"submitted": True, "solved": True}, EndReason.SUBMITTED, True),
        ({"infra_failure": True, "submitted": True, "solved": True}, EndReason.INFRA_FAILURE, False),
        ({}, EndReason.TURN_LIMIT, False),
    ],
)
def test_precedence_on_the_last_allowed_turn(facts, reason, terminated):
    clock = Clock()
    episode = Episode(Budget(max_turns=1, time_limit_s=1.0, byte_limit=1), clock=clock)
    clock.now += 5.0
    assert episode.finish_turn(output_bytes=10, **facts) is reason
    assert episode.terminated is terminated
    assert episode.truncated is not terminated


def test_solved_does_not_end_an_episode_that_leaves_stopping_to_the_agent():
    episode = Episode(Budget(max_turns=2, end_on_solved=False))
    assert episode.finish_turn(solved=True) is None
    assert episode.finish_turn(solved=True) is EndReason.TURN_LIMIT


def test_time_limit_and_time_left():
    clock = Clock()
    episode = Episode(Budget(max_turns=None, time_limit_s=10.0, byte_limit=5), clock=clock)
    assert episode.remaining_s == 10.0
    clock.now += 4.0
    assert (episode.seconds, episode.remaining_s) == (4.0, 6.0)
    assert episode.finish_turn() is None
    clock.now += 7.0
    assert episode.remaining_s == 0.0
    assert episode.finish_turn(output_bytes=100) is EndReason.TIME_LIMIT
    assert Episode(Budget()).remaining_s is None


def test_byte_limit_counts_all_output():
    episode = Episode(Budget(byte_limit=100))
    assert episode.finish_turn(output_bytes=60) is None
    assert episode.will_reach_a_limit(output_bytes=40)
    assert not episode.will_reach_a_limit(output_bytes=39)
    assert episode.finish_turn(output_bytes=40) is EndReason.BYTE_LIMIT


def test_no_turn_after_the_end():
    episode = Episode(Budget(max_turns=1))
    episode.finish_turn()
    with pytest.raises(RuntimeError, match=r"turn_limit.*reset"):
        episode.finish_turn()


def test_bad_values_are_refused():
    for name in ("max_turns", "time_limit_s", "byte_limit"):
        with pytest.raises(ConfigError, match=f"{name}=0"):
            Budget(**{name: 0})
    with pytest.raises(ConfigError, match="nan"):
        Budget(time_limit_s=float("nan"))
    with pytest.raises(ValueError, match="output_bytes=-1"):
        Episode(Budget()).finish_turn(output_bytes=-1)


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.booleans(), st.booleans()), max_size=30), st.integers(1, 20), st.booleans())
def test_exactly_one_flag_is_set_at_the_end_and_none_before(turns, max_turns, end_on_solved):
    episode = Episode(Budget(max_turns=max_turns, byte_limit=200, end_on_solved=end_on_solved))
    for output_bytes, submitted, solved, infra in turns:
        reason = episode.finish_turn(output_bytes=output_bytes, submitted=submitted, solved=solved, infra_failure=infra)
        assert (episode.terminated + episode.truncated) == (reason is not None)
        if reason is not None:
            assert episode.turns <= max_turns
            return
    assert episode.turns < max_turns
