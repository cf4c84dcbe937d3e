"""The inside of a verification clone: from a fresh fork of the keeper to the trusted function's result.

The clone sees exactly the frozen sandbox's filesystem through a throw-away layer, in namespaces of its own. Its interpreter keeps
working because the standard library and site-packages are mounted, read-only and straight from the host, in a directory of ``/dev`` whose
name is drawn anew for every clone; nothing is ever imported from what the agent can write.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from t1_env.sandbox import clone_root, detours, limits, rootfs, seccomp, stacking, syscalls, within
from t1_env.sandbox.masking import Masks

if TYPE_CHECKING:
    from _typeshed.importlib import PathEntryFinderProtocol as PathEntryFinder

_BARE: Final = "bare"
_FORBIDDEN_TARGETS: Final = ("proc", "dev", "sys")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Host directories that a clone's interpreter needs.

    Args:
        roots: Mounted as ``library/0``, ``library/1``, ...; none lies inside another.
        hidden: Directories below them that must be empty in a clone (bundled tasks with their solutions).
        executable: Host path of the Python binary.
        library: Where in the clone they are mounted.
    """

    roots: tuple[str, ...]
    hidden: tuple[str, ...]
    executable: str
    library: str = "/dev/.t1"

    def relocate(self, path: str) -> str | None:
        """Where a host path is found in the clone; None if it is not there."""
        for index, root in enumerate(self.roots):
            if path == root or path.startswith(f"{root}/"):
                return f"{self.library}/{index}{path[len(root) :]}"
        return None


@dataclass(frozen=True, slots=True)
class CloneRequest:
    """What one clone is to do.

    Args:
        entry: ``"package.module:function"``, already imported by the caller.
        payload: The function's argument.
        mounts: Absolute path in the clone -> host path.
        env: Complete environment.
        workdir: Working directory, if it exists.
        hostname: Of the sandbox.
        stack: What the sandbox's root started from.
        limits: Bounds.
        memory_is_bounded: Whether a cgroup bounds memory.
        processes_are_bounded: Whether a cgroup bounds the number of processes.
        masks: What the agent did to the base system; None if nobody looked.
        restored: Whether that is taken back.
        network_fd: The agent's network namespace, for a clone beside which it goes on; -1 for a clone with a network of its own.
    """

    entry: str
    payload: Any
    mounts: Mapping[str, str]
    env: Mapping[str, str]
    workdir: str
    hostname: str
    stack: stacking.Stack
    limits: limits.Limits
    memory_is_bounded: bool
    processes_are_bounded: bool
    masks: Masks | None = None
    restored: bool = False
    network_fd: int = -1

    @property
    def live(self) -> bool:
        """Whether the agent goes on beside it."""
        return self.network_fd >= 0


def import_warm(name: str) -> ModuleType:
    """Import a module and let it prepare itself for being forked: its ``warm()``, if it has one, is called and must be idempotent."""
    module = importlib.import_module(name)
    warm = getattr(module, "warm", None)
    if callable(warm):
        warm()
    return module


def resolve_entry(entry: str) -> Callable[[Any], Any]:
    """Import and return the function that ``"package.module:function"`` names.

    Raises:
        ValueError: The name has another form, or names no function.
        ImportError: The module cannot be imported.
    """
    module, separator, name = entry.partition(":")
    if not (module and separator and name):
        raise ValueError(f'entry {entry!r} is not of the form "package.module:function"')
    function = getattr(import_warm(module), name, None)
    if not callable(function):
        raise ValueError(f"entry {entry!r}: module {module} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def run_clone(
    request: CloneRequest, template: rootfs.Template, interpreter: Interpreter, result_fd: int, ready_fd: int | None = None
) -> NoReturn:
    """Set the clone up as its pid 1, call the function, write its result as JSON to ``result_fd`` and end; never returns.

    ``ready_fd`` is closed as soon as the clone does not need the agent's files any more.
    """
    result: dict[str, Any]
    try:
        syscalls.close_all_except([fd for fd in (result_fd, ready_fd, request.network_fd) if fd is not None and fd >= 0])
        syscalls.set_process_name("t1-verifier")
        _enter(request, template, replace(interpreter, library=f"/dev/.{os.urandom(16).hex()}"), ready_fd)
        result = {"payload": resolve_entry(request.entry)(request.payload)}
        data = json.dumps(result).encode("ascii")
    except BaseException as error:  # noqa: BLE001  (whatever the function raises, SystemExit included, is its caller's to hear of)
        message = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_tb(error.__traceback__)[-8:])
        data = json.dumps({"error": f"{request.entry} raised {message}\n{trace}".rstrip()}).encode("ascii")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(result_fd, view) :]
    finally:
        os._exit(0)


