"""Forward passes of actor and critic over a ``Batch``: the only place where the trainer touches a model.

Hidden states are computed for the whole batch, logits for loss positions alone: no ``[tokens, vocabulary]`` tensor of a whole batch is
ever made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from t1_agent.algo.losses import token_logprobs
from t1_agent.models.critic import Critic
from t1_agent.routing.replay import ReplayReport, RoutingReplay
from t1_agent.train.batch import Batch, BatchError


@dataclass(frozen=True, slots=True)
class ActorOutput:
    """What the actor says about the trainable tokens of a batch.

    Args:
        logprobs: float32 [n], log-prob of each trainable token at the sampling temperature.
        entropy: float32 [n], entropy of the distribution it was drawn from.
        routes: How routes were used (checked against the record), or None when nothing was replayed.
    """

    logprobs: Tensor
    entropy: Tensor
    routes: ReplayReport | None


def actor_forward(actor: Any, batch: Batch, *, temperature: float = 1.0, replay: bool = False) -> ActorOutput:
    """Log-probs and entropies of a batch's trainable tokens.

    Args:
        actor: A transformers causal LM.
        batch: Right-padded episodes.
        temperature: Sampling temperature.
        replay: Replay the batch's recorded routes (R3); rows that were not recorded are routed live.

    Raises:
        BatchError: ``replay`` is set and the batch carries no routes.
        RoutingError: The experts used are not those that were recorded.
    """
    report = None
    if replay:
        if batch.routes is None or batch.routes_valid is None:
            raise BatchError(
                "actor_forward: asked to replay routes, but the episodes carry none; record them while sampling or switch it off"
            )
        with RoutingReplay(actor.base_model, batch.routes, batch.routes_valid, counted=rows_that_matter(batch)) as replaying:
            hidden = _hidden(actor, batch)
        report = replaying.verify()
    else:
        hidden = _hidden(actor, batch)
    states = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.state_index)
    logits = actor.get_output_embeddings()(states)
    logprobs, entropy = token_logprobs(logits, batch.action_ids, temperature)
    return ActorOutput(logprobs, entropy, report)


def _hidden(actor: Any, batch: Batch) -> Tensor:
    # No attention mask: padding is on the right, and a causal model never looks there.
    hidden: Tensor = actor.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    return hidden


def rows_that_matter(batch: Batch) -> Tensor:
    """Rows whose route can move a loss, bool [B, T]: real tokens before the last trainable one of their episode.

    The last sampled token of an episode is never read by the sampler, so it has no recorded route and needs none.
    """
    later_actions = batch.loss_mask.flip(1).cumsum(1).flip(1) - batch.loss_mask.long()
    return (later_actions > 0) & batch.attention_mask


def critic_forward(critic: Critic, batch: Batch) -> Tensor:
    """Values at every position, float32 [B, T]."""
    return critic.values(batch.input_ids)


def values_at_actions(values: Tensor, batch: Batch) -> Tensor:
    """V(s_t) of the batch's trainable tokens, float32 [n]: read one position before each."""
    return values.reshape(-1).index_select(0, batch.state_index)


def clip_gradients(parameters: Any, max_norm: float) -> float:
    """Scale gradients down to ``max_norm`` and return the norm they had.

    Raises:
        FloatingPointError: The norm is not finite; stepping would destroy the weights.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(list(parameters), max_norm))
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"gradient norm is {norm}: the loss or a weight is not finite; lower the learning rate or look at the batch"
        )
    return norm
