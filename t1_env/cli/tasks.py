"""``t1-env tasks list`` and ``t1-env tasks check``."""

from __future__ import annotations

import fnmatch
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

from rich.console import Console
from rich.progress import Progress, TextColumn

from t1_env.errors import T1Error, UnknownTask
from t1_env.tasks import Task, list_tasks, load_task, resolve_tasks
from t1_env.tasks.check import TaskCheck, check_task

EXIT_OK, EXIT_FAILED = 0, 1
_ABOUT_CHARS = 100
_SMALL_POOL, _SPLIT_SAMPLE = 10_000, 3
"""A family without a seed or ``n`` stands for a whole split; a few instances stand for it."""


def list_command(pattern: str | None) -> int:
    """Print the id, category and beginning of the instruction of each task, one a line.

    Args:
        pattern: A glob that ids must match, or None for all.

    Returns:
        0.

    Raises:
        UnknownTask: If no id matches.
    """
    ids = list_tasks()
    chosen = [task_id for task_id in ids if pattern is None or fnmatch.fnmatchcase(task_id, pattern)]
    if not chosen:
        raise UnknownTask(f"no task matches {pattern!r}; expected a glob over ids such as {ids[0]!r}" if ids else "the corpus is empty")
    tasks = [load_task(task_id) for task_id in chosen]
    width, category_width = max(map(len, chosen)), max(len(task.metadata.category or "-") for task in tasks)
    for task_id, task in zip(chosen, tasks, strict=True):
        about = textwrap.shorten(task.instruction, _ABOUT_CHARS, placeholder=" ...")
        print(f"{task_id:<{width}}  {task.metadata.category or '-':<{category_width}}  {about}")
    return EXIT_OK


def check_command(ids: Sequence[str], *, jobs: int = 1, instances: int | None = None, sandbox: str = "local", slips: bool = False) -> int:
    """Check tasks and print one line each.

    Args:
        ids: Ids, globs, directories or families; all tasks when empty.
        jobs: How many to check at the same time.
        instances: How many instances of a family's level to check; default all that were named, or 3 of a whole split.
        sandbox: Backend name.
        slips: Whether to play every slip too: each must cost at least one verifier.

    Returns:
        0 if every task is sound, else 1.

    Raises:
        UnknownTask: If an id names nothing.
        TaskError: If a single task that was named is malformed.
        SandboxUnavailable: If this machine cannot run the sandbox, so that nothing can be checked.
    """
    chosen = _expand(ids, instances)
    console = Console(highlight=False, soft_wrap=True)
    failed, bases = 0, Counter[str]()
    pool = ThreadPoolExecutor(jobs)
    columns = (TextColumn("checking"), *Progress.get_default_columns())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(chosen))
        try:
            for found, base in pool.map(lambda item: _check(*item, sandbox=sandbox, slips=slips), chosen.items()):
                bases.update(base)
                failed += not found.sound
                detail = "; ".join(found.problems) or _sizes(found, slips=slips)
                progress.console.print(f"{'ok  ' if found.sound else 'FAIL'}  {found.task_id}  {detail}", markup=False)
                progress.advance(bar)
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C only what is running is waited for
    for line, count in sorted(bases.items()):
        console.print(line if line.startswith("note: ") else f"{count} on {line}", markup=False)
    console.print(f"{len(chosen) - failed} of {len(chosen)} tasks are sound", markup=False)
    return EXIT_FAILED if failed else EXIT_OK


def _check(task_id: str, load: Callable[[], Task], *, sandbox: str, slips: bool) -> tuple[TaskCheck, list[str]]:
    """Check one task, and say what it really started from; one that cannot even be loaded is a problem like any other."""
    try:
        task = load()
    except T1Error as error:
        return TaskCheck(task_id, (" ".join(str(error).split()),), n_verifiers=0, n_steps=0, n_slips=0, requires=()), []
    return check_task(task, sandbox=sandbox, slips=slips), _base(task) if sandbox == "local" else []


def _base(task: Task) -> list[str]:
    """What the local sandbox has instead of the image after ``FROM``, and what it leaves out."""
    from t1_env.sandbox.base import ImageSource
    from t1_env.sandbox.builder import describe

    try:
        made = describe(ImageSource(task.environment_dir, task.config.environment.docker_image))
    except T1Error:
        return []  # what keeps it from being built has been found by playing it
    return [made.base, *(f"note: {task.id}: {note}" for note in made.notes)]


def _sizes(found: TaskCheck, *, slips: bool) -> str:
    played = f", slips: {found.n_slips}" if slips else ""
    return f"verifiers: {found.n_verifiers}, oracle steps: {found.n_steps}{played}"


def _expand(ids: Sequence[str], instances: int | None) -> dict[str, Callable[[], Task]]:
    """Task id -> how to load it, for everything asked for."""
    chosen: dict[str, Callable[[], Task]] = {}
    for spec in ids or list_tasks():
        source = resolve_tasks(spec)
        if len(source) == 1 and ids:
            task = source.sample(0)  # named by itself: a malformed task is the caller's mistake, said before anything runs
            chosen[task.id] = partial(_same, task)
            continue
        for part in source.parts:
            limit = min(len(part), instances or (_SPLIT_SAMPLE if len(part) > _SMALL_POOL else len(part)))
            chosen |= {task_id: partial(part.at, index) for index, task_id in enumerate(islice(part.ids(), limit))}
    return chosen


def _same(task: Task) -> Task:
    return task