def _enter(request: CloneRequest, template: rootfs.Template, interpreter: Interpreter, ready_fd: int | None) -> None:
    root = template.clone_root
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    if not request.processes_are_bounded:
        limits.bound_pid_namespace(request.limits.max_processes)
    clone_root.build_clone_root(
        template, request.stack, storage_mb=request.limits.storage_mb, masks=request.masks, restored=request.restored, copied=request.live
    )
    if ready_fd is not None:
        os.close(ready_fd)
    rootfs.mount_kernel_filesystems(root)
    _mount_library(root, interpreter)
    bare = f"{interpreter.library}/{_BARE}"
    os.mkdir(root + bare, 0o755)
    rootfs.seal_dev(root)
    if request.mounts:
        syscalls.mount(root, root + bare, None, syscalls.MS_BIND | syscalls.MS_REC)
        within.bare_root = bare
    for target, source in request.mounts.items():
        _mount_read_only(root, target, source, request.stack.link_target(template, target.strip("/").partition("/")[0]))
    guarded = [target for target, source in request.mounts.items() if os.path.isdir(source) and detours.brings_answers(source)]
    links = _agents_links(template, request) if guarded else []
    syscalls.enter_root(root)
    detours.cut(links, guarded)
    _relocate_interpreter(interpreter)
    syscalls.set_hostname(request.hostname)
    if request.live:
        syscalls.setns(request.network_fd, syscalls.CLONE_NEWNET)
        os.close(request.network_fd)
    else:
        syscalls.bring_loopback_up()
    doubled = limits.Limits(
        memory_mb=request.limits.memory_mb,
        storage_mb=request.limits.storage_mb,
        max_processes=2 * request.limits.max_processes,  # an ordinary user's limit counts the frozen sandbox's processes too
        cpus=None,
    )
    limits.prefer_as_victim()
    limits.apply_rlimits(doubled, memory_is_bounded=request.memory_is_bounded)
    # A program that this process starts in the bare root stays there: it gets nothing that could change its root.
    syscalls.drop_privileges(not_for_programs=(syscalls.CAP_SYS_CHROOT,))
    if seccomp.available():
        seccomp.install()
    os.environ.clear()
    os.environ.update(request.env)
    time.tzset()
    tempfile.tempdir = None
    with contextlib.suppress(OSError):
        os.chdir(request.workdir)


def _agents_links(template: rootfs.Template, request: CloneRequest) -> list[str]:
    copied = f"{template.clone_store}/copy" if request.live else None
    written = stacking.written_by_agent(template, request.stack, copied)
    return [link for directory, at in written for link in detours.links_in(directory, at)]


def _mount_library(root: str, interpreter: Interpreter) -> None:
    os.mkdir(root + interpreter.library, 0o755)
    for index, source in enumerate(interpreter.roots):
        target = f"{root}{interpreter.library}/{index}"
        os.mkdir(target, 0o755)
        syscalls.bind(source, target, read_only=True)
    for path in interpreter.hidden:
        inside = interpreter.relocate(path)
        if inside is not None:
            flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_RDONLY
            syscalls.mount("t1", root + inside, "tmpfs", flags, "size=4k,mode=755")


def _mount_read_only(root: str, target: str, source: str, first: str) -> None:
    rest = target.strip("/").partition("/")[2]
    if not first or first in _FORBIDDEN_TARGETS or ".." in target.split("/"):
        raise ValueError(f"cannot mount at {target!r} in a clone: give an absolute path outside /proc, /dev and /sys")
    point = rootfs.make_mount_point(root, f"{first}/{rest}", directory=os.path.isdir(source))
    syscalls.bind(source, point, read_only=True, recursive=True)


def _relocate_interpreter(interpreter: Interpreter) -> None:
    """Point everything that imports later at the mounted copies.

    Packages that are loaded already keep their host paths in ``__path__``; a path hook translates these. (Rewriting them instead would
    touch, and so copy, the memory of every loaded module: 8 ms.)
    """
    hooks = tuple(sys.path_hooks)

    def hook(path: str) -> PathEntryFinder:
        inside = interpreter.relocate(path)
        if inside is not None:
            for original in hooks:
                with contextlib.suppress(ImportError):
                    return original(inside)
        raise ImportError(f"{path} is not part of T1's interpreter", path=path)

    sys.dont_write_bytecode = True
    sys.path[:] = [inside for inside in map(interpreter.relocate, sys.path) if inside is not None]
    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()
    sys.executable = interpreter.relocate(interpreter.executable) or interpreter.executable
