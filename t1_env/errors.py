"""Every error that ``t1_env`` raises on purpose.

One flat tree. A message says what failed, the value seen, what was expected and what to do. The command lines print the message alone
and exit with status 2; a traceback means a bug in T1.
"""

from __future__ import annotations


class T1Error(Exception):
    """Base of all errors that T1 raises on purpose."""


class ConfigError(T1Error, ValueError):
    """An argument, option or configuration file holds something that cannot be used."""


class DependencyMissing(T1Error, ImportError):
    """An optional package is needed; the message names the exact ``pip install`` command."""


class TaskError(T1Error, ValueError):
    """A task directory is malformed: names the file, the key and what was expected."""


class UnknownTask(TaskError, LookupError):
    """No task answers to the given id, path or pattern; the message suggests the nearest."""


class SandboxError(T1Error, RuntimeError):
    """The machinery under the shell failed. Infrastructure, never the agent's doing."""


class SandboxUnavailable(SandboxError):
    """This machine cannot run the asked-for sandbox; the message says what to install or enable."""


class SandboxDied(SandboxError):
    """A running sandbox is gone."""


class ImageBuildError(SandboxError):
    """The task's environment could not be built; names the Dockerfile line."""


class TransportLost(SandboxError):
    """The connection to the sandbox broke."""


class ShellError(T1Error, RuntimeError):
    """The shell session could not be started or recovered."""


class VerifierError(T1Error, RuntimeError):
    """The verifiers could not be collected or run. Infrastructure, never a verdict."""
