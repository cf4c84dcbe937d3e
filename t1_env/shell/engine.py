"""One shell in this process's reach: the engine behind a session.

Imports nothing but the standard library and pyte, so that it also runs at the far end of a connection, beside the bash it drives.
"""

from __future__ import annotations

import os
import time
from typing import Final

from t1_env.errors import SandboxDied, SandboxError, ShellError
from t1_env.protocol import ShellState
from t1_env.sandbox.base import KillsAll
from t1_env.shell.channel import ShellChannel, Spawner
from t1_env.shell.config import TIMEOUT_EXIT_CODE, ShellConfig, ShellResult
from t1_env.shell.dialect import ShellName, dialect_for
from t1_env.shell.driver import Outcome, ShellDriver
from t1_env.shell.interface import LOG_BLOCK_BYTES, OffersShell, ShellEngine
from t1_env.shell.keys import encode_keys
from t1_env.shell.log import OutputLog
from t1_env.shell.output import HeadTail, TextFilter
from t1_env.shell.prompts import is_continuation
from t1_env.shell.repair import Holder
from t1_env.shell.screen import TerminalScreen

__all__ = ["LOG_BLOCK_BYTES", "BashEngine", "OffersShell", "ShellEngine"]

_END_NEWS_S: Final = 2.0
_REPAIR_S: Final = 20.0
_SECOND_TRY_S: Final = 0.5
_NOT_FOUND: Final = 127
_VERSIONS: Final[dict[ShellName, str]] = {"bash": "bash 5.0 or later", "sh": "a POSIX shell such as dash", "zsh": "zsh 5.8 or later"}


