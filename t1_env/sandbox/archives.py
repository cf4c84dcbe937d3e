"""Unpacking tar archives into a directory that nothing in them can lead out of."""

from __future__ import annotations

import contextlib
import errno
import lzma
import os
import stat
import tarfile
import zlib
from dataclasses import dataclass
from tarfile import ReadError
from typing import IO, Final, Self

from t1_env.sandbox import files, syscalls, trees

_CHUNK_BYTES: Final = 1 << 20
_ZEROS: Final = bytes(_CHUNK_BYTES)
_MAX_OWNER: Final = 65535
_ATTRIBUTE: Final = "SCHILY.xattr."
_NOT_THE_END: Final = tuple(
    getattr(tarfile, name)
    for name in ("InvalidHeaderError", "TruncatedHeaderError", "EmptyHeaderError")  # not in its documentation
)
_ERRORS: Final = (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError)

MAGIC: Final = ((b"\x1f\x8b", "gz"), (b"BZh", "bz2"), (b"\xfd7zXZ\0", "xz"), (b"\x28\xb5\x2f\xfd", "zst"))
"""First bytes of a compressed archive -> its compression."""


@dataclass(slots=True)
class Unpacked:
    """What an archive held.

    Args:
        entries: Files, directories and links that were made.
        skipped: Device nodes, and what lies where something else is mounted.
        foreign_owners: Entries whose owner is above 65535 and became ``nobody``.
    """

    entries: int = 0
    skipped: int = 0
    foreign_owners: int = 0


