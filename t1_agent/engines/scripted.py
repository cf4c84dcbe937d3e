"""An engine that plays given token sequences, for tests of everything around a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t1_agent.engines.base import EngineError
from t1_agent.types import Completion, IntArray, SamplingParams

#: Given the prompt and the number of calls made so far, the token ids to answer with.
Script = Callable[[IntArray, int], Sequence[int]]


class ScriptedEngine:
    """Answers from a script: a list of turns played to every session, or a function of the prompt.

    Args:
        script: Turns (each a sequence of token ids), played in order for each session on its own; or a function of
            (prompt, turns this session has had).
        stop_token_ids: A turn ending in one of these finishes by ``"stop"``, any other by ``"length"``.
        logprob: Log-prob reported for every token.
        weight_version: Version reported.
    """

    def __init__(
        self,
        script: Sequence[Sequence[int]] | Script,
        *,
        stop_token_ids: Sequence[int] = (),
        logprob: float = -1.0,
        weight_version: int = 0,
    ) -> None:
        self._script = script
        self._stop = frozenset(stop_token_ids)
        self._logprob = logprob
        self._version = weight_version
        self._turns: dict[str, int] = {}
        #: Every prompt seen, in order, for assertions.
        self.prompts: list[IntArray] = []

    @property
    def weight_version(self) -> int:
        """Version of the weights in use."""
        return self._version

    def generate(
        self, prompts: Sequence[IntArray], params: SamplingParams, *, session_ids: Sequence[str] | None = None
    ) -> list[Completion]:
        """Play the next turn of each session (without ids, the i-th request is session ``"i"``), cut at ``params.max_tokens``."""
        names = [str(index) for index in range(len(prompts))] if session_ids is None else list(session_ids)
        if len(names) != len(prompts) or len(set(names)) != len(names):
            raise EngineError(f"ScriptedEngine.generate: got session ids {names} for {len(prompts)} prompts, expected one distinct id each")
        return [self._play(np.asarray(prompt, dtype=np.int32), name, params) for prompt, name in zip(prompts, names, strict=True)]

    def _play(self, prompt: IntArray, name: str, params: SamplingParams) -> Completion:
        turn = self._turns.get(name, 0)
        if callable(self._script):
            answer = self._script(prompt, turn)
        elif turn < len(self._script):
            answer = self._script[turn]
        else:
            raise EngineError(f"ScriptedEngine: session {name!r} asked for turn {turn}, the script has {len(self._script)}")
        self._turns[name] = turn + 1
        self.prompts.append(prompt)
        ids = np.asarray(list(answer)[: params.max_tokens], dtype=np.int32)
        if not len(ids):
            raise EngineError(f"ScriptedEngine: turn {turn} of session {name!r} is empty; an engine always samples at least one token")
        reason = "stop" if int(ids[-1]) in self._stop else "length"
        return Completion(ids, np.full(len(ids), self._logprob, dtype=np.float32), reason, self._version)

    def end_session(self, session_id: str) -> None:
        """Start the script again for this session."""
        self._turns.pop(session_id, None)

    def load_weights(self, state_dict: Mapping[str, Any], version: int) -> str:
        """Take the version and ignore the weights; the checksum is empty."""
        self._version = version
        return ""

    def close(self) -> None:
        """Nothing to release."""
