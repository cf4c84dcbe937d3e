"""What stands behind a session, wherever its shell runs."""

from __future__ import annotations

from typing import Final, Protocol, runtime_checkable

from t1_env.protocol import ShellState
from t1_env.shell.config import ShellConfig, ShellResult

LOG_BLOCK_BYTES: Final = 4 << 20
"""The most that is asked of ``ShellEngine.log`` at once: an engine at the far end of a connection answers in one message."""


class ShellEngine(Protocol):
    """What stands behind a :class:`t1_env.shell.Session`: a shell, wherever it runs. The methods are those of ``BashEngine``."""

    def start(self) -> None:
        """Start the shell and wait until it answers."""

    def close(self) -> None:
        """End the shell. Idempotent."""

    @property
    def state(self) -> ShellState:
        """What the terminal was doing when the last step returned."""

    @property
    def cwd(self) -> str:
        """Working directory of the shell after its last finished command."""

    @property
    def pid(self) -> int:
        """Process id of the shell as this host sees it; 0 if unknown."""

    @property
    def size(self) -> tuple[int, int]:
        """(rows, cols) of the terminal."""

    @property
    def cursor(self) -> tuple[int, int]:
        """(row, column) of the cursor, from 0."""

    def screen_codes(self) -> bytes:
        """The terminal's picture: one little-endian uint32 code point for each cell, row by row."""

    def resize(self, rows: int, cols: int) -> None:
        """Change the size of the terminal."""

    def run(self, text: str, timeout_s: float | None = None) -> ShellResult:
        """Run a command."""

    def keys(self, text: str, wait_s: float = 1.0) -> ShellResult:
        """Type keys."""

    @property
    def log_start(self) -> int:
        """Offset of the first byte of the log that is still kept."""

    @property
    def log_size(self) -> int:
        """How many bytes the terminal has printed: the offset of the end of the log."""

    def log(self, offset: int, size: int) -> bytes:
        """Bytes of the log from an offset on. A session asks for at most ``LOG_BLOCK_BYTES`` at once.

        Raises:
            ShellError: If some of them are not kept any more.
        """


@runtime_checkable
class OffersShell(Protocol):
    """A sandbox that brings a shell engine of its own, because its processes are out of this process's reach."""

    def open_shell(self, config: ShellConfig) -> ShellEngine:
        """Return an engine that is not started yet."""
