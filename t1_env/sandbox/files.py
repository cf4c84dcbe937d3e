"""Files of a running sandbox, read and written from outside it without ever leaving its root.

Used by the keeper. Paths are resolved by ``openat2(RESOLVE_IN_ROOT)``: what the sandbox's processes plant (symlinks, FIFOs, device
nodes) can neither lead to the host nor block the keeper.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import stat
import struct
import time
from collections.abc import Iterable
from typing import Final

from t1_env.sandbox import syscalls
from t1_env.sandbox.trees import is_opaque

_RECORD: Final = struct.Struct("=QIIIQqqQQ")
_COPY_CHUNK_BYTES: Final = 1 << 20
LONG_PATH: Final = 3500
"""With one more name of 255 bytes still shorter than the 4096 that a path may have."""

_CLOCK_REALTIME_COARSE: Final = 5  # linux/time.h; the clock of file timestamps, not named by the time module
# From 6.13 the kernel gives a changed file a timestamp later than any that was read before; older ones tick every few milliseconds.
_FINE_TIMESTAMPS: Final = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit()) >= (6, 13)


def make_directories(root_fd: int, path: str, mode: int = 0o755, *, owner: tuple[int, int] | None = None) -> None:
    """``mkdir -p`` that never leaves ``root_fd``; symlinks are followed inside it.

    Args:
        root_fd: The sandbox's root.
        path: Absolute path inside.
        mode: Permission bits of what is made.
        owner: Whom to give what is made to.

    Raises:
        OSError: A component exists and is not a directory, or the storage is full.
    """
    done = ""
    parent = os.dup(root_fd)
    try:
        for name in (part for part in path.split("/") if part not in ("", ".")):
            done = f"{done}/{name}"
            try:
                child = syscalls.open_in_root(root_fd, done, os.O_PATH | os.O_DIRECTORY)
            except FileNotFoundError:
                os.mkdir(name, mode, dir_fd=parent)
                if owner is not None:
                    os.chown(name, *owner, dir_fd=parent, follow_symlinks=False)
                child = syscalls.open_in_root(root_fd, done, os.O_PATH | os.O_DIRECTORY)
            os.close(parent)
            parent = child
    finally:
        os.close(parent)


def open_for_reading(root_fd: int, path: str) -> int:
    """Open a regular file inside ``root_fd``.

    Raises:
        OSError: It is missing, or it is not a regular file (``EINVAL``; ``EISDIR`` for a directory).
    """
    # O_NONBLOCK: opening a FIFO must not wait for a writer.
    fd = syscalls.open_in_root(root_fd, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "Is a directory" if code == errno.EISDIR else "Not a regular file", path)
    return fd


Owner = tuple[int, int] | None
"""User and group id to give what is written to; None leaves it to root."""


def write_file(root_fd: int, dest: str, source_fd: int, mode: int, times_ns: tuple[int, int] | None = None, *, owner: Owner = None) -> None:
    """Copy an open file to ``dest`` inside ``root_fd``, creating its parents.

    Args:
        root_fd: The sandbox's root.
        dest: Absolute path inside.
        source_fd: Open for reading; copied from its current offset to its end.
        mode: Permission bits of the result.
        times_ns: Access and modification time to give it, or None for now.
        owner: Whom to give it to.

    Raises:
        OSError: The storage is full, or something that is not a regular file stands at ``dest``.
    """
    parent, _, name = dest.rstrip("/").rpartition("/")
    if not name:
        raise OSError(errno.EISDIR, "Is a directory", dest)
    make_directories(root_fd, parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
    fd = syscalls.open_in_root(root_fd, f"{parent}/{name}", flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", dest)
        os.ftruncate(fd, 0)
        while os.sendfile(fd, source_fd, None, _COPY_CHUNK_BYTES):  # None: move the offset along
            pass
        if owner is not None:
            os.fchown(fd, *owner)
        os.fchmod(fd, mode)
        if times_ns is not None:
            os.utime(fd, ns=times_ns)
    finally:
        os.close(fd)


def write_tree(
    root_fd: int, dest: str, source: str, *, owner: Owner = None, left_out: frozenset[str] = frozenset(), mode: int | None = None
) -> None:
    """Copy the contents of the host directory ``source`` into ``dest``; symlinks are copied as they are, special files refused.

    Args:
        root_fd: The sandbox's root.
        dest: Absolute path inside.
        source: Host directory.
        owner: Whom to give what is written to.
        left_out: Host paths that are not copied.
        mode: Permission bits of all that is written; None to keep those of the source.

    Raises:
        OSError: Reading failed, the storage is full, or a special file was met.
    """
    make_directories(root_fd, dest, owner=owner)
    with os.scandir(source) as entries:
        children = sorted(entries, key=lambda entry: entry.name)
    for entry in children:
        if entry.path in left_out:
            continue
        status = entry.stat(follow_symlinks=False)
        permissions = stat.S_IMODE(status.st_mode) if mode is None else mode
        target = f"{dest.rstrip('/')}/{entry.name}"
        if entry.is_symlink():
            _write_symlink(root_fd, dest, entry.name, os.readlink(entry.path), owner)
        elif entry.is_dir(follow_symlinks=False):
            write_tree(root_fd, target, entry.path, owner=owner, left_out=left_out, mode=mode)
            fd = syscalls.open_in_root(root_fd, target, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if owner is not None:
                    os.fchown(fd, *owner)
                os.fchmod(fd, permissions)
                os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
            finally:
                os.close(fd)
        elif entry.is_file(follow_symlinks=False):
            source_fd = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                times_ns = (status.st_atime_ns, status.st_mtime_ns)
                write_file(root_fd, target, source_fd, permissions, times_ns, owner=owner)
            finally:
                os.close(source_fd)
        else:
            raise OSError(errno.EINVAL, "Not a regular file, directory or symlink", entry.path)


def _write_symlink(root_fd: int, directory: str, name: str, target: str, owner: Owner) -> None:
    parent = syscalls.open_in_root(root_fd, directory, os.O_PATH | os.O_DIRECTORY)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
        os.symlink(target, name, dir_fd=parent)
        if owner is not None:
            os.chown(name, *owner, dir_fd=parent, follow_symlinks=False)
    finally:
        os.close(parent)


def fingerprint(directories: Iterable[str]) -> str:
    """Digest of the metadata of everything below ``directories``.

    Covers names, types, inode numbers, link counts, owners, modes, sizes, modification and change times (a change of contents, of
    attributes or of extended attributes moves the change time). Does not read contents; a process that keeps writing through a shared
    memory mapping moves the times only at its first write to each page.
    """
    while True:
        digest, newest_ns = _scan(directories)
        if _FINE_TIMESTAMPS or newest_ns < time.clock_gettime_ns(_CLOCK_REALTIME_COARSE):
            return digest
        # The latest change was in the present clock tick: one more change in it could not be told apart. Wait for the next tick.
        time.sleep(0.0005)


def changed_files(written: str, lowers: Iterable[str], prefix: str, *, only: frozenset[str] | None = None) -> dict[str, str]:
    """Files of the lower directories that an overlay's upper directory replaces, changes or takes away.

    Args:
        written: The upper directory.
        lowers: The directories below it.
        prefix: Where the overlay is mounted inside the sandbox.
        only: Top-level names to look at; None for all.

    Returns:
        Path inside the sandbox -> a mark that changes whenever the file changes again. New files and directories are not listed; a
        directory is listed if it replaces one of a lower directory.
    """
    found: dict[str, str] = {}
    lowers = tuple(lowers)
    pending = [""]
    while pending:
        relative = pending.pop()
        if len(relative) > LONG_PATH:
            continue  # no base system is that deep
        try:
            with os.scandir(f"{written}{relative}") as entries:
                children = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed while we looked
        for entry in children:
            path = f"{relative}/{entry.name}"
            if only is not None and not relative and entry.name not in only:
                continue
            if entry.is_dir(follow_symlinks=False):
                pending.append(path)
                if not is_opaque(entry.path):
                    continue
            if any(os.path.lexists(f"{lower}{path}") for lower in lowers):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found[f"{prefix}{path}"] = f"{status.st_ino}-{status.st_ctime_ns}"
    return found


class _Anchor:
    """A directory that lies too deep for its path to be used; what is below is named relative to it while anything refers to it."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.path = f"/proc/self/fd/{self._fd}/."

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


