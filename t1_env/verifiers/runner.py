"""Host side of verification: collect a task's verifiers once, run them in a clone of the sandbox as often as asked."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from t1_env.errors import SandboxError, TaskError, VerifierError
from t1_env.protocol import VerifierOutcome, VerifierReport, VerifierStatus
from t1_env.sandbox.base import CloneResult, Sandbox
from t1_env.tasks.task import Task

TESTS_MOUNT: Final = "/tests"
"""Where a task's tests are found inside a clone, as Harbor places them. The agent's own view never has them."""

_WORKER: Final = "t1_env.verifiers.worker"
_CLONE_MARGIN_S: Final = 10.0
_MIN_TEST_TIMEOUT_S: Final = 10.0

_collected: dict[str, tuple[str, ...]] = {}
_collected_lock = threading.Lock()


def collect(sandbox: Sandbox, task: Task, *, env: Mapping[str, str] | None = None, workdir: str | None = None) -> tuple[str, ...]:
    """List a task's verifiers, in a clone of its freshly built sandbox.

    The answer is frozen: it is taken once for each task digest in this process, whatever the agent does later.

    Args:
        sandbox: A started sandbox with the task's environment built and nothing done in it yet.
        task: The task.
        env: Variables that building the environment set (Dockerfile ``ENV``), for the tests to see.
        workdir: Working directory of the tests; default the task's.

    Returns:
        pytest node ids relative to the task's ``tests`` directory, in pytest's order.

    Raises:
        TaskError: The test files cannot be collected, hold no test, or give two tests the same id.
        VerifierError: The machinery failed twice.
    """
    known = _known_ids(task)
    if known is not None:
        return known
    result = in_clone(sandbox, clone_payload(task, task.config.verifier.timeout_sec, env, workdir), task, f"{_WORKER}:collect", retries=1)
    return _freeze(task, result)


def run(
    sandbox: Sandbox,
    task: Task,
    ids: Sequence[str],
    *,
    timeout_s: float | None = None,
    retries: int = 1,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
) -> VerifierReport:
    """Run a task's verifiers in a clone of the sandbox as it stands.

    Args:
        sandbox: The sandbox to judge. It is frozen while the verifiers run and unchanged afterwards.
        task: The task.
        ids: The frozen list, from `collect`.
        timeout_s: Limit for all verifiers together; default ``[verifier] timeout_sec`` of the task. One verifier may use a quarter of
            it, but at least 10 s, so that one that hangs leaves time for the others.
        retries: How often to try again when the machinery fails.
        env: Variables that building the environment set, as for `collect`.
        workdir: Working directory of the tests, as for `collect`.

    Returns:
        A report with every id in the frozen order. If the machinery failed every time, ``infra_error`` says why and there are no
        outcomes.
    """
    limit_s = task.config.verifier.timeout_sec if timeout_s is None else timeout_s
    payload = clone_payload(task, limit_s, env, workdir) | {"ids": list(ids), "test_timeout_s": _test_timeout_s(limit_s)}
    result = in_clone(sandbox, payload, task, f"{_WORKER}:run", retries=retries)
    return VerifierReport(seconds=result.seconds, infra_error=result.error) if result.error is not None else _report(result, ids)


def collect_and_run(
    sandbox: Sandbox, task: Task, *, retries: int = 1, env: Mapping[str, str] | None = None, workdir: str | None = None
) -> tuple[tuple[str, ...], VerifierReport]:
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
        payload = clone_payload(task, limit_s, env, workdir) | {"test_timeout_s": _test_timeout_s(limit_s)}
        result = in_clone(sandbox, payload, task, f"{_WORKER}:collect_and_run", retries=max(1, retries), limit_s=2 * limit_s)
        known = _freeze(task, result)
        # Another thread may have frozen another list meanwhile (tests that name themselves anew each time): then as ever, on that one.
        if result.payload["outcomes"] is not None and list(known) == result.payload["ids"]:
            return known, _report(result, known)
    return known, run(sandbox, task, known, retries=retries, env=env, workdir=workdir)


def ids_digest(ids: Sequence[str]) -> str:
    """SHA-256 (hex) of a frozen list of verifier ids; written beside results so that two lists can be told apart."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def clone_payload(task: Task, timeout_s: float, env: Mapping[str, str] | None, workdir: str | None = None) -> dict[str, Any]:
    """What every entry point of the worker needs to know: the task, its limits and its environment."""
    environment = task.config.environment
    return {
        "tests_dir": TESTS_MOUNT,
        "workdir": task.workdir if workdir is None else workdir,
        "timeout_s": timeout_s,
        "env": literal_env({**(env or {}), **environment.env, **task.config.verifier.env}),
        "inherit_env": True,
        "memory_mb": environment.memory_limit_mb,
    }


