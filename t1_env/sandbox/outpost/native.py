"""The sandbox that an outpost is in itself: a container whose first process it is, or, without isolation, the account it runs under."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from t1_env.errors import ConfigError, SandboxDied, SandboxError, SandboxUnavailable
from t1_env.sandbox import checks, files, wire
from t1_env.sandbox.base import BuiltEnvironment, CloneResult, CloneView, ExecResult, Sandbox, SandboxSpec
from t1_env.sandbox.init import STATUS_FORMAT
from t1_env.sandbox.keeper import BASE_ENV
from t1_env.sandbox.local import SandboxFileError
from t1_env.sandbox.outpost import scan, transfer
from t1_env.sandbox.outpost.children import Children, kill_descendants, kill_session
from t1_env.sandbox.process import LocalProcess, drain, read_ready
from t1_env.sandbox.reaper import remove_tree

_KILL_TIMEOUT_S: Final = 5.0
_PID_OF_INIT: Final = 1
_ATTEMPTS: Final = 4
_REFUSALS: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE})
_EXIT_NOT_FOUND: Final = 127
_EXIT_NOT_EXECUTABLE: Final = 126


class NativeSandbox:
    """The namespaces, files and limits that the outpost finds itself in, as a sandbox.

    Args:
        spec: Working directory and variables; the limits are up to whoever made the place.
        children: Starts processes and waits for them.
    """

    isolation = "none"

    def __init__(self, spec: SandboxSpec, children: Children) -> None:
        self.spec = spec
        self.capabilities: frozenset[str] = frozenset()
        self._children = children
        self._alive = False
        self._root_fd = -1
        self._env: dict[str, str] = {}
        self._made: str | None = None

    def start(self) -> None:
        """Make the working directory."""
        self._root_fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._env = {**_own_environment(), **self.spec.env}
        missing = _topmost_missing(self.spec.workdir)
        try:
            os.makedirs(self.spec.workdir, exist_ok=True)
            self._made = missing
        except OSError as error:
            raise SandboxUnavailable(
                f"the working directory {self.spec.workdir!r} cannot be made in the sandbox: {error.strerror} (as user {os.geteuid()}); "
                "choose another workdir, or a user who may write there"
            ) from error
        self._alive = True

    @property
    def built(self) -> BuiltEnvironment:
        """Nothing: an image's settings are in the environment of the container already."""
        return BuiltEnvironment()

    @property
    def alive(self) -> bool:
        """Whether it is started and not closed."""
        return self._alive

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pty_size: tuple[int, int] | None = None,
        fds: Mapping[int, int] | None = None,
    ) -> LocalProcess:
        """Start a process, in a session of its own; see ``Sandbox.spawn``. A program that cannot be executed ends with 127 or 126."""
        if not self._alive:
            raise SandboxDied("this sandbox was closed")
        targets = dict(fds or {})
        checks.check_spawn(argv, env, targets)
        program_env = {**self._env, **(env or {})}
        for attempt in range(_ATTEMPTS):
            try:
                return self._start(argv, program_env, cwd or self.spec.workdir, pty_size, targets)
            except OSError as error:
                if error.errno not in _REFUSALS or attempt == _ATTEMPTS - 1:
                    raise SandboxError(f"cannot start {argv[0]!r} in the sandbox: {error.strerror}") from error
                # The agent uses up all processes, all memory or all terminals there are. That is its own doing, not a failure of the
                # machinery: what it runs is ended, and there is room again.
                self.kill_all()
        raise AssertionError

    def _start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, pty_size: tuple[int, int] | None, fds: Mapping[int, int]
    ) -> LocalProcess:
        master = slave = None
        try:
            if pty_size is not None:
                master, slave = os.openpty()
                fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *pty_size, 0, 0))
            try:
                pid, pidfd, status_fd = self._children.start(argv, env, cwd, fds, None if slave is None else os.ttyname(slave))
            except OSError as error:
                if error.errno in _REFUSALS:
                    raise
                return NotExecuted(argv[0], error, fds.get(2, slave), master)
        except BaseException:
            if master is not None:
                os.close(master)
            raise
        finally:
            if slave is not None:
                os.close(slave)
        os.set_blocking(status_fd, False)
        return LocalProcess(pid, pidfd, status_fd, master)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 60.0,
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Run a process without a terminal to its end and capture its output; see ``Sandbox.run``."""
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as stack:

            def pipe() -> tuple[int, int]:
                read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(read_fd, False)
                stack.callback(os.close, read_fd)
                return read_fd, write_fd

            (out, out_child), (err, err_child) = pipe(), pipe()
            fds = {1: out_child, 2: err_child}
            try:
                if stdin:
                    fds[0] = _memory_file(stdin)
                process = self.spawn(argv, env=env, cwd=cwd, fds=fds)
            finally:
                wire.close_all(list(fds.values()))
            sinks = {out: bytearray(), err: bytearray()}
            finished = drain(process, sinks, deadline, max_output_bytes)
            if not finished:
                kill_session(process.pid)
                process.wait(_KILL_TIMEOUT_S)
                read_ready(sinks, max_output_bytes)
        return ExecResult(process.poll() if finished else None, bytes(sinks[out]), bytes(sinks[err]), timed_out=not finished)

    def put(self, source: Path | bytes, dest: str, *, mode: int | None = None) -> None:
        """Write bytes to an absolute path; see ``Sandbox.put``. (Files of the other side arrive in parts: see transfer.py.)"""
        if isinstance(source, Path):
            raise ConfigError(f"put({str(source)!r}): an outpost has no files of the host")
        checks.check_path(dest)
        fd = _memory_file(source)
        try:
            files.write_file(self._root_fd, dest, fd, 0o644 if mode is None else mode)
        except OSError as error:
            raise SandboxFileError(error.errno, f"put: {error.strerror}", dest) from error
        finally:
            os.close(fd)

    def write_entries(self, dest: str, entries: Sequence[transfer.Entry], blob: bytes) -> None:
        """Write a part of what the other side puts to ``dest``."""
        checks.check_path(dest)
        try:
            transfer.apply(self._root_fd, dest, entries, blob)
        except OSError as error:
            raise SandboxFileError(error.errno or errno.EIO, f"put: {error.strerror}", dest) from error

    def open_for_reading(self, path: str) -> int:
        """Return a descriptor of a regular file."""
        checks.check_path(path)
        try:
            return files.open_for_reading(self._root_fd, path)
        except OSError as error:
            raise SandboxFileError(error.errno, f"get: {error.strerror}", path) from error

    def get(self, path: str, *, max_bytes: int = 1 << 24) -> bytes:
        """Read a regular file; see ``Sandbox.get``."""
        with os.fdopen(self.open_for_reading(path), "rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise SandboxFileError(errno.EFBIG, f"get: file is larger than max_bytes={max_bytes}", path)
        return data

    def generation(self) -> str:
        """A fingerprint of everything that can be written: in a container of all of it, elsewhere of the working directory."""
        if os.getpid() == _PID_OF_INIT:
            return scan.fingerprint(*scan.writable_places())
        return scan.fingerprint((self.spec.workdir,), frozenset())

    def run_in_clone(
        self,
        entry: str,
        payload: Any,
        *,
        mounts: Mapping[str, Path] | None = None,
        timeout_s: float = 60.0,
        view: CloneView | None = None,
    ) -> CloneResult:
        """Raise ``SandboxError``: a place cannot clone itself."""
        raise SandboxError(f"cannot run {entry} in a clone: an outpost in native mode cannot copy the place it is in")

    def fork(self) -> Sandbox:
        """Raise ``SandboxError``: a place cannot copy itself."""
        raise SandboxError("cannot fork: an outpost in native mode cannot copy the place it is in")

    def kill_all(self) -> None:
        """SIGKILL every process that was started here; see ``KillsAll``."""
        kill_descendants()

    def close(self) -> None:
        """Kill every process that was started here, and remove the working directory if it was made for this sandbox. Idempotent."""
        if self._alive:
            self._alive = False
            self.kill_all()
            if self._made is not None and os.getpid() != _PID_OF_INIT:  # a container goes with all its files
                remove_tree(self._made)


class NotExecuted(LocalProcess):
    """A program that could not be executed: as in a shell, it has ended with status 127 or 126 and said why.

    Args:
        program: Its name.
        error: Why.
        stderr_fd: Where it says so, if anywhere.
        pty_fd: Its terminal's master side.
    """

    def __init__(self, program: str, error: OSError, stderr_fd: int | None, pty_fd: int | None) -> None:
        if stderr_fd is not None:
            with contextlib.suppress(OSError):
                os.write(stderr_fd, f"t1: {program}: {error.strerror}\n".encode("utf-8", "surrogateescape"))
        status_read, status_write = os.pipe2(os.O_CLOEXEC)
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        os.write(status_write, STATUS_FORMAT.pack(_EXIT_NOT_FOUND if missing else _EXIT_NOT_EXECUTABLE))
        os.close(status_write)
        super().__init__(0, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), status_read, pty_fd)

    def kill(self, signal: int = 9) -> None:
        """Nothing: it has ended."""


def _own_environment() -> dict[str, str]:
    """What every process starts with: in a container its own settings over the base, elsewhere the base for this account."""
    if os.getpid() == _PID_OF_INIT:
        own = {name: value for name, value in os.environ.items() if not name.startswith("T1_")}
        return {**BASE_ENV, **own}
    user, home = os.environ.get("USER") or os.environ.get("LOGNAME"), os.environ.get("HOME")
    account = {} if user is None else {"USER": user, "LOGNAME": user}
    return {**BASE_ENV, **account, **({} if home is None else {"HOME": home})}


def _topmost_missing(path: str) -> str | None:
    """The first of a path and its parents, from the top, that does not exist; None if all do."""
    missing = None
    while not os.path.lexists(path):
        path, missing = os.path.dirname(path), path
    return missing


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("t1", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
