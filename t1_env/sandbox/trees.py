"""Copying a directory tree exactly: owners, modes, times, hard links, holes, extended attributes, and the marks of an overlay.

An overlay's upper directory says "gone" with a whiteout (a character device 0/0) and "nothing below shows through" with an attribute of a
directory. A copy can keep these marks (a fork), collect them as a list (a layer, which may lie on a disk that cannot hold them) or drop
them (an image that somebody hands in). Nothing is ever followed: no symlink, no device, no FIFO. Trees may be of any depth.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

OPAQUE: Final = "user.overlay.opaque"
"""Attribute of a directory of an overlay layer that hides what lower layers have at its path."""

_OPAQUE_NAMES: Final = (OPAQUE, "trusted.overlay.opaque")
_OVERLAY_PREFIX: Final = "user.overlay."
_KEPT_ATTRIBUTES: Final = ("user.", "system.posix_acl_", "security.capability")
_CHUNK_BYTES: Final = 1 << 22
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_OWNER: Final = 65535  # a sandbox has the users 0..65535
_UNSUPPORTED: Final = (errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL)


@dataclass(slots=True)
class Marks:
    """What an overlay layer takes away, as paths relative to its top.

    Args:
        whiteouts: Paths that no longer exist.
        opaque: Directories that hide what lies below them.
    """

    whiteouts: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Copied:
    """What a copy held.

    Args:
        entries: Files, directories and links, the top not counted.
        size_bytes: Sum of the sizes of its regular files.
        skipped: Device nodes and sockets that were left out.
    """

    entries: int = 0
    size_bytes: int = 0
    skipped: int = 0

    def plus(self, other: Copied) -> Copied:
        """The sum of both."""
        return Copied(self.entries + other.entries, self.size_bytes + other.size_bytes, self.skipped + other.skipped)


@dataclass(slots=True)
class _Level:
    """A directory on the way down: what is still to be entered, and what it is to look like in the end."""

    relative: str
    status: os.stat_result
    attributes: dict[str, bytes]
    source_id: tuple[int, int]
    target_id: tuple[int, int]
    pending: list[str]


def is_opaque(directory: str) -> bool:
    """Whether a directory of an overlay layer hides what lower layers have at its path; also one that a container engine mounts."""
    for name in _OPAQUE_NAMES:
        with contextlib.suppress(OSError):  # no such attribute, which is how most directories are
            if os.getxattr(directory, name, follow_symlinks=False) == b"y":
                return True
    return False


def copy_tree(source_fd: int, target_fd: int, *, overlay: Literal["keep", "collect", "drop"], owners: bool = True) -> tuple[Copied, Marks]:
    """Copy the contents and attributes of one open directory to another, which is empty or holds only other names.

    Args:
        source_fd: Directory to copy; nothing in it may be renamed meanwhile.
        target_fd: Directory to copy into.
        overlay: What to do with whiteouts and opaque directories.
        owners: Whether to keep owner and group (needs the privilege to give files away).

    Returns:
        What was copied, and the marks if they were collected.

    Raises:
        OSError: Reading or writing failed; what was written so far stays.
    """
    return _Copy(source_fd, target_fd, overlay, owners).run()


class _Copy:
    """One copy. Only the two directories being worked on are open, however deep they lie."""

    def __init__(self, source_fd: int, target_fd: int, overlay: str, owners: bool) -> None:
        self._top = target_fd
        self._source = os.open(".", _DIRECTORY, dir_fd=source_fd)
        self._target = os.open(".", _DIRECTORY, dir_fd=target_fd)
        self._overlay = overlay
        self._owners = owners
        self._linked: dict[tuple[int, int], str] = {}
        self._copied = Copied()
        self._marks = Marks()

    def run(self) -> tuple[Copied, Marks]:
        try:
            levels = [self._enter("")]
            while levels:
                level = levels[-1]
                if level.pending:
                    name = level.pending.pop()
                    self._source = _replace(self._source, os.open(name, _DIRECTORY, dir_fd=self._source))
                    os.mkdir(name, 0o700, dir_fd=self._target)
                    self._target = _replace(self._target, os.open(name, _DIRECTORY, dir_fd=self._target))
                    levels.append(self._enter(f"{level.relative}{name}/"))
                else:
                    _finish(self._target, level.status, level.attributes, owners=self._owners)
                    levels.pop()
                    if levels:
                        self._source = _ascend(self._source, levels[-1].source_id)
                        self._target = _ascend(self._target, levels[-1].target_id)
        finally:
            os.close(self._source)
            os.close(self._target)
        return self._copied, self._marks

    def _enter(self, relative: str) -> _Level:
        """Copy everything in the current directory but its directories."""
        status, target = os.fstat(self._source), os.fstat(self._target)
        attributes = _attributes(self._source)
        if OPAQUE in attributes and (self._overlay != "keep" or not relative):
            del attributes[OPAQUE]
            if self._overlay == "collect" and relative:
                self._marks.opaque.append(relative.rstrip("/"))
        level = _Level(relative, status, attributes, _identity(status), _identity(target), [])
        with os.scandir(self._source) as entries:
            names = sorted((entry.name for entry in entries), reverse=True)
        for name in names:
            found = os.stat(name, dir_fd=self._source, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                level.pending.append(name)
                self._copied.entries += 1
            elif is_whiteout(found) and self._overlay != "drop":
                self._copy_whiteout(name, f"{relative}{name}")
            elif not self._copy_linked(name, f"{relative}{name}", found):
                self._copy_entry(name, found)
        return level

    def _copy_whiteout(self, name: str, relative: str) -> None:
        # Before hard links are looked at: the kernel makes the whiteouts of an overlay links of one file.
        if self._overlay == "collect":
            self._marks.whiteouts.append(relative)
        else:
            os.mknod(name, stat.S_IFCHR | 0o600, os.makedev(0, 0), dir_fd=self._target)

    def _copy_linked(self, name: str, relative: str, status: os.stat_result) -> bool:
        """Make a hard link if another name of this file was copied already; else remember this one."""
        if status.st_nlink < 2:
            return False
        first = self._linked.setdefault(_identity(status), relative)
        if first == relative:
            return False
        try:
            os.link(first, name, src_dir_fd=self._top, dst_dir_fd=self._target, follow_symlinks=False)
        except FileNotFoundError:
            return True  # its first name was left out (a device): so is this one
        self._copied.entries += 1
        return True

    def _copy_entry(self, name: str, status: os.stat_result) -> None:
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFREG:
            self._copy_file(name)
            self._copied.size_bytes += status.st_size
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=self._source), name, dir_fd=self._target)
        elif kind == stat.S_IFIFO:
            os.mkfifo(name, 0o600, dir_fd=self._target)
        elif kind == stat.S_IFSOCK and self._overlay == "keep":
            os.mknod(name, stat.S_IFSOCK | 0o600, 0, dir_fd=self._target)
        else:
            self._copied.skipped += 1
            return
        self._copied.entries += 1
        if kind != stat.S_IFREG:
            _set_status(name, status, self._target, owners=self._owners)

    def _copy_file(self, name: str) -> None:
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._source)
        try:
            status = os.fstat(source)
            target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._target)
            try:
                _copy_data(source, target, status)
                _finish(target, status, _attributes(source), owners=self._owners)
            finally:
                os.close(target)
        finally:
            os.close(source)


def _copy_data(source: int, target: int, status: os.stat_result) -> None:
    """Copy contents, leaving holes where the source has them."""
    if status.st_blocks * 512 >= status.st_size:  # no holes: one run
        _send(source, target, 0, status.st_size)
        return
    os.ftruncate(target, status.st_size)
    position = 0
    while position < status.st_size:
        try:
            begin = os.lseek(source, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # only a hole is left
            raise
        position = os.lseek(source, begin, os.SEEK_HOLE)
        os.lseek(target, begin, os.SEEK_SET)
        _send(source, target, begin, position - begin)


def _send(source: int, target: int, offset: int, count: int) -> None:
    while count > 0:
        sent = os.sendfile(target, source, offset, min(count, _CHUNK_BYTES))
        if sent == 0:
            return  # it became shorter; the end is where it is
        offset, count = offset + sent, count - sent


def _attributes(fd: int) -> dict[str, bytes]:
    try:
        names = os.listxattr(fd)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return {}
        raise
    return {name: os.getxattr(fd, name) for name in names if name == OPAQUE or is_kept_attribute(name)}


def _finish(fd: int, status: os.stat_result, attributes: dict[str, bytes], *, owners: bool) -> None:
    """Give an open file or directory its final owner, mode, attributes and times, in the one order that keeps them all."""
    if owners:
        os.fchown(fd, min(status.st_uid, _MAX_OWNER), min(status.st_gid, _MAX_OWNER))
    os.fchmod(fd, stat.S_IMODE(status.st_mode))
    for name, value in attributes.items():
        set_attribute(fd, name, value)
    os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))


def measure(path: str) -> Copied:
    """Count what a copy of the tree at ``path`` would hold."""
    counted, seen = Copied(), set()

    def add(_: str, status: os.stat_result, __: int) -> None:
        counted.entries += 1
        if stat.S_ISREG(status.st_mode):
            if _identity(status) not in seen:
                counted.size_bytes += status.st_size
            if status.st_nlink > 1:
                seen.add(_identity(status))

    visit(path, add)
    return counted


def visit(path: str, add: Callable[[str, os.stat_result, int], None]) -> None:
    """Call ``add(relative name, status, open parent directory)`` for everything below ``path``, in an order that names alone decide.

    Raises:
        OSError: Something could not be read.
    """
    prefix: list[str] = []

    def enter(fd: int) -> list[str]:
        names = sorted(os.listdir(fd))
        directories = []
        for name in names:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            add("/".join([*prefix, name]), status, fd)
            if stat.S_ISDIR(status.st_mode):
                directories.append(name)
        return directories[::-1]

    def open_child(name: str, parent: int) -> int:
        fd = _open_directory(name, parent)
        prefix.append(name)
        return fd

    _descend(os.open(path, _DIRECTORY), enter, lambda name, parent: prefix.pop(), open_child)


def remove_tree(name: str, directory: int | None = None) -> None:
    """Remove a directory and everything in it, of any depth and whatever its modes are; a missing one is fine.

    Args:
        name: The directory (never a symlink to one), relative to ``directory`` if that is given.
        directory: Descriptor of the directory that it lies in.

    Raises:
        OSError: Something could not be removed.
    """
    try:
        fd = _open_to_empty(name, directory)
    except FileNotFoundError:
        return
    _descend(fd, _unlink_files, lambda child, parent: os.rmdir(child, dir_fd=parent), _open_to_empty)
    os.rmdir(name, dir_fd=directory)


def _descend(
    fd: int, enter: Callable[[int], list[str]], leave: Callable[[str, int], object], open_child: Callable[[str, int], int]
) -> None:
    """Visit a tree of any depth with one directory open at a time.

    Args:
        fd: Its top; closed in the end.
        enter: Called with each directory, open; returns the names of those in it to visit.
        leave: Called after each visit but the top's with its name and its parent, open.
        open_child: Opens a directory in another.
    """
    try:
        levels = [("", _identity(os.fstat(fd)), enter(fd))]
        while levels:
            pending = levels[-1][2]
            if pending:
                name = pending.pop()
                fd = _replace(fd, open_child(name, fd))
                levels.append((name, _identity(os.fstat(fd)), enter(fd)))
            else:
                done = levels.pop()[0]
                if levels:
                    fd = _ascend(fd, levels[-1][1])
                    leave(done, fd)
    finally:
        os.close(fd)


def _open_directory(name: str, directory: int) -> int:
    return os.open(name, _DIRECTORY, dir_fd=directory)


def _open_to_empty(name: str, directory: int | None) -> int:
    if os.geteuid() != 0 and not stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        os.chmod(name, 0o700, dir_fd=directory)
    return os.open(name, _DIRECTORY, dir_fd=directory)


def _unlink_files(fd: int) -> list[str]:
    """Remove everything in a directory but its directories, whose names are returned."""
    with os.scandir(fd) as entries:
        children = list(entries)
    for entry in children:
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.name, dir_fd=fd)
    return [entry.name for entry in children if entry.is_dir(follow_symlinks=False)]


def is_kept_attribute(name: str) -> bool:
    """Whether an extended attribute travels with a file; what marks an overlay's own business does not."""
    return name.startswith(_KEPT_ATTRIBUTES) and not name.startswith(_OVERLAY_PREFIX)


