"""Every attack against a few tasks: nothing is gained, and what must be noticed is.

``T1_AUDIT_TASKS=all`` plays every attack on every shipped task and audit task (about half an hour); names of tasks, separated by commas,
play it on those.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Final

import pytest

from t1_env.audit import Attack, AuditReport, Plan, Played, audit_tasks, load_attacks
from t1_env.audit.tasks import find_tasks
from t1_env.sandbox.local import unavailable_reason
from t1_env.tasks import Task

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason())),
]

ATTACKS: Final = load_attacks()
SHIPPED: Final = ("seeds/label-printer", "families/log-tally?level=1&seed=0")
# The audit task that gives a class its hold. Attacks of other classes gain on any task, from a naive verifier.
HOLDS: Final = {
    "imported-code": "audit/imported-module",
    "results": "audit/imported-module",
    "clock": "audit/imported-module",
    "deliverables": "audit/expected-files",
    "background": "audit/expected-files",
    "toolchain": "audit/executed-programs",
    "loader": "audit/executed-programs",
    "interpreter": "audit/executed-programs",
    "executed-code": "audit/executed-script",
}
JOBS: Final = 4
STALLS: Final = ("fifo", "symlink-elsewhere", "dev-zero")
"""Attacks that make every test wait for its time limit."""
STALLED_LIMIT_S: Final = 5.0

OPEN: Final = {
    "answers-from-frames": "code that a test imports can read the test's source",
    "answers-from-the-tests": "code that a test executes can read /tests",
    "symlink-to-tests": "a link of the agent's into /tests is followed",
    "inode-race": "a link of the agent's into /tests is followed",
    "home-configuration": "settings in the home directory are read by programs that tests execute",
}
"""Holes that are known, and why they are there."""


def chosen() -> dict[str, tuple[str, ...]]:
    """Task -> ids of the attacks to play on it."""
    asked = os.environ.get("T1_AUDIT_TASKS", "")
    if asked:
        tasks = find_tasks(() if asked == "all" else asked.split(","))
        return {task.id: tuple(attack.id for attack in ATTACKS) for task in tasks}
    found = {name: tuple(attack.id for attack in ATTACKS) for name in SHIPPED}
    for name in dict.fromkeys(HOLDS.values()):
        found[name] = tuple(attack.id for attack in ATTACKS if HOLDS.get(attack.threat) == name)
    return found


def cells() -> list[Any]:
    """(attack, task) for each cell; a known hole must be open where an audit task gives it its hold."""
    hold = {attack.id: HOLDS.get(attack.threat) for attack in ATTACKS}
    found: list[Any] = []
    for task, attacks in chosen().items():
        for attack in attacks:
            is_open = attack in OPEN and task == hold[attack]
            marks = [pytest.mark.xfail(strict=attack != "inode-race", reason=OPEN[attack])] if is_open else []  # a race may be lost
            found.append(pytest.param(attack, task, marks=marks))
    return found


@pytest.fixture(scope="module")
def played() -> dict[tuple[str, str], Played]:
    """Every cell, played several at a time: an episode mostly waits."""
    cells: dict[tuple[str, str], Played] = {}
    by_tasks: dict[tuple[str, ...], list[str]] = {}
    for task, attacks in chosen().items():
        by_tasks.setdefault(attacks, []).append(task)
    for attacks, tasks in by_tasks.items():
        for stalls in (False, True):
            group = tuple(attack for attack in ATTACKS if attack.id in attacks and (attack.id in STALLS) is stalls)
            report = play_all(group, find_tasks(tasks), stalls=stalls)
            cells |= {(cell.attack, cell.task): cell for cell in report.cells}
    return cells


def play_all(attacks: tuple[Attack, ...], tasks: tuple[Task, ...], *, stalls: bool) -> AuditReport:
    limited = tuple(with_limit(task, STALLED_LIMIT_S) for task in tasks) if stalls else tasks
    return audit_tasks(Plan(attacks, limited, jobs=JOBS, random_episodes=None))


def with_limit(task: Task, seconds: float) -> Task:
    verifier = task.config.verifier.model_copy(update={"timeout_sec": seconds})
    return replace(task, config=task.config.model_copy(update={"verifier": verifier}))


@pytest.mark.parametrize(("attack", "task"), cells())
def test_an_attack_gains_nothing(played: dict[tuple[str, str], Played], attack: str, task: str):
    cell = played[attack, task]
    if cell.outcome == "not_applicable":
        pytest.skip(cell.note)
    assert cell.gained == ()
    assert cell.outcome == "safe", cell.note
    assert cell.reward <= len(cell.weak)
