"""Seconds by phase, kept apart from everything that is deterministic."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Timing(Mapping[str, float]):
    """Wall-clock seconds by phase: the value of ``info["_timing"]``.

    How long a step took is no part of what it returned, so any two timings compare equal. That is what lets two runs of the same
    actions be compared with ``==`` (Gymnasium's ``check_env`` does) while the figures are still there. Read it like a dict;
    ``dict(timing)`` gives one.

    Args:
        seconds: Phase -> seconds.
    """

    __slots__ = ("_seconds",)

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self._seconds = dict(seconds or {})

    def __getitem__(self, phase: str) -> float:
        return self._seconds[phase]

    def __iter__(self) -> Iterator[str]:
        return iter(self._seconds)

    def __len__(self) -> int:
        return len(self._seconds)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timing)

    def __hash__(self) -> int:
        return hash(Timing)

    def __repr__(self) -> str:
        return f"Timing({ {phase: round(seconds, 6) for phase, seconds in self._seconds.items()} })"


class Stopwatch:
    """Adds up the seconds spent in named phases.

    Args:
        enabled: When False nothing is measured and ``read`` returns an empty ``Timing``.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of the ``with`` block under ``name``, even when it raises."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start_s)

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere under ``name``."""
        if self._enabled:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def read(self) -> Timing:
        """Return what was measured so far and start again from zero."""
        timing = Timing(self._seconds)
        self._seconds = {}
        return timing
