"""What one PPO update works on: episodes with old log-probs, values, advantages and returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from t1_agent.algo.advantages import group_advantages, normalise
from t1_agent.algo.gae import Discount, episode_gae, state_values
from t1_agent.algo.mismatch import episode_mismatch
from t1_agent.algo.statistics import explained_variance
from t1_agent.config import PPOConfig
from t1_agent.models.critic import Critic
from t1_agent.routing.replay import ReplayReport
from t1_agent.train.batch import Batch, build_batch, check_drift, plan_micro_batches
from t1_agent.train.forward import actor_forward, critic_forward
from t1_agent.train.replicas import Replicas
from t1_agent.types import FloatArray, Trajectory


@dataclass(frozen=True, slots=True)
class Experience:
    """Per-episode arrays over trainable tokens, float32 [n_e] each, in the order of ``trajectories``.

    Args:
        trajectories: Screened episodes.
        old_logprobs: The actor's at the start of the update, recomputed with replayed routes.
        state_values: V(s_t); zeros with a group baseline.
        advantages: Normalised over the batch.
        returns: Targets of the critic; empty arrays with a group baseline.
        reference_logprobs: Of the KL's reference policy, or None.
        metrics: What was measured on the way.
    """

    trajectories: tuple[Trajectory, ...]
    old_logprobs: list[FloatArray]
    state_values: list[FloatArray]
    advantages: list[FloatArray]
    returns: list[FloatArray]
    reference_logprobs: list[FloatArray] | None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each episode."""
        return [len(t.token_ids) for t in self.trajectories]

    def micro_batches(self, indices: Sequence[int], max_tokens: int, threads: int = 1) -> list[Batch]:
        """Batches that cover ``indices``, each checked against the ledger's digests."""
        batches = []
        for plan in plan_micro_batches(self.lengths, indices, max_tokens, threads=threads):
            batch = build_batch(self.trajectories, plan)
            check_drift(batch, self.trajectories)
            batches.append(batch)
        return batches


def gather(parts: Sequence[FloatArray], batch: Batch) -> Tensor:
    """Per-episode arrays as one float32 [n] tensor in the order of the batch."""
    return torch.from_numpy(np.concatenate([parts[index] for index in batch.episodes.tolist()]))


def evaluate_actor(
    actor: Any, trajectories: Sequence[Trajectory], *, max_tokens: int, temperature: float, replay: bool
) -> tuple[list[FloatArray], dict[str, float]]:
    """Log-probs of every episode's trainable tokens, and how routes were used.

    Args:
        actor: A transformers causal LM, or replicas of one.
        trajectories: Episodes.
        max_tokens: Padded tokens of one forward pass.
        temperature: Sampling temperature.
        replay: Replay recorded routes.

    Returns:
        (one float32 [n_e] array an episode, ``routing/*`` metrics).
    """
    actors: Replicas[Any] = actor if isinstance(actor, Replicas) else Replicas(actor, 1)
    batches = _all_batches(trajectories, max_tokens, actors.count)
    outputs = actors.run(lambda actor, batch: actor_forward(actor, batch, temperature=temperature, replay=replay), batches, cost)
    results: dict[int, FloatArray] = {}
    tally = RouteTally()
    for batch, output in zip(batches, outputs, strict=True):
        results.update(zip(batch.episodes.tolist(), batch.split(output.logprobs), strict=True))
        tally.add(output.routes)
    return [results[index] for index in range(len(trajectories))], tally.metrics()


def cost(batch: Batch) -> int:
    """Work of a batch, for dealing it out to threads: its padded tokens."""
    return batch.input_ids.numel()


def _all_batches(trajectories: Sequence[Trajectory], max_tokens: int, threads: int) -> list[Batch]:
    lengths = [len(t.token_ids) for t in trajectories]
    plans = plan_micro_batches(lengths, range(len(lengths)), max_tokens, threads=threads)
    return [build_batch(trajectories, plan) for plan in plans]


class RouteTally:
    """Sums replay reports over micro-batches."""

    def __init__(self) -> None:
        self._rows = 0
        self._replayed = 0
        self._disagreed = 0.0

    def add(self, report: ReplayReport | None) -> None:
        """Add one forward pass; None (nothing was replayed) adds nothing."""
        if report is not None:
            self._rows += report.rows
            self._replayed += report.replayed
            self._disagreed += report.agreement.mean_disagreement * report.agreement.rows

    def metrics(self, prefix: str = "routing") -> dict[str, float]:
        """``<prefix>/*``: rows that count, the share routed live for want of a record, and what live routing would have changed.

        Every report was checked: on rows with a record the experts used are the recorded ones, or the pass would have raised.
        """
        if not self._rows:
            return {}
        return {
            f"{prefix}/rows": float(self._rows),
            f"{prefix}/fallback_fraction": 1.0 - self._replayed / self._rows,
            f"{prefix}/live_disagreement": self._disagreed / max(self._replayed, 1),
            f"{prefix}/rows_not_as_recorded": 0.0,
        }


