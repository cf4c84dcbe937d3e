"""An outpost that is a process of this machine, spoken to through its standard input and output."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from t1_env.errors import SandboxUnavailable, TransportLost

_READ_BYTES: Final = 1 << 18
_END_TIMEOUT_S: Final = 10.0
_STUCK_TIMEOUT_S: Final = 1.0


class PipeStream:
    """A ``Stream`` to a local process: an outpost of this machine, or a program that leads to one elsewhere.

    Args:
        argv: Command line of the process.
        env: Its whole environment; None inherits.

    Raises:
        SandboxUnavailable: The program cannot be started.
    """

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        try:
            self._process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=None if env is None else dict(env),
                start_new_session=True,  # ^C on the terminal is for the host process
            )
        except OSError as error:
            raise SandboxUnavailable(f"cannot start the outpost {argv[0]!r}: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._out, self._in = self._stdin.fileno(), self._stdout.fileno()
        self._closed = False
        self._sending = threading.Lock()
        self._closing = threading.Lock()

    @property
    def pid(self) -> int:
        """Process id of the outpost."""
        return self._process.pid

    def send(self, data: bytes) -> None:
        """Send all of it; see ``Stream``."""
        view = memoryview(data)
        with self._sending:
            try:
                while view and not self._closed:
                    view = view[os.write(self._out, view) :]
            except OSError as error:
                raise TransportLost(f"the outpost's process is gone: {error.strerror}") from error
        if view:
            raise TransportLost("the connection to the outpost was closed")

    def receive(self) -> bytes:
        """Wait for bytes; empty at the end."""
        if self._closed:
            return b""
        try:
            return os.read(self._in, _READ_BYTES)
        except OSError as error:
            raise TransportLost(f"the outpost's process is gone: {error.strerror}") from error

    def close(self) -> None:
        """End the process: it goes when its input ends, or is killed. Idempotent, never raises."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            # A sender that is stuck, because the outpost stands still, keeps the descriptor until the process is killed.
            if self._sending.acquire(timeout=_STUCK_TIMEOUT_S):
                self._stdin.close()
                self._sending.release()
            else:
                self._process.kill()
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            with self._sending:
                self._stdin.close()
            # Only now: the thread that receives was woken up by the end of the process.
            self._stdout.close()

    def abandon(self) -> None:
        """In a forked child: close the copies of the parent's descriptors and leave the outpost alone."""
        self._closed = True
        for file in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                file.close()
        self._process.returncode = 0  # not ours to wait for
