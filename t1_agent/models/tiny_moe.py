"""A Mixture-of-Experts language model small enough to train on two CPU cores, built from transformers' Qwen3-MoE classes.

With the defaults and a vocabulary of 768 it has 1.48 M parameters: 4 layers of hidden size 128, 8 experts of width 96 of which 2 run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from t1_env.errors import ConfigError

if TYPE_CHECKING:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def tiny_moe_config(
    vocab_size: int,
    *,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    experts: int = 8,
    top_k: int = 2,
    moe_intermediate: int = 96,
    max_positions: int = 2048,
    tie_embeddings: bool = True,
    initializer_range: float = 0.06,
    pad_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> Qwen3MoeConfig:
    """Return the configuration of a tiny Qwen3-MoE.

    Args:
        vocab_size: Number of token ids.
        hidden: Width of the residual stream; the head size is ``hidden // heads``.
        layers: Decoder layers; every one is a MoE layer.
        heads: Query heads.
        kv_heads: Key/value heads; must divide ``heads``.
        experts: Experts a layer.
        top_k: Experts a token; their weights are renormalised to sum to 1.
        moe_intermediate: Width of one expert.
        max_positions: Longest sequence the model accepts.
        tie_embeddings: Share input embedding and output head, which saves ``vocab_size * hidden`` parameters.
        initializer_range: Standard deviation of the initial weights. 0.06 is about ``0.7 / sqrt(hidden)`` for the default width; the
            transformers default of 0.02 is meant for models thirty times as wide and leaves a tiny one with a nearly linear start.
        pad_token_id: Id used for padding, if the tokenizer has one.
        eos_token_id: Id that ends a turn, if the tokenizer has one.

    Raises:
        ConfigError: When the sizes do not fit together.
    """
    from transformers import Qwen3MoeConfig

    if vocab_size < 2:
        raise ConfigError(f"tiny MoE: vocab_size is {vocab_size}, expected at least 2")
    if hidden % heads or (hidden // heads) % 2:
        raise ConfigError(f"tiny MoE: hidden={hidden} must be an even multiple of heads={heads} (rotary embeddings need an even head size)")
    if heads % kv_heads:
        raise ConfigError(f"tiny MoE: heads={heads} must be a multiple of kv_heads={kv_heads}")
    if not 1 <= top_k <= experts:
        raise ConfigError(f"tiny MoE: top_k={top_k} must lie between 1 and experts={experts}")
    return Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim is an extra of the base class's keyword arguments
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        # No layer is dense, so this width is never used; it is set only because the configuration wants a number.
        intermediate_size=moe_intermediate * top_k,
        moe_intermediate_size=moe_intermediate,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        # The policy gradient and a load-balancing loss pull routers apart; with replayed routes the second would also fight the first.
        router_aux_loss_coef=0.0,
        tie_word_embeddings=tie_embeddings,
        max_position_embeddings=max_positions,
        initializer_range=initializer_range,
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_id,
        bos_token_id=None,
    )


def build_actor(config: Qwen3MoeConfig, seed: int) -> Qwen3MoeForCausalLM:
    """Build the language model in float32 with weights that are a pure function of ``config`` and ``seed``.

    The global random state is left as it was.

    Args:
        config: As made by `tiny_moe_config`.
        seed: Seed of the initial weights.

    Returns:
        The model, in training mode (it has no dropout, so evaluation mode computes the same).
    """
    from transformers import Qwen3MoeForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(config)  # type: ignore[no-untyped-call]


def parameter_count(module: torch.nn.Module) -> int:
    """Count parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())
