"""``t1-env tasks list`` and ``t1-env tasks check``."""

from __future__ import annotations

import fnmatch
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice

from rich.console import Console
from rich.progress import Progress, TextColumn

from t1_env.env import TerminalEnv
from t1_env.errors import SandboxUnavailable, T1Error, UnknownTask
from t1_env.tasks import Task, list_tasks, load_task, resolve_tasks
from t1_env.testing import Rollout, noop_actions, oracle_actions, rollout

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


@dataclass(frozen=True, slots=True)
class Checked:
    """Outcome of checking one task.

    Args:
        problems: What is wrong with it; empty if nothing is.
        verifiers: Number of its verifiers.
        steps: Number of oracle steps.
    """

    problems: tuple[str, ...]
    verifiers: int = 0
    steps: int = 0


def check_task(load: Callable[[], Task], *, sandbox: str = "local") -> Checked:
    """Play the oracle and an agent that does nothing; the first must pass every verifier, the second none.

    Args:
        load: Returns the task.
        sandbox: Backend name.

    Returns:
        What was found; a task that cannot be loaded or played is a problem, not an exception.

    Raises:
        SandboxUnavailable: This machine cannot run the sandbox, so nothing can be checked.
    """
    try:
        task = load()
        oracle = oracle_actions(task)
        with TerminalEnv(task=task, sandbox=sandbox, max_turns=len(oracle) + 1) as env:
            does_nothing = rollout(env, noop_actions(), seed=0)
            solves = rollout(env, oracle, seed=0)
    except SandboxUnavailable:
        raise
    except T1Error as error:
        return Checked((" ".join(str(error).split()),))
    problems = [*_infra_problems(does_nothing, "noop"), *_infra_problems(solves, "oracle")]
    if not problems:
        if not solves.solved:
            failed = [name for name, passed in solves.infos[-1]["verifiers"].items() if not passed]
            problems.append(f"the oracle fails {', '.join(failed)}")
        already = [name for name, passed in does_nothing.infos[-1]["verifiers"].items() if passed]
        if already:
            problems.append(f"doing nothing passes {', '.join(already)}")
    return Checked(tuple(problems), solves.infos[-1]["verifiers_total"], len(oracle))


def _infra_problems(episode: Rollout, agent: str) -> list[str]:
    return [f"{agent}: the machinery failed: {episode.infos[-1]['infra_error']}"] if episode.infra_failure else []


def check_command(ids: Sequence[str], *, jobs: int = 1, instances: int | None = None, sandbox: str = "local") -> int:
    """Check tasks and print one line each.

    Args:
        ids: Ids, globs, directories or families; all tasks when empty.
        jobs: How many to check at the same time.
        instances: How many instances of a family's level to check; default all that were named, or 3 of a whole split.
        sandbox: Backend name.

    Returns:
        0 if every task is sound, else 1.

    Raises:
        UnknownTask: If an id names nothing.
        TaskError: If a single task that was named is malformed.
    """
    chosen = _expand(ids, instances)
    console = Console(highlight=False, soft_wrap=True)
    failed = 0
    pool = ThreadPoolExecutor(jobs)
    columns = (TextColumn("checking"), *Progress.get_default_columns())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(chosen))
        try:
            for task_id, checked in zip(chosen, pool.map(lambda load: check_task(load, sandbox=sandbox), chosen.values()), strict=True):
                failed += bool(checked.problems)
                detail = "; ".join(checked.problems) or f"verifiers: {checked.verifiers}, oracle steps: {checked.steps}"
                progress.console.print(f"{'FAIL' if checked.problems else 'ok  '}  {task_id}  {detail}", markup=False)
                progress.advance(bar)
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C only what is running is waited for
    console.print(f"{len(chosen) - failed} of {len(chosen)} tasks are sound", markup=False)
    return EXIT_FAILED if failed else EXIT_OK


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
