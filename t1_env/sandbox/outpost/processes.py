"""Processes that an outpost started for somebody at the other side, and their terminals."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

from t1_env.errors import SandboxError
from t1_env.sandbox.outpost import records
from t1_env.sandbox.outpost.frames import Header
from t1_env.sandbox.outpost.watcher import Watcher
from t1_env.sandbox.process import LocalProcess

Reply: TypeAlias = Callable[[Header, bytes], None]
_READ_BYTES: Final = 1 << 16


class HostedProcess:
    """One process; answers come when there is news, without a thread waiting for it.

    Args:
        process: The process.
        watcher: Tells when it has ended or printed something.
    """

    def __init__(self, process: LocalProcess, watcher: Watcher) -> None:
        self._process = process
        self._watcher = watcher
        self._lock = threading.Lock()
        self._released = False
        self._reader: Reply | None = None
        if process.pty_fd is not None:
            os.set_blocking(process.pty_fd, False)

    def serve(self, operation: str, request: Header, blob: bytes, reply: Reply) -> None:
        """Answer a request; returns at once."""
        with self._lock:
            if self._released:
                reply(records.error_to_json(SandboxError("this process was let go of")), b"")
            elif operation == "process.wait":
                self._watcher.once(self._process.fileno(), lambda: reply({"exit_code": self._process.poll()}, b""))
            elif operation == "process.kill":
                self._process.kill(int(request["signal"]))
                reply({}, b"")
            elif operation == "process.hang_up":
                self._hang_up()
                reply({}, b"")
            elif operation == "process.read" and self._process.pty_fd is not None:
                self._reader = reply
                self._watcher.once(self._process.pty_fd, self._pass_on)
            elif operation == "process.write" and self._process.pty_fd is not None:
                reply({"written": self._write(blob)}, b"")
            else:
                reply(records.error_to_json(SandboxError(f"the outpost does not know the request {operation!r}")), b"")

    def release(self) -> None:
        """Forget the process; if it has a terminal it gets a hang-up."""
        with self._lock:
            if not self._released:
                self._released = True
                self._watcher.forget(self._process.fileno())
                self._hang_up()

    def _hang_up(self) -> None:
        if self._process.pty_fd is not None:
            self._watcher.forget(self._process.pty_fd)
            os.close(self._process.pty_fd)
            self._process.pty_fd = None
            reader, self._reader = self._reader, None
            if reader is not None:
                reader({}, b"")

    def _pass_on(self) -> None:
        """Answer the one who reads the terminal."""
        with self._lock:
            reader, self._reader = self._reader, None
            if reader is None or self._process.pty_fd is None:
                return
            try:
                data = os.read(self._process.pty_fd, _READ_BYTES)
            except OSError:  # EIO: the other side of the terminal is closed
                data = b""
        reader({}, data)

    def _write(self, data: bytes) -> int:
        assert self._process.pty_fd is not None
        try:
            return os.write(self._process.pty_fd, data)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: nobody is there any more
            return len(data)
