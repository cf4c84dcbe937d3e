"""How two sets of routes compare. Pure functions over numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from t1_agent.types import BoolArray, FloatArray, require_length


@dataclass(frozen=True, slots=True)
class RouteAgreement:
    """Comparison of two route arrays over the same tokens.

    Args:
        rows: Tokens compared.
        disagreement: float32 [L], share of tokens whose *set* of experts differs in that layer; the order within a set is of no account.
        overlap: float32 [L], mean share of experts in common.
        any_layer: Share of tokens whose set differs in at least one layer.
        disjoint: Share of (token, layer) pairs with no expert in common.
    """

    rows: int
    disagreement: FloatArray
    overlap: FloatArray
    any_layer: float
    disjoint: float

    @property
    def mean_disagreement(self) -> float:
        """Share of (token, layer) pairs whose set of experts differs."""
        return float(self.disagreement.mean()) if self.rows else 0.0

    def as_dict(self, prefix: str = "r3/") -> dict[str, float]:
        """Flatten into scalars for a log, one entry a layer."""
        scalars = {
            f"{prefix}disagreement": self.mean_disagreement,
            f"{prefix}disagreement_any_layer": self.any_layer,
            f"{prefix}disjoint": self.disjoint,
        }
        for layer, (disagreement, overlap) in enumerate(zip(self.disagreement, self.overlap, strict=True)):
            scalars[f"{prefix}disagreement/layer_{layer}"] = float(disagreement)
            scalars[f"{prefix}overlap/layer_{layer}"] = float(overlap)
        return scalars


def compare_routes(first: npt.NDArray[Any], second: npt.NDArray[Any], valid: BoolArray | None = None) -> RouteAgreement:
    """Compare routes row by row.

    Args:
        first: Integer [tokens, L, K], K distinct experts a row.
        second: Same shape.
        valid: bool [tokens], rows to compare; None compares all.

    Returns:
        Shares over the compared rows; with none, disagreement 0 and overlap 1.

    Raises:
        ValueError: When the shapes differ.
    """
    if first.shape != second.shape or first.ndim != 3:
        raise ValueError(f"compare_routes: got shapes {first.shape} and {second.shape}, expected two equal [tokens, layers, top_k]")
    if valid is not None:
        require_length("compare_routes: valid", len(valid), len(first))
        first, second = first[valid], second[valid]
    rows, layers, top_k = first.shape
    if not rows:
        return RouteAgreement(0, np.zeros(layers, dtype=np.float32), np.ones(layers, dtype=np.float32), 0.0, 0.0)
    shared = (first[..., :, None] == second[..., None, :]).any(axis=-1).sum(axis=-1)
    differs = shared < top_k
    return RouteAgreement(
        rows=rows,
        disagreement=differs.mean(axis=0).astype(np.float32),
        overlap=(shared / top_k).mean(axis=0).astype(np.float32),
        any_layer=float(differs.any(axis=1).mean()),
        disjoint=float((shared == 0).mean()),
    )
