"""Aggressive warm starts: a supervised actor, then a critic regressed offline on Monte-Carlo returns."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from t1_agent.algo.gae import Level, monte_carlo_returns
from t1_agent.algo.losses import value_loss
from t1_agent.algo.statistics import explained_variance
from t1_agent.config import WarmstartConfig
from t1_agent.models.critic import Critic
from t1_agent.train.batch import Batch, build_batch, check_drift, plan_micro_batches, screen
from t1_agent.train.experience import cost, evaluate_critic, gather
from t1_agent.train.forward import actor_forward, clip_gradients, critic_forward, values_at_actions
from t1_agent.train.learner import Averages, LearnerError
from t1_agent.train.replicas import Replicas
from t1_agent.types import FloatArray, Trajectory

Report = Callable[[int, int, dict[str, float]], None]
"""Called with (step, steps, metrics)."""


def learning_rate_factor(step: int, steps: int, warmup: int, schedule: Literal["cosine", "linear", "constant"]) -> float:
    """Share of the peak learning rate at ``step`` (from 0): linear rise, then decay to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = (step - warmup) / max(steps - warmup, 1)
    remaining = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return 0.1 + 0.9 * remaining


def bucketed_batches(lengths: Sequence[int], batch_episodes: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Endless batches of episodes of similar length: shuffled pools, sorted inside, batches shuffled again.

    Args:
        lengths: Tokens of each episode.
        batch_episodes: Episodes a batch (the last of a pass may hold fewer).
        rng: Source of the shuffles.
    """
    pool = 16 * batch_episodes
    while True:
        order = rng.permutation(len(lengths))
        batches = []
        for start in range(0, len(order), pool):
            part = sorted(order[start : start + pool].tolist(), key=lambda index: lengths[index])
            batches += [part[i : i + batch_episodes] for i in range(0, len(part), batch_episodes)]
        for index in rng.permutation(len(batches)).tolist():
            yield batches[index]


def warmstart_actor(
    actor: Any,
    demonstrations: Sequence[Trajectory],
    config: WarmstartConfig,
    *,
    seed: int,
    micro_batch_tokens: int = 2048,
    threads: int = 1,
    report: Report | None = None,
) -> dict[str, float]:
    """Teach the actor to write what the demonstrations' turns hold; the loss is on ``sampled`` tokens alone.

    Args:
        actor: A transformers causal LM; updated in place.
        demonstrations: Episodes recorded through the environment and the ledger.
        config: Steps, learning rate, schedule.
        seed: Names the shuffles.
        micro_batch_tokens: Padded tokens of one forward and backward pass.
        threads: Micro-batches computed side by side.
        report: Told of every step.

    Returns:
        Means over the last 20 steps of ``warmstart/loss`` (nats a trainable token) and ``warmstart/confident`` (share of trainable tokens
        said with more than even odds), and counts.

    Raises:
        LearnerError: No demonstration can be used.
        LedgerError: One differs from what its ledger recorded.
    """
    screening = screen(demonstrations)
    if not screening.kept:
        raise LearnerError(f"actor warm start: none of {len(demonstrations)} demonstrations can be used")
    lengths = [len(t.token_ids) for t in screening.kept]
    batches = bucketed_batches(lengths, config.actor_batch_episodes, np.random.default_rng(seed))
    optimizer = torch.optim.AdamW(actor.parameters(), lr=config.actor_lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True)
    actors = Replicas(actor, threads)
    recent: list[dict[str, float]] = []
    trained_tokens = 0
    for step in range(config.actor_steps):
        factor = learning_rate_factor(step, config.actor_steps, config.actor_lr_warmup_steps, config.schedule)
        for group in optimizer.param_groups:
            group["lr"] = config.actor_lr * factor
        plans = plan_micro_batches(lengths, next(batches), micro_batch_tokens, threads=threads)
        micro = [build_batch(screening.kept, plan) for plan in plans]
        tokens = sum(batch.n_actions for batch in micro)
        trained_tokens += tokens
        work = partial(_imitate, screening.kept, tokens)
        averages = Averages()
        for part in actors.run(work, micro, cost, gradients=True):
            averages.add(*part)
        norm = clip_gradients(actor.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        metrics = averages.means("warmstart") | {"warmstart/grad_norm": norm, "warmstart/lr": config.actor_lr * factor}
        recent = [*recent[-19:], metrics]
        if report is not None:
            report(step + 1, config.actor_steps, metrics)
    summary = {name: float(np.mean([m[name] for m in recent])) for name in ("warmstart/loss", "warmstart/confident") if recent}
    counts = {"steps": config.actor_steps, "demonstrations": len(screening.kept), "trained_tokens": trained_tokens}
    return summary | {f"warmstart/{name}": float(value) for name, value in counts.items()}


def _imitate(demonstrations: Sequence[Trajectory], total: int, actor: Any, batch: Batch) -> tuple[int, dict[str, float]]:
    """Add one micro-batch's share of the gradient. Returns its tokens and sums over them."""
    check_drift(batch, demonstrations)
    logprobs = actor_forward(actor, batch).logprobs
    loss = -logprobs.sum()
    (loss / total).backward()  # type: ignore[no-untyped-call]
    # A token said with more than even odds is what greedy decoding says.
    return batch.n_actions, {"loss": float(loss.detach()), "confident": float((logprobs > math.log(0.5)).sum())}


def warmstart_critic(
    critic: Critic,
    rollouts: Sequence[Trajectory],
    config: WarmstartConfig,
    *,
    seed: int,
    gamma: float = 1.0,
    gamma_level: Level = "turn",
    micro_batch_tokens: int = 2048,
    threads: int = 1,
    report: Report | None = None,
) -> dict[str, float]:
    """Regress the critic on Monte-Carlo returns of the dense reward until held-out explained variance stops rising; keep the best.

    Args:
        critic: Updated in place, and left with the weights of the best pass.
        rollouts: Episodes of the warm-started actor.
        config: Learning rate, most passes, patience, held-out share.
        seed: Names the split and the shuffles.
        gamma: Discount of the returns; use that of the PPO objective.
        gamma_level: Where it applies.
        micro_batch_tokens: Padded tokens of one forward and backward pass.
        threads: Micro-batches computed side by side.
        report: Told of every pass.

    Returns:
        ``critic/explained_variance`` (held out, best pass), the same by turn (``.../turn_0-1``, ``turn_2-3``, ``turn_4+``) and
        ``critic/passes``.

    Raises:
        LearnerError: Fewer than two usable episodes.
    """
    kept = screen(rollouts).kept
    if len(kept) < 2:
        raise LearnerError(f"critic warm start: {len(kept)} usable episodes, expected at least 2 (one to learn from, one to measure on)")
    rng = np.random.default_rng(seed)
    returns = [monte_carlo_returns(t, gamma, gamma_level) for t in kept]
    order = rng.permutation(len(kept)).tolist()
    n_held_out = min(max(1, round(config.critic_holdout * len(kept))), len(kept) - 1)
    held_out, training = order[:n_held_out], order[n_held_out:]
    optimizer = torch.optim.AdamW(critic.parameters(), lr=config.critic_lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True)
    critics = Replicas(critic, threads)
    best = _measure(critics, kept, returns, held_out, micro_batch_tokens)
    best_weights, since_best, passes = copy.deepcopy(critic.state_dict()), 0, 0
    while passes < config.critic_max_epochs and since_best < config.critic_patience:
        loss = _critic_pass(critics, optimizer, kept, returns, training, config, rng, micro_batch_tokens)
        passes += 1
        measured = _measure(critics, kept, returns, held_out, micro_batch_tokens)
        since_best += 1
        # A constant critic's 0 is the floor; NaN (held-out returns that do not vary) never counts as a rise.
        if measured["critic/explained_variance"] > best["critic/explained_variance"] + 1e-3:
            best, best_weights, since_best = measured, copy.deepcopy(critic.state_dict()), 0
        if report is not None:
            report(passes, config.critic_max_epochs, {"critic/loss": loss, **measured})
    critic.load_state_dict(best_weights)
    return best | {"critic/passes": float(passes), "critic/episodes": float(len(kept))}


def _critic_pass(
    critics: Replicas[Critic],
    optimizer: torch.optim.Optimizer,
    kept: Sequence[Trajectory],
    returns: Sequence[FloatArray],
    training: Sequence[int],
    config: WarmstartConfig,
    rng: np.random.Generator,
    micro_batch_tokens: int,
) -> float:
    """One pass over the training episodes; returns the mean loss a token."""
    lengths = [len(t.token_ids) for t in kept]
    order = rng.permutation(np.asarray(training)).tolist()
    averages = Averages()
    for start in range(0, len(order), config.critic_batch_episodes):
        chosen = order[start : start + config.critic_batch_episodes]
        plans = plan_micro_batches(lengths, chosen, micro_batch_tokens, threads=critics.count)
        batches = [build_batch(kept, plan) for plan in plans]
        work = partial(_regress, returns, sum(batch.n_actions for batch in batches))
        for part in critics.run(work, batches, cost, gradients=True):
            averages.add(*part)
        clip_gradients(critics.module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return averages.means("critic")["critic/loss"]


def _regress(returns: Sequence[FloatArray], total: int, critic: Critic, batch: Batch) -> tuple[int, dict[str, float]]:
    """Add one micro-batch's share of the gradient. Returns its tokens and the sum of their losses."""
    losses, _ = value_loss(values_at_actions(critic_forward(critic, batch), batch), gather(returns, batch))
    (losses.sum() / total).backward()  # type: ignore[no-untyped-call]
    return batch.n_actions, {"loss": float(losses.detach().sum())}


def _measure(
    critics: Replicas[Critic], kept: Sequence[Trajectory], returns: Sequence[FloatArray], held_out: Sequence[int], max_tokens: int
) -> dict[str, float]:
    """Explained variance on held-out episodes, in all and by turn."""
    episodes = [kept[index] for index in held_out]
    values = evaluate_critic(critics, episodes, max_tokens=max_tokens)
    masks = [t.loss_mask for t in episodes]
    predicted = np.concatenate([v[np.flatnonzero(m) - 1] for v, m in zip(values, masks, strict=True)])
    targets = np.concatenate([returns[index] for index in held_out])
    turns = np.concatenate([t.turn_index[m] for t, m in zip(episodes, masks, strict=True)])
    result = {"critic/explained_variance": explained_variance(predicted, targets)}
    for name, low, high in (("turn_0-1", 0, 1), ("turn_2-3", 2, 3), ("turn_4+", 4, 1 << 30)):
        inside = (turns >= low) & (turns <= high)
        result[f"critic/explained_variance/{name}"] = explained_variance(predicted[inside], targets[inside])
    return result
