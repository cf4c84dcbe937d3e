"""Every attack on every task: how the cells are played, and the report they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from typing import Any

from t1_env.audit.agents import IdleRewards, idle_rewards, weak_verifiers
from t1_env.audit.attack import Attack
from t1_env.audit.naive import naive_gain
from t1_env.audit.play import Played, play
from t1_env.tasks import Task

Progress = Callable[[Played | IdleRewards], None]
"""Called with each result as it comes in, from the thread that asked for the audit."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an audit does.

    Args:
        attacks: To play.
        tasks: To play them on.
        sandbox: Backend name, or a factory as for ``TerminalEnv``.
        jobs: Episodes at the same time.
        naive: Whether each attack is also played against a naive verifier, which takes twice the time.
        random_episodes: Episodes of random commands on each task; None leaves out the agents that do no work.
    """

    attacks: tuple[Attack, ...]
    tasks: tuple[Task, ...]
    sandbox: Any = "local"
    jobs: int = 1
    naive: bool = False
    random_episodes: int | None = 20

    @property
    def n_cells(self) -> int:
        """Number of results to come."""
        return len(self.tasks) * (len(self.attacks) + (self.random_episodes is not None))


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found.

    Args:
        cells: A result for each attack on each task, tasks in order, attacks in order.
        idle: What agents that do no work are paid, for each task.
        sandbox: Name of the backend.
    """

    cells: tuple[Played, ...]
    idle: tuple[IdleRewards, ...]
    sandbox: str

    @property
    def problems(self) -> tuple[Played, ...]:
        """Cells where something was gained, went unnoticed or could not be played."""
        return tuple(cell for cell in self.cells if cell.outcome in ("gained", "unflagged", "failed"))

    @property
    def ok(self) -> bool:
        """Whether something was played and nothing of it is a problem."""
        return any(cell.outcome == "safe" for cell in self.cells) and not self.problems

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON-compatible data."""
        return {
            "sandbox": self.sandbox,
            "ok": self.ok,
            "cells": [asdict(cell) for cell in self.cells],
            "idle": [asdict(rewards) | {"random_mean": rewards.random_mean} for rewards in self.idle],
        }


def audit_tasks(plan: Plan, *, progress: Progress | None = None) -> AuditReport:
    """Play attacks on tasks.

    Args:
        plan: What to do.
        progress: Told of every result.

    Returns:
        The report.

    Raises:
        SandboxUnavailable: This machine cannot run the sandbox.
        TaskError: A task cannot be played at all.
    """
    cells: dict[tuple[int, int], Played] = {}
    idle: dict[int, IdleRewards] = {}
    with ThreadPoolExecutor(plan.jobs, thread_name_prefix="t1-audit") as pool:
        pending: dict[Future[Any], tuple[int, int]] = {}
        try:
            for number, weak in enumerate(pool.map(lambda task: weak_verifiers(task, sandbox=plan.sandbox), plan.tasks)):
                task = plan.tasks[number]
                if plan.random_episodes is not None:
                    episodes = plan.random_episodes
                    pending[pool.submit(idle_rewards, task, weak, episodes=episodes, sandbox=plan.sandbox)] = (number, -1)
                for index, attack in enumerate(plan.attacks):
                    pending[pool.submit(_cell, attack, task, weak, plan)] = (number, index)
            for future, (number, index) in _as_completed(pending):
                result = future.result()
                if isinstance(result, Played):
                    cells[number, index] = result
                else:
                    idle[number] = result
                if progress is not None:
                    progress(result)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    name = plan.sandbox if isinstance(plan.sandbox, str) else type(plan.sandbox).__name__
    return AuditReport(tuple(cells[key] for key in sorted(cells)), tuple(idle[key] for key in sorted(idle)), name)


def _as_completed(pending: dict[Future[Any], tuple[int, int]]) -> Iterable[tuple[Future[Any], tuple[int, int]]]:
    """Futures as they end; short waits, so that Ctrl-C is heard."""
    left = set(pending)
    while left:
        done, left = wait(left, timeout=0.5, return_when=FIRST_COMPLETED)
        for future in done:
            yield future, pending[future]


def _cell(attack: Attack, task: Task, weak: frozenset[str], plan: Plan) -> Played:
    played = play(attack, task, sandbox=plan.sandbox, weak=weak)
    if not plan.naive or played.outcome == "not_applicable":
        return played
    return replace(played, naive=naive_gain(attack, task, sandbox=plan.sandbox, weak=weak))


def by_attack(cells: Sequence[Played]) -> dict[str, list[Played]]:
    """Cells of each attack, in the order of the cells."""
    grouped: dict[str, list[Played]] = {}
    for cell in cells:
        grouped.setdefault(cell.attack, []).append(cell)
    return grouped