def _scan(directories: Iterable[str]) -> tuple[str, int]:
    digest = hashlib.blake2b(digest_size=16)
    newest_ns = 0
    pending: list[tuple[str, _Anchor | None]] = [(directory, None) for directory in directories]
    while pending:
        directory, anchor = pending.pop()
        try:
            if len(directory) > LONG_PATH:
                anchor = _Anchor(directory)
                directory = anchor.path
            # Which directory this is says its inode number, and its parent's listing says where that belongs.
            own = os.lstat(directory)
            digest.update(_RECORD.pack(*_fields(own)))
            newest_ns = max(newest_ns, own.st_ctime_ns)
            with os.scandir(directory) as entries:
                children = sorted(entries, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed while we looked; its parent's times say so
        for entry in children:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            newest_ns = max(newest_ns, status.st_ctime_ns)
            digest.update(os.fsencode(entry.name))
            digest.update(_RECORD.pack(*_fields(status)))
            if stat.S_ISDIR(status.st_mode):
                pending.append((entry.path, anchor))
    return digest.hexdigest(), newest_ns


def _fields(status: os.stat_result) -> tuple[int, ...]:
    return (
        status.st_ino,
        status.st_mode,
        status.st_uid,
        status.st_gid,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_nlink,
        status.st_rdev,
    )
