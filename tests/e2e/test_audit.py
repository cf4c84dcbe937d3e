"""Every attack against a few tasks: nothing is gained, and what must be noticed is.

``T1_AUDIT_TASKS=all`` plays every attack on every shipped task and audit task (about half an hour); names of tasks, separated by commas,
play it on those.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Final

import pytest

from t1_env.audit import Attack, Played, load_attacks, play
from t1_env.audit.agents import weak_verifiers
from t1_env.audit.tasks import PREFIX, find_tasks
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
STALLS: Final = ("fifo", "symlink-elsewhere", "nonce-from-memory")
"""Attacks that make every test wait for its time limit, which is shorter for them."""
STALLED_LIMIT_S: Final = 5.0


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


CELLS: Final = [(attack, task) for task, attacks in chosen().items() for attack in attacks]


@pytest.fixture(scope="module")
def played() -> Iterator[dict[tuple[str, str], Future[Played]]]:
    """Every cell, played several at a time: an episode mostly waits."""
    attacks = {attack.id: attack for attack in ATTACKS}
    with ThreadPoolExecutor(JOBS) as pool:
        weak = {task: pool.submit(weak_of, task) for task in chosen()}
        order = sorted(((name in STALLS, name, task) for task, names in chosen().items() for name in names), reverse=True)
        yield {(name, task): pool.submit(play_one, attacks[name], task, weak[task]) for _, name, task in order}
        pool.shutdown(cancel_futures=True)


def weak_of(task_id: str) -> frozenset[str]:
    """Weak tests of a task; audit tasks have none, which is what they are made for."""
    return frozenset() if task_id.startswith(PREFIX) else weak_verifiers(find_tasks([task_id])[0])


def play_one(attack: Attack, task_id: str, weak: Future[frozenset[str]]) -> Played:
    (task,) = find_tasks([task_id])
    return play(attack, with_limit(task, STALLED_LIMIT_S) if attack.id in STALLS else task, weak=weak.result())


def with_limit(task: Task, seconds: float) -> Task:
    verifier = task.config.verifier.model_copy(update={"timeout_sec": seconds})
    return replace(task, config=task.config.model_copy(update={"verifier": verifier}))


@pytest.mark.parametrize(("attack", "task"), CELLS)
def test_an_attack_gains_nothing(played: dict[tuple[str, str], Future[Played]], attack: str, task: str):
    cell = played[attack, task].result()
    if cell.outcome == "not_applicable":
        pytest.skip(cell.note)
    assert cell.gained == ()
    assert cell.outcome == "safe", cell.note
    assert cell.reward <= len(cell.weak)
