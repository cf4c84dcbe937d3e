"""A shell at the far end of a connection: the engine runs there, this stands for it here."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from t1_env.errors import SandboxDied, ShellError, T1Error
from t1_env.protocol import ShellState
from t1_env.sandbox.outpost import records
from t1_env.sandbox.outpost.client import OutpostClient
from t1_env.sandbox.outpost.shells import screen_from_blob
from t1_env.shell.config import ShellConfig, ShellResult

_SLACK_S: Final = 120.0
_CLOSE_TIMEOUT_S: Final = 10.0


class RemoteShell:
    """A ``ShellEngine`` whose bash and driver are over there; each step is one request and one answer.

    The screen travels along with the answer as long as somebody looked at the one before, else only when it is asked for.

    Args:
        client: The conversation.
        sandbox: Number of the sandbox.
        config: How to behave.
    """

    def __init__(self, client: OutpostClient, sandbox: int, config: ShellConfig) -> None:
        self._client = client
        self._sandbox = sandbox
        self._config = config
        self._number: int | None = None
        self._state = ShellState.SHELL_EXITED
        self._cwd = ""
        self._size = (config.rows, config.cols)
        self._screen: bytes | None = None
        self._cursor: tuple[int, int] | None = None
        self._looked = False
        self._log = (0, 0)

    def start(self) -> None:
        """Start the shell and wait until it answers; see ``BashEngine.start``."""
        if self._number is not None:
            raise ShellError("the session is already started: close it first")
        opened, _ = self._client.request("shell.open", sandbox=self._sandbox, config=records.shell_config_to_json(self._config))
        self._number = int(opened["shell"])
        try:
            self._ask("shell.start", self._config.start_timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the shell. Idempotent."""
        if self._number is not None:
            # gone with its sandbox, or queued behind a step that somebody else waits for
            with contextlib.suppress(T1Error, TimeoutError):
                self._client.submit("shell.close", sandbox=self._sandbox, shell=self._number).result(_CLOSE_TIMEOUT_S)
            self._number = None
        self._state = ShellState.SHELL_EXITED

    # ----------------------------------------------------------------------------------------------------------------------- state
    @property
    def state(self) -> ShellState:
        """What the terminal was doing when the last step returned."""
        return self._state

    @property
    def cwd(self) -> str:
        """Working directory of the shell after its last finished command."""
        return self._cwd

    @property
    def pid(self) -> int:
        """0: the shell is not a process of this host."""
        self._live()
        return 0

    @property
    def size(self) -> tuple[int, int]:
        """(rows, cols) of the terminal."""
        return self._size

    @property
    def cursor(self) -> tuple[int, int]:
        """(row, column) of the cursor, from 0."""
        self._look()
        assert self._cursor is not None
        return self._cursor

    def screen_codes(self) -> bytes:
        """The terminal's picture: one little-endian uint32 code point for each cell, row by row."""
        self._look()
        assert self._screen is not None
        return self._screen

    def resize(self, rows: int, cols: int) -> None:
        """Change the size of the terminal."""
        self._ask("shell.resize", 0, rows=rows, cols=cols)

    @property
    def log_start(self) -> int:
        """Offset of the first byte of the log that is still kept."""
        return self._log[0]

    @property
    def log_size(self) -> int:
        """How many bytes the terminal had printed when the last step returned."""
        return self._log[1]

    def log(self, offset: int, size: int) -> bytes:
        """Bytes of the log, which is kept over there; see ``ShellEngine.log``."""
        return self._client.request("shell.log", sandbox=self._sandbox, shell=self._live(), offset=offset, size=size)[1]

    # ----------------------------------------------------------------------------------------------------------------------- steps
    def run(self, text: str, timeout_s: float | None = None) -> ShellResult:
        """Run a command; see ``BashEngine.run``."""
        limit_s = self._config.timeout_s if timeout_s is None else timeout_s
        return self._step("shell.run", limit_s, text=text, timeout_s=timeout_s)

    def keys(self, text: str, wait_s: float = 1.0) -> ShellResult:
        """Type keys; see ``BashEngine.keys``."""
        return self._step("shell.keys", wait_s, text=text, wait_s=wait_s)

    def _step(self, operation: str, limit_s: float, **fields: Any) -> ShellResult:
        self._live()
        if self._state is ShellState.SANDBOX_DEAD:
            return self._dead()
        looked, self._looked = self._looked, False
        try:
            header = self._ask(operation, limit_s, screen=looked, **fields)
        except SandboxDied:
            self._state = ShellState.SANDBOX_DEAD
            return self._dead()
        return records.shell_result_from_json(header["result"])

    def _dead(self) -> ShellResult:
        return ShellResult("", 0, 0, None, ShellState.SANDBOX_DEAD, self._cwd, timed_out=False, seconds=0.0)

    # ------------------------------------------------------------------------------------------------------------------- internals
    def _live(self) -> int:
        if self._number is None:
            raise ShellError("the session is not started: call start() first (or use it as a context manager)")
        return self._number

    def _look(self) -> None:
        self._looked = True
        if self._screen is None:
            if self._number is None:
                rows, cols = self._size
                self._screen, self._cursor = (32).to_bytes(4, "little") * (rows * cols), (0, 0)
            else:
                self._ask("shell.screen", 0, screen=True)

    def _ask(self, operation: str, limit_s: float, *, screen: bool = False, **fields: Any) -> dict[str, Any]:
        config = self._config
        allowed_s = limit_s + config.interrupt_grace_s + config.quit_grace_s + config.kill_grace_s + config.start_timeout_s + _SLACK_S
        header, blob = self._client.request(
            operation, answer_timeout_s=allowed_s, sandbox=self._sandbox, shell=self._live(), screen=screen, **fields
        )
        self._state = ShellState(header["state"])
        self._cwd = header["cwd"]
        self._size = (header["size"][0], header["size"][1])
        self._log = (header["log"][0], header["log"][1])
        self._screen = screen_from_blob(blob) if screen else None
        self._cursor = (header["cursor"][0], header["cursor"][1]) if screen else None
        return header
