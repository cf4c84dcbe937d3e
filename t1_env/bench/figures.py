"""Figures: a number made of samples by a stated rule, with its target and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from t1_env.bench import statistics
from t1_env.bench.measure import Measured

Value = Callable[[Measured], float]
"""Makes a figure's value of the series."""


@dataclass(frozen=True, slots=True)
class Target:
    """A bound that a figure should keep.

    Args:
        limit: The bound, in the figure's unit.
        better: ``"lower"`` if the value must not exceed it, ``"higher"`` if it must reach it.
    """

    limit: float
    better: Literal["lower", "higher"]

    def met(self, value: float) -> bool:
        """Whether a value keeps it."""
        return value <= self.limit if self.better == "lower" else value >= self.limit


def at_most(limit: float) -> Target:
    """Return a target that must not be exceeded."""
    return Target(limit, "lower")


def at_least(limit: float) -> Target:
    """Return a target that must be reached."""
    return Target(limit, "higher")


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """How a figure is made.

    Args:
        name: Unique, e.g. ``"local-true-p50"``.
        title: Short, for the table.
        definition: What exactly is measured, in a sentence.
        unit: ``"s"``, ``"steps/s"``, ``"bytes"``, ``"share"`` (of 1) or ``"x"`` (a ratio).
        value: Makes the value of the series.
        of: Name of the series it is about.
        target: The bound it should keep, or None.
        against: Names of the floors and peers that were measured in turn with it.
    """

    name: str
    title: str
    definition: str
    unit: str
    value: Value
    of: str
    target: Target | None = None
    against: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure beside a floor or a peer of the same run.

    Args:
        name: Of the floor or peer.
        role: ``"floor"``, ``"peer"``, or ``"ours"`` for another way through T1.
        value: Its median.
        ratio: Its cost over that of T1, paired by rounds: 100 means that it takes a hundred times as long.
    """

    name: str
    role: str
    value: float
    ratio: float

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"name": self.name, "role": self.role, "value": self.value, "ratio": self.ratio}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that was measured.

    Args:
        spec: How it was made.
        benchmark: Name of the benchmark it belongs to.
        value: The value, in ``spec.unit``.
        comparisons: Floors and peers of the same run.
    """

    spec: FigureSpec
    benchmark: str
    value: float
    comparisons: tuple[Comparison, ...] = ()

    @property
    def met(self) -> bool | None:
        """Whether the target is kept; None without a target."""
        return None if self.spec.target is None else self.spec.target.met(self.value)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        target = self.spec.target
        return {
            "name": self.spec.name,
            "benchmark": self.benchmark,
            "title": self.spec.title,
            "definition": self.spec.definition,
            "unit": self.spec.unit,
            "value": self.value,
            "target": None if target is None else {"limit": target.limit, "better": target.better},
            "met": self.met,
            "compared_with": [comparison.as_dict() for comparison in self.comparisons],
        }


def evaluate(spec: FigureSpec, benchmark: str, measured: Measured) -> Figure:
    """Make a figure of what was measured.

    Args:
        spec: How.
        benchmark: Name of the benchmark it belongs to.
        measured: The series.

    Returns:
        The figure.
    """
    ours = measured[spec.of]
    comparisons = []
    for name in spec.against:
        other = measured[name]
        over, under = (ours, other) if ours.unit.endswith("/s") else (other, ours)  # the cost of a rate is its inverse
        ratio = statistics.paired_ratio(over.blocks, under.blocks)
        comparisons.append(Comparison(name, other.role.value, statistics.median(other.values), ratio))
    return Figure(spec, benchmark, spec.value(measured), tuple(comparisons))


def percentile(series: str, q: float) -> Value:
    """Return the rule "``q``-th percentile of all samples of ``series``"."""
    return lambda measured: statistics.percentile(measured[series].values, q)


def mean(series: str) -> Value:
    """Return the rule "arithmetic mean of all samples of ``series``"."""
    return lambda measured: statistics.summarise(measured[series].values).mean


def ratio(numerator: str, denominator: str) -> Value:
    """Return the rule "how many times larger", paired by rounds; see ``statistics.paired_ratio``."""
    return lambda measured: statistics.paired_ratio(measured[numerator].blocks, measured[denominator].blocks)
