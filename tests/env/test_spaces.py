"""Spaces: what is in them, what is not, and that they can be sampled, batched and written as JSON."""

from __future__ import annotations

import json
from copy import deepcopy

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from hypothesis import given
from hypothesis import strategies as st

from t1_env.protocol import SHELL_STATES, Command, Keys, Submit
from t1_env.spaces import (
    MAX_CODE_POINT,
    TerminalAction,
    TerminalText,
    action_from_json,
    action_to_json,
    clip_text,
    observation_space,
    to_unicode,
)

any_unicode = st.text(alphabet=st.characters(exclude_categories=["Cs"]))


@given(any_unicode.filter(lambda text: len(text) <= 50))
def test_terminal_text_holds_any_unicode(text: str) -> None:
    assert text in TerminalText(50)


@pytest.mark.parametrize("outsider", ["x" * 51, "\ud800", b"bytes", None, 3, np.array("a")])
def test_terminal_text_leaves_out_what_is_not_text(outsider: object) -> None:
    assert outsider not in TerminalText(50)


def test_terminal_text_samples_are_members_and_follow_the_seed() -> None:
    first, second = TerminalText(200, seed=7), TerminalText(200, seed=7)
    drawn = [first.sample() for _ in range(20)]
    assert drawn == [second.sample() for _ in range(20)]
    assert all(text in first for text in drawn)
    assert len({len(text) for text in drawn}) > 1


def test_texts_of_different_length_differ() -> None:
    assert TerminalText(5) == TerminalText(5)
    assert TerminalText(5) != TerminalText(6)
    assert TerminalText(5) != spaces.Text(5, min_length=0)


def test_batched_text_is_a_tuple_of_fresh_texts() -> None:
    space = TerminalText(10)
    batched = batch_space(space, 2)
    assert ("", "é\n\x1b[0m") in batched
    assert concatenate(space, ["a", "b"], create_empty_array(space, 2)) == ("a", "b")


@pytest.mark.parametrize("action", ["ls", "", "echo ü\n", Command("ls"), Command("sleep 1", 2.5), Keys("C-c"), Keys("y", 0), Submit()])
def test_actions_are_members_and_survive_json(action: object) -> None:
    space = TerminalAction()
    assert action in space
    written = json.loads(json.dumps(space.to_jsonable([action])))
    assert space.from_jsonable(written) == [action]
    assert action_from_json(action_to_json(action)) == action


@pytest.mark.parametrize("outsider", ["\udc80", "x" * 101, Keys("x" * 101), Command("\udfff"), None, 0, b"ls", ["ls"], {"kind": "submit"}])
def test_what_is_no_action(outsider: object) -> None:
    assert outsider not in TerminalAction(100)


@pytest.mark.parametrize("record", [{"kind": "drop"}, {}, 3, None, {"kind": "command"}, {"kind": "keys", "text": 3, "wait_s": 1.0}])
def test_bad_action_records_are_refused(record: object) -> None:
    with pytest.raises(ValueError, match="not an action record"):
        action_from_json(record)


def test_sampled_actions_follow_the_seed() -> None:
    first, second = TerminalAction(seed=3), deepcopy(TerminalAction(seed=3))
    drawn = [first.sample() for _ in range(30)]
    assert drawn == [second.sample() for _ in range(30)]
    assert len(set(drawn)) > 3
    assert all(action in first for action in drawn)


def test_action_space_takes_no_mask() -> None:
    with pytest.raises(ValueError, match="mask"):
        TerminalAction().sample(mask=np.ones(3, dtype=np.int8))


def test_observation_space_has_the_agreed_parts() -> None:
    space = observation_space(3, 20, 512)
    observation = {
        "cwd": "/app",
        "exit_code": np.array(-1, dtype=np.int32),
        "output": "x" * 512 + " and a notice",
        "screen": np.full((3, 20), MAX_CODE_POINT, dtype=np.uint32),
        "state": len(SHELL_STATES) - 1,
        "turn": np.array(0, dtype=np.int32),
    }
    assert observation in space
    assert {**observation, "screen": observation["screen"] + 1} not in space
    assert {**observation, "state": len(SHELL_STATES)} not in space
    assert {**observation, "exit_code": np.array(256, dtype=np.int32)} not in space


@given(any_unicode, st.integers(64, 200))
def test_clipping_keeps_head_and_tail_and_fits(text: str, limit: int) -> None:
    text = text * 3
    clipped = clip_text(text, limit)
    assert len(clipped) <= limit
    if len(text) <= limit:
        assert clipped == text


def test_clipping_says_how_much_is_missing() -> None:
    clipped = clip_text("a" * 500 + "b" * 500, 100)
    head, notice, tail = clipped.split("\n")
    assert set(head) == {"a"}
    assert set(tail) == {"b"}
    assert f"{1000 - len(head) - len(tail)} characters" in notice


@given(st.text(alphabet=st.characters()))
def test_to_unicode_always_encodes_and_keeps_good_text(text: str) -> None:
    cleaned = to_unicode(text)
    cleaned.encode("utf-8")
    assert len(cleaned) == len(text)
    assert all(new in (old, "?") for new, old in zip(cleaned, text, strict=True))
