"""Verifiers: one pytest test each, collected once, run in a throw-away clone of the sandbox after every step that changed it.

The host side is `t1_env.verifiers.collecting` (``collect``), `t1_env.verifiers.runner` (``run``), `t1_env.verifiers.baseline` (both, on the
untouched environment) and `t1_env.verifiers.verbatim` (the task's own test script); what runs inside the clone is
`t1_env.verifiers.worker`. This file imports none of them: the warm interpreter of the sandbox loads the package under a stub ``t1_env``
and must get the standard library and pytest only.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["FrozenIds", "collect", "collect_and_run", "ids_digest", "run", "run_verbatim"]

_HOME = {
    "FrozenIds": "ids",
    "collect": "collecting",
    "collect_and_run": "collecting",
    "ids_digest": "ids",
    "run": "runner",
    "run_verbatim": "verbatim",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
