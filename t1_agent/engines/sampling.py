"""Draw tokens and report their log-probs under the very distribution they were drawn from."""

from __future__ import annotations

import torch


def scaled_log_probs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probs in float32 of the sampling distribution; temperature 0 (greedy) reports those at temperature 1.

    Args:
        logits: [..., V] of any float dtype.
        temperature: >= 0.

    Returns:
        float32 [..., V].
    """
    scaled = logits.float()
    if temperature not in (0.0, 1.0):
        scaled = scaled / temperature
    return torch.log_softmax(scaled, dim=-1)


def draw(log_probs: torch.Tensor, uniforms: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the cumulative distribution, or take the likeliest.

    One uniform number a row makes the draw of a row independent of the vocabulary's size and cheap; float64 keeps rare tokens reachable.

    Args:
        log_probs: float32 [B, V].
        uniforms: float64 [B] in [0, 1), or None for greedy.

    Returns:
        (int64 [B] tokens, float32 [B] their log-probs). A token of probability zero is never drawn.
    """
    if uniforms is None:
        tokens = log_probs.argmax(dim=-1)
    else:
        cumulative = log_probs.double().exp().cumsum(dim=-1)
        thresholds = uniforms * cumulative[:, -1]
        # right=True: the first index whose cumulative probability exceeds the threshold, so it has probability above zero.
        tokens = torch.searchsorted(cumulative, thresholds[:, None], right=True).squeeze(-1).clamp(max=log_probs.shape[-1] - 1)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)
