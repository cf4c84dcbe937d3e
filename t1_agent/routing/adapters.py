"""Find the MoE routers of a transformers model and read or replace the experts they chose.

One adapter serves one *shape* of router. Families whose routers compute the same thing share an adapter; the table at the end says which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from t1_env.errors import T1Error

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_ROUTER_NAME = re.compile(r"(Router|Gating)$|Top[Kk\d]+\w*Gate$")


class RoutingError(T1Error, ValueError):
    """Routes cannot be recorded or replayed as asked."""


class UnsupportedRouter(RoutingError):
    """The model has an MoE router that no adapter knows; the message names its class."""


class RouterAdapter(Protocol):
    """What recording and replay need to know of one router shape."""

    def sizes(self, router: nn.Module) -> tuple[int, int]:
        """Return (number of experts, experts a token)."""

    def indices(self, output: Any) -> torch.Tensor:
        """Read the chosen experts, int64 [tokens, top_k], from the router's output."""

    def replace(self, router: nn.Module, output: Any, indices: torch.Tensor) -> Any:
        """Return the output the router would have had, had it chosen ``indices``; scores and gradients stay the router's own."""

    def received(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Read, from the arguments of the experts module, the experts that really compute: int64 [tokens, top_k]."""


class SoftmaxThenTopK:
    """``weights = softmax(logits)[top-k]``, renormalised when the router says so; output ``(logits, weights, indices)``.

    The weights of replayed experts are gathered from the softmax over *all* experts. Gathering from scores already masked to the live top-k
    would give a drifted expert weight zero and cut its gradient.
    """

    def sizes(self, router: nn.Module) -> tuple[int, int]:
        """Return (number of experts, experts a token)."""
        return int(router.num_experts), int(router.top_k)  # type: ignore[arg-type]

    def indices(self, output: Any) -> torch.Tensor:
        """Read the chosen experts, int64 [tokens, top_k]."""
        indices: torch.Tensor = output[2]
        return indices

    def replace(self, router: nn.Module, output: Any, indices: torch.Tensor) -> Any:
        """Return ``(logits, gathered weights, indices)``."""
        logits, weights, _ = output
        gathered = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, indices)
        # Mixtral always renormalises and has no switch for it.
        if getattr(router, "norm_topk_prob", True):
            gathered = gathered / gathered.sum(dim=-1, keepdim=True)
        return logits, gathered.to(weights.dtype), indices

    def received(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Read ``top_k_index`` of ``experts(hidden_states, top_k_index, top_k_weights)``."""
        indices: torch.Tensor = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        return indices


_SOFTMAX_THEN_TOP_K = SoftmaxThenTopK()

#: Router class name -> adapter. Every entry is covered by the exactness tests.
ADAPTERS: dict[str, RouterAdapter] = {
    "Qwen3MoeTopKRouter": _SOFTMAX_THEN_TOP_K,
    "Qwen2MoeTopKRouter": _SOFTMAX_THEN_TOP_K,
    "OlmoeTopKRouter": _SOFTMAX_THEN_TOP_K,
    "MixtralTopKRouter": _SOFTMAX_THEN_TOP_K,
}


@dataclass(frozen=True, slots=True)
class RouterSite:
    """One MoE layer of a model.

    Args:
        name: Module path of the router.
        layer: Global number of the decoder layer (dense layers count), read from the path.
        router: The router.
        experts: The module that receives the chosen experts.
        adapter: How to read and replace the router's choice.
        num_experts: Experts of the layer.
        top_k: Experts a token.
    """

    name: str
    layer: int
    router: nn.Module
    experts: nn.Module
    adapter: RouterAdapter
    num_experts: int
    top_k: int


def router_sites(model: nn.Module) -> tuple[RouterSite, ...]:
    """Find the MoE layers of a model, in the order of its layers.

    Args:
        model: A transformers model.

    Returns:
        One site a MoE layer; empty for a dense model. Column i of a route array belongs to site i.

    Raises:
        UnsupportedRouter: When a MoE layer's router has no adapter; a layer is never left out in silence.
        RoutingError: When the layers disagree on the number of experts a token.
    """
    sites = [_site(name, module) for name, module in model.named_modules() if _is_moe_block(module)]
    sites.sort(key=lambda site: site.layer)
    if len({site.layer for site in sites}) != len(sites):
        raise RoutingError(f"routers of {type(model).__name__}: two share a layer number: {[site.name for site in sites]}")
    if len({site.top_k for site in sites}) > 1:
        raise RoutingError(f"routers of {type(model).__name__}: experts a token differ between layers: {[site.top_k for site in sites]}")
    return tuple(sites)


def _is_moe_block(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return "experts" in children or any(_ROUTER_NAME.search(type(child).__name__) for child in children.values())


def _site(block_name: str, block: nn.Module) -> RouterSite:
    children = dict(block.named_children())
    known = [(name, child) for name, child in children.items() if type(child).__name__ in ADAPTERS]
    if len(known) != 1 or "experts" not in children:
        suspects = [type(child).__name__ for child in children.values() if _ROUTER_NAME.search(type(child).__name__)]
        raise UnsupportedRouter(
            f"routing: no adapter for the router of {block_name} ({type(block).__name__}, router class "
            f"{', '.join(suspects) or 'not recognised'}); supported: {', '.join(sorted(ADAPTERS))}. "
            "Turn route recording and replay off, or add an adapter to t1_agent.routing.adapters."
        )
    (name, router), experts = known[0], children["experts"]
    path = f"{block_name}.{name}"
    numbers = _LAYER.findall(path)
    if not numbers:
        raise RoutingError(f"routing: no layer number in the module path {path!r}")
    adapter = ADAPTERS[type(router).__name__]
    num_experts, top_k = adapter.sizes(router)
    return RouterSite(path, int(numbers[-1]), router, experts, adapter, num_experts, top_k)


def route_dtype(num_experts: int) -> type:
    """Return the numpy dtype that stores an expert index: uint8 up to 256 experts, else uint16."""
    import numpy as np

    return np.uint8 if num_experts <= 256 else np.uint16
