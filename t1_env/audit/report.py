"""The report of an audit as text: a summary by class, a line for each attack, the weak tests, and what agents that do no work are paid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table

from t1_env.audit.attack import THREAT_CLASSES, Attack
from t1_env.audit.matrix import AuditReport, by_attack
from t1_env.audit.play import Played

Row: TypeAlias = Sequence[str]

_SHOWN: Final = {"gained": "GAINED", "failed": "failed", "unflagged": "unnoticed", "safe": "safe", "not_applicable": "n/a"}
"""Outcome -> how it is shown, the worst first."""


def summary_rows(report: AuditReport, attacks: Sequence[Attack]) -> tuple[Row, Sequence[Row]]:
    """Header and a row for each class of attacks."""
    cells = by_attack(report.cells)
    rows = []
    for threat in THREAT_CLASSES:
        members = [attack for attack in attacks if attack.threat == threat]
        played = [cell for attack in members for cell in cells.get(attack.id, []) if cell.outcome != "not_applicable"]
        if members:
            rows.append((threat, str(len(members)), str(len(played)), _gains(played), _naive(played), _flagged(played), _seconds(played)))
    return ("class", "attacks", "episodes", "gained", "naive gains", "flagged", "seconds"), rows


def attack_rows(report: AuditReport, attacks: Sequence[Attack]) -> tuple[Row, Sequence[Row]]:
    """Header and a row for each attack, all tasks together."""
    cells = by_attack(report.cells)
    rows = []
    for attack in sorted(attacks, key=lambda attack: (list(THREAT_CLASSES).index(attack.threat), attack.id)):
        found = cells.get(attack.id, [])
        played = [cell for cell in found if cell.outcome != "not_applicable"]
        figures = (_gains(played), _naive(played), _flagged(played), _seconds(played))
        rows.append((attack.threat, attack.id, str(len(played)), *figures, _worst(found)))
    return ("class", "attack", "tasks", "gained", "naive gains", "flagged", "seconds", "outcome"), rows


def cell_rows(report: AuditReport) -> tuple[Row, Sequence[Row]]:
    """Header and a row for each attack on each task."""
    rows = []
    for cell in report.cells:
        played = cell.outcome != "not_applicable"
        gained = str(len(cell.gained)) if played else ""
        naive = "" if cell.naive is None else str(cell.naive)
        flags = ", ".join(cell.flags)
        rows.append((cell.task, cell.attack, gained, naive, str(len(cell.weak) or ""), flags, f"{cell.seconds:.1f}", cell.outcome))
    return ("task", "attack", "gained", "naive", "weak", "flagged", "seconds", "outcome"), rows


def idle_rows(report: AuditReport) -> tuple[Row, Sequence[Row]]:
    """Header and a row for each task: what agents that do no work are paid, and which tests are weak."""
    rows = [
        (
            *(idle.task, str(idle.verifiers), f"{idle.named_paths:g}", f"{idle.random_mean:.2f}"),
            *(f"{max(idle.random, default=0.0):g}", str(idle.random_best), ", ".join(name.rpartition("::")[2] for name in idle.weak)),
        )
        for idle in report.idle
    ]
    return ("task", "verifiers", "named paths", "random, mean", "random, best", "random, peak", "pass for inert actions"), rows


def problem_lines(report: AuditReport) -> list[str]:
    """A line for each cell that is a problem."""
    lines = []
    for cell in report.problems:
        what = ", ".join(cell.gained) if cell.gained else cell.note
        lines.append(f"{cell.attack} on {cell.task}: {cell.outcome}: {what}")
    return lines


def markdown(report: AuditReport, attacks: Sequence[Attack], *, heading: str, facts: Iterable[str]) -> str:
    """The whole report as a Markdown page.

    Args:
        report: What was found.
        attacks: What was played.
        heading: Of the page.
        facts: Lines about where and when.
    """
    parts = [f"# {heading}", "", *(f"- {fact}" for fact in facts), "", verdict(report), ""]
    parts += [f"- {line}" for line in problem_lines(report)]
    sections = [("By class", summary_rows(report, attacks)), ("By attack", attack_rows(report, attacks))]
    if report.idle:
        sections.append(("Agents that do no work", idle_rows(report)))
    sections.append(("Every attack on every task", cell_rows(report)))
    for title, (header, rows) in sections:
        parts += ["", f"## {title}", "", _markdown_row(header), _markdown_row(["---"] * len(header)), *map(_markdown_row, rows)]
    return "\n".join(parts) + "\n"


def tables(report: AuditReport, attacks: Sequence[Attack]) -> RenderableType:
    """The report for a terminal: by class, by attack and by task; not every cell."""
    shown = [("attacks", attack_rows(report, attacks)), ("classes", summary_rows(report, attacks))]
    if report.idle:
        shown.append(("agents that do no work", idle_rows(report)))
    return Group(*(_table(title, header, rows) for title, (header, rows) in shown))


def verdict(report: AuditReport) -> str:
    """The report in a sentence."""
    played = [cell for cell in report.cells if cell.outcome != "not_applicable"]
    gained = sum(len(cell.gained) for cell in played)
    unnoticed = sum(cell.outcome == "unflagged" for cell in played)
    failed = sum(cell.outcome == "failed" for cell in played)
    rest = [f"{unnoticed} unnoticed"] if unnoticed else []
    rest += [f"{failed} could not be played"] if failed else []
    return "; ".join([f"{len(played)} episodes, {gained} verifiers gained", *rest])


def _table(title: str, header: Row, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < 2 or index >= len(header) - 1 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _gains(played: Sequence[Played]) -> str:
    return str(sum(len(cell.gained) for cell in played))


def _naive(played: Sequence[Played]) -> str:
    """Verifiers gained naively, and on how many tasks."""
    tried = [cell.naive for cell in played if cell.naive is not None]
    return f"{sum(tried)} on {sum(gain > 0 for gain in tried)} of {len(tried)}" if tried else ""


def _flagged(played: Sequence[Played]) -> str:
    return f"{sum(bool(cell.flags) for cell in played)} of {len(played)}" if played else ""


def _seconds(played: Sequence[Played]) -> str:
    return f"{sum(cell.seconds for cell in played):.0f}"


def _worst(cells: Sequence[Played]) -> str:
    return next((shown for outcome, shown in _SHOWN.items() if any(cell.outcome == outcome for cell in cells)), "")
