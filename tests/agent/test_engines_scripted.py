"""The scripted engine."""

from __future__ import annotations

import numpy as np
import pytest

from t1_agent.engines.base import Engine, EngineError
from t1_agent.engines.scripted import ScriptedEngine
from t1_agent.types import SamplingParams

PROMPT = np.array([1, 2, 3], dtype=np.int32)


def ids(completions):
    return [completion.token_ids.tolist() for completion in completions]


def test_is_an_engine():
    assert isinstance(ScriptedEngine([[1]]), Engine)


def test_every_session_plays_the_script_from_the_start():
    engine = ScriptedEngine([[5, 9], [6]], stop_token_ids=[9], logprob=-0.5, weight_version=3)
    first = engine.generate([PROMPT, PROMPT], SamplingParams(), session_ids=["a", "b"])
    assert ids(first) == [[5, 9], [5, 9]]
    assert first[0].finish_reason == "stop"
    assert first[0].weight_version == 3
    assert first[0].logprobs.tolist() == [-0.5, -0.5]
    assert ids(engine.generate([PROMPT], SamplingParams(), session_ids=["b"])) == [[6]]
    engine.end_session("a")
    assert ids(engine.generate([PROMPT, PROMPT], SamplingParams(), session_ids=["a", "c"])) == [[5, 9], [5, 9]]
    assert len(engine.prompts) == 5


def test_function_of_prompt_and_turn():
    engine = ScriptedEngine(lambda prompt, turn: [int(prompt[-1]), turn + 10])
    assert ids(engine.generate([PROMPT], SamplingParams())) == [[3, 10]]
    assert ids(engine.generate([PROMPT[:2]], SamplingParams())) == [[2, 11]]


def test_turns_are_cut_at_max_tokens():
    (completion,) = ScriptedEngine([[1, 2, 9]], stop_token_ids=[9]).generate([PROMPT], SamplingParams(max_tokens=2))
    assert completion.token_ids.tolist() == [1, 2]
    assert completion.finish_reason == "length"


def test_running_out_and_empty_turns_are_errors():
    engine = ScriptedEngine([[1], []])
    engine.generate([PROMPT], SamplingParams())
    with pytest.raises(EngineError, match="is empty"):
        engine.generate([PROMPT], SamplingParams())
    with pytest.raises(EngineError, match="asked for turn 2, the script has 2"):
        engine.generate([PROMPT], SamplingParams())


def test_session_ids_must_be_distinct():
    with pytest.raises(EngineError, match="one distinct id each"):
        ScriptedEngine([[1]]).generate([PROMPT, PROMPT], SamplingParams(), session_ids=["a", "a"])
