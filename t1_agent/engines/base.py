"""The engine seam: token ids in, sampled token ids with log-probs and routes out. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from t1_agent.types import Completion, IntArray, SamplingParams
from t1_env.errors import T1Error


class EngineError(T1Error, RuntimeError):
    """An engine was asked for something it cannot do, or its weights are not those it was given."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made.

    Args:
        prefilled_tokens: Prompt tokens that were computed.
        reused_tokens: Prompt tokens whose computation a session's cache saved.
        sampled_tokens: Tokens sampled.
        prefill_seconds: Wall time of reading prompts.
        decode_seconds: Wall time of sampling.
    """

    prefilled_tokens: int = 0
    reused_tokens: int = 0
    sampled_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@runtime_checkable
class Engine(Protocol):
    """What the rollout needs from anything that samples."""

    @property
    def weight_version(self) -> int:
        """Version of the weights in use."""

    def generate(
        self, prompts: Sequence[IntArray], params: SamplingParams, *, session_ids: Sequence[str] | None = None
    ) -> list[Completion]:
        """Sample one turn for each prompt.

        Args:
            prompts: int32 arrays of token ids, one a request, of any lengths.
            params: How to sample; the log-probs returned are those of this distribution. Pass another seed for every call: the same seed
                draws the same random numbers.
            session_ids: One name a request. Later calls that extend what a session has read pay only for the new tokens.

        Returns:
            One completion a prompt, in order.

        Raises:
            EngineError: When a prompt is empty, too long or holds an unknown id, or the session ids are not distinct.
        """

    def end_session(self, session_id: str) -> None:
        """Forget what a session has read. Unknown ids are fine: new weights drop all sessions."""

    def load_weights(self, state_dict: Mapping[str, Any], version: int) -> str:
        """Replace all weights.

        Args:
            state_dict: Name -> tensor; exactly the engine's own names and shapes.
            version: Number reported in completions from now on.

        Returns:
            Checksum of the weights as the engine holds them, for the caller to compare with that of its own copy.

        Raises:
            EngineError: When a name is missing, unknown, or has another shape. The old weights stay in that case.
        """

    def close(self) -> None:
        """Release memory; the engine cannot be used afterwards."""
