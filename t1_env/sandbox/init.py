"""Pid 1 of a sandbox: starts processes on request, reaps every orphan, reports exits.

It holds one socket to the host process and one to the keeper, cannot be traced from inside, and ends (and with it the whole pid
namespace) as soon as the other end of either is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from t1_env.sandbox import limits as limits_
from t1_env.sandbox import wire

STATUS_FORMAT: Final = struct.Struct("=i")
"""How an exit status travels through a process's status pipe."""

_EXIT_NOT_FOUND: Final = 127
_EXIT_NOT_EXECUTABLE: Final = 126
_PID_OF_INIT: Final = 1
_STOP_TIMEOUT_S: Final = 5.0
_KILL_TIMEOUT_S: Final = 20.0


@dataclass(slots=True)
class InitConfig:
    """What pid 1 needs to know.

    Args:
        env: The complete environment every process starts with.
        workdir: Default working directory.
        limits: Bounds set on every process.
        memory_is_bounded: Whether a cgroup bounds memory.
        procs_fds: cgroup.procs descriptors that every process joins; pid 1 itself stays outside, so it answers even when the limit on
            processes is reached or the sandbox is frozen.
        thaw_fd: The freezer's file, or None. If the keeper is killed while the agent stands still, nobody else would let it go, and a
            process that a version 1 freezer holds cannot even be killed.
        thaw_word: What to write to it.
    """

    env: Mapping[str, str]
    workdir: str
    limits: limits_.Limits
    memory_is_bounded: bool
    procs_fds: list[int] = field(default_factory=list)
    thaw_fd: int | None = None
    thaw_word: bytes = b""