def set_attribute(fd: int, name: str, value: bytes) -> None:
    """Set an extended attribute, unless the filesystem cannot hold it or this user may not set it.

    Raises:
        OSError: It could not be set for another reason (no space, an I/O error), or it marks an opaque directory, which must not be lost.
    """
    try:
        os.setxattr(fd, name, value)
    except OSError as error:
        if name == OPAQUE or error.errno not in _UNSUPPORTED:
            raise


def _set_status(name: str, status: os.stat_result, directory: int, *, owners: bool) -> None:
    if owners:
        uid, gid = min(status.st_uid, _MAX_OWNER), min(status.st_gid, _MAX_OWNER)
        os.chown(name, uid, gid, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=directory)
    with contextlib.suppress(NotImplementedError):
        os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=directory, follow_symlinks=False)


def is_whiteout(status: os.stat_result) -> bool:
    """Whether this is how an overlay says that something no longer exists."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _replace(old: int, new: int) -> int:
    os.close(old)
    return new


def _ascend(fd: int, expected: tuple[int, int]) -> int:
    """Exchange a directory for its parent, unless that is not ``expected``."""
    parent = os.open("..", _DIRECTORY, dir_fd=fd)
    if _identity(os.fstat(parent)) != expected:
        os.close(parent)
        raise OSError(errno.ESTALE, "a directory was moved meanwhile")
    return _replace(fd, parent)
