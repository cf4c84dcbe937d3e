"""Small trusted functions to run in a clone: to check that clones work, and to run a program there."""

from __future__ import annotations

import subprocess
from typing import Any


def echo(payload: Any) -> Any:
    """Return the payload."""
    return payload


def execute(payload: dict[str, Any]) -> dict[str, Any]:
    """Run a program in the clone.

    Args:
        payload: ``argv`` (list of str) and optionally ``timeout_s`` (float).

    Returns:
        ``exit_code``, ``stdout`` and ``stderr`` (text, undecodable bytes replaced).
    """
    result = subprocess.run(payload["argv"], capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=payload.get("timeout_s"))
    return {
        "exit_code": result.returncode if result.returncode >= 0 else 128 - result.returncode,
        "stdout": result.stdout.decode("utf-8", "replace"),
        "stderr": result.stderr.decode("utf-8", "replace"),
    }
