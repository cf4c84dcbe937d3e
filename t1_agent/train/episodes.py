"""What a collection of episodes looked like, in numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from t1_agent.types import Trajectory


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """``rollout/*`` over the episodes that the machinery did not break; those it broke are counted and enter nothing else."""
    sound = [t for t in trajectories if not t.infra_failure]
    metrics = {"rollout/episodes": float(len(sound)), "rollout/infra_failures": float(len(trajectories) - len(sound))}
    if not sound:
        return metrics
    repairs: dict[str, int] = {}
    for trajectory in sound:
        for kind, count in trajectory.repairs.items():
            repairs[kind] = repairs.get(kind, 0) + count
    return metrics | {
        "rollout/return_mean": float(np.mean([t.rewards.sum() for t in sound])),
        "rollout/solved_rate": float(np.mean([t.solved for t in sound])),
        "rollout/verifiers_fraction": float(np.mean([t.verifiers_passed / t.verifiers_total for t in sound if t.verifiers_total] or [0.0])),
        "rollout/turns_mean": float(np.mean([len(t.rewards) for t in sound])),
        "rollout/tokens_mean": float(np.mean([len(t.token_ids) for t in sound])),
        "rollout/turns": float(sum(len(t.rewards) for t in sound)),
        "rollout/sandbox_s": float(sum(t.metadata.get("sandbox_s", 0.0) for t in sound)),
        "rollout/sampled_tokens": float(sum(int(t.loss_mask.sum()) for t in sound)),
        "rollout/truncated_rate": float(np.mean([t.truncated for t in sound])),
        **{f"tito/repairs/{kind}": float(count) for kind, count in sorted(repairs.items())},
    }
