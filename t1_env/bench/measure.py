"""Measuring several things in turn, so that what slows the machine down for a while slows all of them."""

from __future__ import annotations

import contextlib
import enum
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from t1_env.bench.statistics import summarise
from t1_env.errors import T1Error

_ORDER_SEED: Final = 0

Tick = Callable[[float], None]
"""Takes the share of a benchmark that is done, from 0 to 1."""


class MeasurementError(T1Error, RuntimeError):
    """What was to be measured did not do what it should: the figure would mean nothing."""


@contextlib.contextmanager
def third_party(name: str) -> Iterator[None]:
    """Turn whatever a peer's own code raises into a ``MeasurementError``: its failure is one benchmark's, not the run's.

    Args:
        name: Of the peer.
    """
    try:
        yield
    except T1Error:
        raise
    except Exception as error:  # the classes are the peer's own, with no common base
        raise MeasurementError(f"{name} raised {type(error).__name__}: {error}") from error


class Role(enum.StrEnum):
    """What a series stands for."""

    OURS = "ours"
    """T1 itself."""
    FLOOR = "floor"
    """The least that the same thing could cost on this machine, without T1."""
    PEER = "peer"
    """Another program or method for the same thing."""


@dataclass(slots=True)
class Series:
    """Samples of one thing, in blocks that pair with the blocks of the others that were measured with it.

    Args:
        role: What it stands for.
        unit: ``"s"``, ``"steps/s"``, ``"bytes"`` or ``"share"`` (of 1).
        blocks: Samples; one block for each round.
    """

    role: Role
    unit: str = "s"
    blocks: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        """All samples, oldest first."""
        return [value for block in self.blocks for value in block]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form: the summary, not the samples."""
        return {"role": self.role.value, "unit": self.unit, "blocks": len(self.blocks), **summarise(self.values).as_dict()}


Measured = dict[str, Series]
"""Series by name."""


def extend(measured: Measured, more: Measured) -> None:
    """Append the blocks of another run of the same benchmark."""
    for name, series in more.items():
        measured.setdefault(name, Series(series.role, series.unit)).blocks.extend(series.blocks)


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that is measured.

    Args:
        series: Where its samples go; several if one take measures several things.
        take: Does the thing once; returns one sample for each series.
        block: How often it is done in each round.
    """

    series: tuple[Series, ...]
    take: Callable[[], Sequence[float]]
    block: int = 1


def timed(series: Series, action: Callable[[], object], block: int = 1) -> Contender:
    """Return a contender whose sample is the wall time of an action in seconds."""

    def take() -> tuple[float]:
        start = time.perf_counter()
        action()
        return (time.perf_counter() - start,)

    return Contender((series,), take, block)


def interleave(contenders: Iterable[Contender], rounds: int, tick: Tick, *, warmup: int = 1) -> None:
    """Let every contender fill a block in each round, in an order that is shuffled from round to round.

    Args:
        contenders: What to measure.
        rounds: How many blocks each of them gets.
        tick: Is told the progress.
        warmup: How often each is done before the first round, unmeasured.
    """
    order = list(contenders)
    for contender in order:
        for _ in range(warmup):
            contender.take()
    generator = random.Random(_ORDER_SEED)
    for done in range(rounds):
        generator.shuffle(order)
        for contender in order:
            taken = [contender.take() for _ in range(contender.block)]
            for series, samples in zip(contender.series, zip(*taken, strict=True), strict=True):
                series.blocks.append(tuple(samples))
        tick((done + 1) / rounds)
