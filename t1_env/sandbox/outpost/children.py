"""The processes that an outpost starts for the agent: waiting for all of them, also for orphans, and ending them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from t1_env.sandbox import wire
from t1_env.sandbox.init import STATUS_FORMAT

_NO_CHILDREN_PAUSE_S: Final = 1.0
_OOM_SCORE: Final = b"500"
_KILL_ROUNDS: Final = 200
_ROUND_S: Final = 0.005


class Children:
    """Starts processes and waits for every child of this process, for ever: for those it started, and for orphans that came to it.

    Starting is safe in a process with threads: no code of ours runs between fork and exec (``posix_spawn``).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._status_fds: dict[int, int] = {}
        self._started = threading.Event()
        threading.Thread(target=self._reap_for_ever, name="t1-reaper", daemon=True).start()

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, fds: Mapping[int, int], terminal: str | None = None
    ) -> tuple[int, int, int]:
        """Start a program in a session of its own.

        Args:
            argv: Program and arguments; looked up in the ``PATH`` of ``env``.
            env: Its whole environment.
            cwd: Working directory; ``/`` if it is gone.
            fds: Descriptor number of the program -> descriptor of this process. What is missing of 0-2 is the null device.
            terminal: Path of a terminal that becomes its controlling one and its descriptors 0-2.

        Returns:
            Its pid, a pidfd, and a pipe end from which its exit status can be read.

        Raises:
            OSError: It cannot be executed, or the kernel refuses another process (``EAGAIN``, ``ENOMEM``).
        """
        floor = max([*fds, 2]) + 1
        status_read, status_write = os.pipe2(os.O_CLOEXEC)
        opened = [status_read, status_write]
        moved: list[int] = []
        try:
            actions = _terminal_actions(terminal)
            for number, fd in fds.items():
                moved.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor))  # out of the way of every target number
                actions.append((os.POSIX_SPAWN_DUP2, moved[-1], number))
            with self._lock:  # nothing is reaped meanwhile, so the pid is its own; and the working directory is everybody's
                pid = _spawn_in(cwd, argv, env, actions)
                opened.append(os.pidfd_open(pid))
                self._status_fds[pid] = status_write
            self._started.set()
        except BaseException:
            wire.close_all(opened)
            raise
        finally:
            wire.close_all(moved)
        _prefer_as_victim(pid)
        return pid, opened[-1], status_read

    def _reap_for_ever(self) -> None:
        while True:
            try:
                news = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                self._started.wait(_NO_CHILDREN_PAUSE_S)
                self._started.clear()
                continue
            if news is None:
                continue
            with self._lock:
                with contextlib.suppress(ChildProcessError):  # one that somebody else here started and waited for
                    os.waitid(os.P_PID, news.si_pid, os.WEXITED)
                fd = self._status_fds.pop(news.si_pid, None)
            if fd is not None:
                _report(fd, news.si_status if news.si_code == os.CLD_EXITED else 128 + news.si_status)


def _terminal_actions(terminal: str | None) -> list[tuple[Any, ...]]:
    """What a new process does with its descriptors 0-2."""
    # The leader of a session gets the first terminal it opens as its controlling one.
    first = (os.POSIX_SPAWN_OPEN, 0, terminal or os.devnull, os.O_RDWR, 0)
    return [first, (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]


def _spawn_in(cwd: str, argv: Sequence[str], env: Mapping[str, str], actions: Sequence[tuple[Any, ...]]) -> int:
    try:
        os.chdir(cwd)
    except OSError:
        os.chdir("/")
    try:
        failure: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
        for program in _candidates(argv[0], env):
            try:
                return os.posix_spawn(
                    program,
                    list(argv),
                    dict(env),
                    file_actions=actions,
                    setsid=True,
                    setsigmask=(),
                    setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
                )
            except (FileNotFoundError, NotADirectoryError):
                continue
            except PermissionError as error:  # as a shell does: another directory may hold one that can be executed
                failure = error
        raise failure
    finally:
        os.chdir("/")


def _candidates(program: str, env: Mapping[str, str]) -> list[str]:
    if "/" in program:
        return [program]
    return [os.path.join(directory or ".", program) for directory in env.get("PATH", os.defpath).split(":")]


def _prefer_as_victim(pid: int) -> None:
    """When memory runs out, the kernel shall kill this process and its children, not the outpost."""
    with contextlib.suppress(OSError):  # it has ended already, or belongs to somebody else by now
        fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, _OOM_SCORE)
        finally:
            os.close(fd)


def _report(fd: int, code: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for this one any more
        os.write(fd, STATUS_FORMAT.pack(code))
    os.close(fd)


def kill_session(session: int) -> None:
    """SIGKILL every process of a session until none is left."""
    _kill_until_gone(lambda: [pid for pid, _, sid in _processes() if sid == session])


def kill_descendants() -> None:
    """SIGKILL everything that was ever started below this process (it adopts orphans), until nothing is left."""
    own = os.getpid()
    if own == 1:
        # Everything else in this pid namespace is the agent's. One call hits all at once: not even a fork bomb can outrun it.
        def kill_everything() -> list[int]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            return [pid for pid, _, _ in _processes() if pid != own]

        _kill_until_gone(kill_everything)
        return

    def found() -> list[int]:
        parents = {pid: parent for pid, parent, _ in _processes()}
        below = []
        for pid in parents:
            ancestor = pid
            while ancestor in parents and ancestor != own:
                ancestor = parents[ancestor]
            if ancestor == own and pid != own:
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