def evaluate_critic(critic: Critic | Replicas[Critic], trajectories: Sequence[Trajectory], *, max_tokens: int) -> list[FloatArray]:
    """The critic's output at every position of every episode, float32 [T_e] each."""
    critics = critic if isinstance(critic, Replicas) else Replicas(critic, 1)
    batches = _all_batches(trajectories, max_tokens, critics.count)
    results: dict[int, FloatArray] = {}
    for batch, output in zip(batches, critics.run(critic_forward, batches, cost), strict=True):
        values = output.cpu().numpy()
        for row, index in enumerate(batch.episodes.tolist()):
            results[index] = values[row, : int(batch.lengths[row])].copy()
    return [results[index] for index in range(len(trajectories))]


Estimate = tuple[list[FloatArray], list[FloatArray], list[FloatArray], dict[str, float]]
"""(advantages before normalisation, returns, state values, metrics)."""


def estimate_gae(trajectories: Sequence[Trajectory], values: Sequence[FloatArray], config: PPOConfig) -> Estimate:
    """GAE with one lambda for the advantages and another for the critic's targets."""
    actor_discount = Discount(config.gamma, config.lam_actor, config.gamma_level, config.lam_level)
    critic_discount = Discount(config.gamma, config.lam_critic, config.gamma_level, config.lam_level)
    advantages = [episode_gae(t, v, actor_discount)[0] for t, v in zip(trajectories, values, strict=True)]
    returns = [episode_gae(t, v, critic_discount)[1] for t, v in zip(trajectories, values, strict=True)]
    states = [state_values(v, t.loss_mask) for t, v in zip(trajectories, values, strict=True)]
    flat_returns, flat_states = np.concatenate(returns), np.concatenate(states)
    metrics = {
        "train/explained_variance": explained_variance(flat_states, flat_returns),
        "train/value_mean": float(flat_states.mean()),
        "train/return_mean": float(flat_returns.mean()),
        "train/return_std": float(flat_returns.std()),
    }
    return advantages, returns, states, metrics


def estimate_group(trajectories: Sequence[Trajectory], config: PPOConfig) -> Estimate:
    """One advantage an episode, from the other episodes of its task instance."""
    assert config.advantage != "gae"
    totals = np.array([t.rewards.sum() for t in trajectories], dtype=np.float32)
    per_episode = group_advantages(totals, [t.task_id for t in trajectories], config.advantage)
    sizes = [int(t.loss_mask.sum()) for t in trajectories]
    advantages = [np.full(size, value, dtype=np.float32) for size, value in zip(sizes, per_episode, strict=True)]
    zeros = [np.zeros(size, dtype=np.float32) for size in sizes]
    return advantages, zeros, zeros, {"train/return_mean": float(totals.mean()), "train/return_std": float(totals.std())}


def prepare_experience(
    trajectories: tuple[Trajectory, ...],
    actors: Replicas[Any],
    critics: Replicas[Critic],
    config: PPOConfig,
    *,
    max_tokens: int,
    temperature: float,
    references: Replicas[Any] | None = None,
) -> Experience:
    """Recompute what the update holds fixed: old log-probs, values, advantages, returns.

    Args:
        trajectories: Screened episodes, at least one.
        actors: Policy that sampled them (its weights at the start of the update).
        critics: Not used with a group baseline.
        config: Objective and estimator.
        max_tokens: Padded tokens of one forward pass.
        temperature: Sampling temperature.
        references: Policy of the KL term; routes are its own (what was recorded belongs to another policy).
    """
    old, metrics = evaluate_actor(actors, trajectories, max_tokens=max_tokens, temperature=temperature, replay=config.replay_routes)
    rollout = [t.logprobs[t.loss_mask] for t in trajectories]
    turns = [t.turn_index[t.loss_mask] for t in trajectories]
    metrics |= {f"mismatch/{name}": value for name, value in episode_mismatch(old, rollout, turns).items()}
    if config.advantage == "gae":
        values = evaluate_critic(critics, trajectories, max_tokens=max_tokens)
        advantages, returns, states, measured = estimate_gae(trajectories, values, config)
    else:
        advantages, returns, states, measured = estimate_group(trajectories, config)
    flat = np.concatenate(advantages)
    metrics |= measured | {"train/advantage_mean": float(flat.mean()), "train/advantage_std": float(flat.std())}
    against = None
    if references is not None:
        against, _ = evaluate_actor(references, trajectories, max_tokens=max_tokens, temperature=temperature, replay=False)
    return Experience(trajectories, old, states, normalise(advantages), returns, against, metrics)
