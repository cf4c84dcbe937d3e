"""What a verification asks of a sandbox: one call of a trusted function in a clone, tried again when the machinery fails."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from t1_env.errors import SandboxError
from t1_env.sandbox.base import CloneResult, Sandbox
from t1_env.tasks.task import Task

TESTS_MOUNT: Final = "/tests"
"""Where a task's tests are found inside a clone, as Harbor places them. The agent's own view never has them."""

_CLONE_MARGIN_S: Final = 10.0


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


def in_clone(
    sandbox: Sandbox,
    payload: Mapping[str, Any],
    task: Task,
    entry: str,
    *,
    retries: int,
    limit_s: float | None = None,
    mounts: Mapping[str, Path] | None = None,
) -> CloneResult:
    """Call an entry point in a clone, again if the machinery fails. Never raises for a failure of the machinery.

    Args:
        sandbox: The sandbox to clone.
        payload: From `clone_payload`.
        task: The task, whose tests are mounted.
        entry: ``"package.module:function"``.
        retries: How often to try again.
        limit_s: What the function may take; default the payload's ``timeout_s``.
        mounts: What to mount beside the tests: path in the clone -> host path.

    Returns:
        The result of the first attempt that worked, or the last error, with the seconds of all attempts.
    """
    clone_timeout_s = (payload["timeout_s"] if limit_s is None else limit_s) + _CLONE_MARGIN_S
    seconds, error = 0.0, "not attempted"
    for _ in range(retries + 1):
        try:
            result = sandbox.run_in_clone(entry, payload, mounts={TESTS_MOUNT: task.tests_dir, **(mounts or {})}, timeout_s=clone_timeout_s)
        except SandboxError as failure:
            return CloneResult(payload=None, seconds=seconds, error=f"{type(failure).__name__}: {failure}")
        seconds += result.seconds
        if result.error is None:
            return CloneResult(payload=result.payload, seconds=seconds)
        error = result.error
    return CloneResult(payload=None, seconds=seconds, error=error)
