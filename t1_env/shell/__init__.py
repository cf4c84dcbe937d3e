"""A persistent interactive shell with out-of-band control: see ``docs/design/shell.md``."""

from t1_env.shell.config import TIMEOUT_EXIT_CODE, ShellConfig, ShellResult
from t1_env.shell.session import Session

__all__ = ["TIMEOUT_EXIT_CODE", "Session", "ShellConfig", "ShellResult"]