class BashEngine:
    """A persistent interactive shell whose terminal and descriptors this process holds: bash, or ``sh`` and ``zsh`` in plain mode.

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
        self._log = OutputLog(0)
        self._log_start = 0  # of the step that comes next
        self._dialect = dialect_for(config.shell)
        self._started = False
        self._owner = os.getpid()
        self._driver: ShellDriver | None = None  # also None while the sandbox cannot run a shell
        self._exports = b""  # of a shell that could not be replaced yet
        self._state = ShellState.SHELL_EXITED
        self._cwd = ""
        self._typed = ""
        self._trouble = ""

    # ------------------------------------------------------------------------------------------------------------------ life cycle
    def start(self) -> None:
        """Start the shell and wait until it answers.

        Raises:
            SandboxError: If the sandbox cannot start a process.
            ShellError: If the shell is missing or does not come up.
        """
        if self._started:
            raise ShellError("the session is already started: close it first")
        self._log = OutputLog(self._config.log_bytes)
        self._owner = os.getpid()
        try:
            self._driver = self._open(cwd=self._config.cwd, exports=b"")
        except BaseException:
            self._log.close()
            raise
        self._log_start = self._log.size
        self._started = True
        self._state = ShellState.IDLE

    def close(self) -> None:
        """End the shell. Background jobs end with the sandbox. Idempotent."""
        if self._driver is not None and self._owner == os.getpid():
            self._driver.channel.close()
        self._driver = None
        self._log.close()
        self._started = False
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
        self._require_started()
        return self._driver.channel.process.pid if self._driver is not None else 0

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
        self._require_started()
        if self._driver is not None:
            self._driver.channel.resize(rows, cols)
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
            ShellError: If the session was not started.
        """
        started = time.monotonic()
        if not self._has_shell():
            return self._without_shell(started)
        driver = self._live()
        self._typed = ""
        deadline = started + (self._config.timeout_s if timeout_s is None else timeout_s)
        if not self._is_there(driver):
            return self._ended(started)
        if driver.busy:
            driver.type_keys(text.replace("\n", "\r").encode("utf-8", "replace") + b"\r", deadline)
        else:
            driver.begin(text)
        try:
            outcome = self._wait(driver, deadline, self._config.quiet_timeout_s)
        except KeyboardInterrupt:
            # Whoever called turns away from this command (Ctrl-C in a notebook). Left running, it would be given the next one as input.
            if driver.interrupt() is not Outcome.FINISHED:
                driver.channel.process.kill()  # the next step puts a new shell in its place
            raise
        timed_out = outcome in (Outcome.EXPIRED, Outcome.QUIET)
        if timed_out:
            outcome = driver.interrupt()
            if outcome is Outcome.LOST and self._mend(driver) and not driver.busy:
                outcome = Outcome.FINISHED
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
            ShellError: If the session was not started.
        """
        started = time.monotonic()
        if not self._has_shell():
            return self._without_shell(started)
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
        return self._conclude(self._wait(driver, deadline), started)

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
    def _require_started(self) -> None:
        if not self._started:
            raise ShellError("the session is not started: call start() first (or use it as a context manager)")

    def _live(self) -> ShellDriver:
        assert self._driver is not None
        return self._driver

    def _has_shell(self) -> bool:
        """Whether there is a shell; one that could not be replaced when it ended is replaced now, if that has become possible."""
        self._require_started()
        if self._owner != os.getpid():  # a forked child has a copy of this object, not a shell
            self._driver, self._state = None, ShellState.SANDBOX_DEAD
        if self._driver is None and self._state is not ShellState.SANDBOX_DEAD:
            self._state, _ = self._new_shell(self._exports)
        return self._driver is not None

    def _without_shell(self, started: float) -> ShellResult:
        if self._state is ShellState.SANDBOX_DEAD:
            return self._result(started, None, ShellState.SANDBOX_DEAD)
        self._kept.append(self._trouble)
        return self._result(started, _NOT_FOUND, ShellState.SHELL_EXITED)

    def _is_there(self, driver: ShellDriver) -> bool:
        if self._state is ShellState.SANDBOX_DEAD or not driver.catch_up():
            return False
        if driver.broken:  # after the last command, or what is left of it in the background, closed a descriptor
            self._mend(driver)
        return True

    def _wait(self, driver: ShellDriver, deadline: float, quiet_s: float | None = None) -> Outcome:
        outcome = driver.wait(deadline, quiet_s=quiet_s)
        if outcome is Outcome.LOST and self._mend(driver):
            outcome = driver.wait(deadline, quiet_s=quiet_s) if driver.busy else Outcome.FINISHED
        return outcome

    def _conclude(self, outcome: Outcome, started: float, *, timed_out: bool = False) -> ShellResult:
        driver = self._live()
        match outcome:
            case Outcome.FINISHED:
                assert driver.record is not None
                self._cwd = driver.record.cwd
                exit_code = TIMEOUT_EXIT_CODE if timed_out else driver.record.exit_code
                return self._result(started, exit_code, ShellState.IDLE, timed_out=timed_out)
            case Outcome.WAITING:
                return self._result(started, None, self._waiting_state(driver))
            case Outcome.ENDED:
                return self._ended(started, timed_out=timed_out)
            case _ if timed_out or outcome is Outcome.LOST:  # it did not come back from the interrupts, or from its own prompt
                return self._replaced(started, TIMEOUT_EXIT_CODE if timed_out else None, timed_out=timed_out)
            case _:
                state = ShellState.FULLSCREEN if self._text.alternate else ShellState.RUNNING
                return self._result(started, None, state)

    def _waiting_state(self, driver: ShellDriver) -> ShellState:
        """Somebody reads the terminal: that is certain. What the program calls its prompt refines it, where the program is known."""
        if self._text.alternate:
            return ShellState.FULLSCREEN
        if is_continuation(driver.foreground_program(), self._text.unfinished_line):
            return ShellState.CONTINUATION
        return ShellState.WAITING_FOR_INPUT

    def _ended(self, started: float, *, timed_out: bool = False) -> ShellResult:
        driver = self._live()
        if self._state is ShellState.SANDBOX_DEAD:
            return self._result(started, None, ShellState.SANDBOX_DEAD)
        driver.drain()
        exit_code = driver.channel.exit_code(_END_NEWS_S)
        return self._replaced(started, TIMEOUT_EXIT_CODE if timed_out else exit_code, timed_out=timed_out)

    def _replaced(self, started: float, exit_code: int | None, *, timed_out: bool) -> ShellResult:
        """Put a new shell with the same directory and exported variables in the place of one that is gone or lost."""
        driver = self._live()
        visible = self._text.flush()
        exports = driver.channel.exports()
        self._cwd = driver.left_cwd if driver.left_cwd is not None else self._cwd
        driver.channel.close()
        self._driver = None
        self._kept.append(visible)
        output, log_end = self._kept.take(), self._log.size
        self._text = TextFilter(keep_ansi=self._config.keep_ansi)
        self._screen.feed(b"\x1b[?1049l")
        self._state, exit_code = self._new_shell(exports, exit_code)
        log_start, self._log_start = self._log_start, self._log.size
        return ShellResult(*output, exit_code, self._state, self.cwd, timed_out, time.monotonic() - started, log_start, log_end)

    def _new_shell(self, exports: bytes, exit_code: int | None = None) -> tuple[ShellState, int | None]:
        """Start a shell in the place of one that is gone, with its directory and exported variables.

        What keeps a sandbox that lives from running one is its agent's doing (no process or memory left, the program deleted): that is
        not an error, and it is tried again with the next step.
        """
        self._exports = exports
        for last in (False, True):
            try:
                if not self._sandbox.alive:
                    raise SandboxDied("the sandbox is gone")
                self._driver = self._open(cwd=self._cwd, exports=exports)
                return ShellState.SHELL_EXITED, exit_code
            except SandboxDied:
                return ShellState.SANDBOX_DEAD, None
            except (SandboxError, ShellError) as error:
                self._trouble = f"[no shell can be started here: {error}]\n"
                if not last and not self._make_room():
                    time.sleep(_SECOND_TRY_S)
        return ShellState.SHELL_EXITED, exit_code

    def _make_room(self) -> bool:
        """End the processes that leave no room for a shell; False where the sandbox cannot."""
        if not isinstance(self._sandbox, KillsAll):
            return False
        try:
            self._sandbox.kill_all()
        except SandboxError:  # what of it matters shows in the next try
            return False
        return True

    def _mend(self, driver: ShellDriver) -> bool:
        """Bring back a bash that sits at its prompt because it closed its side of the channels."""
        if self._dialect.name != "bash":
            return False
        try:
            holder = Holder(self._sandbox, _REPAIR_S)
        except (SandboxError, OSError):  # no room for a helper: the shell is replaced
            return False
        try:
            driver.await_prompt(_REPAIR_S)
            line = holder.line_for(driver.channel)
            return driver.reconnect(line, holder.take(), _REPAIR_S)
        finally:
            holder.close()

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
        channel = ShellChannel.open(self._sandbox, self._dialect, rows=rows, cols=cols, env=self._config.env, cwd=cwd)
        driver = ShellDriver(channel, self._config, self._text, self._kept, self._screen, self._log)
        try:
            self._await_ready(driver)
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
        if outcome is Outcome.FINISHED and driver.record is not None:
            self._cwd = driver.record.cwd
            return
        self._kept.append(self._text.flush())
        output, code, name = self._kept.take()[0].strip(), driver.channel.exit_code(), self._dialect.name
        if code == _NOT_FOUND:
            raise ShellError(f"{name} is not installed in this sandbox: {self._advice()}")
        reason = f"ended with status {code}" if code is not None else f"did not answer within {self._config.start_timeout_s} s"
        raise ShellError(f"{name} {reason} while starting; it printed {output[-500:]!r}. Expected {_VERSIONS[name]}")

    def _advice(self) -> str:
        other: ShellName = "sh" if self._config.shell == "bash" else "bash"
        process = self._sandbox.spawn([other, "-c", "exit 0"])
        found = process.wait(self._config.start_timeout_s) == 0
        return f"use shell={other!r}, which is" if found else f"expected it, or {other}, in the PATH"
