"""The zygote: one small, single-threaded process per host process, from which every sandbox is forked.

Forking the host process itself would be wrong (it may have threads, gigabytes and a GPU); starting an interpreter per sandbox would be
slow. The zygote starts once, with the modules that sandboxes and verifiers need, builds the read-only template in a mount namespace of
its own, and forks a keeper for each request. It ends when the host process does.

Run as ``python -I -S -c BOOTSTRAP config`` (see launcher.py), so that neither ``t1_env/__init__`` nor any site customisation runs in it.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import signal
import socket
import traceback
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from t1_env.sandbox import clone, rootfs, seccomp, stacking, syscalls, wire
from t1_env.sandbox.keeper import Keeper, KeeperConfig

PRELOADED: Final = (
    # What verifiers commonly import: loaded here once, from the host, together with the shared libraries behind it. A clone could
    # otherwise load such a library (sqlite, ssl) from files that the agent has replaced.
    "pytest",
    "_pytest.assertion.rewrite",
    "asyncio",
    "bz2",
    "configparser",
    "csv",
    "datetime",
    "decimal",
    "difflib",
    "glob",
    "grp",
    "gzip",
    "hashlib",
    "http.client",
    "lzma",
    "pathlib",
    "pwd",
    "random",
    "shlex",
    "shutil",
    "sqlite3",
    "ssl",
    "statistics",
    "subprocess",
    "tarfile",
    "tempfile",
    "unittest.mock",
    "urllib.request",
    "uuid",
    "xml.etree.ElementTree",
    "zipfile",
    "zlib",
    "zoneinfo",
)

_MAX_IDS: Final = 65536
_CAP_SETUID: Final = 7
_CAP_SYS_ADMIN: Final = 21


def main(fd: int, config: Mapping[str, Any]) -> NoReturn:
    """Serve the host process whose socket is ``fd``; never returns."""
    sock = socket.socket(fileno=fd)
    try:
        zygote = Zygote(sock, config)
        wire.send(sock, {"ready": True})
        os.dup2(1, 2)  # the host reads standard error while we start; from here on it is /dev/null like standard output
    except OSError as error:
        wire.send(sock, {"error": f"{error.strerror}: {error.filename or 'namespaces'}", "errno": error.errno})
        os._exit(1)
    with contextlib.suppress(wire.Disconnected):
        zygote.serve()
    os._exit(0)


class Zygote:
    """Forks keepers on request."""

    def __init__(self, sock: socket.socket, config: Mapping[str, Any]) -> None:
        self._owner = str(config["owner"])
        syscalls.set_process_name("t1-zygote", self._owner)
        os.umask(0o022)
        self._sock = sock
        self._privileged = os.geteuid() == 0 and _has_capability(_CAP_SETUID) and _has_capability(_CAP_SYS_ADMIN)
        self._interpreter = clone.Interpreter(roots=tuple(config["roots"]), hidden=tuple(config["hidden"]), executable=config["executable"])
        if self._privileged:
            syscalls.unshare(syscalls.CLONE_NEWNS)
        else:
            uid, gid = os.geteuid(), os.getegid()
            syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
            _map_own_ids(uid, gid)
        self._template = rootfs.prepare_template()
        for name in PRELOADED:
            with contextlib.suppress(ImportError):  # a Python built without it; a verifier that needs it will say so
                importlib.import_module(name)
        seccomp.available()  # asked once, here, and the filter is assembled
        gc.collect()
        gc.freeze()  # keeps the forks from touching, and so copying, these objects
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are reaped by the kernel

    def serve(self) -> None:
        """Answer requests until the host is gone."""
        while True:
            request, fds = wire.receive(self._sock)
            if request["op"] == "preload":
                # Failing here is not an error yet: the keeper that needs the module imports it again and reports.
                with contextlib.suppress(Exception):
                    clone.import_warm(request["module"])
            elif request["op"] == "start":
                self._fork_keeper(request, fds)
            wire.close_all(fds)

    def _fork_keeper(self, request: wire.Message, fds: list[int]) -> None:
        ready_read, ready_write = os.pipe()
        mapped_read, mapped_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            syscalls.close_all_except([*fds, ready_write, mapped_read])
            self._run_keeper(request, fds, ready_write, mapped_read)
        os.close(ready_write)
        os.close(mapped_read)
        try:
            if self._privileged and os.read(ready_read, 1) == b"1":
                _map_all_ids(pid)
                os.write(mapped_write, b"1")
        except OSError:
            with contextlib.suppress(OSError):  # the keeper itself was killed
                os.write(mapped_write, b"0")  # the keeper reports it; an empty pipe would mean that this process was killed
        finally:
            os.close(ready_read)
            os.close(mapped_write)

    def _run_keeper(self, request: wire.Message, fds: list[int], ready_write: int, mapped_read: int) -> NoReturn:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sock, *lender = [socket.socket(fileno=fd) for fd in fds]
        keeper = None
        try:
            syscalls.set_process_name("t1-keeper", self._owner)
            spec = self._look_apart(request["spec"])
            syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
            if self._privileged:
                try:
                    os.write(ready_write, b"1")
                    answer = os.read(mapped_read, 1)
                except BrokenPipeError:
                    answer = b""
                if answer == b"":
                    raise OSError(errno.EPIPE, "the launcher was killed meanwhile", "zygote")  # no refusal: it can be tried again
                if answer != b"1":
                    raise OSError(errno.EPERM, "the user namespace could not be mapped", "/proc/self/uid_map")
            else:
                _map_own_ids(0, 0)
            os.close(ready_write)
            os.close(mapped_read)
            _forbid_nested_namespaces()
            config = KeeperConfig(request["name"], spec, self._template, self._interpreter, self._privileged, *lender)
            keeper = Keeper(sock, config)
            keeper.start()
            keeper.serve()
        except wire.Disconnected:
            pass
        except OSError as error:
            _report(sock, {"error": f"{error.strerror}: {error.filename or 'namespaces'}", "errno": error.errno})
        except BaseException:  # noqa: BLE001  (a bug here must reach the host as text; there is no terminal to print it on)
            _report(sock, {"error": traceback.format_exc(), "errno": None})
        finally:
            with contextlib.suppress(BaseException):
                if keeper is not None:
                    keeper.shut_down()
            os._exit(0)

    def _look_apart(self, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let a sandbox that stands on an agent's own mount see its files through another one, where that is possible."""
        stack = stacking.Stack.from_json(spec["root"])
        if not self._privileged or stack.written is None:
            return spec
        syscalls.unshare(syscalls.CLONE_NEWNS)
        return {**spec, "root": stacking.look_apart(stack).to_json()}


