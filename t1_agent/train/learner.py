"""One PPO update in one process: recompute what stays fixed, then critic passes, then actor passes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from t1_agent.algo.losses import kl_estimate, ppo_policy_loss, tis_weights, value_loss
from t1_agent.config import OptimConfig, PPOConfig
from t1_agent.models.actor_critic import ActorCritic
from t1_agent.models.critic import Critic
from t1_agent.routing.replay import ReplayReport
from t1_agent.train.batch import Batch, screen, split_minibatches
from t1_agent.train.experience import Experience, RouteTally, cost, gather, prepare_experience
from t1_agent.train.forward import actor_forward, clip_gradients, critic_forward, values_at_actions
from t1_agent.train.replicas import Replicas
from t1_agent.types import Trajectory
from t1_env.errors import T1Error


class LearnerError(T1Error, RuntimeError):
    """An update cannot be made; the message says what is inconsistent."""


@dataclass(frozen=True, slots=True)
class ActorPart:
    """One micro-batch's contribution to an actor step.

    Args:
        n_actions: Trainable tokens.
        sums: Quantities summed over them.
        ratio_max: Largest pi / pi_old.
        routes: How routes were used, or None.
    """

    n_actions: int
    sums: dict[str, float]
    ratio_max: float
    routes: ReplayReport | None


class Averages:
    """Sums of per-token quantities over micro-batches, divided by tokens when read."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._tokens = 0

    def add(self, n_tokens: int, sums: dict[str, float]) -> None:
        """Add sums over ``n_tokens`` tokens."""
        self._tokens += n_tokens
        for name, value in sums.items():
            self._sums[name] += value

    def means(self, prefix: str) -> dict[str, float]:
        """``prefix/name`` -> mean a token."""
        return {f"{prefix}/{name}": value / max(self._tokens, 1) for name, value in self._sums.items()}