class _Member(tarfile.TarInfo):
    """A member whose damaged or missing header is an error; tarfile takes it for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        """Read the next header."""
        try:
            return super().fromtarfile(tarfile)
        except _NOT_THE_END as error:
            raise ReadError(f"{error} at byte {tarfile.offset}") from error


def compression(head: bytes) -> str | None:
    """Compression of a file that begins with ``head``; None if it is none that is known."""
    return next((name for magic, name in MAGIC if head.startswith(magic)), None)


def is_archive(stream: IO[bytes]) -> bool:
    """Whether a seekable file is a tar archive, plain or compressed with gzip, bzip2 or xz; its position is kept."""
    start = stream.tell()
    try:
        with tarfile.open(fileobj=stream, mode="r|*") as archive:
            return archive.next() is not None
    except (*_ERRORS, OSError):
        return False
    finally:
        stream.seek(start)


def unpack(
    stream: IO[bytes], root_fd: int, dest: str = "/", *, owners: bool, whiteouts: bool = False, closed: tuple[str, ...] = ()
) -> Unpacked:
    """Unpack an archive (plain, gzip, bzip2 or xz) below ``dest``.

    Paths are resolved inside ``root_fd``, symlinks included. Device nodes are left out; a later entry replaces an earlier one.

    Args:
        stream: The archive; read once, from its position to its end.
        root_fd: Directory that acts as ``/``.
        dest: Directory inside to unpack into; made if missing.
        owners: Whether to give files to the numeric owners in the archive (needs privilege).
        whiteouts: Whether names that begin with ``.wh.`` remove what earlier layers left (a layer of a saved image).
        closed: Paths where something else is mounted: entries at or below them are left out.

    Raises:
        OSError: The archive is damaged (``EBADMSG``), a path in it leads outside (``EXDEV``), or writing failed.
    """
    try:
        with tarfile.open(fileobj=stream, mode="r|*", errorlevel=2, tarinfo=_Member) as archive:
            return _Unpacking(archive, root_fd, dest, owners, whiteouts, closed).run()
    except _ERRORS as error:
        raise OSError(errno.EBADMSG, f"the archive is damaged, cut short or not a tar archive ({error})") from error


class _Unpacking:
    """One archive on its way into a directory."""

    def __init__(self, archive: tarfile.TarFile, root_fd: int, dest: str, owners: bool, whiteouts: bool, closed: tuple[str, ...]) -> None:
        self._archive = archive
        self._root = root_fd
        self._dest = dest.rstrip("/")
        self._owners = owners
        self._whiteouts = whiteouts
        self._closed = closed
        self._made: set[str] = set()
        # Set at the end: unpacking into a directory moves its time, and its mode may forbid it.
        self._directories: dict[str, tarfile.TarInfo] = {}
        self._result = Unpacked()

    def run(self) -> Unpacked:
        if self._dest:
            files.make_directories(self._root, self._dest)
        for member in self._archive:
            path = self._place(member.name)
            try:
                self._add(member, path)
            except OSError as error:
                raise OSError(error.errno, f"{member.name!r} in the archive: {error.strerror or error}") from error
        for path, member in sorted(self._directories.items(), reverse=True):
            fd = syscalls.open_in_root(self._root, path or "/", os.O_RDONLY | os.O_DIRECTORY)
            try:
                self._finish(fd, member)
            finally:
                os.close(fd)
        return self._result

    def _place(self, name: str) -> str:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise OSError(errno.EXDEV, f"{name!r} in the archive leads outside of it")
        return "/".join([self._dest, *parts])

    def _add(self, member: tarfile.TarInfo, path: str) -> None:
        parent, _, name = path.rpartition("/")
        if self._whiteouts and name.startswith(".wh."):
            self._take_away(parent, name.removeprefix(".wh."))
            return
        if not name:  # the top itself
            if member.isdir():
                self._directories[self._dest] = member
            return
        known = member.isdir() or member.isreg() or member.issym() or member.islnk() or member.isfifo()
        if not known or any(path == each or path.startswith(f"{each}/") for each in self._closed):
            self._result.skipped += 1
            return
        files.make_directories(self._root, parent or "/")
        directory = syscalls.open_in_root(self._root, parent or "/", os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._make_room(directory, name, path, member)
            self._make(directory, name, path, member)
        finally:
            os.close(directory)
        self._made.add(path)
        self._result.entries += 1

    def _make(self, directory: int, name: str, path: str, member: tarfile.TarInfo) -> None:
        if member.isdir():
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=directory)
            self._directories[path] = member
        elif member.islnk():
            self._link(directory, name, member)
        elif member.issym():
            os.symlink(member.linkname, name, dir_fd=directory)
            if self._owners:
                os.chown(name, *self._owner(member), dir_fd=directory, follow_symlinks=False)
            os.utime(name, ns=_times(member), dir_fd=directory, follow_symlinks=False)
        else:
            if member.isfifo():
                os.mkfifo(name, 0o600, dir_fd=directory)
            flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if member.isfifo() else os.O_CREAT | os.O_EXCL)
            fd = os.open(name, flags, 0o600, dir_fd=directory)
            try:
                if member.isreg():
                    self._write(fd, member)
                self._finish(fd, member)
            finally:
                os.close(fd)

    def _make_room(self, directory: int, name: str, path: str, member: tarfile.TarInfo) -> None:
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISDIR(status.st_mode):
            if not member.isdir():
                trees.remove_tree(name, directory)
                self._forget(path)
        else:
            os.unlink(name, dir_fd=directory)

    def _link(self, directory: int, name: str, member: tarfile.TarInfo) -> None:
        parent, _, first = self._place(member.linkname).rpartition("/")
        source = syscalls.open_in_root(self._root, parent or "/", os.O_PATH | os.O_DIRECTORY)
        try:
            os.link(first, name, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)
        finally:
            os.close(source)

    def _write(self, fd: int, member: tarfile.TarInfo) -> None:
        source = self._archive.extractfile(member)
        assert source is not None
        sparse, written = member.issparse(), 0
        if sparse:
            os.ftruncate(fd, member.size)
        while chunk := source.read(_CHUNK_BYTES):
            if sparse and chunk == _ZEROS[: len(chunk)]:
                os.lseek(fd, len(chunk), os.SEEK_CUR)
            else:
                view = memoryview(chunk)
                while view:
                    view = view[os.write(fd, view) :]
            written += len(chunk)
        if written != member.size:
            raise EOFError(f"{member.name!r} ends after {written} of {member.size} bytes")

    def _finish(self, fd: int, member: tarfile.TarInfo) -> None:
        if self._owners:
            os.fchown(fd, *self._owner(member))
        os.fchmod(fd, member.mode & 0o7777)
        for key, value in member.pax_headers.items():
            name = key.removeprefix(_ATTRIBUTE)
            if name != key and trees.is_kept_attribute(name):
                trees.set_attribute(fd, name, value.encode("utf-8", "surrogateescape"))
        os.utime(fd, ns=_times(member))

    def _owner(self, member: tarfile.TarInfo) -> tuple[int, int]:
        if not (0 <= member.uid <= _MAX_OWNER and 0 <= member.gid <= _MAX_OWNER):
            self._result.foreign_owners += 1
        nobody = _MAX_OWNER - 1
        return (
            member.uid if 0 <= member.uid <= _MAX_OWNER else nobody,
            member.gid if 0 <= member.gid <= _MAX_OWNER else nobody,
        )

    # --------------------------------------------------------------------------------------------------------------- saved images
    def _take_away(self, parent: str, name: str) -> None:
        """Remove what an earlier layer left: one entry, or (for an opaque directory) all that this layer has not made itself."""
        try:
            directory = syscalls.open_in_root(self._root, parent or "/", os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            for victim in os.listdir(directory) if name == ".wh..opq" else [name]:
                path = f"{parent}/{victim}"
                if any(made == path or made.startswith(f"{path}/") for made in self._made):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if stat.S_ISDIR(os.stat(victim, dir_fd=directory, follow_symlinks=False).st_mode):
                        trees.remove_tree(victim, directory)
                        self._forget(path)
                    else:
                        os.unlink(victim, dir_fd=directory)
        finally:
            os.close(directory)

    def _forget(self, path: str) -> None:
        """Directories that are gone need no final attributes."""
        self._directories = {name: member for name, member in self._directories.items() if name != path and not name.startswith(f"{path}/")}


def _times(member: tarfile.TarInfo) -> tuple[int, int]:
    modified = int(float(member.mtime) * 1e9)
    return modified, modified
