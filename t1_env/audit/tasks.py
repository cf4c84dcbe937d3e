"""What an audit is aimed at when nothing is named: the shipped corpus, and tasks made for attacks that no shipped task gives a hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from t1_env.tasks import Task, load_task, resolve_tasks
from t1_env.tasks.corpus import corpus_root, family_files, task_directories

PREFIX: Final = "audit/"
"""Ids of audit tasks start with this: ``audit/imported-module``."""

_TASKS_DIR: Final = Path(__file__).resolve().parent / "tasks"


def audit_task_ids() -> tuple[str, ...]:
    """Ids of the audit tasks: each has verifiers that import, execute or read what an attacker controls."""
    return tuple(f"{PREFIX}{path.parent.name}" for path in sorted(_TASKS_DIR.glob("*/task.toml")))


def shipped_task_ids() -> tuple[str, ...]:
    """Ids of every hand-written task and of one instance of every family."""
    seeds = tuple(task_id for task_id, _ in task_directories(corpus_root()))
    return (*seeds, *(f"families/{name}?level=2&seed=0" for name, _ in family_files(corpus_root())))


def find_tasks(specs: Sequence[str] = ()) -> tuple[Task, ...]:
    """Load what was asked for.

    Args:
        specs: Ids, globs, directories, families (one instance of each) or ``audit/<name>``; if empty, the corpus and all audit tasks.

    Returns:
        The tasks, each once.

    Raises:
        UnknownTask: A name stands for nothing.
        TaskError: A task is malformed.
    """
    tasks: dict[str, Task] = {}
    for spec in specs or (*shipped_task_ids(), *audit_task_ids()):
        for task in _resolve(spec):
            tasks.setdefault(task.id, task)
    return tuple(tasks.values())


def _resolve(spec: str) -> list[Task]:
    if spec.startswith(PREFIX) and not Path(spec).exists():
        return [task for task in map(_load, audit_task_ids()) if spec in (task.id, f"{PREFIX}*")] or [load_task(spec)]
    return [part.at(0) for part in resolve_tasks(spec).parts]


def _load(task_id: str) -> Task:
    return replace(load_task(_TASKS_DIR / task_id.removeprefix(PREFIX)), id=task_id)
