"""Token drift: do the trained ids differ from the sampled ones? Zero for a ledger, and measured for the baseline that re-tokenises text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from t1_agent.tito.tokenizer import ChatTokenizer
from t1_agent.types import BoolArray, Completion, FloatArray, IntArray, Trajectory


@dataclass(frozen=True, slots=True)
class Retokenised:
    """An episode as a trainer sees it that keeps text and tokenises it again.

    Args:
        token_ids: int32 [T'], ids of the whole transcript.
        loss_mask: bool [T'], tokens that begin in text the policy wrote.
        turn_index: int32 [T'], turn of each token, -1 for the opening.
        logprobs: float32 [T'], the sampler's log-probs paired by position within each turn, as such a trainer pairs them; NaN where a turn
            has more tokens than were sampled, 0.0 outside the loss.
        injected_control_ids: Control tokens that environment text turned into.
    """

    token_ids: IntArray
    loss_mask: BoolArray
    turn_index: IntArray
    logprobs: FloatArray
    injected_control_ids: int


def drift_tokens_in_loss(trajectory: Trajectory, completions: Sequence[Completion]) -> int:
    """Number of tokens in the loss that are not the engine's, or the engine's that are missing from the loss.

    Args:
        trajectory: What is trained on.
        completions: What the engine returned, kept apart from the ledger, in order.
    """
    sampled = [np.asarray(completion.token_ids) for completion in completions]
    n_turns = max(len(sampled), int(trajectory.turn_index.max(initial=-1)) + 1)
    trained = _by_turn(trajectory.token_ids, trajectory.loss_mask, trajectory.turn_index, n_turns)
    sampled += [np.empty(0, dtype=np.int32)] * (n_turns - len(sampled))
    stray = int((trajectory.loss_mask & (trajectory.turn_index < 0)).sum())
    return stray + sum(drift_between(ours, theirs) for ours, theirs in zip(trained, sampled, strict=True))


def baseline_drift_tokens(trajectory: Trajectory, tokenizer: ChatTokenizer) -> int:
    """Drift in the loss region if the episode were kept as text and tokenised again."""
    again = retokenise(trajectory, tokenizer)
    n_turns = int(trajectory.turn_index.max(initial=-1)) + 1
    sampled = _by_turn(trajectory.token_ids, trajectory.loss_mask, trajectory.turn_index, n_turns)
    trained = _by_turn(again.token_ids, again.loss_mask, again.turn_index, n_turns)
    return sum(drift_between(theirs, ours) for theirs, ours in zip(trained, sampled, strict=True))


def retokenised_trajectory(trajectory: Trajectory, tokenizer: ChatTokenizer) -> tuple[IntArray, BoolArray]:
    """Ids int32 [T'] and loss mask bool [T'] of ``retokenise``, for scoring the baseline."""
    again = retokenise(trajectory, tokenizer)
    return again.token_ids, again.loss_mask


def retokenise(trajectory: Trajectory, tokenizer: ChatTokenizer) -> Retokenised:
    """Decode the episode turn by turn and encode the transcript again, matching control tokens in it.

    The transcript is the chat template's render of the conversation, so this is what a trainer gets that stores messages and applies the
    template before the update.
    """
    starts, sampled, turns = _runs(trajectory)
    ends = [*starts[1:], len(trajectory.token_ids)]
    texts = [tokenizer.decode(trajectory.token_ids[start:end]) for start, end in zip(starts, ends, strict=True)]
    ids, first_char = tokenizer.encode_with_offsets("".join(texts))
    run = np.searchsorted(np.cumsum([len(text) for text in texts]), first_char, side="right")
    run = np.minimum(run, len(texts) - 1)
    loss_mask, turn_index = np.asarray(sampled)[run], np.asarray(turns, dtype=np.int32)[run]
    control = list(tokenizer.control_ids)
    outside = int(np.isin(ids[~loss_mask], control).sum()), int(np.isin(trajectory.token_ids[~trajectory.loss_mask], control).sum())
    return Retokenised(ids, loss_mask, turn_index, _paired_logprobs(trajectory, loss_mask, turn_index), outside[0] - outside[1])


def drift_between(trained: IntArray, sampled: IntArray) -> int:
    """Tokens that differ between two sequences aligned by their longest matching blocks; a replaced run counts its longer side."""
    if len(trained) == len(sampled) and np.array_equal(trained, sampled):
        return 0
    # The common ends are cut off first: the alignment is quadratic in what is left.
    head = _common_length(trained, sampled)
    trained, sampled = trained[head:], sampled[head:]
    tail = _common_length(trained[::-1], sampled[::-1])
    trained, sampled = trained[: len(trained) - tail], sampled[: len(sampled) - tail]
    matcher = SequenceMatcher(None, trained.tolist(), sampled.tolist(), autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def _common_length(first: IntArray, second: IntArray) -> int:
    shortest = min(len(first), len(second))
    differing = np.flatnonzero(first[:shortest] != second[:shortest])
    return int(differing[0]) if len(differing) else shortest


def _by_turn(token_ids: IntArray, loss_mask: BoolArray, turn_index: IntArray, n_turns: int) -> list[IntArray]:
    """Ids in the loss, turn by turn; turns never go back, so one split does it."""
    turns = turn_index[loss_mask]
    cuts = np.searchsorted(turns, np.arange(n_turns + 1))
    ids = token_ids[loss_mask]
    return [ids[cuts[turn] : cuts[turn + 1]] for turn in range(n_turns)]


def _runs(trajectory: Trajectory) -> tuple[list[int], list[bool], list[int]]:
    """Start, whether sampled, and turn of each run of tokens that share both."""
    mask, turn = trajectory.loss_mask, trajectory.turn_index
    changes = np.flatnonzero((mask[1:] != mask[:-1]) | (turn[1:] != turn[:-1])) + 1
    starts = np.concatenate([[0], changes])
    return starts.tolist(), mask[starts].tolist(), turn[starts].tolist()


def _paired_logprobs(trajectory: Trajectory, loss_mask: BoolArray, turn_index: IntArray) -> FloatArray:
    paired = np.zeros(len(loss_mask), dtype=np.float32)
    sampled_turns, sampled_logprobs = trajectory.turn_index[trajectory.loss_mask], trajectory.logprobs[trajectory.loss_mask]
    positions = np.flatnonzero(loss_mask)
    turns = turn_index[positions]
    within = np.arange(len(turns)) - np.searchsorted(turns, turns)
    first, last = np.searchsorted(sampled_turns, turns), np.searchsorted(sampled_turns, turns, side="right")
    there = first + within < last
    paired[positions] = np.nan
    paired[positions[there]] = sampled_logprobs[(first + within)[there]]
    return paired
