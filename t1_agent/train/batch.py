"""Trajectories to padded micro-batches, and back.

Episodes are sorted by length and cut into micro-batches under a token budget, so that little of a batch is padding. Padding is on the
right: a causal model never looks there, and no attention mask is needed. What the losses need is flat: trainable tokens only, episode
after episode in the order of the batch's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from t1_agent.algo.gae import action_positions
from t1_agent.tito.ledger import ids_digest, verify_digests
from t1_agent.types import FloatArray, Trajectory, require_length
from t1_env.errors import T1Error


class BatchError(T1Error, ValueError):
    """Episodes cannot be made into a batch; the message names the episode."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Some episodes, padded to one length. ``n`` counts trainable tokens over all rows, row by row.

    Args:
        input_ids: int64 [B, T], padded with 0 on the right.
        position_ids: int64 [B, T], counting from 0 in each row.
        attention_mask: bool [B, T], True on real tokens.
        loss_mask: bool [B, T], True on trainable tokens.
        state_index: int64 [n], flat index into ``B * T`` of the position *before* each trainable token, where its log-prob and V(s_t) are
            read.
        action_ids: int64 [n], the trainable tokens.
        rollout_logprobs: float32 [n], as the sampler returned them.
        lengths: int64 [B], real tokens of each row.
        counts: int64 [B], trainable tokens of each row.
        episodes: int64 [B], index of each row's episode in the list the batch was built from.
        routes: int32 [B, T, L, K], or None when nothing was recorded.
        routes_valid: bool [B, T], rows of ``routes`` to replay; None with ``routes``.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    state_index: Tensor
    action_ids: Tensor
    rollout_logprobs: Tensor
    lengths: Tensor
    counts: Tensor
    episodes: Tensor
    routes: Tensor | None
    routes_valid: Tensor | None

    @property
    def n_actions(self) -> int:
        """Trainable tokens."""
        return len(self.action_ids)

    @property
    def padding_share(self) -> float:
        """Share of the tensor that is padding."""
        return 1.0 - float(self.lengths.sum()) / self.input_ids.numel()

    def split(self, flat: Tensor) -> list[FloatArray]:
        """Cut a float [n] tensor into one numpy array a row."""
        require_length("Batch.split", len(flat), self.n_actions)
        parts = torch.split(flat.detach().float().cpu(), self.counts.tolist())
        return [part.numpy() for part in parts]


def build_batch(trajectories: Sequence[Trajectory], indices: Sequence[int]) -> Batch:
    """Pad chosen episodes into one batch.

    Args:
        trajectories: All episodes.
        indices: Which of them, in row order.

    Raises:
        BatchError: No episode is chosen, or some carry routes and others do not.
    """
    if not indices:
        raise BatchError("build_batch: no episodes given, expected at least one")
    chosen = [trajectories[index] for index in indices]
    lengths = [len(t.token_ids) for t in chosen]
    size = (len(chosen), max(lengths))
    input_ids = np.zeros(size, dtype=np.int64)
    mask = np.zeros(size, dtype=np.bool_)
    loss_mask = np.zeros(size, dtype=np.bool_)
    for row, (trajectory, length) in enumerate(zip(chosen, lengths, strict=True)):
        action_positions(trajectory.loss_mask)
        input_ids[row, :length] = trajectory.token_ids
        mask[row, :length] = True
        loss_mask[row, :length] = trajectory.loss_mask
    action_index = np.flatnonzero(loss_mask.reshape(-1))
    routes, routes_valid = _pad_routes(chosen, size)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.arange(size[1]).expand(size),
        attention_mask=torch.from_numpy(mask),
        loss_mask=torch.from_numpy(loss_mask),
        state_index=torch.from_numpy(action_index - 1),
        action_ids=torch.from_numpy(input_ids.reshape(-1)[action_index]),
        rollout_logprobs=torch.from_numpy(np.concatenate([t.logprobs[t.loss_mask] for t in chosen]).astype(np.float32)),
        lengths=torch.tensor(lengths),
        counts=torch.from_numpy(loss_mask.sum(axis=1)),
        episodes=torch.tensor(list(indices)),
        routes=routes,
        routes_valid=routes_valid,
    )


