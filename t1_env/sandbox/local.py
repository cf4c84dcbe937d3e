"""The local sandbox: Linux namespaces and overlays over the host's own system directories. No daemon, no image, no root needed."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import select
import selectors
import signal as signals
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from t1_env.errors import ConfigError, SandboxDied, SandboxError, SandboxUnavailable
from t1_env.sandbox import launcher, wire
from t1_env.sandbox.base import CloneResult, ExecResult, SandboxProcess, SandboxSpec
from t1_env.sandbox.init import STATUS_FORMAT
from t1_env.sandbox.limits import PREFIX, process_stamp

_CLOSE_TIMEOUT_S: Final = 5.0
_KILLED: Final = 128 + signals.SIGKILL
_MAX_CHILD_FD: Final = 255
_READ_BYTES: Final = 1 << 16
_ERRNOS_OF_REFUSAL: Final = frozenset({errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL, errno.ENOSPC, errno.ENODEV, errno.EUSERS})
_counter: Final = itertools.count()


class SandboxFileError(SandboxError, OSError):
    """A file could not be put into or read from a sandbox; ``errno`` and ``filename`` say why and which."""


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


class LocalSandbox:
    """A private machine for one episode, made of Linux namespaces.

    The root is an overlay over an allow-list of the host's system directories (``/usr``, ``/opt``) with a synthetic ``/etc``; the rest is
    empty, writes go to a size-limited tmpfs, there is no network, and root inside has no rights outside. Works for root and, with one
    user inside, for ordinary users. docs/design/sandbox.md describes the anatomy and the limits.

    ``spawn`` never raises because a program cannot be executed: as in a shell, the process then ends with status 127 or 126 and says why
    on its standard error.

    Args:
        spec: What to build; default ``SandboxSpec()``.

    Raises:
        ConfigError: The specification asks for something a local sandbox cannot be.
    """

    isolation = "namespaces"

    def __init__(self, spec: SandboxSpec | None = None) -> None:
        self.spec = spec if spec is not None else SandboxSpec()
        _check_spec(self.spec)
        self.capabilities: frozenset[str] = frozenset({"clone", "freeze", "storage_limit", "network_off"})
        self._link: _Link | None = None
        self._closed = False
        self._start_lock = threading.Lock()

    def __enter__(self) -> LocalSandbox:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Create it; does nothing when it is started already.

        Raises:
            SandboxUnavailable: This machine refuses the namespaces or mounts it needs; the message says what to enable.
            SandboxDied: It was closed.
        """
        with self._start_lock:
            if self._closed:
                raise SandboxDied("this sandbox was closed; make a new one")
            if self._link is None:
                if sys.platform != "linux":
                    raise SandboxUnavailable(f"the local sandbox needs Linux, this is {sys.platform}")
                self._link, self.capabilities = _Link.open(self, self.spec)

    @property
    def alive(self) -> bool:
        """Whether it is started and its processes can run."""
        return self._link is not None and self._link.alive

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pty_size: tuple[int, int] | None = None,
        fds: Mapping[int, int] | None = None,
    ) -> SandboxProcess:
        """Start a process, in a session of its own; see ``Sandbox.spawn``."""
        return self._spawn(argv, env=env, cwd=cwd, pty_size=pty_size, fds=fds)[0]

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
        """Run a process without a terminal to its end and capture its output; see ``Sandbox.run``.

        Returns as soon as the process itself has ended; what background processes would still write is not waited for.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as stack:

            def pipe() -> tuple[int, int]:
                read_fd, write_fd = os.pipe()
                os.set_blocking(read_fd, False)
                stack.callback(os.close, read_fd)
                return read_fd, write_fd

            (out, out_child), (err, err_child) = pipe(), pipe()
            fds = {1: out_child, 2: err_child}
            if stdin:
                fds[0] = _memfd(stdin)
            try:
                process, inner_pid = self._spawn(argv, env=env, cwd=cwd, fds=fds)
            finally:
                wire.close_all(list(fds.values()))
            sinks = {out: bytearray(), err: bytearray()}
            finished = _drain(process, sinks, deadline, max_output_bytes)
            if not finished:
                self._require_link().ask_init({"op": "kill_session", "pid": inner_pid})
                process.wait(_CLOSE_TIMEOUT_S)
                _read_ready(sinks, max_output_bytes)
        return ExecResult(process.poll() if finished else None, bytes(sinks[out]), bytes(sinks[err]), timed_out=not finished)

    def put(self, source: Path | bytes, dest: str, *, mode: int | None = None) -> None:
        """Copy a host file, a whole host directory (its contents into ``dest``) or bytes to an absolute path; parents are created.

        Files belong to root inside; modes and modification times are kept (bytes get mode 0644 and the present time).

        Raises:
            SandboxFileError: Missing source, full storage, or something in the way.
        """
        _check_path(dest)
        if isinstance(source, Path) and source.is_dir():
            self._ask_files({"op": "put_tree", "source": str(source.resolve()), "dest": dest})
            if mode is not None:
                raise ConfigError(f"put({str(source)!r}): mode applies to a single file, not to a directory")
            return
        if isinstance(source, Path):
            try:
                fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise SandboxFileError(error.errno, f"put: cannot read the host file: {error.strerror}", str(source)) from error
            status = os.fstat(fd)
            times: list[int] | None = [status.st_atime_ns, status.st_mtime_ns]
        else:
            fd, times = _memfd(source), None
            mode = 0o644 if mode is None else mode
        try:
            self._ask_files({"op": "put", "dest": dest, "mode": mode, "times_ns": times}, [fd])
        finally:
            os.close(fd)

    def get(self, path: str, *, max_bytes: int = 1 << 24) -> bytes:
        """Read a regular file, resolved inside the sandbox (a symlink can never reach the host).

        Raises:
            SandboxFileError: Missing, not a regular file, or larger than ``max_bytes`` (``EFBIG``).
        """
        _check_path(path)
        _, fds = self._ask_files({"op": "get", "path": path})
        with os.fdopen(fds[0], "rb") as stream:
            data = stream.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise SandboxFileError(errno.EFBIG, f"get: file is larger than max_bytes={max_bytes}", path)
        return data

    def generation(self) -> str:
        """A fingerprint of everything the sandbox's processes wrote: equal fingerprints mean the filesystem did not change.

        It covers all metadata (a change of contents moves a file's change time) of everything writable except kernel filesystems. What it
        cannot see: a process that goes on writing to a page that it mapped and had already written to.
        """
        return str(self._require_link().ask_keeper({"op": "generation"})[0]["generation"])

    def run_in_clone(self, entry: str, payload: Any, *, mounts: Mapping[str, Path] | None = None, timeout_s: float = 60.0) -> CloneResult:
        """Freeze the sandbox, run a trusted function in a copy-on-write clone of its filesystem, discard it, thaw; see ``Sandbox``."""
        link = self._require_link()
        sources = {}
        for target, source in (mounts or {}).items():
            _check_path(target)
            if not Path(source).exists():
                raise ConfigError(f"run_in_clone: mounts[{target!r}] = {str(source)!r} does not exist on the host")
            sources[target] = str(Path(source).resolve())
        request = {"op": "clone", "entry": entry, "payload": payload, "mounts": sources, "timeout_s": timeout_s}
        reply, _ = link.ask_keeper(request)
        launcher.LAUNCHER.preload(entry.partition(":")[0])
        if reply.get("result") is None:
            return CloneResult(None, float(reply.get("seconds", 0.0)), str(reply["error"]))
        result = json.loads(reply["result"])
        return CloneResult(result.get("payload"), float(reply["seconds"]), result.get("error"))

    def close(self) -> None:
        """Kill every process and remove every trace. Idempotent, never raises."""
        self._closed = True
        if self._link is not None:
            self._link.close()

    # ---------------------------------------------------------------------------------------------------------------- internals
    def _require_link(self) -> _Link:
        if self._link is None:
            raise SandboxDied("this sandbox was closed" if self._closed else "this sandbox is not started: call start() first")
        return self._link

    def _spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pty_size: tuple[int, int] | None = None,
        fds: Mapping[int, int] | None = None,
    ) -> tuple[LocalProcess, int]:
        targets = dict(fds or {})
        _check_spawn(argv, env, targets)
        request = {
            "op": "spawn",
            "argv": list(argv),
            "env": dict(env or {}),
            "cwd": cwd,
            "pty": pty_size,
            "fds": list(targets),
        }
        reply, received = self._require_link().ask_init(request, list(targets.values()))
        pidfd, status_fd, *pty = received
        os.set_blocking(status_fd, False)
        return LocalProcess(_pid_of(pidfd), pidfd, status_fd, pty[0] if pty else None), int(reply["pid"])

    def _ask_files(self, request: wire.Message, fds: Sequence[int] = ()) -> tuple[wire.Message, list[int]]:
        reply, received = self._require_link().ask_keeper(request, fds)
        if "error" in reply:
            path = reply.get("path") or request.get("dest") or request.get("path")
            raise SandboxFileError(reply.get("errno") or errno.EIO, f"{request['op']}: {reply['error']}", path)
        return reply, received


class _Link:
    """The descriptors that tie a host process to one running sandbox, and who may use them when."""

    def __init__(self, keeper: socket.socket, init: socket.socket, keeper_pidfd: int) -> None:
        self._owner = os.getpid()
        self._keeper = keeper
        self._init = init
        self._keeper_pidfd = keeper_pidfd
        self._keeper_lock = threading.Lock()
        self._init_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._closed = False
        _LINKS.add(self)

    @classmethod
    def open(cls, owner: LocalSandbox, spec: SandboxSpec) -> tuple[_Link, frozenset[str]]:
        """Have a keeper forked and wait for its first message."""
        ours, theirs = socket.socketpair()
        fields = {
            "workdir": spec.workdir,
            "env": dict(spec.env),
            "hostname": spec.hostname,
            "memory_mb": spec.memory_mb,
            "storage_mb": spec.storage_mb,
            "max_processes": spec.max_processes,
            "cpus": spec.cpus,
            "hide": sorted({str(path) for given in (*spec.hide, *launcher.installation_paths()) for path in (given, given.resolve())}),
        }
        name = f"{PREFIX}{process_stamp(os.getpid())}-{next(_counter)}"
        try:
            with theirs:
                launcher.LAUNCHER.request({"op": "start", "name": name, "spec": fields}, theirs.fileno())
            ours.settimeout(launcher.START_TIMEOUT_S)
            reply, fds = wire.receive(ours)
            ours.settimeout(None)
        except (wire.Disconnected, TimeoutError) as error:
            ours.close()
            raise SandboxError("the sandbox's keeper ended while starting; is the machine out of memory or processes?") from error
        except BaseException:
            ours.close()
            raise
        if "error" in reply:
            ours.close()
            if reply.get("errno") in _ERRNOS_OF_REFUSAL:
                raise SandboxUnavailable(launcher.explain_refusal(reply["error"], reply["errno"]))
            raise SandboxError(f"the sandbox could not be started: {reply['error']}")
        link = cls(ours, socket.socket(fileno=fds[0]), fds[1])
        weakref.finalize(owner, link.close)  # also runs at interpreter exit
        return link, frozenset(reply["capabilities"])

    @property
    def alive(self) -> bool:
        if self._closed or self._owner != os.getpid():
            return False
        poller = select.poll()
        for sock in (self._keeper, self._init):
            poller.register(sock, select.POLLRDHUP)
        return not poller.poll(0)

    def ask_keeper(self, request: wire.Message, fds: Sequence[int] = ()) -> tuple[wire.Message, list[int]]:
        return self._ask(self._keeper, self._keeper_lock, request, fds)

    def ask_init(self, request: wire.Message, fds: Sequence[int] = ()) -> tuple[wire.Message, list[int]]:
        reply, received = self._ask(self._init, self._init_lock, request, fds)
        if "error" in reply:
            raise SandboxError(f"the sandbox could not do {request['op']!r}: {reply['error']}")
        return reply, received

    def _ask(self, sock: socket.socket, lock: threading.Lock, request: wire.Message, fds: Sequence[int]) -> tuple[wire.Message, list[int]]:
        with lock:
            if not self.alive:
                raise SandboxDied("this sandbox is gone: it was closed, or its first process was killed")
            try:
                wire.send(sock, request, fds)
                return wire.receive(sock)
            except (wire.Disconnected, OSError) as error:
                raise SandboxDied(f"the sandbox died while it was asked to {request['op']!r}") from error

    def close(self) -> None:
        with self._close_lock:
            if self._closed or self._owner != os.getpid():
                return
            self._closed = True
            # Not only for the keeper: a thread that waits for an answer wakes up too.
            for sock in (self._keeper, self._init):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            poller = select.poll()
            poller.register(self._keeper_pidfd, select.POLLIN)
            if not poller.poll(_CLOSE_TIMEOUT_S * 1000):
                with contextlib.suppress(OSError):
                    signals.pidfd_send_signal(self._keeper_pidfd, signals.SIGKILL)
            with self._keeper_lock, self._init_lock:
                self._release()

    def abandon(self) -> None:
        """In a forked child: close the copies of the parent's descriptors."""
        if not self._closed:
            self._closed = True
            self._release()

    def _release(self) -> None:
        self._keeper.close()
        self._init.close()
        os.close(self._keeper_pidfd)


_LINKS: Final[weakref.WeakSet[_Link]] = weakref.WeakSet()


def _abandon_links() -> None:
    for link in list(_LINKS):
        link.abandon()


os.register_at_fork(after_in_child=_abandon_links)

_reason_lock: Final = threading.Lock()
_reason: list[str | None] = []


def unavailable_reason() -> str | None:
    """Why this machine cannot run the local sandbox, or None if it can; found out once, by starting one."""
    with _reason_lock:
        if not _reason:
            try:
                with LocalSandbox(SandboxSpec(storage_mb=16)) as sandbox:
                    result = sandbox.run(["true"], timeout_s=20)
                _reason.append(None if result.exit_code == 0 else f"a probe command in the local sandbox failed: {result}")
            except SandboxError as error:
                _reason.append(str(error))
        return _reason[0]


# -------------------------------------------------------------------------------------------------------------------------- details
def _check_spec(spec: SandboxSpec) -> None:
    if spec.network:
        raise ConfigError("SandboxSpec.network=True: the local sandbox has loopback only; leave network off")
    _check_path(spec.workdir)
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62})", spec.hostname):
        raise ConfigError(f"SandboxSpec.hostname must be 1 to 63 letters, digits, dots or hyphens, got {spec.hostname!r}")
    for name, value, least in (
        ("memory_mb", spec.memory_mb, 16),
        ("storage_mb", spec.storage_mb, 1),
        ("max_processes", spec.max_processes, 4),
        ("cpus", spec.cpus, 0.01),
    ):
        if value is None and name in ("memory_mb", "cpus"):
            continue
        if not isinstance(value, (int, float)) or value < least:
            raise ConfigError(f"SandboxSpec.{name} must be at least {least}, got {value!r}")
    _check_env(spec.env)


