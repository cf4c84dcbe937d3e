"""The outpost's spawner: a single-threaded process that forks the agent's processes, because the outpost itself has threads.

Each process is forked twice, so that it becomes a child of the outpost: when the agent kills the spawner, nobody's exit status is lost
and a new spawner takes its place. A process stands still before its program until the outpost has seen it and says "go".
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import struct
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, NoReturn

from t1_env.errors import SandboxError
from t1_env.sandbox import wire
from t1_env.sandbox.outpost.children import Reaper

_EXIT_NOT_FOUND: Final = 127
_EXIT_NOT_EXECUTABLE: Final = 126
_ATTEMPTS: Final = 5
_OOM_SCORE: Final = b"500"
_PID: Final = struct.Struct("=i")


@dataclass(frozen=True, slots=True)
class Order:
    """One process to start.

    Args:
        argv: Program and arguments.
        env: Its whole environment.
        cwd: Working directory; ``/`` if it is gone.
        numbers: Where the child finds the descriptors that come with the order.
        terminal: Whether descriptor 0 among them becomes its controlling terminal.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    numbers: Sequence[int]
    terminal: bool = False


class Spawner:
    """The outpost's hold on its spawner. Thread-safe.

    Args:
        sock: Socket of a spawner that runs already.
        reaper: Passes on exit statuses.
        start: Starts another spawner and returns its socket.
        make_room: Called when the kernel refuses another process: ends those of the agent.
    """

    def __init__(
        self, sock: socket.socket | None, reaper: Reaper, start: Callable[[], socket.socket], make_room: Callable[[], None]
    ) -> None:
        self._lock = threading.Lock()
        self._sock = sock
        self._reaper = reaper
        self._start = start
        self._make_room = make_room

    def spawn(self, order: Order, fds: Sequence[int]) -> tuple[int, int, int]:
        """Start a process.

        Args:
            order: What to start.
            fds: As many as ``order.numbers``; the caller keeps its own.

        Returns:
            Its pid, a pidfd, and a pipe end from which its exit status can be read.

        Raises:
            SandboxError: It cannot be started.
        """
        reason = ""
        for _ in range(_ATTEMPTS):
            status_read, status_write = os.pipe2(os.O_CLOEXEC)
            go_read, go_write = os.pipe2(os.O_CLOEXEC)
            try:
                with self._lock, self._reaper.expecting():
                    pid = self._ask(order, [go_read, *fds])
                    pidfd = os.pidfd_open(pid)
                    self._reaper.watch(pid, status_write)
                    status_write = -1
                with contextlib.suppress(BrokenPipeError):  # it was killed before it began; its status says so
                    os.write(go_write, b"1")
            except OSError as error:
                os.close(status_read)
                if status_write >= 0:
                    os.close(status_write)
                reason = error.strerror or str(error)
                if error.errno in (errno.EAGAIN, errno.ENOMEM):
                    self._make_room()
                elif error.errno not in (errno.ESRCH, errno.EPIPE, errno.ECONNRESET):
                    break
            else:
                return pid, pidfd, status_read
            finally:
                os.close(go_read)
                os.close(go_write)
        raise SandboxError(f"cannot start {order.argv[0]!r} in the sandbox: {reason}")

    def _ask(self, order: Order, fds: Sequence[int]) -> int:
        if self._sock is None:
            self._sock = self._start()
        try:
            wire.send(self._sock, asdict(order), fds)
            reply, _ = wire.receive(self._sock)
        except wire.Disconnected:
            self._sock.close()
            self._sock = None
            raise BrokenPipeError(errno.EPIPE, "the spawner was killed") from None
        if "errno" in reply:
            raise OSError(reply["errno"], os.strerror(reply["errno"]))
        return int(reply["pid"])


def serve(sock: socket.socket) -> NoReturn:
    """Be the spawner until the outpost is gone; never returns. Nothing else may run in this process."""
    with contextlib.suppress(OSError):  # a file system without it, or another user's: then nobody is preferred
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        os.write(fd, _OOM_SCORE)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        while True:
            request, fds = wire.receive(sock)
            try:
                reply: wire.Message = {"pid": _fork_twice(Order(**request), fds)}
            except OSError as error:
                reply = {"errno": error.errno or errno.EIO}
            finally:
                wire.close_all(fds)
            wire.send(sock, reply)
    except wire.Disconnected:
        pass
    finally:
        os._exit(0)


def _fork_twice(order: Order, fds: Sequence[int]) -> int:
    """Start a process whose parent ends at once; returns its pid."""
    pid_read, pid_write = os.pipe2(os.O_CLOEXEC)
    try:
        middleman = os.fork()
        if middleman == 0:
            _middleman(order, fds, pid_write)
        os.close(pid_write)
        pid_write = -1
        data = os.read(pid_read, _PID.size)
        os.waitpid(middleman, 0)
    finally:
        os.close(pid_read)
        if pid_write >= 0:
            os.close(pid_write)
    if len(data) != _PID.size:
        raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))  # it was killed
    (pid,) = _PID.unpack(data)
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    return int(pid)


def _middleman(order: Order, fds: Sequence[int], pid_write: int) -> NoReturn:
    try:
        try:
            answer = os.fork()
        except OSError as error:
            answer = -(error.errno or errno.EIO)
        if answer == 0:
            _become(order, fds[0], dict(zip(order.numbers, fds[1:], strict=True)))
        os.write(pid_write, _PID.pack(answer))
    finally:
        os._exit(0)


def _become(order: Order, go_fd: int, fds: dict[int, int]) -> NoReturn:
    """Wait for "go" and become the program; the caller has just forked."""
    code = _EXIT_NOT_EXECUTABLE
    try:
        os.setsid()
        if os.read(go_fd, 1) != b"1":
            os._exit(0)  # nobody took this one
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signal.getsignal(number) not in (signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _install(fds, terminal=order.terminal)
        os.umask(0o022)
        try:
            os.chdir(order.cwd)
        except OSError:
            os.chdir("/")
        try:
            os.execvpe(order.argv[0], list(order.argv), dict(order.env))
        except FileNotFoundError:
            code = _EXIT_NOT_FOUND
            raise
    except BaseException as error:  # noqa: BLE001  (whatever happens, a forked child must not return into the spawner's loop)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        with contextlib.suppress(OSError):
            os.write(2, f"t1: {order.argv[0]}: {reason}\n".encode("utf-8", "surrogateescape"))
    finally:
        os._exit(code)


def _install(wanted: dict[int, int], *, terminal: bool) -> None:
    """Put every descriptor at its number; 0-2 that are not given are the terminal, or the null device."""
    if terminal:
        fcntl.ioctl(wanted[0], termios.TIOCSCTTY, 0)
        rest = wanted[0]
    else:
        rest = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for number in (0, 1, 2):
        wanted.setdefault(number, rest)
    floor = max(wanted) + 1
    # First out of the way of every target number, then to it. Everything else in this process is close-on-exec.
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor) for number, fd in wanted.items()}
    for number, fd in moved.items():
        os.dup2(fd, number, inheritable=True)