def literal_env(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold plain values. Harbor's ``${NAME}`` templates would copy the host's secrets into the clone."""
    return {name: value for name, value in env.items() if "${" not in value}


def _known_ids(task: Task) -> tuple[str, ...] | None:
    """The frozen ids of a task, None if there are none yet; ``TaskError`` if there can be none."""
    with _collected_lock:
        known = _collected.get(task.digest)
    if known is None and not task.tests_dir.is_dir():
        raise TaskError(f"{task.tests_dir}: the task has no tests directory: expected pytest files in it")
    return known


def _freeze(task: Task, result: CloneResult) -> tuple[str, ...]:
    """Freeze what a clone collected, or say why it cannot be."""
    if result.error is not None:
        raise VerifierError(f"the verifiers of {task.id} could not be collected: {result.error}")
    ids = [str(name) for name in result.payload["ids"]]
    # Errors of a run that followed the collecting (a file that imports only once) are verdicts, not reasons against the list.
    if result.payload["errors"] and result.payload.get("outcomes") is None:
        raise TaskError(f"{task.tests_dir}: the tests cannot be collected: {'; '.join(result.payload['errors'])}")
    if not ids:
        raise TaskError(f"{task.tests_dir}: no test found: expected files named test_*.py with functions named test_*")
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise TaskError(f"{task.tests_dir}: {', '.join(twice)} names more than one test: give each verifier an id of its own")
    with _collected_lock:
        return _collected.setdefault(task.digest, tuple(ids))


def _test_timeout_s(limit_s: float) -> float:
    return min(limit_s, max(_MIN_TEST_TIMEOUT_S, limit_s / 4))


def _report(result: CloneResult, ids: Sequence[str]) -> VerifierReport:
    outcomes = {name: _outcome(result.payload["outcomes"], name) for name in ids}
    return VerifierReport(
        outcomes=MappingProxyType(outcomes), source="runner", seconds=result.seconds, unknown=tuple(result.payload["unknown"])
    )


def in_clone(
    sandbox: Sandbox, payload: Mapping[str, Any], task: Task, entry: str, *, retries: int, limit_s: float | None = None
) -> CloneResult:
    """Call an entry point in a clone, again if the machinery fails. Never raises for a failure of the machinery.

    Args:
        sandbox: The sandbox to clone.
        payload: From `clone_payload`.
        task: The task, whose tests are mounted.
        entry: ``"package.module:function"``.
        retries: How often to try again.
        limit_s: What the function may take; default the payload's ``timeout_s``.

    Returns:
        The result of the first attempt that worked, or the last error, with the seconds of all attempts.
    """
    clone_timeout_s = (payload["timeout_s"] if limit_s is None else limit_s) + _CLONE_MARGIN_S
    seconds, error = 0.0, "not attempted"
    for _ in range(retries + 1):
        try:
            result = sandbox.run_in_clone(entry, payload, mounts={TESTS_MOUNT: task.tests_dir}, timeout_s=clone_timeout_s)
        except SandboxError as failure:
            return CloneResult(payload=None, seconds=seconds, error=f"{type(failure).__name__}: {failure}")
        seconds += result.seconds
        if result.error is None:
            return CloneResult(payload=result.payload, seconds=seconds)
        error = result.error
    return CloneResult(payload=None, seconds=seconds, error=error)


def _outcome(outcomes: Mapping[str, Any], name: str) -> VerifierOutcome:
    if name not in outcomes:
        return VerifierOutcome(VerifierStatus.MISSING, message="the run did not report it")
    status, seconds, message = outcomes[name]
    return VerifierOutcome(VerifierStatus(status), float(seconds), str(message))
