"""What a benchmark is, and how large it is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from t1_env.bench.figures import FigureSpec
from t1_env.bench.measure import Measured, Tick
from t1_env.errors import ConfigError

FLEET_SIZE: Final = 64
OUTPUT_BYTES: Final = 10_000_000
DEFAULT_TASK: Final = "seeds/bakery-backup"
"""Its Dockerfile has a WORKDIR, a COPY and a RUN."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How large the benchmarks are made.

    Args:
        fraction: Share of the full number of samples, over 0 and up to 1.
        fleet_size: Sandboxes that run at the same time.
        output_bytes: Size of the large output.
        task: Task whose environment is built in the measured resets.
        docker_image: Image of the Docker sandbox; None for the backend's default.
        conformance: Whether every task's own script is compared with the fast road (minutes).
    """

    fraction: float = 1.0
    fleet_size: int = FLEET_SIZE
    output_bytes: int = OUTPUT_BYTES
    task: str = DEFAULT_TASK
    docker_image: str | None = None
    conformance: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction={self.fraction!r}: expected a number over 0 and up to 1")
        for name in ("fleet_size", "output_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected at least 1")

    def count(self, full: int, least: int = 2) -> int:
        """Return how many of something there are: ``full`` scaled by the fraction, but not fewer than ``least``."""
        return max(least, math.ceil(full * self.fraction))


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Something that can be run by name and yields one or more figures.

    Args:
        name: Unique, e.g. ``"local-true"``.
        title: What it measures, in a few words.
        figures: How each figure is made of what ``run`` measures.
        run: Measures; is told where to report progress.
    """

    name: str
    title: str
    figures: tuple[FigureSpec, ...]
    run: Callable[[Tick], Measured]
