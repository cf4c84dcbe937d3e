"""Record which experts a forward pass chose, through public module hooks."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from t1_agent.routing.adapters import RouterSite, RoutingError, route_dtype, router_sites
from t1_agent.types import RouteArray


class RouteRecorder:
    """Scope in which every forward pass of ``model`` leaves its routes behind.

    Rows follow the order in which the routers see tokens: batch-major, ``[B, T]`` flattened. Padding has rows too; drop them by your mask.

    Args:
        model: A transformers model; a dense one records nothing.

    Raises:
        UnsupportedRouter: When a router has no adapter.
    """

    def __init__(self, model: nn.Module) -> None:
        self.sites: tuple[RouterSite, ...] = router_sites(model)
        self._dtype = route_dtype(max((site.num_experts for site in self.sites), default=1))
        self._chosen: list[list[torch.Tensor]] = [[] for _ in self.sites]
        self._handles: list[RemovableHandle] = []

    @property
    def shape(self) -> tuple[int, int]:
        """(MoE layers, experts a token) of a row."""
        return len(self.sites), self.sites[0].top_k if self.sites else 0

    def __enter__(self) -> RouteRecorder:
        if self._handles:
            raise RoutingError("RouteRecorder: entered twice; make one recorder a scope")
        self._chosen = [[] for _ in self.sites]
        for column, site in enumerate(self.sites):
            self._handles.append(site.experts.register_forward_pre_hook(self._hook(column, site), with_kwargs=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, column: int, site: RouterSite) -> Any:
        # At the experts' door, so that what is recorded is what computes, also inside a replay.
        def keep(_experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._chosen[column].append(site.adapter.received(args, kwargs).detach())

        return keep

    def take(self) -> RouteArray:
        """Return the rows of all forward passes since the last call, and forget them.

        Returns:
            uint8/uint16 [tokens, layers, top_k]; forward passes follow one another.

        Raises:
            RoutingError: When the layers saw different numbers of tokens (a pass failed half way, or was recomputed in part).
        """
        chosen, self._chosen = self._chosen, [[] for _ in self.sites]
        counts = [sum(len(part) for part in parts) for parts in chosen]
        if len(set(counts)) > 1:
            raise RoutingError(f"RouteRecorder: layers recorded different numbers of tokens: {counts}; record whole forward passes only")
        if not self.sites or not counts[0]:
            return np.zeros((0, *self.shape), dtype=self._dtype)
        columns = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in chosen]
        rows: RouteArray = torch.stack(columns, dim=1).cpu().numpy().astype(self._dtype)
        return rows
