"""A process inside a local sandbox, as the host process holds it, and the collection of its output."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal as signals
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from t1_env.sandbox import wire
from t1_env.sandbox.init import STATUS_FORMAT

_KILLED: Final = 128 + signals.SIGKILL
_READ_BYTES: Final = 1 << 16


class LocalProcess:
    """A process in a local sandbox; see ``SandboxProcess``."""

    def __init__(self, pid: int, pidfd: int, status_fd: int, pty_fd: int | None) -> None:
        self.pid = pid
        self.pty_fd = pty_fd
        self._pidfd = pidfd
        self._status_fd = status_fd
        self._exit_code: int | None = None
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, wire.close_all, (pidfd, status_fd))

    def poll(self) -> int | None:
        """Exit status if it has ended (128 + n for a signal n), else None. Never blocks."""
        return self.wait(0)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end; None when the time ran out first. The end of the sandbox counts as death by SIGKILL."""
        if self._exit_code is None:
            poller = select.poll()
            poller.register(self._status_fd, select.POLLIN)
            if not poller.poll(None if timeout_s is None else max(timeout_s, 0) * 1000):
                return None
            with self._lock:
                if self._exit_code is None:
                    data = os.read(self._status_fd, STATUS_FORMAT.size)
                    self._exit_code = STATUS_FORMAT.unpack(data)[0] if data else _KILLED
        return self._exit_code

    def kill(self, signal: int = signals.SIGKILL) -> None:
        """Signal the process; a no-op once it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signals.pidfd_send_signal(self._pidfd, signal)

    def fileno(self) -> int:
        """Descriptor that becomes readable when the process has ended (for ``select``); do not read from it."""
        return self._status_fd


def host_pid(pidfd: int) -> int:
    """The pid, in this process's own pid namespace, of what a pidfd stands for; 0 if it has ended."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii").splitlines():
        if line.startswith("Pid:"):
            return max(int(line.split()[1]), 0)
    return 0


def drain(process: LocalProcess, sinks: Mapping[int, bytearray], deadline: float, max_bytes: int) -> bool:
    """Collect output until the process has ended; False if the deadline passed first."""
    with selectors.DefaultSelector() as selector:
        selector.register(process, selectors.EVENT_READ)
        for fd in sinks:
            selector.register(fd, selectors.EVENT_READ)
        while True:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            for key, _ in selector.select(remaining_s):
                if key.fileobj is process:
                    read_ready(sinks, max_bytes)
                    return True
                if not _read_some(key.fd, sinks[key.fd], max_bytes):
                    selector.unregister(key.fd)


def read_ready(sinks: Mapping[int, bytearray], max_bytes: int) -> None:
    """Take what has been written already; the readers are non-blocking."""
    for fd, sink in sinks.items():
        # Bounded: a background process that keeps writing must not keep us here.
        for _ in range(1024):
            try:
                if not _read_some(fd, sink, max_bytes):
                    break
            except BlockingIOError:
                break


def _read_some(fd: int, sink: bytearray, max_bytes: int) -> bool:
    data = os.read(fd, _READ_BYTES)
    sink += data[: max(max_bytes - len(sink), 0)]
    return bool(data)
