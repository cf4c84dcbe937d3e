"""T1: a Gymnasium environment in which an agent drives a real shell and is paid by the task's own verifiers.

Importing this package registers ``T1Terminal-v0`` and loads no sandbox backend; the heavier names below are imported when first used::

    import gymnasium as gym
    import t1_env

    env = gym.make("T1Terminal-v0", task="seeds/hello-file")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import gymnasium

from t1_env._version import __version__
from t1_env.errors import (
    ConfigError,
    DependencyMissing,
    ImageBuildError,
    SandboxDied,
    SandboxError,
    SandboxUnavailable,
    ShellError,
    T1Error,
    TaskError,
    TransportLost,
    UnknownTask,
    VerifierError,
)
from t1_env.protocol import (
    INFO_KEYS,
    SCHEMA_VERSION,
    SHELL_STATES,
    Action,
    Command,
    EndReason,
    Keys,
    ShellState,
    Submit,
    VerbatimVerdict,
    VerifierOutcome,
    VerifierReport,
    VerifierStatus,
)

if TYPE_CHECKING:
    from t1_env import testing
    from t1_env.config import EnvConfig
    from t1_env.env import TerminalEnv
    from t1_env.tasks import Task, list_tasks, load_task, resolve_tasks
    from t1_env.vector import TerminalVectorEnv

__all__ = [
    "ENV_ID",
    "INFO_KEYS",
    "SCHEMA_VERSION",
    "SHELL_STATES",
    "Action",
    "Command",
    "ConfigError",
    "DependencyMissing",
    "EndReason",
    "EnvConfig",
    "ImageBuildError",
    "Keys",
    "SandboxDied",
    "SandboxError",
    "SandboxUnavailable",
    "ShellError",
    "ShellState",
    "Submit",
    "T1Error",
    "Task",
    "TaskError",
    "TerminalEnv",
    "TerminalVectorEnv",
    "TransportLost",
    "UnknownTask",
    "VerbatimVerdict",
    "VerifierError",
    "VerifierOutcome",
    "VerifierReport",
    "VerifierStatus",
    "__version__",
    "list_tasks",
    "load_task",
    "resolve_tasks",
    "testing",
]

ENV_ID = "T1Terminal-v0"
"""Id under which the environment is registered."""

_LAZY = {
    "EnvConfig": "t1_env.config",
    "Task": "t1_env.tasks",
    "TerminalEnv": "t1_env.env",
    "TerminalVectorEnv": "t1_env.vector",
    "list_tasks": "t1_env.tasks",
    "load_task": "t1_env.tasks",
    "resolve_tasks": "t1_env.tasks",
}


def __getattr__(name: str) -> Any:
    """Import the heavier public names when they are first asked for (PEP 562)."""
    if name == "testing":
        return importlib.import_module("t1_env.testing")
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 't1_env' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if ENV_ID not in gymnasium.registry:
    gymnasium.register(
        id=ENV_ID,
        entry_point="t1_env.env:TerminalEnv",
        vector_entry_point="t1_env.vector:TerminalVectorEnv",
        nondeterministic=False,
    )
