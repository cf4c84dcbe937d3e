"""The processes that an outpost starts for the agent: waiting for all of them, also for orphans, and ending them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from t1_env.sandbox.init import STATUS_FORMAT

_NO_CHILDREN_PAUSE_S: Final = 0.05
_KILL_ROUNDS: Final = 200
_ROUND_S: Final = 0.005


class Reaper:
    """Waits for every child of this process, for ever: those it was told of, whose status it passes on, and adopted orphans."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._status_fds: dict[int, int] = {}
        self._early: dict[int, int] = {}
        self._expecting = 0
        threading.Thread(target=self._reap_for_ever, name="t1-reaper", daemon=True).start()

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """While a child is being started whose pid is not known yet, no status is thrown away."""
        with self._lock:
            self._expecting += 1
        try:
            yield
        finally:
            with self._lock:
                self._expecting -= 1
                if not self._expecting:
                    self._early.clear()

    def watch(self, pid: int, status_fd: int) -> None:
        """Write the exit status of ``pid`` to ``status_fd`` and close that, once the time comes; call inside ``expecting``."""
        with self._lock:
            code = self._early.pop(pid, None)
            if code is None:
                self._status_fds[pid] = status_fd
        if code is not None:
            _report(status_fd, code)

    def _reap_for_ever(self) -> None:
        while True:
            try:
                news = os.waitid(os.P_ALL, 0, os.WEXITED)
            except ChildProcessError:
                time.sleep(_NO_CHILDREN_PAUSE_S)
                continue
            if news is None:
                continue
            code = news.si_status if news.si_code == os.CLD_EXITED else 128 + news.si_status
            with self._lock:
                fd = self._status_fds.pop(news.si_pid, None)
                if fd is None and self._expecting:
                    self._early[news.si_pid] = code
            if fd is not None:
                _report(fd, code)


def _report(fd: int, code: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for this one any more
        os.write(fd, STATUS_FORMAT.pack(code))
    os.close(fd)


def kill_session(session: int) -> None:
    """SIGKILL every process of a session until none is left."""
    _kill_until_gone(lambda: [pid for pid, _, sid in _processes() if sid == session])


def kill_descendants(spared: Iterable[int] = ()) -> None:
    """SIGKILL everything that was ever started below this process (it adopts orphans), except ``spared``, until nothing is left."""
    own, kept = os.getpid(), frozenset(spared)
    if own == 1:
        # Everything else in this pid namespace is the agent's. One call hits all at once: not even a fork bomb can outrun it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return

    def found() -> list[int]:
        parents = {pid: parent for pid, parent, _ in _processes()}
        below = []
        for pid in parents:
            ancestor = pid
            while ancestor in parents and ancestor != own:
                ancestor = parents[ancestor]
            if ancestor == own and pid != own and pid not in kept:
                below.append(pid)
        return below

    for pid in found():  # standing still first: what forks faster than we look could otherwise go on for ever
        _signal(pid, signal.SIGSTOP)
    _kill_until_gone(found)


def _kill_until_gone(find: Callable[[], list[int]]) -> None:
    for attempt in range(_KILL_ROUNDS):
        members = find()
        if not members:
            return
        for pid in members:
            _signal(pid, signal.SIGKILL)
        if attempt:
            time.sleep(_ROUND_S)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _processes() -> list[tuple[int, int, int]]:
    """(pid, parent, session) of every process that can be seen and is not a zombie."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # gone meanwhile, or hidden from us
            continue
        if fields[0] not in (b"Z", b"X"):
            found.append((int(name), int(fields[1]), int(fields[3])))
    return found