def _pad_routes(chosen: Sequence[Trajectory], size: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
    having = [t for t in chosen if t.routes is not None]
    if not having:
        return None, None
    if len(having) != len(chosen):
        without = next(t.task_id for t in chosen if t.routes is None)
        raise BatchError(f"build_batch: {len(having)} of {len(chosen)} episodes carry routes, {without} does not; expected all or none")
    first = having[0].routes
    assert first is not None  # for the type checker: `having` was filtered on it
    # torch indexes with uint8 as if it were a mask and knows little of uint16: int32 holds every expert number and means what it says.
    routes = np.zeros((*size, *first.shape[1:]), dtype=np.int32)
    valid = np.zeros(size, dtype=np.bool_)
    for row, trajectory in enumerate(chosen):
        assert trajectory.routes is not None
        assert trajectory.routes_valid is not None
        if trajectory.routes.shape[1:] != first.shape[1:]:
            raise BatchError(
                f"build_batch: routes of {trajectory.task_id} have shape {trajectory.routes.shape}, expected [tokens, *{first.shape[1:]}]"
            )
        routes[row, : len(trajectory.routes)] = trajectory.routes
        valid[row, : len(trajectory.routes)] = trajectory.routes_valid
    return torch.from_numpy(routes), torch.from_numpy(valid)


def unpad(batch: Batch) -> list[dict[str, np.ndarray]]:
    """Undo ``build_batch``: for each row its ids, loss mask, sampler log-probs at every position, and routes if any.

    Returns:
        Dicts with ``token_ids`` int32 [T], ``loss_mask`` bool [T], ``logprobs`` float32 [T], and ``routes`` int32 / ``routes_valid`` bool.
    """
    rows: list[dict[str, np.ndarray]] = []
    for row, (length, logprobs) in enumerate(zip(batch.lengths.tolist(), batch.split(batch.rollout_logprobs), strict=True)):
        mask = batch.loss_mask[row, :length].numpy()
        full = np.zeros(length, dtype=np.float32)
        full[mask] = logprobs
        entry = {"token_ids": batch.input_ids[row, :length].numpy().astype(np.int32), "loss_mask": mask, "logprobs": full}
        if batch.routes is not None and batch.routes_valid is not None:
            entry["routes"] = batch.routes[row, :length].numpy()
            entry["routes_valid"] = batch.routes_valid[row, :length].numpy()
        rows.append(entry)
    return rows


def plan_micro_batches(lengths: Sequence[int], indices: Sequence[int], max_tokens: int, *, threads: int = 1) -> list[list[int]]:
    """Cut episodes into micro-batches whose padded size stays under a token budget, longest first.

    Args:
        lengths: Tokens of every episode.
        indices: The episodes to plan.
        max_tokens: Most tokens of a padded micro-batch; an episode longer than that gets one of its own.
        threads: How many run at once: the budget is lowered until that many have equal work.

    Returns:
        Lists of indices. Every index appears exactly once; equal inputs give equal plans.
    """
    ordered = sorted(indices, key=lambda index: (-lengths[index], index))
    plans = _cut(lengths, ordered, max_tokens)
    most = min(-(-len(plans) // threads) * threads, len(ordered))
    low, high = 1, max_tokens  # the smallest budget that needs no more than `most` micro-batches
    while threads > 1 and low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(lengths, ordered, middle)) <= most else (middle + 1, high)
    return plans if threads == 1 else _cut(lengths, ordered, high)


def _cut(lengths: Sequence[int], ordered: Sequence[int], max_tokens: int) -> list[list[int]]:
    plans: list[list[int]] = []
    for index in ordered:
        # Longest first: the first episode of a micro-batch sets its padded length.
        if plans and lengths[plans[-1][0]] * (len(plans[-1]) + 1) <= max_tokens:
            plans[-1].append(index)
        else:
            plans.append([index])
    return plans


def split_minibatches(n_episodes: int, n_minibatches: int, rng: np.random.Generator) -> list[list[int]]:
    """Shuffle episodes into at most ``n_minibatches`` non-empty parts of nearly equal size, one an optimiser step."""
    order = rng.permutation(n_episodes)
    return [part.tolist() for part in np.array_split(order, min(n_minibatches, n_episodes)) if len(part)]


def drift_tokens(batch: Batch, trajectories: Sequence[Trajectory]) -> int:
    """Count trainable tokens of a batch that are not what the ledger recorded.

    The batch's own tensors are hashed segment by segment, so a fault anywhere between sampler and loss shows: in transport, on disk, in
    collation.

    Args:
        batch: As built from ``trajectories``.
        trajectories: The episodes with their segment digests.

    Returns:
        Trainable tokens in segments whose digest differs, plus tokens that are trainable here and not in the episode.
    """
    drifted = 0
    for row, index in enumerate(batch.episodes.tolist()):
        trajectory = trajectories[index]
        length = len(trajectory.token_ids)
        ids, mask = batch.input_ids[row].numpy(), batch.loss_mask[row].numpy()
        drifted += int(mask[length:].sum()) + int((mask[:length] & ~trajectory.loss_mask).sum())
        start = 0
        assert trajectory.segment_ends is not None  # screen() ran verify_digests, which insists on it
        for end, digest in zip(trajectory.segment_ends.tolist(), trajectory.segment_digests, strict=True):
            if mask[start:end].any() and ids_digest(ids[start:end]) != digest:
                drifted += int(mask[start:end].sum())
            start = end
    return drifted


def check_drift(batch: Batch, trajectories: Sequence[Trajectory]) -> None:
    """Raise unless ``drift_tokens`` is 0.

    Raises:
        BatchError: Some trainable token is not the sampled one.
    """
    if count := drift_tokens(batch, trajectories):
        names = sorted({trajectories[index].task_id for index in batch.episodes.tolist()})
        raise BatchError(f"{count} tokens in the loss are not those that were sampled (episodes of {', '.join(names)}); refusing to train")


@dataclass(frozen=True, slots=True)
class Screening:
    """Which episodes may be trained on.

    Args:
        kept: Episodes for the loss and the statistics.
        infra_failures: Episodes dropped because the machinery failed.
        empty: Episodes dropped because nothing was sampled in them.
    """

    kept: tuple[Trajectory, ...]
    infra_failures: int
    empty: int

    def metrics(self) -> dict[str, float]:
        """What is logged of it, over kept episodes."""
        n_tokens = sum(len(t.token_ids) for t in self.kept)
        n_sampled = sum(int(t.loss_mask.sum()) for t in self.kept)
        return {
            "batch/episodes": float(len(self.kept)),
            "batch/infra_failures": float(self.infra_failures),
            "batch/empty_episodes": float(self.empty),
            "batch/tokens": float(n_tokens),
            "batch/sampled_tokens": float(n_sampled),
        }


def screen(trajectories: Sequence[Trajectory]) -> Screening:
    """Drop what must not be trained on and check the rest against the ledger's digests.

    Raises:
        LedgerError: An episode's ids or mask are not those its ledger recorded.
    """
    kept = [t for t in trajectories if not t.infra_failure]
    sampled = [t for t in kept if t.loss_mask.any()]
    for trajectory in sampled:
        verify_digests(trajectory)
    return Screening(tuple(sampled), len(trajectories) - len(kept), len(kept) - len(sampled))
