"""A persistent interactive shell with out-of-band control: see ``docs/design/shell.md``."""

from typing import TYPE_CHECKING, Any

from t1_env.shell.config import TIMEOUT_EXIT_CODE, ShellConfig, ShellResult
from t1_env.shell.engine import BashEngine, OffersShell, ShellEngine

if TYPE_CHECKING:
    from t1_env.shell.session import Session

__all__ = ["TIMEOUT_EXIT_CODE", "BashEngine", "OffersShell", "Session", "ShellConfig", "ShellEngine", "ShellResult"]


def __getattr__(name: str) -> Any:
    if name != "Session":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not before it is asked for: it needs numpy, and the far end of a connection has the standard library only.
    from t1_env.shell.session import Session

    return Session
