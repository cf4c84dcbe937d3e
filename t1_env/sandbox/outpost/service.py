"""What an outpost does when it is asked: sandboxes, their files and processes, and the shells in them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias

from t1_env.errors import ConfigError, ImageBuildError, SandboxDied, SandboxError, SandboxUnavailable
from t1_env.sandbox.base import CloneResult, ImageSource, SandboxSpec
from t1_env.sandbox.local import LocalSandbox, SandboxFileError
from t1_env.sandbox.masking import view_from_json
from t1_env.sandbox.outpost import records, transfer
from t1_env.sandbox.outpost.frames import MAX_BLOB_BYTES, Header
from t1_env.sandbox.outpost.native import NativeSandbox
from t1_env.sandbox.outpost.processes import HostedProcess
from t1_env.sandbox.outpost.shells import HostedShell
from t1_env.sandbox.outpost.watcher import Watcher
from t1_env.sandbox.outpost.workers import Workers
from t1_env.sandbox.owner import directory_prefix
from t1_env.sandbox.process import LocalProcess

Answer: TypeAlias = tuple[Header, bytes]
Reply: TypeAlias = Callable[[Header, bytes], None]

MODES: Final = ("native", "namespaces", "auto")
_NOTHING: Final[Answer] = ({}, b"")


@dataclass(slots=True)
class _Hosted:
    """A sandbox and what belongs to it."""

    sandbox: LocalSandbox | NativeSandbox
    mode: str
    shells: dict[int, HostedShell] = field(default_factory=dict)
    processes: dict[int, HostedProcess] = field(default_factory=dict)
    staged: dict[int, str] = field(default_factory=dict)
    downloads: dict[int, int] = field(default_factory=dict)


class Service:
    """Serves requests; any number at once.

    Args:
        mode: One of ``MODES``.
        make_native: Makes the sandbox of the place the outpost is in, not started.
    """

    def __init__(self, mode: str, make_native: Callable[[SandboxSpec], NativeSandbox]) -> None:
        self._mode = mode
        self._make_native = make_native
        self._workers = Workers()
        self._watcher = Watcher()
        self._lock = threading.Lock()
        self._serial = itertools.count(1)
        self._hosted: dict[int, _Hosted] = {}
        self._staging = ""
        self._operations: Mapping[str, Callable[[Header, bytes], Answer]] = {
            "start": self._start,
            "alive": self._alive,
            "run": self._run,
            "put": self._put,
            "get": self._get,
            "generation": self._generation,
            "system_changes": self._system_changes,
            "has_mount": self._has_mount,
            "put_mount": self._put_mount,
            "clone": self._clone,
            "fork": self._fork,
            "kill_all": self._kill_all,
            "close": self._close,
            "spawn": self._spawn,
            "shell.open": self._shell_open,
        }

    def serve(self, request: Header, blob: bytes, reply: Reply) -> None:
        """Have a request answered, in whatever thread; returns at once.

        Args:
            request: Header of the request.
            blob: Its blob.
            reply: Called once with the answer; an error is an answer.
        """
        operation = str(request.get("op"))
        family, _, _ = operation.partition(".")
        if family == "shell" and operation != "shell.open":
            shell = self._find_shell(request)
            if shell is None:
                reply(records.error_to_json(SandboxDied("this shell is gone: its sandbox was closed")), b"")
            else:
                shell.strand.submit(lambda: _answer(lambda: shell.serve(request), reply))
        elif family == "process":
            self._serve_process(operation, request, blob, reply)
        elif operation in self._operations:
            handler = self._operations[operation]
            self._workers.submit(lambda: _answer(lambda: handler(request, blob), reply))
        else:
            reply(records.error_to_json(SandboxError(f"the outpost does not know the request {operation!r}")), b"")

    def close(self) -> None:
        """Close every sandbox and remove what was staged."""
        with self._lock:
            hosted, self._hosted = self._hosted, {}
        for each in hosted.values():
            each.sandbox.close()
        if self._staging:
            shutil.rmtree(self._staging, ignore_errors=True)

    # -------------------------------------------------------------------------------------------------------------------- sandboxes
    def _start(self, request: Header, _: bytes) -> Answer:
        spec = records.spec_from_json(request["spec"])
        reason = None
        sandbox: LocalSandbox | NativeSandbox
        if self._mode == "native":
            sandbox, mode = self._start_native(spec), "native"
        else:
            try:
                sandbox, mode = LocalSandbox(replace(spec, image=self._image(request.get("image")))), "namespaces"
                sandbox.start()
            except ImageBuildError as error:
                image = request["image"]
                raise ImageBuildError(str(error).replace(self._mount_path(image["digest"]), image["shown_as"])) from error
            except SandboxUnavailable as error:
                if self._mode == "namespaces":
                    raise
                reason = str(error)
                sandbox, mode = self._start_native(spec), "native"
        return {**self._host(sandbox, mode), "reason": reason}, b""

    def _image(self, fields: Header | None) -> ImageSource | None:
        """What to build over here; its directory was sent before, as a mount is."""
        if fields is None:
            return None
        directory = None if fields["digest"] is None else Path(self._mount_path(fields["digest"]))
        return ImageSource(directory, fields["docker_image"], fields["build_timeout_s"])

    def _start_native(self, spec: SandboxSpec) -> NativeSandbox:
        with self._lock:
            if any(each.mode == "native" for each in self._hosted.values()):
                raise ConfigError("an outpost in native mode holds one sandbox: the place it is in")
        sandbox = self._make_native(spec)
        sandbox.start()
        return sandbox

    def _host(self, sandbox: LocalSandbox | NativeSandbox, mode: str) -> Header:
        number = next(self._serial)
        with self._lock:
            self._hosted[number] = _Hosted(sandbox, mode)
        return {
            "sandbox": number,
            "mode": mode,
            "isolation": sandbox.isolation,
            "capabilities": sorted(sandbox.capabilities),
            "built": records.built_to_json(sandbox.built),
        }

    def _of(self, request: Header) -> _Hosted:
        with self._lock:
            hosted = self._hosted.get(request["sandbox"])
        if hosted is None:
            raise SandboxDied("this sandbox was closed")
        return hosted

    def _alive(self, request: Header, _: bytes) -> Answer:
        with self._lock:
            hosted = self._hosted.get(request["sandbox"])
        return {"alive": hosted is not None and hosted.sandbox.alive}, b""

    def _kill_all(self, request: Header, _: bytes) -> Answer:
        self._of(request).sandbox.kill_all()
        return _NOTHING

    def _fork(self, request: Header, _: bytes) -> Answer:
        hosted = self._of(request)
        copy = hosted.sandbox.fork()
        assert isinstance(copy, LocalSandbox)
        return self._host(copy, hosted.mode), b""

    def _close(self, request: Header, _: bytes) -> Answer:
        with self._lock:
            hosted = self._hosted.pop(request["sandbox"], None)
        if hosted is None:
            return _NOTHING
        hosted.sandbox.close()
        for shell in hosted.shells.values():
            shell.end()
        for process in hosted.processes.values():
            process.release()
        for fd in hosted.downloads.values():
            os.close(fd)
        for directory in hosted.staged.values():
            shutil.rmtree(directory, ignore_errors=True)
        return _NOTHING

    # ------------------------------------------------------------------------------------------------------------------ programs
    def _run(self, request: Header, blob: bytes) -> Answer:
        result = self._of(request).sandbox.run(
            request["argv"],
            stdin=blob,
            env=request["env"],
            cwd=request["cwd"],
            timeout_s=request["timeout_s"],
            max_output_bytes=request["max_output_bytes"],
        )
        return records.exec_result_to_frame(result)

    def _spawn(self, request: Header, _: bytes) -> Answer:
        hosted = self._of(request)
        pty = request["pty"]
        process = hosted.sandbox.spawn(
            request["argv"], env=request["env"], cwd=request["cwd"], pty_size=None if pty is None else (pty[0], pty[1])
        )
        assert isinstance(process, LocalProcess)
        number = next(self._serial)
        hosted.processes[number] = HostedProcess(process, self._watcher)
        return {"process": number}, b""

    def _serve_process(self, operation: str, request: Header, blob: bytes, reply: Reply) -> None:
        with self._lock:
            hosted = self._hosted.get(request["sandbox"])
        process = None if hosted is None else hosted.processes.get(request["process"])
        if hosted is None or process is None:
            reply(records.error_to_json(SandboxDied("this process is gone: its sandbox was closed")), b"")
        elif operation == "process.release":
            hosted.processes.pop(request["process"]).release()
            reply({}, b"")
        else:
            process.serve(operation, request, blob, reply)

    def _find_shell(self, request: Header) -> HostedShell | None:
        with self._lock:
            hosted = self._hosted.get(request["sandbox"])
        return None if hosted is None else hosted.shells.get(request["shell"])

    def _shell_open(self, request: Header, _: bytes) -> Answer:
        hosted = self._of(request)
        number = next(self._serial)
        hosted.shells[number] = HostedShell(hosted.sandbox, request["config"])
        return {"shell": number}, b""

    # --------------------------------------------------------------------------------------------------------------------- files
    def _put(self, request: Header, blob: bytes) -> Answer:
        """Write some entries; a transfer is over with the request that is marked ``final``."""
        hosted, dest = self._of(request), request["dest"]
        if isinstance(hosted.sandbox, NativeSandbox):
            hosted.sandbox.write_entries(dest, request["entries"], blob)
            return _NOTHING
        directory = hosted.staged.get(request["transfer"])
        if directory is None:
            directory = hosted.staged[request["transfer"]] = tempfile.mkdtemp(dir=self._staging_directory(), prefix="put-")
        _write_staged(directory, request, blob)
        if request["final"]:
            hosted.staged.pop(request["transfer"])
            try:
                staged = Path(directory, "staged")
                if request["tree"]:
                    staged.mkdir(exist_ok=True)
                    hosted.sandbox.put(staged, dest)
                elif request["timed"]:
                    hosted.sandbox.put(staged, dest)
                else:
                    hosted.sandbox.put(staged.read_bytes(), dest, mode=staged.stat().st_mode & 0o7777)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
        return _NOTHING

    def _get(self, request: Header, _: bytes) -> Answer:
        """Read a file from its start, or go on reading where a ``download`` stopped."""
        hosted = self._of(request)
        most = min(int(request["max_bytes"]), MAX_BLOB_BYTES)
        number = request.get("download")
        if number is None and not isinstance(hosted.sandbox, NativeSandbox):
            data = hosted.sandbox.get(request["path"], max_bytes=int(request["max_bytes"]))
            if len(data) <= MAX_BLOB_BYTES:
                return {"more": None}, data
            fd = os.memfd_create("download", os.MFD_CLOEXEC)
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            os.lseek(fd, 0, os.SEEK_SET)
        elif number is None:
            assert isinstance(hosted.sandbox, NativeSandbox)
            fd = hosted.sandbox.open_for_reading(request["path"])
        else:
            fd = hosted.downloads.pop(number)
        try:
            data = _read(fd, most + 1)
            if len(data) > int(request["max_bytes"]):
                raise SandboxFileError(errno.EFBIG, f"get: file is larger than max_bytes={request['total_bytes']}", request["path"])
            if len(data) <= most:
                return {"more": None}, data
            os.lseek(fd, most - len(data), os.SEEK_CUR)
            number = next(self._serial)
            hosted.downloads[number] = os.dup(fd)
            return {"more": number}, data[:most]
        finally:
            os.close(fd)

    def _generation(self, request: Header, _: bytes) -> Answer:
        return {"generation": self._of(request).sandbox.generation()}, b""

    def _system_changes(self, request: Header, _: bytes) -> Answer:
        sandbox = self._of(request).sandbox
        return {"files": sandbox.system_changes() if isinstance(sandbox, LocalSandbox) else {}}, b""

    # --------------------------------------------------------------------------------------------------------------------- clones
    def _has_mount(self, request: Header, _: bytes) -> Answer:
        return {"has": os.path.lexists(self._mount_path(request["digest"]))}, b""

    def _put_mount(self, request: Header, blob: bytes) -> Answer:
        """Keep host files under their content digest, where only the outpost can read them."""
        target = self._mount_path(request["digest"])
        private = f"{target}-{request['transfer']}"
        os.makedirs(private, 0o700, exist_ok=True)
        _write_staged(private, request, blob)
        if request["final"]:
            if request["tree"]:
                os.makedirs(os.path.join(private, "staged"), exist_ok=True)
            with contextlib.suppress(FileExistsError, OSError):  # another request was first
                os.rename(os.path.join(private, "staged"), target)
            shutil.rmtree(private, ignore_errors=True)
        return _NOTHING

    def _clone(self, request: Header, _: bytes) -> Answer:
        mounts = {target: Path(self._mount_path(digest)) for target, digest in request["mounts"].items()}
        view = None if request.get("view") is None else view_from_json(request["view"])
        result: CloneResult = self._of(request).sandbox.run_in_clone(
            request["entry"], request["payload"], mounts=mounts, timeout_s=request["timeout_s"], view=view
        )
        return records.clone_result_to_json(result), b""

    def _mount_path(self, digest: str) -> str:
        return os.path.join(self._staging_directory(), f"mount-{digest}")

    def _staging_directory(self) -> str:
        with self._lock:
            if not self._staging:
                self._staging = tempfile.mkdtemp(prefix=directory_prefix("outpost"))
            return self._staging


def _answer(handler: Callable[[], Answer], reply: Reply) -> None:
    try:
        header, blob = handler()
    except Exception as error:  # noqa: BLE001  (whatever it is belongs to the one who asked; the outpost goes on)
        header, blob = records.error_to_json(error), b""
    reply(header, blob)


def _write_staged(directory: str, request: Header, blob: bytes) -> None:
    root_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        transfer.apply(root_fd, "/staged", request["entries"], blob)
    except OSError as error:
        raise SandboxFileError(error.errno or errno.EIO, f"put: {error.strerror}", request.get("dest")) from error
    finally:
        os.close(root_fd)


def _read(fd: int, size: int) -> bytes:
    blocks: list[bytes] = []
    while size > 0 and (block := os.read(fd, size)):
        blocks.append(block)
        size -= len(block)
    return b"".join(blocks)
