"""Which verifiers a task has: found once on its untouched environment, then frozen.

Three ways are tried, the surest first. T1's own runner collects the tests. Where they cannot be imported because what they import is the
agent's to write, it collects them once more in a clone in which the task's oracle has done its work. Where there are no pytest tests at
all, the task's own script runs, and what it reports is the list: names in CTRF, JUnit XML or pytest's summary, keys of ``reward.json``, or
the one number.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

from t1_env.errors import TaskError, VerifierError
from t1_env.protocol import VerifierReport
from t1_env.sandbox.base import CloneResult, Sandbox
from t1_env.tasks.task import Task
from t1_env.verifiers.clones import clone_payload, in_clone, literal_env
from t1_env.verifiers.ids import RUNNER, FrozenIds
from t1_env.verifiers.runner import WORKER, report_of, run, time_for_one
from t1_env.verifiers.verbatim import run_verbatim, script_of

_SOLUTION_MOUNT: Final = "/solution"

_collected: dict[str, FrozenIds] = {}
_collected_lock = threading.Lock()


def collect(sandbox: Sandbox, task: Task, *, env: Mapping[str, str] | None = None, workdir: str | None = None) -> FrozenIds:
    """List a task's verifiers, in a clone of its freshly built sandbox.

    The answer is frozen: it is taken once for each task digest in this process, whatever the agent does later.

    Args:
        sandbox: A started sandbox with the task's environment built and nothing done in it yet.
        task: The task.
        env: Variables that building the environment set (Dockerfile ``ENV``), for the tests to see.
        workdir: Working directory of the tests; default the task's.

    Returns:
        The ids: pytest node ids relative to the task's ``tests`` directory, in pytest's order, or what the task's own script reports.

    Raises:
        TaskError: The test files cannot be collected, hold no test, or give two tests the same id, and the task's script says nothing
            either.
        VerifierError: The machinery failed twice.
    """
    known = _known_ids(task)
    if known is not None:
        return known
    result = in_clone(sandbox, clone_payload(task, task.config.verifier.timeout_sec, env, workdir), task, f"{WORKER}:collect", retries=1)
    return _freeze(sandbox, task, result, env, workdir)


def collect_and_run(
    sandbox: Sandbox, task: Task, *, retries: int = 1, env: Mapping[str, str] | None = None, workdir: str | None = None
) -> tuple[FrozenIds, VerifierReport]:
    """`collect`, then `run` on the untouched environment, in one clone instead of two where the list is not known yet.

    Args:
        sandbox: A started sandbox with the task's environment built and nothing done in it yet.
        task: The task.
        retries: As for `run`. Collecting is tried twice at least, as in `collect`.
        env: Variables that building the environment set.
        workdir: Working directory of the tests.

    Returns:
        The frozen ids and the report on them.

    Raises:
        TaskError: As for `collect`.
        VerifierError: The machinery failed every time and nothing was collected.
    """
    known = _known_ids(task)
    if known is None:
        limit_s = task.config.verifier.timeout_sec
        payload = clone_payload(task, limit_s, env, workdir) | {"test_timeout_s": time_for_one(limit_s)}
        result = in_clone(sandbox, payload, task, f"{WORKER}:collect_and_run", retries=max(1, retries), limit_s=2 * limit_s)
        known = _freeze(sandbox, task, result, env, workdir)
        # Another thread may have frozen another list meanwhile (tests that name themselves anew each time): then as ever, on that one.
        if result.payload["outcomes"] is not None and list(known) == result.payload["ids"]:
            return known, report_of(result, known)
    return known, run(sandbox, task, known, retries=retries, env=env, workdir=workdir)


def _known_ids(task: Task) -> FrozenIds | None:
    """The frozen ids of a task, None if there are none yet; ``TaskError`` if there can be none."""
    with _collected_lock:
        known = _collected.get(task.digest)
    if known is None and not task.tests_dir.is_dir():
        raise TaskError(f"{task.tests_dir}: the task has no tests directory: expected pytest files or a test.sh in it")
    return known


def _freeze(sandbox: Sandbox, task: Task, result: CloneResult, env: Mapping[str, str] | None, workdir: str | None) -> FrozenIds:
    """Freeze what a clone collected, or what can be had instead; ``TaskError`` says why there is nothing."""
    if result.error is not None:
        raise VerifierError(f"the verifiers of {task.id} could not be collected: {result.error}")
    # Errors of a run that followed the collecting (a file that imports only once) are verdicts, not reasons against the list.
    errors = result.payload["errors"] if result.payload.get("outcomes") is None else []
    found = [str(name) for name in result.payload["ids"]]
    ids: FrozenIds | None = None
    try:
        ids = _checked(task, found, errors)
    except TaskError:
        if errors and task.solution_path is not None:
            ids = _collect_solved(sandbox, task, env, workdir)
        if not errors and not found and script_of(task) is not None:
            ids = _collect_from_script(sandbox, task, env, workdir)
        if ids is None:
            raise
    with _collected_lock:
        return _collected.setdefault(task.digest, ids)


def _checked(task: Task, ids: list[str], errors: list[str]) -> FrozenIds:
    if errors:
        raise TaskError(f"{task.tests_dir}: the tests cannot be collected: {'; '.join(errors)}")
    if not ids:
        raise TaskError(f"{task.tests_dir}: no test found: expected files named test_*.py with functions named test_*")
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise TaskError(f"{task.tests_dir}: {', '.join(twice)} names more than one test: give each verifier an id of its own")
    return FrozenIds(ids)


def _collect_solved(sandbox: Sandbox, task: Task, env: Mapping[str, str] | None, workdir: str | None) -> FrozenIds | None:
    """The list as it is once the oracle has done its work in a clone of its own; None if that does not help."""
    assert task.solution_path is not None
    limit_s = max(task.config.verifier.timeout_sec, task.config.agent.timeout_sec or 0.0)
    payload: dict[str, Any] = clone_payload(task, limit_s, env, workdir) | {
        "solution": f"{_SOLUTION_MOUNT}/{task.solution_path.name}",
        "solution_env": literal_env(task.config.solution.env),
    }
    mounts = {_SOLUTION_MOUNT: task.solution_path.parent}
    result = in_clone(sandbox, payload, task, f"{WORKER}:collect_solved", retries=1, limit_s=2 * limit_s, mounts=mounts)
    if result.error is not None:
        raise VerifierError(f"the verifiers of {task.id} could not be collected behind its oracle: {result.error}")
    try:
        return _checked(task, [str(name) for name in result.payload["ids"]], result.payload["errors"])
    except TaskError:
        return None  # the untouched environment's reason is the one to tell


def _collect_from_script(sandbox: Sandbox, task: Task, env: Mapping[str, str] | None, workdir: str | None) -> FrozenIds | None:
    """What the task's own script reports on the untouched environment; None if that is nothing."""
    said = run_verbatim(sandbox, task, None, env=env, workdir=workdir)
    if said.failed:
        raise VerifierError(f"the verifiers of {task.id} could not be collected: its test script could not be run: {said.problem}")
    if said.report is None or not said.report.outcomes:
        return None
    assert said.report.source != RUNNER
    return FrozenIds(said.report.outcomes, said.report.source)
