"""One thread that waits for many descriptors."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable


class Watcher:
    """Calls back once when a descriptor becomes readable or is hung up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._poll = select.epoll()
        threading.Thread(target=self._watch, name="t1-watcher", daemon=True).start()

    def once(self, fd: int, callback: Callable[[], None]) -> None:
        """Call ``callback``, which must not raise or wait, when ``fd`` is readable; replaces an earlier call for the same descriptor."""
        with self._lock:
            known = fd in self._callbacks
            self._callbacks[fd] = callback
            if not known:
                self._poll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)

    def forget(self, fd: int) -> None:
        """Do not call; to be called before ``fd`` is closed."""
        with self._lock:
            if self._callbacks.pop(fd, None) is not None:
                with contextlib.suppress(OSError):
                    self._poll.unregister(fd)

    def _watch(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                with self._lock:
                    callback = self._callbacks.pop(fd, None)
                    with contextlib.suppress(OSError):
                        self._poll.unregister(fd)
                if callback is not None:
                    callback()
