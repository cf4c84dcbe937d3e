"""A spawner without isolation, for tests of the shell session only: a sandbox's ``spawn``, but plain processes of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from t1_env.errors import SandboxDied

BASE_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "SHELL": "/bin/bash"}


class LocalProcess:
    def __init__(self, pid: int, pty_fd: int | None) -> None:
        self.pid = pid
        self.pty_fd = pty_fd
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    code = os.waitstatus_to_exitcode(status)
                    self._status = code if code >= 0 else 128 - code
        return self._status

    def wait(self, timeout_s: float | None = None) -> int | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.poll() is None and (deadline is None or time.monotonic() < deadline):
            time.sleep(0.002)
        return self._status

    def kill(self, signal: int = signal.SIGKILL) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal)


class ProcessSpawner:
    """Starts plain processes, remembers them, kills their sessions on ``close``."""

    def __init__(self, workdir: Path, env: Mapping[str, str] | None = None) -> None:
        self.workdir = workdir
        self.env = {**BASE_ENV, **(env or {})}
        self.alive = True
        self.processes: list[LocalProcess] = []

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pty_size: tuple[int, int] | None = None,
        fds: Mapping[int, int] | None = None,
    ) -> LocalProcess:
        if not self.alive:
            raise SandboxDied("the test spawner was closed")
        master = slave = None
        if pty_size is not None:
            master, slave = os.openpty()
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *pty_size, 0, 0))
        pid = os.fork()
        if pid == 0:
            try:
                self._become(list(argv), {**self.env, **(env or {})}, cwd or str(self.workdir), slave, dict(fds or {}))
            finally:
                os._exit(127)
        if slave is not None:
            os.close(slave)
        process = LocalProcess(pid, master)
        self.processes.append(process)
        return process

    @staticmethod
    def _become(argv: list[str], env: dict[str, str], cwd: str, slave: int | None, fds: dict[int, int]) -> None:
        os.setsid()
        # All of them: a job in the background of a script ignores SIGINT and SIGQUIT.
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        if slave is not None:
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            fds = {0: slave, 1: slave, 2: slave, **fds}
        moved = {target: fcntl.fcntl(source, fcntl.F_DUPFD, 800) for target, source in fds.items()}
        for target, source in moved.items():
            os.dup2(source, target, inheritable=True)
        for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - Path.iterdir would keep a descriptor open
            if fd not in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
        try:
            os.chdir(cwd)
        except OSError:
            os.chdir("/")
        os.execvpe(argv[0], argv, env)

    def start(self) -> None:
        """Nothing to do: it starts processes from the beginning."""

    def close(self) -> None:
        self.alive = False
        for process in self.processes:
            for pid in _session_members(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(5)


def _session_members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(entry.name)) == session:
                    members.append(int(entry.name))
    return members
