"""How far the trainer's log-probs lie from the sampler's on the same tokens. Pure functions; numpy arrays or torch tensors in, floats out.

With ``delta = trainer - sampler`` over loss tokens: ``mean_abs_delta_logp`` is the mean of ``|delta|``; ``k1`` and ``k3`` are Schulman's
estimators of KL(sampler || trainer) from the sampler's own tokens, ``-delta`` and ``exp(delta) - 1 - delta``
(http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from t1_agent.types import FloatArray, require_length

#: Name and first turn of each bucket; a bucket ends where the next begins.
TURN_BUCKETS: tuple[tuple[str, int], ...] = (("turn_0", 0), ("turn_1_3", 1), ("turn_4_15", 4), ("turn_16_63", 16), ("turn_64_up", 64))

_LN_2 = float(np.log(2.0))


def mismatch_metrics(
    trainer_logprobs: Any,
    sampler_logprobs: Any,
    loss_mask: Any,
    *,
    turn_index: Any | None = None,
    routes_valid: Any | None = None,
    sequence_index: Any | None = None,
) -> dict[str, float]:
    """Summarise the difference over loss tokens.

    Args:
        trainer_logprobs: [B, T], or [N] flat.
        sampler_logprobs: Same shape.
        loss_mask: bool, same shape, True on sampled tokens; all else is ignored.
        turn_index: Integer, same shape: adds ``mean_abs_delta_logp/<bucket>`` for every bucket of `TURN_BUCKETS` that has tokens.
        routes_valid: bool, same shape, whether the position whose logits predict the token had a recorded route: adds
            ``mean_abs_delta_logp/routed`` and ``.../unrouted`` where there are such tokens.
        sequence_index: Integer, same shape: which sequence a token belongs to, for packed batches. Default: the row for [B, T] and one
            single sequence for [N].

    Returns:
        ``tokens``; ``non_finite`` (loss tokens whose difference is not finite: left out of all else, so look at this first);
        ``mean_abs_delta_logp`` (mean over tokens), ``mean_abs_delta_logp_seq`` (mean over sequences of the mean over their tokens),
        ``p99_abs_delta_logp``, ``max_abs_delta_logp``, ``share_over_ln2`` (tokens whose probability differs by more than a factor of 2),
        ``k1``, ``k3``. Without tokens the means are NaN.

    Raises:
        ValueError: When the shapes differ or the mask is not bool.
    """
    mask = _array(loss_mask)
    if mask.dtype != np.bool_:
        raise ValueError(f"mismatch_metrics: loss_mask has dtype {mask.dtype}, expected bool")
    trainer, sampler = _same_shape("trainer_logprobs", trainer_logprobs, mask), _same_shape("sampler_logprobs", sampler_logprobs, mask)
    if sequence_index is not None:
        sequences = _same_shape("sequence_index", sequence_index, mask)
    else:
        sequences = np.broadcast_to(np.arange(len(mask))[:, None], mask.shape) if mask.ndim == 2 else np.zeros(mask.shape, dtype=np.int64)
    delta = trainer.astype(np.float64)[mask] - sampler.astype(np.float64)[mask]
    finite = np.isfinite(delta)
    metrics = {"tokens": float(delta.size), "non_finite": float((~finite).sum())}
    metrics |= _summary(delta[finite], sequences[mask][finite])
    absolute = np.abs(delta)
    if turn_index is not None:
        turns = _same_shape("turn_index", turn_index, mask)[mask]
        ends = [start for _, start in TURN_BUCKETS[1:]] + [np.iinfo(np.int64).max]
        for (name, start), end in zip(TURN_BUCKETS, ends, strict=True):
            _add_mean(metrics, name, absolute[finite & (turns >= start) & (turns < end)])
    if routes_valid is not None:
        routed = _same_shape("routes_valid", routes_valid, mask)[mask].astype(np.bool_)
        _add_mean(metrics, "routed", absolute[finite & routed])
        _add_mean(metrics, "unrouted", absolute[finite & ~routed])
    return metrics


def _summary(delta: npt.NDArray[np.float64], sequences: npt.NDArray[Any]) -> dict[str, float]:
    names = ("mean_abs_delta_logp", "mean_abs_delta_logp_seq", "p99_abs_delta_logp", "max_abs_delta_logp", "share_over_ln2", "k1", "k3")
    if not delta.size:
        return dict.fromkeys(names, float("nan"))
    absolute = np.abs(delta)
    _, owner = np.unique(sequences, return_inverse=True)
    per_sequence = np.bincount(owner, weights=absolute) / np.bincount(owner)
    # expm1 keeps the small differences that are the rule; exp(delta) - 1 - delta in that form loses them to rounding.
    k3 = np.expm1(delta) - delta
    values = (
        absolute.mean(),
        per_sequence.mean(),
        np.quantile(absolute, 0.99),
        absolute.max(),
        (absolute > _LN_2).mean(),
        (-delta).mean(),
        k3.mean(),
    )
    return {name: float(value) for name, value in zip(names, values, strict=True)}


def _add_mean(metrics: dict[str, float], name: str, absolute: npt.NDArray[np.float64]) -> None:
    if absolute.size:
        metrics[f"mean_abs_delta_logp/{name}"] = float(absolute.mean())


def _array(values: Any) -> npt.NDArray[Any]:
    # Torch tensors are recognised by what they can do, so that numpy users need no torch.
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    return np.asarray(values)


def _same_shape(name: str, values: Any, mask: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array = _array(values)
    if array.shape != mask.shape:
        raise ValueError(f"mismatch_metrics: {name} has shape {array.shape}, loss_mask has {mask.shape}")
    return array


def episode_mismatch(
    trainer: Sequence[FloatArray], sampler: Sequence[FloatArray], turns: Sequence[npt.NDArray[np.int32]] | None = None
) -> dict[str, float]:
    """``mismatch_metrics`` over episodes of different lengths.

    Args:
        trainer: float32 [n_e] each, one array an episode: log-probs of its loss tokens, recomputed with the weights that sampled.
        sampler: Same shapes, as the sampler returned them.
        turns: int32, same shapes, turn of each loss token, or None.

    Returns:
        As ``mismatch_metrics``.

    Raises:
        ValueError: When two episodes differ in length.
    """
    require_length("episode_mismatch: sampler", len(sampler), len(trainer))
    for index, (ours, theirs) in enumerate(zip(trainer, sampler, strict=True)):
        require_length(f"episode_mismatch: sampler of episode {index}", len(theirs), len(ours))
    flat = _flat(trainer, np.float32)
    return mismatch_metrics(
        flat,
        _flat(sampler, np.float32),
        np.ones(flat.shape, dtype=np.bool_),
        turn_index=None if turns is None else _flat(turns, np.int32),
        sequence_index=np.repeat(np.arange(len(trainer)), [len(part) for part in trainer]),
    )


def _flat(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
