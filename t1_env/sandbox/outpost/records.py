"""How specifications, results and errors travel in a frame's header: as JSON, field by field."""

from __future__ import annotations

import dataclasses
import errno
import traceback
from collections.abc import Mapping
from typing import Any, Final

from t1_env import errors
from t1_env.protocol import ShellState
from t1_env.sandbox.base import BuiltEnvironment, CloneResult, ExecResult, SandboxSpec
from t1_env.sandbox.local import SandboxFileError
from t1_env.shell.config import ShellConfig, ShellResult

_ERRORS: Final[Mapping[str, type[errors.T1Error]]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.T1Error) and kind is not errors.TransportLost
}


# ------------------------------------------------------------------------------------------------------------------------ records
def spec_to_json(spec: SandboxSpec) -> dict[str, Any]:
    """Return a specification as JSON, without the image (which is built from this side) and what this host must hide."""
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    del fields["image"], fields["hide"]
    return {**fields, "env": dict(spec.env)}


def spec_from_json(fields: Mapping[str, Any]) -> SandboxSpec:
    """Return the specification again."""
    return SandboxSpec(**fields)


def shell_config_to_json(config: ShellConfig) -> dict[str, Any]:
    """Return a shell's configuration as JSON."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {**fields, "env": dict(config.env)}


def shell_config_from_json(fields: Mapping[str, Any]) -> ShellConfig:
    """Return the configuration again."""
    return ShellConfig(**fields)


def shell_result_to_json(result: ShellResult) -> dict[str, Any]:
    """Return the result of a shell step as JSON."""
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return {**fields, "state": result.state.value}


def shell_result_from_json(fields: Mapping[str, Any]) -> ShellResult:
    """Return the result again."""
    return ShellResult(**{**fields, "state": ShellState(fields["state"])})


def built_to_json(built: BuiltEnvironment) -> dict[str, Any]:
    """Return what a build left as JSON."""
    fields = {field.name: getattr(built, field.name) for field in dataclasses.fields(built)}
    return {**fields, "env": dict(built.env)}


def built_from_json(fields: Mapping[str, Any]) -> BuiltEnvironment:
    """Return what a build left."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return BuiltEnvironment(**values)


def exec_result_to_frame(result: ExecResult) -> tuple[dict[str, Any], bytes]:
    """Return the result of a program as JSON and a blob that holds its output."""
    header = {"exit_code": result.exit_code, "stdout_bytes": len(result.stdout), "timed_out": result.timed_out}
    return header, result.stdout + result.stderr


def exec_result_from_frame(header: Mapping[str, Any], blob: bytes) -> ExecResult:
    """Return the result again."""
    size = header["stdout_bytes"]
    return ExecResult(header["exit_code"], blob[:size], blob[size:], header["timed_out"])


def clone_result_to_json(result: CloneResult) -> dict[str, Any]:
    """Return the result of a clone as JSON."""
    return {"payload": result.payload, "seconds": result.seconds, "failure": result.error, "masked": list(result.masked)}


def clone_result_from_json(fields: Mapping[str, Any]) -> CloneResult:
    """Return the result again."""
    return CloneResult(fields["payload"], float(fields["seconds"]), fields["failure"], tuple(fields.get("masked", ())))


# ------------------------------------------------------------------------------------------------------------------------- errors
def error_to_json(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON: its class, what it says, and for a file which one and why."""
    if isinstance(error, SandboxFileError):
        return {"error": "SandboxFileError", "message": str(error.strerror), "errno": error.errno, "filename": error.filename}
    if isinstance(error, errors.T1Error):
        return {"error": _class_name(type(error)), "message": str(error)}
    if isinstance(error, OSError):
        return {"error": "SandboxError", "message": f"the outpost could not do it: {error}"}
    trace = "".join(traceback.format_exception(error)[-6:]).strip()
    return {"error": "SandboxError", "message": f"the outpost failed (a bug in T1, please report it): {trace}"}


def error_from_json(fields: Mapping[str, Any]) -> errors.T1Error:
    """Return the error again; an unknown class is a ``SandboxError``."""
    message = str(fields.get("message"))
    if fields["error"] == "SandboxFileError":
        return SandboxFileError(fields.get("errno") or errno.EIO, message, fields.get("filename"))
    return _ERRORS.get(fields["error"], errors.SandboxError)(message)


def _class_name(kind: type) -> str:
    """The nearest class that the other side knows by name."""
    return next((base.__name__ for base in kind.__mro__ if base.__name__ in _ERRORS), "SandboxError")
