"""Replay recorded experts in a forward pass: only the indices change, scores and gradients stay the router's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from t1_agent.routing.adapters import RouterSite, RoutingError, route_dtype, router_sites
from t1_agent.routing.metrics import RouteAgreement, compare_routes
from t1_agent.types import BoolArray, RouteArray

# Routers with a replay in force, to refuse nesting. Nothing else is global: the routes live in the context object.
_ACTIVE: weakref.WeakSet[nn.Module] = weakref.WeakSet()

Routes = npt.NDArray[Any] | torch.Tensor


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What one forward pass under replay did.

    Args:
        rows: Rows that count (real tokens).
        replayed: Of these, rows routed as recorded.
        fallback_fraction: Share of counting rows without a recorded route, which were routed live.
        agreement: How the router's own live choice compares with the recorded one, on replayed rows.
    """

    rows: int
    replayed: int
    fallback_fraction: float
    agreement: RouteAgreement


class RoutingReplay:
    """Scope in which ``model`` routes each token to recorded experts.

    Every read is pure: there is no cursor, so the pass may be run, recomputed by gradient checkpointing or repeated at will, as long as
    it is over these rows. With gradient checkpointing the backward pass must run inside the scope too (it routes again); leaving without
    it raises. Other models, a critic or a reference copy, are not touched.

    Args:
        model: A transformers MoE model.
        routes: Integer [B, T, L, K] or [B * T, L, K], rows in the order of the flattened ``input_ids``; column l is MoE layer l of
            `router_sites`.
        valid: bool [B, T] or [B * T]. False rows are routed live; their content does not matter.
        counted: bool, same shape as ``valid``: rows that are real tokens, for the report; None counts all.

    Raises:
        RoutingError: When the model has no MoE layer, a shape does not fit, a valid row repeats an expert or names one that does not
            exist, or a replay of this model is already in force.
        UnsupportedRouter: When a router has no adapter.
    """

    def __init__(self, model: nn.Module, routes: Routes, valid: Routes, *, counted: Routes | None = None) -> None:
        self._model = model
        self.sites: tuple[RouterSite, ...] = router_sites(model)
        if not self.sites:
            raise RoutingError(f"RoutingReplay: {type(model).__name__} has no MoE layer; do not replay routes on a dense model")
        device = next(self.sites[0].router.parameters()).device
        self._routes = _as_rows(routes, self.sites).to(device)
        self._valid = _as_flags("valid", valid, len(self._routes)).to(device)
        self._counted = torch.ones_like(self._valid) if counted is None else _as_flags("counted", counted, len(self._routes)).to(device)
        _check_rows(self._routes, self._valid, self.sites)
        self._all_valid = bool(self._valid.all())
        self._handles: list[RemovableHandle] = []
        self._live: list[torch.Tensor | None] = [None] * len(self.sites)
        self._used: list[torch.Tensor | None] = [None] * len(self.sites)
        self._calls = [0] * len(self.sites)
        self._owed = 0

    def __enter__(self) -> RoutingReplay:
        if any(site.router in _ACTIVE for site in self.sites):
            raise RoutingError(f"RoutingReplay: a replay of this {type(self._model).__name__} is already in force; scopes do not nest")
        _ACTIVE.update(site.router for site in self.sites)
        self._calls = [0] * len(self.sites)
        self._owed = 0
        self._handles.append(self._model.register_forward_pre_hook(self._note_pass))
        for column, site in enumerate(self.sites):
            self._handles.append(site.router.register_forward_hook(self._route_hook(column, site)))
            self._handles.append(site.experts.register_forward_pre_hook(self._used_hook(column, site), with_kwargs=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _ACTIVE.difference_update(site.router for site in self.sites)
        if kind is None and min(self._calls) < self._owed:
            raise RoutingError(
                f"RoutingReplay: with gradient checkpointing every router runs twice, in forward and in backward; got {min(self._calls)} "
                f"runs, expected {self._owed}. Call backward() inside the scope (or run the forward pass under torch.no_grad())."
            )

    def _note_pass(self, model: nn.Module, _args: Any) -> None:
        recomputes = torch.is_grad_enabled() and model.training and bool(getattr(model, "is_gradient_checkpointing", False))
        self._owed += 2 if recomputes else 1

    def _route_hook(self, column: int, site: RouterSite) -> Callable[..., Any]:
        def route(router: nn.Module, _args: Any, output: Any) -> Any:
            live = site.adapter.indices(output)
            if len(live) != len(self._routes):
                raise RoutingError(
                    f"RoutingReplay: {site.name} routes {len(live)} tokens, {len(self._routes)} rows were given; they must be the rows of "
                    "the flattened input_ids, padding included"
                )
            self._live[column] = live.detach()
            self._calls[column] += 1
            recorded = self._routes[:, column]
            if not self._all_valid:
                recorded = torch.where(self._valid[:, None], recorded, live)
            return site.adapter.replace(router, output, recorded)

        return route

    def _used_hook(self, column: int, site: RouterSite) -> Callable[..., None]:
        # Read at the experts' door, not where it was set: another hook in between would be seen.
        def note(_experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._used[column] = site.adapter.received(args, kwargs).detach()

        return note

    def used(self) -> RouteArray:
        """Return the experts that really computed in the last pass: uint8/uint16 [tokens, L, K].

        Raises:
            RoutingError: When no whole pass has run.
        """
        return self._collect(self._used)

    def live(self) -> RouteArray:
        """Return the experts the routers would have chosen in the last pass, same shape as `used`."""
        return self._collect(self._live)

    def verify(self, *, max_disjoint: float = 1.0) -> ReplayReport:
        """Check that the last pass used the recorded experts on every valid row, and report on it.

        Args:
            max_disjoint: Largest share of (token, layer) pairs in which recorded and live choice have no expert in common. Routes shifted
                by a row or with layers exchanged have valid shapes and values and show only here; 0.05 suits a trainer whose weights
                are close to the sampler's.

        Raises:
            RoutingError: When a row differs (naming the first), more is disjoint than allowed, or no whole pass has run.
        """
        used = self.used()
        recorded, valid, counted = self._routes.cpu().numpy(), self._valid.cpu().numpy(), self._counted.cpu().numpy()
        wrong = (used != recorded).any(axis=-1) & valid[:, None]
        if wrong.any():
            row, column = (int(index) for index in np.argwhere(wrong)[0])
            raise RoutingError(
                f"RoutingReplay: {int(wrong.sum())} (row, layer) pairs were not routed as recorded; first: row {row}, layer "
                f"{self.sites[column].layer} used experts {used[row, column].tolist()}, recorded {recorded[row, column].tolist()}"
            )
        rows, replayed = int(counted.sum()), int((counted & valid).sum())
        agreement = compare_routes(recorded, self.live(), valid & counted)
        if agreement.disjoint > max_disjoint:
            raise RoutingError(
                f"RoutingReplay: in {agreement.disjoint:.1%} of (token, layer) pairs the recorded experts share none with the live choice, "
                f"expected at most {max_disjoint:.1%}; are rows shifted, layers exchanged, or the weights not the sampler's?"
            )
        return ReplayReport(rows, replayed, 1.0 - replayed / rows if rows else 0.0, agreement)

    def _collect(self, columns: list[torch.Tensor | None]) -> RouteArray:
        present = [column for column in columns if column is not None]
        if len(present) != len(self.sites):
            raise RoutingError("RoutingReplay: no whole forward pass has run in this scope")
        dtype = route_dtype(max(site.num_experts for site in self.sites))
        rows: RouteArray = torch.stack(present, dim=1).cpu().numpy().astype(dtype)
        return rows


def _as_rows(routes: Routes, sites: tuple[RouterSite, ...]) -> torch.Tensor:
    # Through numpy because torch has few operations on uint16; int64 is what gather wants.
    array = routes.detach().cpu().numpy() if isinstance(routes, torch.Tensor) else np.asarray(routes)
    expected = (len(sites), sites[0].top_k)
    if not np.issubdtype(array.dtype, np.integer):
        raise RoutingError(f"RoutingReplay: routes have dtype {array.dtype}, expected integers")
    if array.ndim not in (3, 4) or array.shape[-2:] != expected:
        raise RoutingError(
            f"RoutingReplay: routes have shape {array.shape}, expected [tokens, {expected[0]} MoE layers, {expected[1]} experts a token] "
            "or the same with a leading batch axis"
        )
    return torch.from_numpy(array.reshape(-1, *expected).astype(np.int64))


def _as_flags(name: str, flags: Routes, rows: int) -> torch.Tensor:
    array: BoolArray | npt.NDArray[Any] = flags.detach().cpu().numpy() if isinstance(flags, torch.Tensor) else np.asarray(flags)
    if array.dtype != np.bool_:
        raise RoutingError(f"RoutingReplay: {name} has dtype {array.dtype}, expected bool")
    if array.size != rows:
        raise RoutingError(f"RoutingReplay: {name} has {array.size} rows, routes have {rows}")
    return torch.from_numpy(array.reshape(-1).copy())


def _check_rows(routes: torch.Tensor, valid: torch.Tensor, sites: tuple[RouterSite, ...]) -> None:
    for column, site in enumerate(sites):
        rows = routes[:, column]
        out_of_range = ((rows < 0) | (rows >= site.num_experts)).any(-1) & valid
        ordered = rows.sort(dim=-1).values
        repeated = (ordered[:, 1:] == ordered[:, :-1]).any(-1) & valid
        for flagged, what in ((out_of_range, f"names an expert outside 0 to {site.num_experts - 1}"), (repeated, "repeats an expert")):
            if flagged.any():
                row = int(flagged.nonzero()[0])
                raise RoutingError(
                    f"RoutingReplay: row {row} of layer {site.layer} {what}: {rows[row].tolist()}; mark rows without a recorded route as "
                    "not valid"
                )
