"""One bash in this process's reach: the engine behind a session.

Imports nothing but the standard library and pyte, so that it also runs at the far end of a connection, beside the bash it drives.
"""

from __future__ import annotations

import os
import time
from typing import Final, Protocol, runtime_checkable

from t1_env.errors import SandboxDied, SandboxError, ShellError
from t1_env.protocol import ShellState
from t1_env.shell.channel import ShellChannel, Spawner
from t1_env.shell.config import TIMEOUT_EXIT_CODE, ShellConfig, ShellResult
from t1_env.shell.driver import Outcome, ShellDriver
from t1_env.shell.keys import encode_keys
from t1_env.shell.log import OutputLog
from t1_env.shell.output import HeadTail, TextFilter
from t1_env.shell.screen import TerminalScreen

_END_NEWS_S: Final = 2.0
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


class BashEngine:
    """A persistent interactive bash whose terminal and descriptors this process holds.

    Args:
        sandbox: A started sandbox (anything with its ``spawn`` and ``alive``).
        config: How to behave.
    """

    def __init__(self, sandbox: Spawner, config: ShellConfig) -> None:
        self._sandbox = sandbox
        self._config = config
        self._size = (self._config.rows, self._config.cols)
        self._text = TextFilter(keep_ansi=self._config.keep_ansi)
        self._kept = HeadTail(self._config.max_output_bytes)
        self._screen = TerminalScreen(*self._size)
        self._log = OutputLog(config.log_bytes)
        self._log_start = 0  # of the step that comes next
        self._driver: ShellDriver | None = None
        self._state = ShellState.SHELL_EXITED
        self._cwd = ""
        self._typed = ""

    # ------------------------------------------------------------------------------------------------------------------ life cycle
    def start(self) -> None:
        """Start the shell and wait until it answers.

        Raises:
            SandboxError: If the sandbox cannot start a process.
            ShellError: If bash is missing or does not come up.
        """
        if self._driver is not None:
            raise ShellError("the session is already started: close it first")
        self._log = OutputLog(self._config.log_bytes)
        self._driver = self._open(cwd=self._config.cwd, exports=b"")
        self._log_start = self._log.size
        self._state = ShellState.IDLE

    def close(self) -> None:
        """End the shell. Background jobs end with the sandbox. Idempotent."""
        if self._driver is not None:
            self._driver.channel.close()
            self._driver = None
        self._log.close()
        self._state = ShellState.SHELL_EXITED

    # ----------------------------------------------------------------------------------------------------------------------- state
    @property
    def state(self) -> ShellState:
        """What the terminal was doing when the last step returned."""
        return self._state

    @property
    def cwd(self) -> str:
        """Working directory of the shell after its last finished command."""
        return os.fsencode(self._cwd).decode("utf-8", "replace")

    @property
    def pid(self) -> int:
        """Process id of the shell as the host sees it; 0 if unknown."""
        return self._live().channel.process.pid

    @property
    def size(self) -> tuple[int, int]:
        """(rows, cols) of the terminal."""
        return self._size

    def screen_codes(self) -> bytes:
        """The terminal's picture.

        Returns:
            One little-endian uint32 code point for each cell, row by row; blank cells are 32.
        """
        return self._screen.codes()

    @property
    def cursor(self) -> tuple[int, int]:
        """(row, column) of the cursor, from 0."""
        return self._screen.cursor

    def resize(self, rows: int, cols: int) -> None:
        """Change the size of the terminal, as a window does."""
        self._live().channel.resize(rows, cols)
        self._screen.resize(rows, cols)
        self._size = (rows, cols)

    @property
    def log_start(self) -> int:
        """Offset of the first byte of the log that is still kept."""
        return self._log.start

    @property
    def log_size(self) -> int:
        """How many bytes the terminal has printed: the offset of the end of the log."""
        return self._log.size

    def log(self, offset: int, size: int) -> bytes:
        """Bytes of the log from an offset on; fewer than asked for at its end.

        Raises:
            ShellError: If some of them are not kept any more.
        """
        return self._log.read(offset, size)

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
            ShellError: If the session was not started, or a shell that ended could not be replaced.
        """
        started = time.monotonic()
        driver = self._live()
        self._typed = ""
        deadline = started + (self._config.timeout_s if timeout_s is None else timeout_s)
        if not self._is_there(driver):
            return self._ended(started)
        if driver.busy:
            driver.type_keys(text.replace("\n", "\r").encode("utf-8", "replace") + b"\r", deadline)
        else:
            driver.begin(text)
        outcome = driver.wait(deadline, quiet_s=self._config.quiet_timeout_s)
        timed_out = outcome in (Outcome.EXPIRED, Outcome.QUIET)
        if timed_out:
            outcome = driver.interrupt()
        return self._conclude(outcome, started, timed_out=timed_out)

    def keys(self, text: str, wait_s: float = 1.0) -> ShellResult:
        """Type keys and wait for what comes of them. Nothing is ended when the time is up.

        At the shell's prompt (state ``idle``) text is collected, and Enter (the key, or a newline in the text) runs it as a command.

        Args:
            text: Key name in tmux notation (``C-c``, ``Enter``, ``Up``) or literal text.
            wait_s: How long to wait for the command to finish or the program to want more input.

        Returns:
            What happened; state ``running`` if neither was the case in time.

        Raises:
            ShellError: If the session was not started, or a shell that ended could not be replaced.
        """
        started = time.monotonic()
        driver = self._live()
        deadline = started + wait_s
        if not self._is_there(driver):
            return self._ended(started)
        if driver.busy:
            driver.type_keys(encode_keys(text, application_cursor=self._text.application_cursor), deadline)
        else:
            command = self._type_at_prompt(text)
            if command is None:
                driver.drain()
                return self._result(started, None, ShellState.IDLE)
            driver.begin(command)
        return self._conclude(driver.wait(deadline), started)

    def _type_at_prompt(self, text: str) -> str | None:
        """Edit the line at the prompt; returns the command once Enter was pressed on one."""
        match text:
            case "Enter":
                text = "\n"
            case "BSpace":
                self._typed = self._typed[:-1]
                return None
            case "C-c" | "C-u":
                self._typed = ""
                return None
            case "C-d":
                return None if self._typed else "exit"
            case "Space":
                text = " "
            case "Tab":
                text = "\t"
            case _ if encode_keys(text) != text.encode("utf-8", "replace"):
                return None  # another key: nothing to move or complete here
        *lines, self._typed = (self._typed + text.replace("\r", "\n")).split("\n")
        command = "\n".join(lines)
        return command if command.strip() else None

    # --------------------------------------------------------------------------------------------------------------------- outcomes
    def _live(self) -> ShellDriver:
        if self._driver is None:
            raise ShellError("the session is not started: call start() first (or use it as a context manager)")
        return self._driver

    def _is_there(self, driver: ShellDriver) -> bool:
        return self._state is not ShellState.SANDBOX_DEAD and driver.catch_up()

    def _conclude(self, outcome: Outcome, started: float, *, timed_out: bool = False) -> ShellResult:
        driver = self._live()
        match outcome:
            case Outcome.FINISHED:
                assert driver.record is not None
                self._cwd = driver.record.cwd
                exit_code = TIMEOUT_EXIT_CODE if timed_out else driver.record.exit_code
                return self._result(started, exit_code, ShellState.IDLE, timed_out=timed_out)
            case Outcome.WAITING:
                state = ShellState.FULLSCREEN if self._text.alternate else ShellState.WAITING_FOR_INPUT
                return self._result(started, None, state)
            case Outcome.ENDED:
                return self._ended(started, timed_out=timed_out)
            case _ if timed_out or outcome is Outcome.LOST:  # it did not come back from the interrupts, or from its own prompt
                return self._replaced(started, TIMEOUT_EXIT_CODE if timed_out else None, timed_out=timed_out)
            case _:
                state = ShellState.FULLSCREEN if self._text.alternate else ShellState.RUNNING
                return self._result(started, None, state)

    def _ended(self, started: float, *, timed_out: bool = False) -> ShellResult:
        driver = self._live()
        if self._state is ShellState.SANDBOX_DEAD:
            return self._result(started, None, ShellState.SANDBOX_DEAD)
        driver.drain()
        exit_code = driver.channel.exit_code(_END_NEWS_S)
        return self._replaced(started, TIMEOUT_EXIT_CODE if timed_out else exit_code, timed_out=timed_out)

    def _replaced(self, started: float, exit_code: int | None, *, timed_out: bool) -> ShellResult:
        """Put a new shell with the same directory and exported variables in the place of one that is gone or lost."""
        old = self._live().channel
        visible = self._text.flush()
        exports = old.exports()
        old.close()
        self._kept.append(visible)
        output, log_end = self._kept.take(), self._log.size
        self._text = TextFilter(keep_ansi=self._config.keep_ansi)
        self._screen.feed(b"\x1b[?1049l")
        try:
            if not self._sandbox.alive:
                raise SandboxDied("the sandbox is gone")
            self._driver = self._open(cwd=self._cwd, exports=exports)
            state = ShellState.SHELL_EXITED
        except SandboxDied:
            state, exit_code = ShellState.SANDBOX_DEAD, None
        except SandboxError as error:
            raise ShellError(f"the shell ended and the sandbox could not start a new one: {error}") from error
        self._state = state
        log_start, self._log_start = self._log_start, self._log.size
        return ShellResult(*output, exit_code, state, self.cwd, timed_out, time.monotonic() - started, log_start, log_end)

    def _result(self, started: float, exit_code: int | None, state: ShellState, *, timed_out: bool = False) -> ShellResult:
        self._state = state
        if state is ShellState.IDLE and self._text.alternate:  # a full-screen program was killed: back to the main screen
            self._text.alternate = False
            self._screen.feed(b"\x1b[?1049l")
        self._kept.append(self._text.flush(final=state is ShellState.IDLE))
        log_start, self._log_start = self._log_start, self._log.size
        seconds = time.monotonic() - started
        return ShellResult(*self._kept.take(), exit_code, state, self.cwd, timed_out, seconds, log_start, self._log_start)

    def _open(self, cwd: str | None, exports: bytes) -> ShellDriver:
        rows, cols = self._size
        channel = ShellChannel.open(self._sandbox, rows=rows, cols=cols, env=self._config.env, cwd=cwd)
        driver = ShellDriver(channel, self._config, self._text, self._kept, self._screen, self._log)
        try:
            self._await_ready(driver)
            channel.save_termios()
            if exports:
                driver.begin(exports.decode("utf-8", "surrogateescape"))
                self._await_ready(driver)
                driver.record = None  # its status is nobody's business
        except ShellError:
            channel.close()
            raise
        self._text.flush()
        self._kept.take()
        return driver

    def _await_ready(self, driver: ShellDriver) -> None:
        outcome = driver.wait(time.monotonic() + self._config.start_timeout_s, for_input=False)
        if outcome is not Outcome.FINISHED or driver.record is None:
            self._kept.append(self._text.flush())
            output, code = self._kept.take()[0].strip(), driver.channel.exit_code()
            reason = f"ended with status {code}" if code is not None else f"did not answer within {self._config.start_timeout_s} s"
            raise ShellError(f"bash {reason} while starting; it printed {output[-500:]!r}. Is bash >= 5.0 installed in the sandbox?")
        self._cwd = driver.record.cwd
