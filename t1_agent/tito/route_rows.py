"""Stitch the expert choices of many completions into one row a token of the episode."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from t1_agent.tito.errors import LedgerError
from t1_agent.types import BoolArray, RouteArray

_Scalar = TypeVar("_Scalar", bound=np.generic)


class RouteRows:
    """Rows ``[tokens, layers, top_k]`` gathered turn by turn; the first computed row of a position stays.

    The last sampled token of a turn has not been read when the turn ends; its row comes with the next turn's prefill. An engine may send
    only what is new (``start`` at the first unread position) or the whole prompt again (``start`` 0): rows that are already here are kept,
    because they are the ones under which the tokens were sampled, and differing repeats are counted. A turn without rows leaves its
    positions invalid.
    """

    def __init__(self) -> None:
        self._rows: RouteArray | None = None
        self._valid: BoolArray = np.zeros(0, dtype=np.bool_)
        self._read = 0
        self.repeated = 0
        """Rows that arrived again."""
        self.conflicting = 0
        """Repeated rows that chose other experts than the first time."""

    def add(self, routes: RouteArray | None, start: int, prompt_length: int, n_sampled: int) -> None:
        """Take in the rows of one completion.

        Args:
            routes: uint8/uint16 [rows, L, K], or None when nothing was recorded.
            start: Absolute position of the first row.
            prompt_length: Tokens before the sampled ones.
            n_sampled: Sampled tokens, at least one.

        Raises:
            LedgerError: When rows would leave a gap after what was read before, do not end at the last token read, or change their shape or
                type in mid-episode. Nothing is taken in then.
        """
        end = prompt_length + n_sampled - 1
        if routes is not None:
            self._check(routes, start, end)
            self._reserve(routes, end)
            self._merge(routes, start, end)
        self._read = end

    def finish(self, n_tokens: int) -> tuple[RouteArray, BoolArray] | tuple[None, None]:
        """Rows [n_tokens, L, K] (zero where invalid) and their validity [n_tokens]; (None, None) when no turn had rows."""
        if self._rows is None:
            return None, None
        rows = np.zeros((n_tokens, *self._rows.shape[1:]), dtype=self._rows.dtype)
        valid = np.zeros(n_tokens, dtype=np.bool_)
        rows[: self._read] = _padded(self._rows, self._read)
        valid[: self._read] = _padded(self._valid, self._read)
        return rows, valid

    def _check(self, routes: RouteArray, start: int, end: int) -> None:
        if routes.dtype not in (np.dtype(np.uint8), np.dtype(np.uint16)) or routes.ndim != 3:
            raise LedgerError(f"routes: got {routes.dtype} {routes.shape}, expected uint8 or uint16 [rows, layers, top_k]")
        if self._rows is not None and (routes.shape[1:] != self._rows.shape[1:] or routes.dtype != self._rows.dtype):
            raise LedgerError(
                f"routes: got {routes.dtype} rows of {routes.shape[1:]}, "
                f"expected {self._rows.dtype} rows of {self._rows.shape[1:]} as before"
            )
        if not 0 <= start <= self._read:
            raise LedgerError(
                f"routes: rows start at position {start}, expected 0..{self._read}; {start - self._read} positions would be skipped"
            )
        if start + len(routes) != end:
            raise LedgerError(
                f"routes: {len(routes)} rows from position {start} end at {start + len(routes)}, expected {end} "
                "(every token but the last sampled one has been read)"
            )

    def _reserve(self, routes: RouteArray, end: int) -> None:
        rows = self._rows if self._rows is not None else np.zeros((0, *routes.shape[1:]), dtype=routes.dtype)
        if len(rows) < end or len(self._valid) < end:
            capacity = max(2 * end, 1024)
            rows, self._valid = _padded(rows, capacity), _padded(self._valid, capacity)
        self._rows = rows

    def _merge(self, routes: RouteArray, start: int, end: int) -> None:
        assert self._rows is not None
        known = self._valid[start:end].copy()
        held = self._rows[start:end]
        self.repeated += int(known.sum())
        self.conflicting += int((held[known] != routes[known]).any(axis=(1, 2)).sum())
        held[~known] = routes[~known]
        self._valid[start:end] = True


def _padded(array: npt.NDArray[_Scalar], length: int) -> npt.NDArray[_Scalar]:
    """The first ``length`` rows, with rows of zeros added where there are fewer."""
    if len(array) >= length:
        return array[:length]
    longer = np.zeros((length, *array.shape[1:]), dtype=array.dtype)
    longer[: len(array)] = array
    return longer