def _report(sock: socket.socket, message: wire.Message) -> None:
    with contextlib.suppress(wire.Disconnected):
        wire.send(sock, message)


def _has_capability(number: int) -> bool:
    with open("/proc/self/status", encoding="ascii", errors="replace") as stream:
        for line in stream:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _map_own_ids(uid: int, gid: int) -> None:
    """Map root inside to this user, the one mapping that needs no privilege."""
    _write("/proc/self/setgroups", "deny", missing_ok=True)
    _write("/proc/self/uid_map", f"0 {uid} 1")
    _write("/proc/self/gid_map", f"0 {gid} 1")


def _map_all_ids(pid: int) -> None:
    """Map the users 0..65535 that exist here onto themselves in the user namespace of ``pid``."""
    for kind in ("uid", "gid"):
        with open(f"/proc/self/{kind}_map", encoding="ascii") as stream:
            extents = [line.split() for line in stream]
        lines = []
        for inside, _, count in ((int(a), int(b), int(c)) for a, b, c in extents):
            if inside < _MAX_IDS:
                lines.append(f"{inside} {inside} {min(count, _MAX_IDS - inside)}")
        _write(f"/proc/{pid}/{kind}_map", "\n".join(lines) + "\n")


def _forbid_nested_namespaces() -> None:
    """Processes inside may not make user namespaces, in which they would have capabilities again.

    The setting is per user namespace, so this touches the sandbox alone. Where /proc/sys is read-only (a container) it stays as it is;
    the mounts of the sandbox are locked in any nested namespace all the same.
    """
    with contextlib.suppress(OSError):
        _write("/proc/sys/user/max_user_namespaces", "0")


def _write(path: str, text: str, *, missing_ok: bool = False) -> None:
    try:
        fd = os.open(path, os.O_WRONLY)
    except FileNotFoundError:
        if missing_ok:
            return
        raise
    try:
        os.write(fd, text.encode("ascii"))
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(fd)