class Init:
    """The loop of pid 1."""

    def __init__(self, socks: Sequence[socket.socket], config: InitConfig) -> None:
        self._socks = {sock.fileno(): sock for sock in socks}
        self._config = config
        self._status_fds: dict[int, int] = {}
        self._stopped: list[int] = []

    def serve(self) -> NoReturn:
        """Answer requests until one of the sockets closes."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poller = select.poll()
        for sock in self._socks.values():
            poller.register(sock, select.POLLIN)
        poller.register(wake_read, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    self._reap()
                else:
                    self._answer(self._socks[fd])

    def _answer(self, sock: socket.socket) -> None:
        try:
            request, fds = wire.receive(sock)
        except wire.Disconnected:
            self._end()
        passed: list[int] = []
        try:
            operation = request["op"]
            if operation == "spawn":
                reply, passed = self._spawn(request, fds)
            elif operation == "kill_session":
                reply = {"killed": _kill_session(int(request["pid"]))}
            elif operation == "kill_all":
                self._kill_all()
                reply = {}
            elif operation == "stop":
                self._stop_all()
                reply = {}
            elif operation == "continue":
                self._continue_all()
                reply = {}
            else:
                reply = {"error": f"unknown request {operation!r}"}
        except OSError as error:
            reply = {"error": f"{os.strerror(error.errno or 0)} ({request.get('op')})", "errno": error.errno}
        finally:
            wire.close_all(fds)
        try:
            wire.send(sock, reply, passed)
        except wire.Disconnected:
            self._end()
        finally:
            wire.close_all(passed)

    def _end(self) -> NoReturn:
        """The host process or the keeper is gone; with this process goes everything inside."""
        if self._config.thaw_fd is not None:
            with contextlib.suppress(OSError):
                os.write(self._config.thaw_fd, self._config.thaw_word)
        os._exit(0)

    # ------------------------------------------------------------------------------------------------------------------ processes
    def _spawn(self, request: wire.Message, fds: Sequence[int]) -> tuple[wire.Message, list[int]]:
        status_read, status_write = os.pipe()
        opened = [status_read, status_write]
        try:
            master = slave = None
            if request["pty"] is not None:
                master, slave = os.openpty()
                opened += [master, slave]
                rows, columns = request["pty"]
                fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            pid = os.fork()
            if pid == 0:
                _run_child(request, dict(zip(request["fds"], fds, strict=True)), slave, self._config)
            opened.append(os.pidfd_open(pid))
        except OSError:
            wire.close_all(opened)
            raise
        self._status_fds[pid] = status_write
        if slave is not None:
            os.close(slave)
        passed = [opened[-1], status_read]
        return {"pid": pid}, passed if master is None else [*passed, master]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            fd = self._status_fds.pop(pid, None)
            if fd is not None:
                code = os.waitstatus_to_exitcode(status)
                with contextlib.suppress(BrokenPipeError):  # nobody waits for this one any more
                    os.write(fd, STATUS_FORMAT.pack(code if code >= 0 else 128 - code))
                os.close(fd)

    def _kill_all(self) -> None:
        """SIGKILL every process but this one until none is left. Needs no new process, so a full process limit cannot prevent it."""
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        pause_s = 0.0
        while True:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            self._reap()
            if not any(state not in "ZX" for _, state, _, _ in _processes()):
                self._reap()
                return
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            time.sleep(pause_s)
            pause_s = min(pause_s + 0.0002, 0.01)

    # ----------------------------------------------------------------------------------- freezing without a cgroup (ordinary user)
    def _stop_all(self) -> None:
        """SIGSTOP everything and wait until it stands; remembers what was already stopped, by job control for instance."""
        already = {pid for pid, state, _, _ in _processes() if state in "Tt"}
        stopped: set[int] = set()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while True:
            running = [pid for pid, state, _, _ in _processes() if state not in "TtZX"]
            if not running:
                break
            stopped.update(running)
            self._stopped = sorted(stopped - already)
            if time.monotonic() > deadline:
                self._continue_all()
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGSTOP)
            time.sleep(0.0002)
        self._stopped = sorted(stopped - already)

    def _continue_all(self) -> None:
        # Children first: a shell that woke before its job would see the job as stopped and say so.
        parents = {pid: parent for pid, _, parent, _ in _processes()}

        def depth(pid: int) -> int:
            steps = 0
            while pid in parents and pid != _PID_OF_INIT and steps <= len(parents):
                pid, steps = parents[pid], steps + 1
            return steps

        for pid in sorted(self._stopped, key=depth, reverse=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped = []


def _run_child(request: Mapping[str, Any], fds: Mapping[int, int], slave: int | None, config: InitConfig) -> NoReturn:
    """Become the requested program; the caller has just forked."""
    code = _EXIT_NOT_EXECUTABLE
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signal.getsignal(number) not in (signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.setsid()
        limits_.join(config.procs_fds)
        _install(fds, slave)
        limits_.apply_rlimits(config.limits, memory_is_bounded=config.memory_is_bounded)
        env = {**config.env, **_become(request.get("account"), slave), **request["env"]}
        try:
            os.chdir(request["cwd"] or config.workdir)
        except OSError:
            os.chdir("/")
        argv = request["argv"]
        try:
            os.execvpe(argv[0], argv, env)
        except FileNotFoundError:
            code = _EXIT_NOT_FOUND
            raise
    except BaseException as error:  # noqa: BLE001  (whatever happens, a forked child must not return into pid 1's loop)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        with contextlib.suppress(OSError):
            os.write(2, f"t1: {request['argv'][0]}: {reason}\n".encode("utf-8", "surrogateescape"))
    finally:
        os._exit(code)


def _become(account: Mapping[str, Any] | None, slave: int | None) -> dict[str, str]:
    """Change to the user that the image names; returns the variables that go with that user."""
    if account is None:
        return {}
    if slave is not None:
        os.fchown(slave, account["uid"], -1)  # a terminal belongs to who is logged in on it
    os.setgroups(account["groups"])
    os.setgid(account["gid"])
    os.setuid(account["uid"])
    return {"HOME": account["home"], "USER": account["name"], "LOGNAME": account["name"]}


def _install(fds: Mapping[int, int], slave: int | None) -> None:
    """Put every descriptor at its number."""
    wanted = dict(fds)
    if slave is not None:
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        wanted.update(dict.fromkeys((0, 1, 2), slave))
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for number in (0, 1, 2):
        wanted.setdefault(number, null)
    floor = max(wanted) + 1
    # First out of the way of every target number, then to it.
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor) for number, fd in wanted.items()}
    # Only the targets become inheritable; all else here (pid 1's socket, status pipes, cgroup files) is close-on-exec.
    for number, fd in moved.items():
        os.dup2(fd, number, inheritable=True)


def _processes() -> list[tuple[int, str, int, int]]:
    """(pid, state, parent, session) of every process of this pid namespace but pid 1."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stream:
                fields = stream.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.append((int(name), fields[0].decode(), int(fields[1]), int(fields[3])))
    return found


def _kill_session(session: int) -> int:
    """SIGKILL every process of a session until none is left, or as long as it may take (what is frozen dies when it is thawed)."""
    killed: set[int] = set()
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while members := [pid for pid, state, _, sid in _processes() if sid == session and state not in "ZX"]:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(members)
        if time.monotonic() > deadline:
            break
        time.sleep(0.0002)
    return len(killed)


def run_init(socks: Sequence[socket.socket], config: InitConfig) -> NoReturn:
    """Serve as pid 1; never returns."""
    try:
        Init(socks, config).serve()
    except BaseException:  # noqa: BLE001  (pid 1 has nobody to report to; its end ends the sandbox, which the host notices)
        os._exit(1)
    finally:
        sys.exit(1)
