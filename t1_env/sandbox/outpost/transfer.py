"""Files and directories on their way to the other side: a list of entries in a frame's header, their contents in its blob.

A large file is cut into parts, a large tree spreads over many frames; each frame can be applied on its own, and twice without harm.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from t1_env.sandbox import files, syscalls

Entry: TypeAlias = dict[str, Any]

PART_BYTES: Final = 1 << 20
_MAX_ENTRIES: Final = 512


# --------------------------------------------------------------------------------------------------------------------- this side
def entries_of_bytes(data: bytes, mode: int, times_ns: tuple[int, int] | None = None) -> Iterator[tuple[Entry, bytes]]:
    """Cut one file's contents into entries; its path is empty."""
    for offset in range(0, max(len(data), 1), PART_BYTES):
        yield _part("", mode, times_ns, offset, last=offset + PART_BYTES >= len(data)), data[offset : offset + PART_BYTES]


def entries_of_file(source: str, mode: int | None = None, path: str = "") -> Iterator[tuple[Entry, bytes]]:
    """Cut a file of this host into entries.

    Raises:
        OSError: It cannot be read, or is not a regular file (``EINVAL``).
    """
    with open(os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", source)
        times_ns = (status.st_atime_ns, status.st_mtime_ns)
        mode = stat.S_IMODE(status.st_mode) if mode is None else mode
        offset, data = 0, file.read(PART_BYTES)
        while True:
            following = file.read(PART_BYTES) if len(data) == PART_BYTES else b""
            yield _part(path, mode, times_ns, offset, last=not following), data
            if not following:
                return
            offset, data = offset + len(data), following


def entries_of_tree(source: str, path: str = "") -> Iterator[tuple[Entry, bytes]]:
    """Walk a directory of this host; symlinks travel as they are.

    Raises:
        OSError: Something cannot be read, or is neither a file nor a directory nor a symlink (``EINVAL``).
    """
    with os.scandir(source) as found:
        children = sorted(found, key=lambda entry: entry.name)
    for child in children:
        below = f"{path}/{child.name}"
        status = child.stat(follow_symlinks=False)
        if child.is_symlink():
            yield {"kind": "link", "path": below, "target": os.readlink(child.path)}, b""
        elif child.is_dir(follow_symlinks=False):
            yield {"kind": "directory", "path": below}, b""
            yield from entries_of_tree(child.path, below)
            times_ns = (status.st_atime_ns, status.st_mtime_ns)
            yield {"kind": "leave", "path": below, "mode": stat.S_IMODE(status.st_mode), "times_ns": times_ns}, b""
        elif child.is_file(follow_symlinks=False):
            yield from entries_of_file(child.path, path=below)
        else:
            raise OSError(errno.EINVAL, "Not a regular file, directory or symlink", child.path)


def batches(entries: Iterable[tuple[Entry, bytes]]) -> Iterator[tuple[list[Entry], bytes, bool]]:
    """Group entries into frames; the last group is marked, and there is always one."""
    group: list[Entry] = []
    blobs: list[bytes] = []
    size = 0
    for entry, data in entries:
        if group and (size + len(data) > PART_BYTES or len(group) >= _MAX_ENTRIES):
            yield group, b"".join(blobs), False
            group, blobs, size = [], [], 0
        group.append({**entry, "size": len(data)})
        blobs.append(data)
        size += len(data)
    yield group, b"".join(blobs), True


def digest_of(source: Path) -> str:
    """Content digest of a file or a directory of this host: names, kinds, modes and contents."""
    digest = hashlib.sha256()
    entries = entries_of_tree(str(source)) if source.is_dir() else entries_of_file(str(source))
    for entry, data in entries:
        mode = entry.get("mode", "")
        digest.update(
            f"{entry['kind']}\0{entry['path']}\0{mode}\0{entry.get('target', '')}\0{len(data)}\0".encode("utf-8", "surrogateescape")
        )
        digest.update(data)
    return digest.hexdigest()


def _part(path: str, mode: int, times_ns: tuple[int, int] | None, offset: int, *, last: bool) -> Entry:
    return {"kind": "file", "path": path, "mode": mode, "times_ns": times_ns, "offset": offset, "last": last}


# ------------------------------------------------------------------------------------------------------------------ the other side
def apply(root_fd: int, dest: str, entries: Sequence[Entry], blob: bytes) -> None:
    """Write entries below ``dest``, without ever leaving ``root_fd``.

    Args:
        root_fd: Directory that acts as the root.
        dest: Absolute path in it; the entries' paths are appended to it.
        entries: What to write.
        blob: Their contents, one after the other.

    Raises:
        OSError: The storage is full, or something is in the way.
    """
    start = 0
    base = dest.rstrip("/")
    for entry in entries:
        size = int(entry["size"])
        path = f"{base}{entry['path']}"
        match entry["kind"]:
            case "file":
                _write_part(root_fd, path, entry, memoryview(blob)[start : start + size])
            case "directory":
                files.make_directories(root_fd, path)
            case "leave":
                _finish_directory(root_fd, path, entry)
            case "link":
                _write_link(root_fd, path, entry["target"])
            case _:
                raise OSError(errno.EINVAL, f"unknown kind of entry {entry['kind']!r}", path)
        start += size


def _split(path: str) -> tuple[str, str]:
    parent, _, name = path.rpartition("/")
    if not name:
        raise OSError(errno.EISDIR, "Is a directory", path or "/")
    return parent, name


def _write_part(root_fd: int, path: str, entry: Entry, data: memoryview) -> None:
    parent, _ = _split(path)
    offset = int(entry["offset"])
    if offset == 0:
        files.make_directories(root_fd, parent)
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | (os.O_CREAT if offset == 0 else 0)
    fd = syscalls.open_in_root(root_fd, path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", path)
        os.ftruncate(fd, offset)
        while data:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written
        if entry["last"]:
            os.fchmod(fd, entry["mode"])
            if entry["times_ns"] is not None:
                os.utime(fd, ns=(entry["times_ns"][0], entry["times_ns"][1]))
    finally:
        os.close(fd)


def _finish_directory(root_fd: int, path: str, entry: Entry) -> None:
    fd = syscalls.open_in_root(root_fd, path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fchmod(fd, entry["mode"])
        os.utime(fd, ns=(entry["times_ns"][0], entry["times_ns"][1]))
    finally:
        os.close(fd)


def _write_link(root_fd: int, path: str, target: str) -> None:
    parent, name = _split(path)
    files.make_directories(root_fd, parent)
    fd = syscalls.open_in_root(root_fd, parent or "/", os.O_PATH | os.O_DIRECTORY)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)
        os.symlink(target, name, dir_fd=fd)
    finally:
        os.close(fd)
