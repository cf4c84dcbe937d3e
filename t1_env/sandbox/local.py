"""The local sandbox: Linux namespaces and overlays over the host's own system directories. No daemon, no image, no root needed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from t1_env.errors import ConfigError, SandboxDied, SandboxError, SandboxUnavailable
from t1_env.sandbox import checks, launcher, wire
from t1_env.sandbox.accounts import Account
from t1_env.sandbox.base import BuiltEnvironment, CloneResult, CloneView, ExecResult, Sandbox, SandboxProcess, SandboxSpec
from t1_env.sandbox.link import Link
from t1_env.sandbox.masking import view_to_json
from t1_env.sandbox.process import LocalProcess, drain, host_pid, read_ready
from t1_env.sandbox.stacking import Stack

_KILL_TIMEOUT_S: Final = 5.0


class SandboxFileError(OSError, SandboxError):  # in this order: only so are errno and filename set
    """A file could not be put into or read from a sandbox; ``errno`` and ``filename`` say why and which."""


class LocalSandbox:
    """A private machine for one episode, made of Linux namespaces.

    The root is an overlay over an allow-list of the host's system directories (``/usr``, ``/opt``) with a synthetic ``/etc``; the rest is
    empty, writes go to a size-limited tmpfs, there is no network (loopback only, also for a task that asks for more: ``"network_off"`` is
    always among the capabilities), and root inside has no rights outside. Works for root and, with one user inside, for ordinary users.
    docs/design/sandbox.md describes the anatomy and the limits.

    ``spawn`` never raises because a program cannot be executed: as in a shell, the process then ends with status 127 or 126 and says why
    on its standard error.

    Args:
        spec: What to build; default ``SandboxSpec()``.
        stack: What its root starts from, where the specification names no image; default the host's system directories.

    Raises:
        ConfigError: The specification asks for something a local sandbox cannot be.
    """

    isolation = "namespaces"

    def __init__(self, spec: SandboxSpec | None = None, *, stack: Stack | None = None) -> None:
        self.spec = spec if spec is not None else SandboxSpec()
        checks.check_spec(self.spec)
        self.capabilities: frozenset[str] = frozenset({"clone", "fork", "freeze", "storage_limit", "network_off"})
        self._link: Link | None = None
        self._built = BuiltEnvironment()
        self._stack = Stack() if stack is None else stack
        self._account: Account | None = None
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
            ImageBuildError: ``SandboxSpec.image`` cannot be built; names the Dockerfile line.
            SandboxDied: It was closed.
        """
        with self._start_lock:
            if self._closed:
                raise SandboxDied("this sandbox was closed; make a new one")
            if self._link is None:
                if sys.platform != "linux":
                    raise SandboxUnavailable(f"the local sandbox needs Linux, this is {sys.platform}")
                if self.spec.image is None:
                    self._link, self.capabilities = Link.open(self, self.spec, self._stack)
                    return
                from t1_env.sandbox.builder import prepared  # builders are local sandboxes themselves

                with prepared(self.spec.image, self.spec.hide) as image:
                    self._stack, self._account, self._built = image.stack, image.account, image.built
                    self._link, self.capabilities = Link.open(self, self.spec, self._stack)

    @property
    def built(self) -> BuiltEnvironment:
        """What the image left: variables, working directory, user, what it really started from; empty before ``start``."""
        return self._built

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
            finished = drain(process, sinks, deadline, max_output_bytes)
            if not finished:
                self._require_link().ask_init({"op": "kill_session", "pid": inner_pid})
                process.wait(_KILL_TIMEOUT_S)
                read_ready(sinks, max_output_bytes)
        return ExecResult(process.poll() if finished else None, bytes(sinks[out]), bytes(sinks[err]), timed_out=not finished)

    def put(self, source: Path | bytes, dest: str, *, mode: int | None = None) -> None:
        """Copy a host file, a whole host directory (its contents into ``dest``) or bytes to an absolute path; parents are created.

        Files belong to root inside; modes and modification times are kept (bytes get mode 0644 and the present time).

        Raises:
            SandboxFileError: Missing source, full storage, or something in the way.
        """
        checks.check_path(dest)
        if isinstance(source, Path) and source.is_dir():
            if mode is not None:
                raise ConfigError(f"put({str(source)!r}): mode applies to a single file, not to a directory")
            self._ask_files({"op": "put_tree", "source": str(source.resolve()), "dest": dest})
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
        checks.check_path(path)
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
        return str(self._ask_files({"op": "generation"})[0]["generation"])

    def system_changes(self) -> dict[str, str]:
        """Files of the base system that were changed, replaced or removed since the start.

        Returns:
            Absolute path -> a mark that changes whenever the file changes again. New files are not listed.
        """
        return dict(self._ask_files({"op": "system_changes"})[0]["files"])

    def run_in_clone(
        self,
        entry: str,
        payload: Any,
        *,
        mounts: Mapping[str, Path] | None = None,
        timeout_s: float = 60.0,
        view: CloneView | None = None,
    ) -> CloneResult:
        """Freeze the sandbox, run a trusted function in a copy-on-write clone of its filesystem, discard it, thaw; see ``Sandbox``."""
        link = self._require_link()
        sources = {}
        for target, source in (mounts or {}).items():
            checks.check_path(target)
            if not Path(source).exists():
                raise ConfigError(f"run_in_clone: mounts[{target!r}] = {str(source)!r} does not exist on the host")
            sources[target] = str(Path(source).resolve())
        request = {"op": "clone", "entry": entry, "payload": payload, "mounts": sources, "timeout_s": timeout_s}
        if view is not None:
            request["view"] = view_to_json(view)
        reply, _ = link.ask_keeper(request)
        launcher.LAUNCHER.preload(entry.partition(":")[0])
        masked = tuple(reply.get("masked", ()))
        if reply.get("result") is None:
            return CloneResult(None, float(reply.get("seconds", 0.0)), str(reply["error"]), masked)
        result = json.loads(reply["result"])
        return CloneResult(result.get("payload"), float(reply["seconds"]), result.get("error"), masked)

    def fork(self) -> Sandbox:
        """Return a started sandbox whose filesystem is a copy of this one's as it stands; see ``Sandbox.fork``."""
        link = self._require_link()
        fork = LocalSandbox(self.spec)
        fork._stack, fork._account, fork._built = self._stack, self._account, self._built
        fork._link, fork.capabilities = Link.open(fork, self.spec, self._stack, copy_of=link)
        return fork

    def kill_all(self) -> None:
        """Kill every process inside and wait until none is left; the sandbox stays. See ``KillsAll``."""
        self._require_link().ask_init({"op": "kill_all"})

    def close(self) -> None:
        """Kill every process and remove every trace. Idempotent, never raises."""
        self._closed = True
        if self._link is not None:
            self._link.close()

    # ---------------------------------------------------------------------------------------------------------------- internals
    def _require_link(self) -> Link:
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
        checks.check_spawn(argv, env, targets)
        request = {
            "op": "spawn",
            "argv": list(argv),
            "env": dict(env or {}),
            "cwd": cwd,
            "pty": pty_size,
            "fds": list(targets),
            "account": None if self._account is None else self._account.to_json(),
        }
        reply, received = self._require_link().ask_init(request, list(targets.values()))
        pidfd, status_fd, *pty = received
        os.set_blocking(status_fd, False)
        return LocalProcess(host_pid(pidfd), pidfd, status_fd, pty[0] if pty else None), int(reply["pid"])

    def _ask_files(self, request: wire.Message, fds: Sequence[int] = ()) -> tuple[wire.Message, list[int]]:
        reply, received = self._require_link().ask_keeper(request, fds)
        if "error" in reply:
            path = reply.get("path") or request.get("dest") or request.get("path")
            raise SandboxFileError(reply.get("errno") or errno.EIO, f"{request['op']}: {reply['error']}", path)
        return reply, received


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


def _memfd(data: bytes) -> int:
    fd = os.memfd_create("t1", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
