"""What came of a run: one record, its JSON, and its table."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from t1_env.bench.figures import Comparison, Figure
from t1_env.bench.measure import Measured, Role

SCHEMA_VERSION: Final = "1"
COLUMNS: Final = ("figure", "value", "target", "met", "beside it, in the same run")


@dataclass(frozen=True, slots=True)
class Failure:
    """A benchmark that could not be run.

    Args:
        benchmark: Its name.
        reason: Why.
    """

    benchmark: str
    reason: str


@dataclass(slots=True)
class Report:
    """A run of ``t1-env bench``.

    Args:
        started_at: Date and time in UTC, ISO 8601.
        options: What was asked for.
        machine: Facts about the machine.
        versions: Name -> version.
        load_before: Load average (1, 5, 15 minutes) before the first benchmark.
        load_after: The same after the last.
        seconds: Wall time of it all.
        figures: In the order of their benchmarks.
        measured: Benchmark -> series.
        failures: Benchmarks without figures.
    """

    started_at: str
    options: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    load_before: list[float]
    load_after: list[float] = field(default_factory=list)
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    measured: dict[str, Measured] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    @property
    def missed(self) -> list[Figure]:
        """Figures whose target is not kept."""
        return [figure for figure in self.figures if figure.met is False]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form; docs/benchmarks.md describes it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "started_at": self.started_at,
            "seconds": round(self.seconds, 1),
            "options": self.options,
            "machine": self.machine,
            "versions": self.versions,
            "load_average": {"before": self.load_before, "after": self.load_after},
            "figures": [figure.as_dict() for figure in self.figures],
            "series": {
                benchmark: {name: series.as_dict() for name, series in measured.items()} for benchmark, measured in self.measured.items()
            },
            "failures": [{"benchmark": failure.benchmark, "reason": failure.reason} for failure in self.failures],
        }

    def to_json(self) -> str:
        """Return the JSON text."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        """Return the table in Markdown, under a line that names machine and load."""
        rows = [COLUMNS, tuple("---" for _ in COLUMNS), *map(_cells, self.figures)]
        table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
        failed = "".join(f"\n- `{failure.benchmark}` failed: {failure.reason}" for failure in self.failures)
        return f"{self.headline()}\n\n{table}\n{failed}"

    def table(self) -> Table:
        """Return the table for a terminal."""
        table = Table()
        for column, justify in zip(COLUMNS, ("left", "right", "right", "left", "left"), strict=True):
            table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for figure in self.figures:
            name, value, target, met, beside = _cells(figure)
            table.add_row(
                Text(name), Text(value), Text(target), Text(met, {True: "green", False: "red", None: ""}[figure.met]), Text(beside)
            )
        return table

    def headline(self) -> str:
        """Return a line that names versions, machine and load."""
        machine, versions = self.machine, self.versions
        load = f"load average {self.load_before[0]:.1f} before, {self.load_after[0]:.1f} after" if self.load_after else "not finished"
        return (
            f"t1-terminal {versions['t1-terminal']}, Python {versions['python']}, bash {versions.get('bash', '?')}, {machine['cpus']} CPUs "
            f"({machine['processor']}), kernel {machine['kernel']}, {self.started_at}, {load}"
        )


def format_value(value: float, unit: str) -> str:
    """Return a number with its unit, at a readable scale.

    Args:
        value: The number.
        unit: ``"s"``, ``"steps/s"``, ``"bytes"``, ``"share"`` or ``"x"``.
    """
    match unit:
        case "s":
            for scale, name in ((1.0, "s"), (1e-3, "ms")):
                if abs(value) >= scale:
                    return f"{_digits(value / scale)} {name}"
            return f"{_digits(value / 1e-6)} µs"
        case "bytes":
            return f"{_digits(value / 1e6)} MB"
        case "share":
            return f"{100 * value:.1f}%"
        case "x":
            return f"{_digits(value)}x"
        case _:
            return f"{_digits(value)} {unit}"


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _cells(figure: Figure) -> tuple[str, str, str, str, str]:
    spec, target = figure.spec, figure.spec.target
    bound = "" if target is None else f"{'<=' if target.better == 'lower' else '>='} {format_value(target.limit, spec.unit)}"
    met = {True: "yes", False: "NO", None: ""}[figure.met]
    unit = "s" if spec.unit == "x" else spec.unit
    beside = "; ".join(_beside(comparison, unit) for comparison in figure.comparisons)
    return spec.title, format_value(figure.value, spec.unit), bound, met, beside


def _beside(comparison: Comparison, unit: str) -> str:
    """A floor says how many times it T1 costs; a peer, how many times T1 it costs."""
    value = f"{comparison.name} {format_value(comparison.value, unit)}"
    if comparison.role == Role.FLOOR:
        return f"{value} (T1 {_digits(1 / comparison.ratio)}x)"
    return f"{value} ({_digits(comparison.ratio)}x T1)" if comparison.role == Role.PEER else value
