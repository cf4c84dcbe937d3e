"""The append-only record of one episode's tokens: what the engine sampled is what the learner trains on, id by id."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from t1_agent.tito.codec import Piece, SegmentKind, TurnCodec
from t1_agent.tito.errors import LedgerError
from t1_agent.tito.route_rows import RouteRows
from t1_agent.types import Completion, FloatArray, IntArray, Trajectory, Turn

_LOWEST_LOGPROB: Final = -9000.0
"""Engines mark a missing log-prob with -9999; no sampled token is that unlikely in float32."""
_HIGHEST_LOGPROB: Final = 1e-3


def ids_digest(ids: npt.NDArray[np.integer[Any]]) -> str:
    """SHA-256 (hex) of ids as little-endian int32."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i4").tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one kind. Arrays are copied and cannot be written to.

    Args:
        ids: int32 [n], n >= 1.
        kind: What the tokens are.
        turn: Turn they belong to, -1 for the opening of the episode.
        logprobs: float32 [n] for sampled tokens, else None.
        weight_version: Version of the weights that sampled them, -1 for other kinds.
        digest: SHA-256 (hex) of the ids, computed on construction.
    """

    ids: IntArray
    kind: SegmentKind
    turn: int
    logprobs: FloatArray | None = None
    weight_version: int = -1
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        if len(self.ids) == 0:
            raise LedgerError(f"Segment of kind {self.kind}: got no ids, expected at least one")
        if (self.logprobs is not None) != (self.kind is SegmentKind.SAMPLED):
            raise LedgerError(f"Segment of kind {self.kind}: log-probs come with sampled tokens and only with them")
        # Arrays over bytes are read-only for good: their flag cannot be switched back.
        object.__setattr__(self, "ids", np.frombuffer(np.ascontiguousarray(self.ids, dtype=np.int32).tobytes(), dtype=np.int32))
        if self.logprobs is not None:
            frozen = np.frombuffer(np.ascontiguousarray(self.logprobs, dtype=np.float32).tobytes(), dtype=np.float32)
            if len(frozen) != len(self.ids):
                raise LedgerError(f"Segment of kind {self.kind}: got {len(frozen)} log-probs, expected {len(self.ids)}")
            object.__setattr__(self, "logprobs", frozen)
        object.__setattr__(self, "digest", ids_digest(self.ids))


class Ledger:
    """Tokens of one episode, growing at the end only: prompt, then completion and observation in turn.

    The prompt of turn k + 1 begins with the prompt and the completion of turn k. What a turn boundary needs beyond the sampled ids
    (separator, close of a turn cut by length) is added outside the loss and counted in ``repairs``. Appending costs time in proportion to
    what is appended, however long the episode is.

    Args:
        codec: The codec of the policy's chat template.
    """

    def __init__(self, codec: TurnCodec) -> None:
        self._codec = codec
        self._segments: list[Segment] = []
        self._buffer: IntArray = np.empty(1024, dtype=np.int32)
        self._n_tokens = 0
        self._n_turns = 0
        self._routes = RouteRows()
        self._repairs = {"clean": 0, "boundary": 0, "reject": 0, "boundary/separator": 0, "boundary/synthetic_close": 0}

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Every segment in order."""
        return tuple(self._segments)

    @property
    def n_tokens(self) -> int:
        """Tokens so far."""
        return self._n_tokens

    @property
    def n_turns(self) -> int:
        """Completions so far."""
        return self._n_turns

    @property
    def repairs(self) -> dict[str, int]:
        """Turn boundaries by kind.

        ``clean``: nothing was added. ``boundary``: something was added outside the loss, itemised under ``boundary/...`` (one boundary can
        count in both items). ``reject``: a completion was refused.
        """
        return dict(self._repairs)

    def prompt_ids(self) -> IntArray:
        """Everything so far, which is what the engine reads next: int32 [n_tokens], a read-only view that later appends do not change.

        Raises:
            LedgerError: When the policy is not to write next.
        """
        self._require(SegmentKind.GEN_PROMPT, "prompt_ids")
        view = self._buffer[: self._n_tokens]
        view.flags.writeable = False
        return view

    def append_prompt(self, instruction: str, *, system: str | None = None) -> int:
        """Open the episode.

        Args:
            instruction: First user message.
            system: System message, or None.

        Returns:
            Number of tokens appended.

        Raises:
            LedgerError: When the ledger is not empty.
        """
        if self._segments:
            raise LedgerError(f"append_prompt: the ledger already holds {self._n_tokens} tokens; a changed history needs a new ledger")
        return self._append_pieces(self._codec.encode_prompt(instruction, system=system), turn=-1)

    def append_completion(self, completion: Completion) -> Segment:
        """Append what the engine sampled, unchanged, as the next turn.

        Raises:
            LedgerError: When the policy is not to write now, or the completion is empty, runs on after a stop token, or has ids, log-probs
                or routes that cannot be right. The ledger is then as before, with one more ``reject``.
        """
        self._require(SegmentKind.GEN_PROMPT, "append_completion")
        self._check_completion(completion)
        segment = Segment(
            completion.token_ids, SegmentKind.SAMPLED, self._n_turns, logprobs=completion.logprobs, weight_version=completion.weight_version
        )
        try:
            self._routes.add(completion.routes, completion.routes_start, self._n_tokens, len(segment.ids))
        except LedgerError as error:
            self._reject(str(error))
        self._append(segment)
        self._n_turns += 1
        return segment

    def append_observation(self, text: str) -> int:
        """Append the environment's answer, and open the next turn. A turn that was left open is closed first, outside the loss.

        Args:
            text: Anything; it is encoded literally and can hold no control token.

        Returns:
            Number of tokens appended.

        Raises:
            LedgerError: When the last thing appended was not a completion.
        """
        self._require(SegmentKind.SAMPLED, "append_observation")
        pieces = self._codec.encode_observation(text)
        separated = any(piece.kind is SegmentKind.SEPARATOR for piece in pieces)
        closed = self._codec.is_closed(self._segments[-1].ids)
        if not closed:
            pieces = (Piece(SegmentKind.SYNTHETIC_CLOSE, self._codec.close_ids), *pieces)
        self._repairs["boundary/separator"] += separated
        self._repairs["boundary/synthetic_close"] += not closed
        self._repairs["boundary" if separated or not closed else "clean"] += 1
        return self._append_pieces(pieces, turn=self._n_turns - 1)

    def to_trajectory(
        self,
        *,
        task_id: str,
        rewards: Sequence[float] | FloatArray,
        terminated: bool,
        truncated: bool,
        end_reason: str,
        verifiers_passed: int,
        verifiers_total: int,
        turns: Sequence[Turn] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Trajectory:
        """Flatten the ledger into the learner's record.

        Args:
            task_id: Id of the task played.
            rewards: One reward a completion.
            terminated: The task really ended.
            truncated: The episode was cut.
            end_reason: ``t1_env.protocol.EndReason`` value.
            verifiers_passed: Count at the end.
            verifiers_total: Size of the frozen list.
            turns: One ``Turn`` a completion, or none.
            metadata: JSON-compatible; ``segment_kinds`` and the counts of repeated and conflicting route rows are added to it.

        Raises:
            LedgerError: When rewards or turns do not match the completions, the ledger is empty, or the ids sent to the engine are no
                longer those of the segments.
        """
        if not self._segments:
            raise LedgerError(f"to_trajectory of {task_id}: the ledger is empty")
        if len(rewards) != self._n_turns:
            raise LedgerError(
                f"to_trajectory of {task_id}: got {len(rewards)} rewards, expected one for each of {self._n_turns} completions"
            )
        if turns and len(turns) != self._n_turns:
            raise LedgerError(f"to_trajectory of {task_id}: got {len(turns)} turns, expected one for each of {self._n_turns} completions")
        token_ids = np.concatenate([segment.ids for segment in self._segments])
        if not np.array_equal(token_ids, self._buffer[: self._n_tokens]):
            raise LedgerError(f"to_trajectory of {task_id}: ids given to the engine were changed after they were recorded")
        lengths = np.asarray([len(segment.ids) for segment in self._segments])
        kinds = [segment.kind for segment in self._segments]
        routes, routes_valid = self._routes.finish(self._n_tokens)
        extra = {
            "segment_kinds": [kind.value for kind in kinds],
            "route_rows_repeated": self._routes.repeated,
            "route_rows_conflicting": self._routes.conflicting,
        }
        return Trajectory(
            task_id=task_id,
            token_ids=token_ids,
            loss_mask=np.repeat([kind is SegmentKind.SAMPLED for kind in kinds], lengths),
            logprobs=np.concatenate([_logprobs_or_zeros(segment) for segment in self._segments]),
            turn_index=np.repeat(np.asarray([segment.turn for segment in self._segments], dtype=np.int32), lengths),
            rewards=np.asarray(rewards, dtype=np.float32),
            terminated=terminated,
            truncated=truncated,
            end_reason=end_reason,
            verifiers_passed=verifiers_passed,
            verifiers_total=verifiers_total,
            routes=routes,
            routes_valid=routes_valid,
            weight_versions=np.repeat(np.asarray([segment.weight_version for segment in self._segments], dtype=np.int32), lengths),
            segment_digests=tuple(segment.digest for segment in self._segments),
            segment_ends=np.cumsum(lengths).astype(np.int32),
            repairs=self.repairs,
            turns=tuple(turns),
            metadata={**(metadata or {}), **extra},
        )

    def _check_completion(self, completion: Completion) -> None:
        ids = completion.token_ids
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            self._reject(f"token_ids: got {ids.dtype} of shape {ids.shape}, expected integers [n]")
        if len(ids) == 0:
            self._reject("token_ids: got none, expected at least one sampled token")
        if len(wrong := np.flatnonzero((ids < 0) | (ids > np.iinfo(np.int32).max))):
            self._reject(f"token_ids: index {wrong[0]} holds {ids[wrong[0]]}, expected an id of 0 or more")
        if len(wrong := np.flatnonzero(np.isin(ids[:-1], self._codec.stop_ids))):
            self._reject(f"token_ids: index {wrong[0]} holds the stop token {ids[wrong[0]]} and {len(ids) - 1 - wrong[0]} tokens follow it")
        logprobs = completion.logprobs
        if len(wrong := np.flatnonzero(~((logprobs > _LOWEST_LOGPROB) & (logprobs < _HIGHEST_LOGPROB)))):
            self._reject(f"logprobs: index {wrong[0]} holds {logprobs[wrong[0]]}, expected a log-probability")

    def _reject(self, reason: str) -> NoReturn:
        self._repairs["reject"] += 1
        raise LedgerError(f"completion of turn {self._n_turns} refused: {reason}")

    def _require(self, last: SegmentKind, what: str) -> None:
        found = self._segments[-1].kind if self._segments else None
        if found is not last:
            raise LedgerError(
                f"{what}: the ledger ends with {found or 'nothing'}, expected {last}; the order is prompt, completion, observation, ..."
            )

    def _append_pieces(self, pieces: Sequence[Piece], turn: int) -> int:
        before = self._n_tokens
        for piece in pieces:
            self._append(Segment(piece.ids, piece.kind, turn))
        return self._n_tokens - before

    def _append(self, segment: Segment) -> None:
        end = self._n_tokens + len(segment.ids)
        if end > len(self._buffer):
            # A new array: views handed out by prompt_ids keep the old one.
            grown = np.empty(2 * end, dtype=np.int32)
            grown[: self._n_tokens] = self._buffer[: self._n_tokens]
            self._buffer = grown
        self._buffer[self._n_tokens : end] = segment.ids
        self._segments.append(segment)
        self._n_tokens = end


def verify_digests(trajectory: Trajectory) -> None:
    """Check, before the loss, that the ids and the mask are those of the ledger.

    Raises:
        LedgerError: When there are no digests, they do not tile the tokens, an id of a segment changed, or the loss mask is not exactly the
            sampled segments. The message names the first such segment.
    """
    what = f"trajectory of {trajectory.task_id}"
    if trajectory.segment_ends is None or not trajectory.segment_digests:
        raise LedgerError(f"{what}: no segment digests; only trajectories made by a ledger can be trained on")
    ends = np.asarray(trajectory.segment_ends)
    starts = np.concatenate([[0], ends[:-1]])
    if len(ends) != len(trajectory.segment_digests) or np.any(ends <= starts) or ends[-1] != len(trajectory.token_ids):
        raise LedgerError(
            f"{what}: {len(ends)} segments ending at {ends[-1]} and {len(trajectory.segment_digests)} digests "
            f"do not tile {len(trajectory.token_ids)} tokens"
        )
    kinds = trajectory.metadata.get("segment_kinds")
    if kinds is None or len(kinds) != len(ends):
        raise LedgerError(f"{what}: metadata['segment_kinds'] is missing or has another length than the {len(ends)} segments")
    in_loss = np.add.reduceat(trajectory.loss_mask.astype(np.int64), starts)
    expected_in_loss = np.where(np.asarray(kinds) == SegmentKind.SAMPLED.value, ends - starts, 0)
    for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        name = f"segment {index} ({kinds[index]}, turn {trajectory.turn_index[start]}, tokens {start}..{end - 1})"
        if ids_digest(trajectory.token_ids[start:end]) != trajectory.segment_digests[index]:
            raise LedgerError(f"{what}: the ids of {name} are not those that were recorded")
        if in_loss[index] != expected_in_loss[index]:
            raise LedgerError(f"{what}: {in_loss[index]} tokens of {name} are in the loss, expected {expected_in_loss[index]}")


def _logprobs_or_zeros(segment: Segment) -> FloatArray:
    return segment.logprobs if segment.logprobs is not None else np.zeros(len(segment.ids), dtype=np.float32)
