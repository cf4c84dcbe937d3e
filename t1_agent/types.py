"""The records that travel through the trainer. Frozen, checked on construction, numpy only (importing this loads no torch).

Conventions: ``T`` tokens of one episode, ``L`` MoE layers (dense layers have no column), ``K`` experts a token, ``N`` turns.
A length that does not match raises and names what, got and expected; nothing is padded, cut or zeroed to fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
RouteArray = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


def require_length(what: str, got: int, expected: int) -> None:
    """Raise ``ValueError`` naming the record when two lengths that must agree do not."""
    if got != expected:
        raise ValueError(f"{what}: got length {got}, expected {expected}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. The log-probs an engine returns are those of this very distribution.

    Args:
        temperature: > 0; 0 means greedy (log-probs are then those at temperature 1).
        max_tokens: Most tokens of one turn.
        seed: Seed of the sampling stream; None leaves it to the engine.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled turn, exactly as the engine produced it.

    Args:
        token_ids: int32 [n], sampled ids, the stop token included when it was sampled.
        logprobs: float32 [n], log-probability of each sampled id under the sampling distribution.
        finish_reason: ``"stop"`` (a stop token was sampled) or ``"length"``.
        weight_version: Version of the weights that sampled it.
        routes: uint8/uint16 [rows, L, K], experts chosen in the forward pass that read each token, or None for a dense model or when
            recording is off. Row i belongs to absolute position ``routes_start + i`` of prompt + completion.
        routes_start: Absolute position of the first row. Rows reach at most position ``len(prompt) + n - 2``: the last sampled token
            has not been read yet and gets its row from the next turn's prefill.
    """

    token_ids: IntArray
    logprobs: FloatArray
    finish_reason: str
    weight_version: int
    routes: RouteArray | None = None
    routes_start: int = 0

    def __post_init__(self) -> None:
        require_length("Completion.logprobs", len(self.logprobs), len(self.token_ids))
        if self.finish_reason not in ("stop", "length"):
            raise ValueError(f"Completion.finish_reason: got {self.finish_reason!r}, expected 'stop' or 'length'")
        if not np.isfinite(self.logprobs).all():
            raise ValueError("Completion.logprobs: got a value that is not finite")
        if self.routes is not None and self.routes.ndim != 3:
            raise ValueError(f"Completion.routes: got {self.routes.ndim} dimensions, expected [rows, layers, top_k]")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode as the environment saw it: for transcripts and statistics, never for the loss.

    Args:
        text: Decoded sampled text.
        action: The action string given to the environment, or None when the turn could not be parsed into one.
        observation: Text that went back to the policy.
        reward: Reward of the step.
        verifiers_passed: Count after the step.
        exit_code: Exit status of the command, -1 when there is none.
        seconds: Wall time of the environment's step.
    """

    text: str
    action: str | None
    observation: str
    reward: float
    verifiers_passed: int
    exit_code: int = -1
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode, ready for the learner: the flattened ledger plus rewards.

    Args:
        task_id: Id of the task played.
        token_ids: int32 [T], every token of the episode in order.
        loss_mask: bool [T], True exactly on sampled tokens.
        logprobs: float32 [T], the sampler's log-probs; 0.0 outside ``loss_mask``.
        turn_index: int32 [T], turn each token belongs to, -1 for the initial prompt. Environment tokens that follow turn k belong to k.
        rewards: float32 [N], one a turn.
        terminated: The task really ended (bootstrap 0).
        truncated: The episode was cut (bootstrap V).
        end_reason: ``t1_env.protocol.EndReason`` value.
        verifiers_passed: Count at the end.
        verifiers_total: Size of the frozen list.
        routes: uint8/uint16 [T, L, K] or None.
        routes_valid: bool [T], which rows of ``routes`` were recorded (False rows are routed live and counted).
        weight_versions: int32 [T], version that sampled each token, -1 outside ``loss_mask``.
        segment_digests: SHA-256 (hex) of each ledger segment's ids, checked again before the loss.
        segment_ends: int32, exclusive end position of each of those segments.
        repairs: Count of turn-boundary repairs by kind (see ``t1_agent.tito``).
        turns: One ``Turn`` a turn, for people.
        metadata: Family, level, seed, wall times ... JSON-compatible.
    """

    task_id: str
    token_ids: IntArray
    loss_mask: BoolArray
    logprobs: FloatArray
    turn_index: IntArray
    rewards: FloatArray
    terminated: bool
    truncated: bool
    end_reason: str
    verifiers_passed: int
    verifiers_total: int
    routes: RouteArray | None = None
    routes_valid: BoolArray | None = None
    weight_versions: IntArray | None = None
    segment_digests: tuple[str, ...] = ()
    segment_ends: IntArray | None = None
    repairs: dict[str, int] = field(default_factory=dict)
    turns: tuple[Turn, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n_tokens = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "turn_index"):
            require_length(f"Trajectory.{name} of {self.task_id}", len(getattr(self, name)), n_tokens)
        for name in ("routes", "routes_valid", "weight_versions"):
            if (value := getattr(self, name)) is not None:
                require_length(f"Trajectory.{name} of {self.task_id}", len(value), n_tokens)
        if (self.routes is None) != (self.routes_valid is None):
            raise ValueError(f"Trajectory of {self.task_id}: routes and routes_valid come together")
        if np.any(self.logprobs[~self.loss_mask] != 0.0):
            raise ValueError(f"Trajectory.logprobs of {self.task_id}: non-zero outside the loss mask")
        last_turn = int(self.turn_index.max(initial=-1))
        if last_turn >= len(self.rewards):
            raise ValueError(f"Trajectory.rewards of {self.task_id}: got {len(self.rewards)}, turn_index reaches {last_turn}")
        if self.terminated and self.truncated:
            raise ValueError(f"Trajectory of {self.task_id}: both terminated and truncated")

    @property
    def solved(self) -> bool:
        """Whether every verifier passes at the end."""
        return self.verifiers_total > 0 and self.verifiers_passed == self.verifiers_total

    @property
    def infra_failure(self) -> bool:
        """Whether the machinery failed: such an episode enters neither loss nor statistics."""
        return self.end_reason == "infra_failure"