def _check_env(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise ConfigError(f"environment variable {name!r}={value!r}: a name must be non-empty without '=', and neither may hold NUL")


def _check_path(path: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f"a path inside a sandbox must be absolute and without NUL, got {path!r}")


def _check_spawn(argv: Sequence[str], env: Mapping[str, str] | None, fds: Mapping[int, int]) -> None:
    if isinstance(argv, str) or not argv or any("\0" in part for part in argv):
        raise ConfigError(f"argv must be a non-empty sequence of strings without NUL, got {argv!r}")
    if any(not 0 <= number <= _MAX_CHILD_FD for number in fds) or len(fds) > wire.MAX_DESCRIPTORS:
        raise ConfigError(f"fds must map child descriptors 0..{_MAX_CHILD_FD} (at most {wire.MAX_DESCRIPTORS}), got {sorted(fds)}")
    _check_env(env or {})


def _memfd(data: bytes) -> int:
    fd = os.memfd_create("t1", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _pid_of(pidfd: int) -> int:
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii").splitlines():
        if line.startswith("Pid:"):
            return max(int(line.split()[1]), 0)
    return 0


def _drain(process: LocalProcess, sinks: Mapping[int, bytearray], deadline: float, max_bytes: int) -> bool:
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
                    _read_ready(sinks, max_bytes)
                    return True
                if not _read_some(key.fd, sinks[key.fd], max_bytes):
                    selector.unregister(key.fd)


def _read_ready(sinks: Mapping[int, bytearray], max_bytes: int) -> None:
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
