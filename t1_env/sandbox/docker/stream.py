"""The connection to the standard streams of a container's first process, as the daemon's attach socket gives it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, Final

from t1_env.errors import TransportLost

_HEADER: Final = struct.Struct(">BxxxI")
_STDOUT: Final = 1
_STDERR: Final = 2
_READ_BYTES: Final = 1 << 16
_STDERR_KEPT_BYTES: Final = 1 << 14


class AttachStream:
    """Standard input and output of a container's first process; see ``Stream``. Its standard error is kept aside, its end only.

    What the daemon sends is cut into frames of ``kind, 3 zero bytes, size (big-endian), data``; they carry both output streams.

    Args:
        attachment: What the SDK's ``attach_socket`` returned.
    """

    def __init__(self, attachment: Any) -> None:
        self._attachment = attachment  # keeps the HTTP response alive, which owns the socket
        self._socket = getattr(attachment, "_sock", attachment)
        self._socket.settimeout(None)
        self._pending = bytearray()
        self._kind = 0
        self._left_bytes = 0
        self._stderr = bytearray()
        self._closed = threading.Event()
        self.expired = False

    @contextlib.contextmanager
    def limited(self, timeout_s: float) -> Iterator[None]:
        """Close the connection, and set ``expired``, when the block takes longer than ``timeout_s``."""

        def expire() -> None:
            self.expired = True
            self.close()

        timer = threading.Timer(timeout_s, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @property
    def stderr(self) -> str:
        """The end of what the process wrote to its standard error."""
        return bytes(self._stderr).decode("utf-8", "replace")

    def send(self, data: bytes) -> None:
        """Send all of it.

        Raises:
            TransportLost: The connection is gone.
        """
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise TransportLost(f"the Docker daemon's connection to the sandbox is gone: {error}") from error

    def receive(self) -> bytes:
        """Wait for bytes and return at least one; empty at the end.

        Raises:
            TransportLost: The connection broke.
        """
        while True:
            data = self._next_output()
            if data:
                return data
            try:
                received = self._socket.recv(_READ_BYTES)
            except OSError as error:
                if self._closed.is_set():
                    return b""
                raise TransportLost(f"the Docker daemon's connection to the sandbox broke: {error}") from error
            if not received:
                return b""
            self._pending += received

    def close(self) -> None:
        """End the connection; the container's standard input ends with it. Idempotent, never raises."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes up whoever is in recv
        self._release()

    def abandon(self) -> None:
        """In a forked child: close this process's copy of the connection and leave the container to the parent."""
        self._closed.set()
        self._release()

    def _release(self) -> None:
        # From the outside in: the HTTP response owns the file that owns the socket.
        for owner in (getattr(self._attachment, "_response", None), self._attachment, self._socket):
            if owner is not None:
                with contextlib.suppress(OSError, ValueError, AttributeError):  # closed with its owner
                    owner.close()

    def _next_output(self) -> bytes:
        """Standard output among the bytes that have arrived; empty if there is none."""
        while self._pending:
            if self._left_bytes == 0:
                if len(self._pending) < _HEADER.size:
                    break
                self._kind, self._left_bytes = _HEADER.unpack_from(self._pending)
                del self._pending[: _HEADER.size]
                continue
            part = bytes(self._pending[: self._left_bytes])
            del self._pending[: len(part)]
            self._left_bytes -= len(part)
            if self._kind == _STDOUT:
                return part
            if self._kind == _STDERR:
                self._stderr += part
                del self._stderr[:-_STDERR_KEPT_BYTES]
        return b""
