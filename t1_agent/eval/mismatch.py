"""The sampler-against-trainer table: TITO on and off, R3 on and off, on the very same sampled episodes.

TITO off is what a trainer gets that keeps text: the transcript is tokenised again, the sampler's log-probs are paired with the new tokens
by position within a turn, and recorded routes hold only up to the first token that drifted, because every later row is off by the drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from t1_agent.algo.mismatch import episode_mismatch
from t1_agent.tito.drift import baseline_drift_tokens, retokenise
from t1_agent.tito.tokenizer import ChatTokenizer
from t1_agent.train.experience import evaluate_actor
from t1_agent.types import FloatArray, Trajectory


def mismatch_table(
    actor: Any,
    trajectories: Sequence[Trajectory],
    tokenizer: ChatTokenizer,
    *,
    sampler_dtype: str,
    trainer_dtype: str,
    temperature: float,
    max_tokens: int,
) -> dict[str, Any]:
    """Score the same episodes four ways with the weights that sampled them.

    Args:
        actor: The trainer's copy of the policy.
        trajectories: Episodes sampled by an engine with the same weights; infra failures are left out.
        tokenizer: The policy's tokenizer.
        sampler_dtype: Named in the table.
        trainer_dtype: Named in the table.
        temperature: Sampling temperature of the episodes.
        max_tokens: Padded tokens of one forward pass.

    Returns:
        JSON-compatible: ``rows`` with ``tito, r3, mean_abs, p99, max_abs, k3, drift_tokens, tokens``, and what was compared.
    """
    exact = [t for t in trajectories if not t.infra_failure]
    again = [_retokenised(t, tokenizer) for t in exact]
    drift_exact = sum(int(t.metadata.get("drift_tokens_in_loss", 0)) for t in exact)
    drift_again = sum(baseline_drift_tokens(t, tokenizer) for t in exact)
    rows = []
    routing: dict[str, float] = {}
    for tito, episodes, drift in (("on", exact, drift_exact), ("off", again, drift_again)):
        for replay in (True, False):
            if replay and any(t.routes is None for t in episodes):
                continue
            scored, metrics = evaluate_actor(actor, _finite(episodes), max_tokens=max_tokens, temperature=temperature, replay=replay)
            difference = episode_mismatch(scored, [_sampler_logprobs(t) for t in episodes])
            rows.append(
                {
                    "tito": tito,
                    "r3": "on" if replay else "off",
                    "mean_abs": difference["mean_abs_delta_logp"],
                    "p99": difference["p99_abs_delta_logp"],
                    "max_abs": difference["max_abs_delta_logp"],
                    "k3": difference["k3"],
                    "drift_tokens": drift,
                    "tokens": int(difference["tokens"] - difference["non_finite"]),
                }
            )
            if tito == "on" and replay:
                routing = metrics
    return {
        "sampler_dtype": sampler_dtype,
        "trainer_dtype": trainer_dtype,
        "episodes": len(exact),
        "loss_tokens": int(sum(t.loss_mask.sum() for t in exact)),
        "rows": rows,
        "routing": routing,
        "routing_note": _routing_note(routing),
    }


def _routing_note(routing: dict[str, float]) -> str:
    if not routing:
        return "The sampler recorded no routes."
    return (
        f"Routes used equal those recorded on every one of the {int(routing['routing/rows']):,} rows that have a record "
        f"(checked in each forward pass); {100 * routing['routing/fallback_fraction']:.2f}% of the rows had none and were routed live. "
        f"Without replay {100 * routing['routing/live_disagreement']:.2f}% of (token, layer) choices would have differed."
    )


def _retokenised(trajectory: Trajectory, tokenizer: ChatTokenizer) -> Trajectory:
    """The episode as a trainer that keeps text would build it; its log-probs may hold NaN where nothing pairs."""
    again = retokenise(trajectory, tokenizer)
    length = len(again.token_ids)
    shared = min(length, len(trajectory.token_ids))
    differing = np.flatnonzero(again.token_ids[:shared] != trajectory.token_ids[:shared])
    aligned = int(differing[0]) if len(differing) else shared
    routes = valid = None
    if trajectory.routes is not None and trajectory.routes_valid is not None:
        # Rows past the first drifted token are placeholders that are never used: they are marked not valid.
        routes = np.resize(trajectory.routes, (length, *trajectory.routes.shape[1:]))
        valid = np.zeros(length, dtype=np.bool_)
        valid[:aligned] = trajectory.routes_valid[:aligned]
    return replace(
        trajectory,
        token_ids=again.token_ids,
        loss_mask=again.loss_mask,
        logprobs=again.logprobs,
        turn_index=again.turn_index,
        routes=routes,
        routes_valid=valid,
        weight_versions=None,
        segment_digests=(),
        segment_ends=None,
    )


def _sampler_logprobs(trajectory: Trajectory) -> FloatArray:
    return trajectory.logprobs[trajectory.loss_mask]


def _finite(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The same episodes with unpaired log-probs at 0.0, for the forward pass, which does not look at them."""
    return [replace(t, logprobs=np.nan_to_num(t.logprobs, nan=0.0)) for t in trajectories]