class Learner:
    """Actor and critic with their optimisers.

    Args:
        model: Actor and critic; updated in place.
        ppo: Objective and estimator.
        optim: Optimisers and batch geometry.
        temperature: Temperature the episodes are sampled at.
        reference: Policy of the KL term; needed exactly when ``ppo.kl_coef`` > 0.

    Raises:
        LearnerError: The KL term lacks its reference.
    """

    def __init__(
        self, model: ActorCritic, ppo: PPOConfig, optim: OptimConfig, *, temperature: float = 1.0, reference: Any | None = None
    ) -> None:
        if ppo.kl_coef > 0 and reference is None:
            raise LearnerError(f"ppo.kl_coef is {ppo.kl_coef}: expected a reference policy to measure the KL against")
        self.model = model
        self._ppo = ppo
        self._optim = optim
        self._temperature = temperature
        self._references: Replicas[Any] | None = Replicas[Any](reference, optim.threads) if ppo.kl_coef > 0 else None
        self._actors = Replicas(model.actor, optim.threads)
        self._critics = Replicas(model.critic, optim.threads)
        self.actor_optimizer = _adamw(model.actor, optim.actor_lr, optim)
        self.critic_optimizer = _adamw(model.critic, optim.critic_lr, optim)

    def update(self, trajectories: Sequence[Trajectory], *, seed: int, train_actor: bool = True) -> dict[str, float]:
        """Learn from one batch of episodes, once.

        Args:
            trajectories: Episodes sampled by the actor as it is now.
            seed: Names the shuffles of this update.
            train_actor: False for a critic-only step.

        Returns:
            Metrics under ``batch/ train/ routing/ mismatch/ tito/``.

        Raises:
            LearnerError: No episode is left to learn from, or old and new policy disagree before the first step.
            LedgerError: Ids or mask differ from what was recorded.
        """
        started = time.perf_counter()
        screening = screen(trajectories)
        if not screening.kept:
            raise LearnerError(f"none of {len(trajectories)} episodes can be learnt from: {screening.infra_failures} infra failures")
        experience = prepare_experience(
            screening.kept,
            self._actors,
            self._critics,
            self._ppo,
            max_tokens=self._optim.micro_batch_tokens,
            temperature=self._temperature,
            references=self._references,
        )
        metrics = screening.metrics() | experience.metrics
        rng = np.random.default_rng(seed)
        prepared = time.perf_counter()
        if self._ppo.advantage == "gae":
            metrics |= self._train_critic(experience, rng)
        valued = time.perf_counter()
        if train_actor:
            metrics |= self._train_actor(experience, rng)
        metrics |= {
            "time/prepare_s": prepared - started,
            "time/critic_s": valued - prepared,
            "time/actor_s": time.perf_counter() - valued,
        }
        return metrics

    def _train_critic(self, experience: Experience, rng: np.random.Generator) -> dict[str, float]:
        averages = Averages()
        norms: list[float] = []
        for _ in range(self._optim.critic_epochs):
            for indices in split_minibatches(len(experience.trajectories), self._optim.critic_minibatches, rng):
                batches = experience.micro_batches(indices, self._optim.micro_batch_tokens, self._optim.threads)
                total = sum(batch.n_actions for batch in batches)
                work = partial(self._critic_backward, experience, total)
                for part in self._critics.run(work, batches, cost, gradients=True):
                    averages.add(*part)
                norms.append(self._step(self.critic_optimizer, self.model.critic))
        return averages.means("train") | {"train/critic_grad_norm": float(np.mean(norms)), "train/critic_steps": float(len(norms))}

    def _train_actor(self, experience: Experience, rng: np.random.Generator) -> dict[str, float]:
        averages = Averages()
        norms: list[float] = []
        padding: list[float] = []
        routes = RouteTally()
        ratio_error, ratio_max, kl = 0.0, 1.0, 0.0
        for epoch in range(self._optim.epochs):
            epoch_kl = Averages()
            for indices in split_minibatches(len(experience.trajectories), self._optim.minibatches, rng):
                batches = experience.micro_batches(indices, self._optim.micro_batch_tokens, self._optim.threads)
                total = sum(batch.n_actions for batch in batches)
                drift = Averages()
                work = partial(self._actor_backward, experience, total)
                for part in self._actors.run(work, batches, cost, gradients=True):
                    averages.add(part.n_actions, part.sums)
                    epoch_kl.add(part.n_actions, {"kl": part.sums["approx_kl"]})
                    drift.add(part.n_actions, {"error": part.sums["log_ratio_abs"]})
                    ratio_max = max(ratio_max, part.ratio_max)
                    routes.add(part.routes)
                padding += [batch.padding_share for batch in batches]
                if not norms:
                    ratio_error = self._check_first_ratio(drift)
                norms.append(self._step(self.actor_optimizer, self.model.actor))
            kl = epoch_kl.means("epoch")["epoch/kl"]
            if self._ppo.target_kl is not None and kl > self._ppo.target_kl and epoch + 1 < self._optim.epochs:
                break
        return (
            averages.means("train")
            | routes.metrics("routing/train")
            | {
                "train/actor_grad_norm": float(np.mean(norms)),
                "train/actor_steps": float(len(norms)),
                "train/ratio_max": ratio_max,
                "train/first_ratio_error": ratio_error,
                "train/last_epoch_kl": kl,
                "batch/padding_share": float(np.mean(padding)),
                # Each micro-batch was hashed against the ledger; one drifted token would have raised.
                "tito/drift_tokens_in_loss": 0.0,
            }
        )

    def _critic_backward(self, experience: Experience, total: int, critic: Critic, batch: Batch) -> tuple[int, dict[str, float]]:
        """Add one micro-batch's share of the gradient to ``critic``. Returns its tokens and sums over them."""
        values = values_at_actions(critic_forward(critic, batch), batch)
        returns, old = gather(experience.returns, batch), gather(experience.state_values, batch)
        losses, clipped = value_loss(values, returns, old, self._ppo.value_clip)
        (losses.sum() / total).backward()  # type: ignore[no-untyped-call]
        return batch.n_actions, {"value_loss": float(losses.detach().sum()), "value_clip_fraction": float(clipped.sum())}

    def _actor_backward(self, experience: Experience, total: int, actor: Any, batch: Batch) -> ActorPart:
        """Add one micro-batch's share of the gradient to ``actor``."""
        config = self._ppo
        output = actor_forward(actor, batch, temperature=self._temperature, replay=config.replay_routes)
        old = gather(experience.old_logprobs, batch)
        weights = None if config.tis_cap is None else tis_weights(old, batch.rollout_logprobs, config.tis_cap)
        policy = ppo_policy_loss(
            output.logprobs,
            old,
            gather(experience.advantages, batch),
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            weights=weights,
        )
        losses = policy.losses - config.entropy_coef * output.entropy
        log_ratio = (output.logprobs - old).detach()
        sums = {
            "policy_loss": policy.losses.sum(),
            "entropy": output.entropy.sum(),
            "clip_fraction": policy.clipped.sum(),
            # KL(old || new) from samples of old: k3 with the roles of "current" and "reference" swapped.
            "approx_kl": kl_estimate(old, output.logprobs.detach(), "k3").sum(),
            "log_ratio_abs": log_ratio.abs().sum(),
        }
        if experience.reference_logprobs is not None:
            kl = kl_estimate(output.logprobs, gather(experience.reference_logprobs, batch), config.kl_kind)
            losses = losses + config.kl_coef * kl
            sums["reference_kl"] = kl.sum()
        if weights is not None and config.tis_cap is not None:
            sums["tis_capped_fraction"] = (weights >= config.tis_cap).sum()
        (losses.sum() / total).backward()  # type: ignore[no-untyped-call]
        numbers = {name: float(value.detach()) for name, value in sums.items()}
        return ActorPart(batch.n_actions, numbers, float(policy.ratio.max()), output.routes)

    def _check_first_ratio(self, drift: Averages) -> float:
        """Before the first step pi == pi_old: anything else means that the two are not computed alike, and the ratio is meaningless."""
        error = drift.means("first")["first/error"]
        if not error <= self._ppo.ratio_tolerance:
            raise LearnerError(
                f"mean |log ratio| is {error:.2e} before the first actor step, expected at most ppo.ratio_tolerance="
                f"{self._ppo.ratio_tolerance:.0e}: old log-probs and the training pass differ (temperature, routes, precision or indexing)"
            )
        return error

    def _step(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> float:
        norm = clip_gradients(module.parameters(), self._optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Optimiser states (the model is saved by its own means)."""
        return {"actor_optimizer": self.actor_optimizer.state_dict(), "critic_optimizer": self.critic_optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        self.actor_optimizer.load_state_dict(state["actor_optimizer"])
        self.critic_optimizer.load_state_dict(state["critic_optimizer"])


def _adamw(module: torch.nn.Module, lr: float, optim: OptimConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=lr, betas=(0.9, optim.beta2), weight_decay=optim.weight_decay, fused=True)
