"""Losses of the actor and the critic, on flat tensors of trainable tokens.

Every function takes ``[n]`` tensors of trainable tokens only and returns ``[n]`` values. The caller sums them and divides by the number
of trainable tokens of the whole optimiser step, which makes padded, bucketed, micro-batched and accumulated losses the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KlKind = Literal["k1", "k2", "k3"]


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and entropy of each distribution, at the temperature that sampled.

    Args:
        logits: float [n, V], rows of loss positions only (never the whole sequence).
        token_ids: int64 [n].
        temperature: Sampling temperature; 0 (greedy) counts as 1, as engines report it.

    Returns:
        (logprobs [n], entropy [n]), float32.
    """
    scale = temperature if temperature > 0 else 1.0
    logps = torch.log_softmax(logits.float() / scale, dim=-1)
    chosen = logps.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    return chosen, entropy


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per-token terms of the clipped objective.

    Args:
        losses: float [n], to be minimised.
        ratio: float [n], pi / pi_old, detached.
        clipped: bool [n], where the clip (either side) cut the gradient.
    """

    losses: Tensor
    ratio: Tensor
    clipped: Tensor


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347) with separate bounds and the optional dual clip.

    Args:
        logprobs: float [n], current policy, with gradient.
        old_logprobs: float [n], policy at the start of the update.
        advantages: float [n].
        clip_low: The ratio is clipped below at ``1 - clip_low``.
        clip_high: ... and above at ``1 + clip_high``; a wider bound than ``clip_low`` leaves room for rare tokens (DAPO, arXiv:2503.14476).
        dual_clip: For negative advantages the loss is bounded by ``-dual_clip * A`` (Ye et al. 2020, arXiv:1912.09729); > 1 or None.
        weights: float [n], constant importance weights (see ``tis_weights``), or None.

    Returns:
        Per-token losses and what was clipped.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"ppo_policy_loss: dual_clip must be > 1, got {dual_clip}")
    ratio = torch.exp(logprobs - old_logprobs)
    plain = -advantages * ratio
    bounded = -advantages * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    losses = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        cut = (advantages < 0) & (losses > ceiling)
        losses = torch.where(cut, ceiling, losses)
        clipped = clipped | cut
    if weights is not None:
        losses = losses * weights.detach()
    return PolicyLoss(losses, ratio.detach(), clipped)


def tis_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float, floor: float = 0.0) -> Tensor:
    """Token-level truncated importance weights pi_old / pi_rollout, clamped to [floor, cap], without gradient.

    They correct for the sampler's kernels differing from the trainer's. Products over a sequence are useless on long episodes, so each
    token stands alone.

    Args:
        old_logprobs: float [n], recomputed by the trainer.
        rollout_logprobs: float [n], from the sampler.
        cap: Upper bound, >= 1.
        floor: Lower bound, in [0, 1].
    """
    if cap < 1.0 or not 0.0 <= floor <= 1.0:
        raise ValueError(f"tis_weights: got cap={cap}, floor={floor}, expected cap >= 1 and 0 <= floor <= 1")
    return torch.exp(old_logprobs - rollout_logprobs).clamp(floor, cap).detach()


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: KlKind = "k3") -> Tensor:
    """Per-token estimate of KL(pi || reference) from samples of pi (Schulman, "Approximating KL divergence", 2020).

    Args:
        logprobs: float [n], current policy.
        reference_logprobs: float [n].
        kind: ``k1`` = -d, ``k2`` = d^2 / 2, ``k3`` = exp(d) - 1 - d, with d = reference - current. ``k1`` is for logging: as a loss its
            expected gradient is zero, while that of ``k2`` is the gradient of the KL.
    """
    delta = reference_logprobs - logprobs
    if kind == "k1":
        return -delta
    if kind == "k2":
        return 0.5 * delta.square()
    if kind == "k3":
        return torch.expm1(delta) - delta
    raise ValueError(f"kl_estimate: got kind {kind!r}, expected 'k1', 'k2' or 'k3'")


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip: float | None = None) -> tuple[Tensor, Tensor]:
    """Half squared error of the critic, optionally clipped around the values at the start of the update.

    Args:
        values: float [n], with gradient.
        returns: float [n].
        old_values: float [n]; needed when ``clip`` is given.
        clip: Largest move away from ``old_values`` that still pays, or None.

    Returns:
        (losses [n], clipped bool [n]).
    """
    losses = 0.5 * (values - returns).square()
    if clip is None:
        return losses, torch.zeros_like(losses, dtype=torch.bool)
    if old_values is None:
        raise ValueError("value_loss: clip is set, expected old_values")
    bounded = 0.5 * (old_values + torch.clamp(values - old_values, -clip, clip) - returns).square()
    return torch.maximum(losses, bounded), bounded > losses
