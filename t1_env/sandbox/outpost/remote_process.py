"""A process at the far end of a connection, as this side holds it."""

from __future__ import annotations

import contextlib
import signal as signals
import socket
import threading
import time
import weakref
from typing import Any, Final

from t1_env.errors import T1Error
from t1_env.sandbox.outpost.client import OutpostClient, Pending

_READ_BYTES: Final = 1 << 16
_RETRY_S: Final = 0.005
_KILLED: Final = 128 + signals.SIGKILL


class RemoteProcess:
    """A process in a remote sandbox; see ``SandboxProcess``. Its pid means nothing here and is 0.

    Args:
        client: The conversation.
        sandbox: Number of the sandbox.
        number: Number of the process.
        terminal: Whether it has one.
    """

    def __init__(self, client: OutpostClient, sandbox: int, number: int, *, terminal: bool) -> None:
        self.pid = 0
        self.pty_fd: int | None = None
        self._client = client
        self._fields: dict[str, Any] = {"sandbox": sandbox, "process": number}
        self._end = client.submit("process.wait", **self._fields)
        self._exit_code: int | None = None
        if terminal:
            ours, theirs = socket.socketpair()
            self.pty_fd = theirs.detach()
            _Pump(client, self._fields, ours).start()
        weakref.finalize(self, _release, client, self._fields, self._end)

    def poll(self) -> int | None:
        """Exit status if it has ended (128 + n for a signal n), else None. Never blocks."""
        return self.wait(0)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end; None when the time ran out first. The end of the sandbox counts as death by SIGKILL."""
        if self._exit_code is None:
            try:
                self._exit_code = int(self._end.result(timeout_s)[0]["exit_code"])
            except TimeoutError:
                return None
            except T1Error:
                self._exit_code = _KILLED
        return self._exit_code

    def kill(self, signal: int = signals.SIGKILL) -> None:
        """Signal the process; a no-op once it has ended."""
        with contextlib.suppress(T1Error):  # gone with the sandbox
            self._client.request("process.kill", signal=int(signal), **self._fields)


def _release(client: OutpostClient, fields: dict[str, Any], end: Pending) -> None:
    end.forget()
    with contextlib.suppress(T1Error):
        client.submit("process.release", **fields)


class _Pump:
    """Carries a terminal's bytes between a socket here and the terminal there."""

    def __init__(self, client: OutpostClient, fields: dict[str, Any], sock: socket.socket) -> None:
        self._client = client
        self._fields = fields
        self._sock = sock

    def start(self) -> None:
        threading.Thread(target=self._carry_output, name="t1-terminal-out", daemon=True).start()
        threading.Thread(target=self._carry_input, name="t1-terminal-in", daemon=True).start()

    def _carry_output(self) -> None:
        with contextlib.suppress(T1Error, OSError):
            while data := self._client.submit("process.read", **self._fields).result()[1]:
                self._sock.sendall(data)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _carry_input(self) -> None:
        with contextlib.suppress(T1Error, OSError):
            while data := self._sock.recv(_READ_BYTES):
                while data:
                    written = int(self._client.request("process.write", data, **self._fields)[0]["written"])
                    data = data[written:]
                    if data:
                        time.sleep(_RETRY_S)
        with contextlib.suppress(T1Error):
            self._client.submit("process.hang_up", **self._fields)
        self._sock.close()
