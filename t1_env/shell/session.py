"""The session: what an environment sees of a shell."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from t1_env.protocol import ShellState
from t1_env.shell.channel import Spawner
from t1_env.shell.config import ShellConfig, ShellResult
from t1_env.shell.engine import BashEngine
from t1_env.shell.interface import LOG_BLOCK_BYTES, OffersShell, ShellEngine


class Session:
    r"""A persistent interactive shell in a sandbox.

    One command at a time; working directory, variables, functions, aliases and background jobs persist. Not thread-safe: one session
    belongs to one episode. The shell is driven from this process where its terminal can be handed over (``local``), else from beside it,
    at the far end of the sandbox's connection (``docker``, ``ssh``); both run the same code.

    Args:
        sandbox: A started sandbox (anything with its ``spawn`` and ``alive``, or with ``open_shell``).
        config: How to behave; defaults to ``ShellConfig()``.

    Example:
        >>> with Session(sandbox) as session:  # doctest: +SKIP
        ...     session.run("cd /tmp && echo $PWD").output
        '/tmp\n'
    """

    def __init__(self, sandbox: Spawner | OffersShell, config: ShellConfig | None = None) -> None:
        config = config or ShellConfig()
        self._step = threading.RLock()
        self._engine: ShellEngine = sandbox.open_shell(config) if isinstance(sandbox, OffersShell) else BashEngine(sandbox, config)

    # ------------------------------------------------------------------------------------------------------------------ life cycle
    def start(self) -> None:
        """Start the shell and wait until it answers.

        Raises:
            SandboxError: If the sandbox cannot start a process.
            ShellError: If the shell is missing or does not come up.
        """
        self._engine.start()

    def close(self) -> None:
        """End the shell, once a step that runs in another thread is over. Background jobs end with the sandbox. Idempotent."""
        with self._step:
            self._engine.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------------------------------- state
    @property
    def state(self) -> ShellState:
        """What the terminal was doing when the last step returned."""
        return self._engine.state

    @property
    def cwd(self) -> str:
        """Working directory of the shell after its last finished command."""
        return self._engine.cwd

    @property
    def pid(self) -> int:
        """Process id of the shell as this host sees it; 0 if unknown."""
        return self._engine.pid

    def screen(self) -> npt.NDArray[np.uint32]:
        """The terminal's picture.

        Returns:
            Code points, shape (rows, cols), dtype uint32; blank cells are 32.
        """
        return np.frombuffer(self._engine.screen_codes(), dtype="<u4").astype(np.uint32).reshape(self._engine.size)

    def screen_text(self) -> str:
        """The terminal's picture as lines of text, trailing blanks removed."""
        return "\n".join("".join(map(chr, row)).rstrip() for row in self.screen()).rstrip("\n")

    @property
    def cursor(self) -> tuple[int, int]:
        """(row, column) of the cursor, from 0."""
        return self._engine.cursor

    @property
    def log_start(self) -> int:
        """Offset of the first byte of the log that is still kept; above 0 once the terminal has printed more than ``log_bytes``."""
        return self._engine.log_start

    @property
    def log_size(self) -> int:
        """How many bytes the terminal has printed since ``start``: the offset of the end of the log."""
        return self._engine.log_size

    def log(self, offset: int = 0, size: int | None = None) -> bytes:
        """What the terminal printed, byte for byte: escape sequences, echo and line ends as a terminal would get them, nothing left out.

        ``ShellResult.log_start`` and ``log_end`` say where each step lies. The log ends with ``close``.

        Args:
            offset: Where to begin, counted from the start of the session.
            size: How many bytes; None for all that follow. Fewer come back at the end.

        Returns:
            The bytes.

        Raises:
            ShellError: If some of them are not kept any more (see ``log_start`` and ``ShellConfig.log_bytes``).
        """
        left = max(0, self.log_size - offset) if size is None else size
        parts = []
        while left > 0 and (part := self._engine.log(offset, min(left, LOG_BLOCK_BYTES))):
            parts.append(part)
            offset, left = offset + len(part), left - len(part)
        return b"".join(parts)

    def resize(self, rows: int, cols: int) -> None:
        """Change the size of the terminal, as a window does."""
        self._engine.resize(rows, cols)

    # ----------------------------------------------------------------------------------------------------------------------- steps
    def run(self, text: str, timeout_s: float | None = None) -> ShellResult:
        r"""Run a command to its end, to its time limit, or until it wants input.

        While a program is in the foreground (state ``running``, ``waiting_for_input`` or ``fullscreen``) there is no prompt to run a
        command at: the text is typed into that program, followed by Enter.

        Args:
            text: Command line, as bash reads it; may span lines.
            timeout_s: Limit in seconds; None takes the configured one. A command that exceeds it is ended (^C, ^\, SIGKILL) and its
                exit code is 124.

        Returns:
            What happened.

        Raises:
            ShellError: If the session was not started.
        """
        with self._step:
            return self._engine.run(text, timeout_s)

    def keys(self, text: str, wait_s: float = 1.0) -> ShellResult:
        """Type keys and wait for what comes of them. Nothing is ended when the time is up.

        At the shell's prompt (state ``idle``) text is collected, and Enter (the key, or a newline in the text) runs it as a command.

        Args:
            text: Key name in tmux notation (``C-c``, ``Enter``, ``Up``) or literal text.
            wait_s: How long to wait for the command to finish or the program to want more input.

        Returns:
            What happened; state ``running`` if neither was the case in time.

        Raises:
            ShellError: If the session was not started.
        """
        with self._step:
            return self._engine.keys(text, wait_s)
