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
    with _collected_lock:
        known = _collected.get(task.digest)
    if known is not None:
        return known
    if not task.tests_dir.is_dir():
        raise TaskError(f"{task.tests_dir}: the task has no tests directory: expected pytest files in it")
    result = _in_clone(sandbox, clone_payload(task, task.config.verifier.timeout_sec, env, workdir), task, "collect", retries=1)
    if result.error is not None:
        raise VerifierError(f"the verifiers of {task.id} could not be collected: {result.error}")
    ids = [str(name) for name in result.payload["ids"]]
    if result.payload["errors"]:
        raise TaskError(f"{task.tests_dir}: the tests cannot be collected: {'; '.join(result.payload['errors'])}")
    if not ids:
        raise TaskError(f"{task.tests_dir}: no test found: expected files named test_*.py with functions named test_*")
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise TaskError(f"{task.tests_dir}: {', '.join(twice)} names more than one test: give each verifier an id of its own")
    with _collected_lock:
        return _collected.setdefault(task.digest, tuple(ids))


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
    payload = clone_payload(task, limit_s, env, workdir)
    payload |= {"ids": list(ids), "test_timeout_s": min(limit_s, max(_MIN_TEST_TIMEOUT_S, limit_s / 4))}
    result = _in_clone(sandbox, payload, task, "run", retries=retries)
    if result.error is not None:
        return VerifierReport(seconds=result.seconds, infra_error=result.error)
    outcomes = {name: _outcome(result.payload["outcomes"], name) for name in ids}
    return VerifierReport(
        outcomes=MappingProxyType(outcomes), source="runner", seconds=result.seconds, unknown=tuple(result.payload["unknown"])
    )


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


def _in_clone(sandbox: Sandbox, payload: Mapping[str, Any], task: Task, function: str, *, retries: int) -> CloneResult:
    """Call the worker, again if the machinery fails. Never raises for a failure of the machinery."""
    seconds, error = 0.0, "not attempted"
    for _ in range(retries + 1):
        try:
            result = sandbox.run_in_clone(
                f"{_WORKER}:{function}", payload, mounts={TESTS_MOUNT: task.tests_dir}, timeout_s=payload["timeout_s"] + _CLONE_MARGIN_S
            )
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
