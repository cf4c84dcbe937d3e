"""Push weights to an engine of this process and check that it holds what was sent."""

from __future__ import annotations

from typing import Any

import torch

from t1_agent.engines.base import Engine, EngineError
from t1_agent.engines.weights import weights_checksum


class InProcessSink:
    """Hands an actor's weights to an engine.

    Args:
        engine: Takes the weights.
        dtype: Precision the engine keeps them in; None when it is the actor's own.
    """

    def __init__(self, engine: Engine, dtype: torch.dtype | None = None) -> None:
        self._engine = engine
        self._dtype = dtype

    def push(self, actor: Any, version: int) -> str:
        """Replace the engine's weights.

        Args:
            actor: A transformers causal LM.
            version: Version reported in completions from now on.

        Returns:
            Checksum of the weights, as the engine holds them.

        Raises:
            EngineError: The engine's checksum or version is not that of what was sent.
        """
        state = actor.state_dict()
        expected = weights_checksum(state, self._dtype)
        got = self._engine.load_weights(state, version)
        if got != expected:
            raise EngineError(f"weight push {version}: the engine holds weights with checksum {got}, {expected} was sent")
        if self._engine.weight_version != version:
            raise EngineError(f"weight push {version}: the engine reports version {self._engine.weight_version}")
        return got
