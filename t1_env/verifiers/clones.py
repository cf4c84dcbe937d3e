"""What a verification asks of a sandbox: one call of a trusted function in a clone, tried again when the machinery fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from t1_env.errors import SandboxError
from t1_env.sandbox.base import CloneResult, CloneView, Sandbox
from t1_env.sandbox.keeper import BASE_ENV
from t1_env.tasks.task import Task

TESTS_MOUNT: Final = "/tests"
"""Where a task's tests are found inside a clone, as Harbor places them. The agent's own view never has them."""

_CLONE_MARGIN_S: Final = 10.0
_VIEWS: Final = "views"
_LIVE: Final = "live"


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
        "imports": task.metadata.imports,
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
    view: CloneView | None = None,
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
        view: How the clone sees the sandbox, from `view_of`.

    Returns:
        The result of the first attempt that worked, or the last error, with the seconds of all attempts.
    """
    clone_timeout_s = (payload["timeout_s"] if limit_s is None else limit_s) + _CLONE_MARGIN_S
    all_mounts = {TESTS_MOUNT: task.tests_dir, **(mounts or {})}
    seen: dict[str, Any] = {} if view is None else {"view": view}  # a sandbox of somebody else's may not know the word
    seconds, error = 0.0, "not attempted"
    for _ in range(retries + 1):
        try:
            result = sandbox.run_in_clone(entry, payload, mounts=all_mounts, timeout_s=clone_timeout_s, **seen)
        except SandboxError as failure:
            return CloneResult(payload=None, seconds=seconds, error=f"{type(failure).__name__}: {failure}")
        seconds += result.seconds
        if result.error is None:
            return replace(result, seconds=seconds)
        error = result.error
    return CloneResult(payload=None, seconds=seconds, error=error)


def view_of(sandbox: Sandbox, task: Task, env: Mapping[str, str] | None, *, live: bool = False) -> CloneView | None:
    """How a clone is to see the sandbox so that what the agent did to the base system is noticed.

    Args:
        sandbox: The sandbox.
        task: The task, which may declare paths that are its business.
        env: Variables that building the environment set.
        live: Whether the agent's processes must answer.

    Returns:
        The view; None where the sandbox offers none. ``live`` is dropped where it cannot be had.
    """
    if not sandbox.capabilities & {_VIEWS, _LIVE}:
        return None
    variables = {**BASE_ENV, **literal_env({**(env or {}), **task.config.environment.env, **task.config.verifier.env})}
    return CloneView(
        search_path=tuple(each for each in variables["PATH"].split(":") if each.startswith("/")),
        home=variables["HOME"],
        writable=task.metadata.writable,
        live=live and _LIVE in sandbox.capabilities,
    )
