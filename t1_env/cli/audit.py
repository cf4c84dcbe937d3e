"""``t1-env audit``: play attacks on tasks and say what they gain."""

from __future__ import annotations

import argparse
import json
import textwrap
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from t1_env.audit.agents import IdleRewards
from t1_env.audit.attack import Attack, choose_attacks, load_attacks
from t1_env.audit.matrix import AuditReport, Plan, audit_tasks
from t1_env.audit.play import Played
from t1_env.audit.report import markdown, problem_lines, tables, verdict
from t1_env.audit.tasks import find_tasks
from t1_env.bench.facts import machine_facts, versions
from t1_env.errors import ConfigError

EXIT_OK, EXIT_FAILED = 0, 1
_FILE_WIDTH = 160


def audit_command(arguments: argparse.Namespace) -> int:
    """Play the attacks, print the tables, write what was asked for.

    Args:
        arguments: As parsed by ``t1_env.cli.main``.

    Returns:
        0 if every attack was played or is not applicable, nothing was gained and everything was noticed that must be; else 1.

    Raises:
        ConfigError: Something that was asked for does not exist or cannot be written.
        UnknownTask: A task does not exist.
        SandboxUnavailable: This machine cannot run the sandbox.
    """
    attacks = choose_attacks(load_attacks(), arguments.attack or (), arguments.threat or ())
    if arguments.list:
        return _list(attacks)
    for file in (arguments.json, arguments.markdown):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ConfigError(f"{file!r} cannot be written: its directory does not exist")
    plan = Plan(
        attacks,
        find_tasks(arguments.tasks),
        sandbox=arguments.sandbox,
        jobs=arguments.jobs,
        naive=arguments.naive,
        random_episodes=arguments.random or None,
    )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    report = _run(plan)
    console.print(tables(report, attacks))
    for line in problem_lines(report):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"{len(attacks)} attacks on {len(plan.tasks)} tasks: {verdict(report)}", markup=False)
    _write(report, attacks, arguments)
    return EXIT_OK if report.ok else EXIT_FAILED


def _run(plan: Plan) -> AuditReport:
    """Play everything; a bar on a terminal, a line for each problem elsewhere."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("attacking", total=plan.n_cells)
        done = 0

        def seen(result: Played | IdleRewards) -> None:
            nonlocal done
            done += 1
            progress.advance(bar)
            if isinstance(result, Played) and result.outcome in ("gained", "unflagged", "failed"):
                console.print(f"[{done}/{plan.n_cells}] {result.attack} on {result.task}: {result.outcome}", markup=False)
            elif not console.is_terminal and done % 50 == 0:
                console.print(f"[{done}/{plan.n_cells}]", markup=False)

        return audit_tasks(plan, progress=seen)


def _list(attacks: tuple[Attack, ...]) -> int:
    for attack in attacks:
        print(f"{attack.id} ({attack.threat})")
        print(textwrap.indent(textwrap.fill(attack.description, 110), "  "))
        print(textwrap.indent(textwrap.fill(f"source: {attack.source}", 110), "  "))
    return EXIT_OK


def _write(report: AuditReport, attacks: tuple[Attack, ...], arguments: argparse.Namespace) -> None:
    now, machine, software = datetime.now(UTC), machine_facts(), versions()
    if arguments.json is not None:
        facts = {"finished_at": now.isoformat(timespec="seconds"), "machine": machine, "versions": software}
        Path(arguments.json).write_text(json.dumps({**facts, **report.to_json()}, indent=1) + "\n", encoding="utf-8")
    if arguments.markdown is not None:
        lines = [
            f"{now:%Y-%m-%d}, T1 {software['t1-terminal']}",
            f"sandbox: {report.sandbox}; {machine['system']} {machine['kernel']}, {machine['architecture']}, {machine['cpus']} CPUs",
            f"{len(attacks)} attacks",
        ]
        Path(arguments.markdown).write_text(markdown(report, attacks, heading="Audit", facts=lines), encoding="utf-8")
