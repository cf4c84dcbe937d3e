"""Everything a terminal printed, byte for byte and by offset: the last part of it, in a file that has no name."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from pathlib import Path

from t1_env.errors import ShellError


class OutputLog:
    """A ring on disk. Appending costs O(new bytes); the file grows as needed and is gone with its owner, however that ends.

    Args:
        capacity_bytes: How much is kept; 0 keeps nothing and only counts.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._fd = -1
        self._finalizer: weakref.finalize[[int], OutputLog] | None = None
        self._trouble = ""
        self.start = 0
        self.size = 0
        if capacity_bytes:
            with contextlib.suppress(OSError):  # a full disk: tried again with the first bytes
                self._open()

    def append(self, data: bytes) -> None:
        """Add bytes at the end. A disk that is full costs the log its past, never the session its step."""
        end = self.size + len(data)
        if self._capacity:
            kept = memoryview(data)[-self._capacity :]
            try:
                self._write(kept, end - len(kept))
                self.start = max(self.start, end - self._capacity)
            except OSError as error:
                self._trouble = f"; the log could not be written: {error}"
                self.start = end
        else:
            self.start = end
        self.size = end

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from an offset on, counted from the beginning of the session.

        Args:
            offset: Where to begin.
            size: How many at most; fewer come back at the end.

        Returns:
            The bytes, empty at the end.

        Raises:
            ShellError: If some of them are not kept any more.
        """
        if offset < 0 or size < 0:
            raise ShellError(f"a part of the log is named by two numbers >= 0, got offset {offset!r} and size {size!r}")
        end = min(offset + size, self.size)
        if offset >= end:
            return b""
        if offset < self.start:
            raise ShellError(
                f"byte {offset} of the session's log is not kept any more: expected an offset from {self.start} to {self.size} "
                f"(ShellConfig.log_bytes is {self._capacity}{self._trouble})"
            )
        parts = []
        while offset < end:
            position = offset % self._capacity
            part = os.pread(self._fd, min(end - offset, self._capacity - position), position)
            if not part:
                raise ShellError(f"the session's log ends at byte {offset}, expected {end}: its file was cut off")
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Give the file back; its bytes are gone. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None
        self._fd = -1
        self.start = self.size

    def _open(self) -> None:
        self._fd = _nameless_file()
        self._finalizer = weakref.finalize(self, os.close, self._fd)

    def _write(self, data: memoryview, offset: int) -> None:
        if self._fd < 0:
            self._open()
        while data:
            position = offset % self._capacity
            written = os.pwrite(self._fd, data[: self._capacity - position], position)
            data, offset = data[written:], offset + written


def _nameless_file() -> int:
    directory = tempfile.gettempdir()
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # a filesystem without such files
        fd, path = tempfile.mkstemp(prefix="t1-log-", dir=directory)
        Path(path).unlink()
        return fd
