"""Scripted stand-ins for tests and timings: episodes without a sandbox and a little game that a tiny model can learn.

Nothing here is faked inside the model: tokens are really sampled, log-probs and routes really recorded. Only the terminal is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from t1_agent.tito.ledger import ids_digest
from t1_agent.types import FloatArray, IntArray, RouteArray, Trajectory


def toy_trajectory(
    segments: Sequence[tuple[str, int, Sequence[int]]],
    rewards: Sequence[float],
    *,
    logprobs: FloatArray | None = None,
    routes: RouteArray | None = None,
    end_reason: str = "submitted",
    task_id: str = "toy",
    weight_version: int = 0,
) -> Trajectory:
    """An episode from segments, with the digests a ledger would have left.

    Args:
        segments: (kind, turn, ids) in order; kind ``"sampled"`` is trainable.
        rewards: One a turn.
        logprobs: float32, one a sampled token; -1.0 each when None.
        routes: [T, L, K] with a valid row for every token but the last, or None.
        end_reason: Decides terminated or truncated.
        task_id: Name.
        weight_version: Version that sampled the tokens.
    """
    token_ids: IntArray = np.concatenate([np.asarray(ids, dtype=np.int32) for _, _, ids in segments])
    sizes = [len(ids) for _, _, ids in segments]
    mask = np.repeat([kind == "sampled" for kind, _, _ in segments], sizes)
    full = np.zeros(len(token_ids), dtype=np.float32)
    full[mask] = -1.0 if logprobs is None else logprobs
    ends = np.cumsum(sizes).astype(np.int32)
    valid = None if routes is None else np.arange(len(token_ids)) < len(token_ids) - 1
    terminated = end_reason in ("submitted", "solved")
    return Trajectory(
        task_id=task_id,
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=full,
        turn_index=np.repeat(np.asarray([turn for _, turn, _ in segments], dtype=np.int32), sizes),
        rewards=np.asarray(rewards, dtype=np.float32),
        terminated=terminated,
        truncated=not terminated,
        end_reason=end_reason,
        verifiers_passed=int(sum(rewards)),
        verifiers_total=len(rewards),
        routes=routes,
        routes_valid=valid,
        weight_versions=np.where(mask, weight_version, -1).astype(np.int32),
        segment_digests=tuple(ids_digest(np.asarray(ids, dtype=np.int32)) for _, _, ids in segments),
        segment_ends=ends,
        metadata={"segment_kinds": [kind for kind, _, _ in segments]},
    )


@dataclass(frozen=True, slots=True)
class CopyGame:
    """Each turn shows a symbol; writing it back earns 1, and any two tokens end the turn.

    Args:
        symbols: Number of symbols; ids 2 .. symbols + 1. Id 0 opens, id 1 separates.
        turns: Turns of an episode.
    """

    symbols: int = 4
    turns: int = 2

    @property
    def vocab_size(self) -> int:
        """Ids in use."""
        return self.symbols + 2

    def play(self, actor: Any, n_episodes: int, *, seed: int, temperature: float = 1.0, weight_version: int = 0) -> list[Trajectory]:
        """Sample episodes from a transformers causal LM, all in one batch, recording log-probs and routes."""
        rng = np.random.default_rng(seed)
        shown = rng.integers(2, 2 + self.symbols, size=(n_episodes, self.turns))
        ids = np.zeros((n_episodes, 1), dtype=np.int64)
        logprobs = np.zeros((n_episodes, self.turns * 2), dtype=np.float32)
        for turn in range(self.turns):
            ids = np.concatenate([ids, shown[:, turn : turn + 1], np.ones((n_episodes, 1), dtype=np.int64)], axis=1)
            for step in range(2):
                probabilities = _next_probabilities(actor, ids, temperature)
                draws = (probabilities.cumsum(axis=1) < rng.random((n_episodes, 1))).sum(axis=1)
                # float rounding can leave the last cumulative sum just below the draw
                tokens = np.minimum(draws, probabilities.shape[1] - 1)
                logprobs[:, turn * 2 + step] = np.log(probabilities[np.arange(n_episodes), tokens])
                ids = np.concatenate([ids, tokens[:, None]], axis=1)
        routes = _routes(actor, ids)
        return [
            self._episode(ids[row], shown[row], logprobs[row], None if routes is None else routes[row], row, weight_version)
            for row in range(n_episodes)
        ]

    def demonstrations(self, n_episodes: int, *, seed: int) -> list[Trajectory]:
        """Perfect episodes (the symbol, then the separator) without log-probs or routes."""
        shown = np.random.default_rng(seed).integers(2, 2 + self.symbols, size=(n_episodes, self.turns))
        ids = [np.concatenate([[0], *([symbol, 1, symbol, 1] for symbol in row)]) for row in shown]
        zeros = np.zeros(2 * self.turns, dtype=np.float32)
        return [self._episode(row, symbols, zeros, None, index, -1) for index, (row, symbols) in enumerate(zip(ids, shown, strict=True))]

    def _episode(self, ids: Any, shown: Any, logprobs: FloatArray, routes: RouteArray | None, row: int, weight_version: int) -> Trajectory:
        segments: list[tuple[str, int, Sequence[int]]] = []
        rewards = []
        for turn in range(self.turns):
            start = 1 + 4 * turn
            opening = start - 1 if turn == 0 else start
            segments.append(("prompt" if turn == 0 else "env_content", turn - 1, ids[opening : start + 2]))
            segments.append(("sampled", turn, ids[start + 2 : start + 4]))
            rewards.append(float(ids[start + 2] == shown[turn]))
        return toy_trajectory(
            segments, rewards, logprobs=logprobs, routes=routes, task_id=f"copy/{shown[0]}/{row % 2}", weight_version=weight_version
        )


def _next_probabilities(actor: Any, ids: Any, temperature: float) -> Any:
    import torch

    with torch.no_grad():
        logits = actor(input_ids=torch.from_numpy(ids), use_cache=False).logits[:, -1]
    return torch.softmax(logits.double() / temperature, dim=-1).numpy()


def _routes(actor: Any, ids: Any) -> Any:
    """Routes of one forward pass over all episodes, [B, T, L, K]; None for a dense model."""
    import torch

    from t1_agent.routing.record import RouteRecorder

    with torch.no_grad(), RouteRecorder(actor.base_model) as recorder:
        actor.base_model(input_ids=torch.from_numpy(ids), use_cache=False)
    if not recorder.sites:
        return None
    rows = recorder.take()
    return rows.reshape(*ids.shape, *rows.shape[1:])
