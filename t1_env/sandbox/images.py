"""Images of the local sandbox: root filesystems that a user has imported, and what the name after ``FROM`` stands for.

An image is a directory named by the digest of its contents, with a manifest beside its files; names are small files that point to one.
Imports happen in a private directory that is renamed into place, so an image is whole or not there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import functools
import hashlib
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from t1_env.errors import ConfigError, SandboxError
from t1_env.sandbox import etc, trees
from t1_env.sandbox.build import build_environment as build_environment

HOST: Final = "host"
"""In the map of names: this machine's own system directories."""

REFUSE: Final = "refuse"
"""In the map of names: an error, for those who want no substitute for an image that is missing."""

_YOUNG_S: Final = 3600.0
_MANIFEST: Final = "image.json"
_PRIVATE: Final = ".new-"
_NAME: Final = re.compile(
    r"(?:[a-z0-9]+(?:[.-]+[a-z0-9]+)*(?::\d+)?/)?"  # a registry
    r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[a-z0-9]+:[0-9a-f]{32,})?"
)
_HOST_MARKS: Final = (
    # What moves when packages of the host change.
    *("/usr", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/local/bin", "/usr/local/lib", "/opt", "/etc/os-release", "/etc/ld.so.cache"),
    *("/var/lib/dpkg/status", "/var/lib/rpm/rpmdb.sqlite", "/usr/lib/sysimage/rpm/rpmdb.sqlite", "/lib/apk/db/installed"),
    "/var/lib/pacman/local",
)


class ImageError(SandboxError):
    """An image could not be imported, found or removed."""


@dataclass(frozen=True, slots=True)
class Image:
    """An imported root filesystem.

    Args:
        digest: ``sha256:`` and the digest of its contents.
        rootfs: Host path of its files.
        names: What it is called.
        env: Variables that its processes start with.
        workdir: Where they start.
        user: Whom they run as; empty for root.
        account: That user as it was found in its ``/etc/passwd``, as JSON.
        entries: How many files, directories and links it has.
        size_bytes: Sum of the sizes of its files.
        created: When it was imported, in ISO 8601.
        notes: What was left out, one line each.
    """

    digest: str
    rootfs: str
    names: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str | None
    user: str
    account: Mapping[str, Any] | None
    entries: int
    size_bytes: int
    created: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What a name stands for.

    Args:
        image: The imported image; None for the host's system directories.
        digest: Of what it starts from: names the bottom of a chain of layers.
        said: A few words for people.
    """

    image: Image | None
    digest: str
    said: str


def data_root() -> Path:
    """``$T1_DATA_DIR``, else ``t1-env`` below ``$XDG_DATA_HOME`` or ``~/.local/share``."""
    if own := os.environ.get("T1_DATA_DIR"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "t1-env"


def normalise(name: str) -> str:
    """The full form of an image's name: ``debian`` is ``debian:latest``, and the default registry is left out.

    Raises:
        ConfigError: This cannot be the name of an image.
    """
    short = name.removeprefix("docker.io/").removeprefix("library/")
    if not _NAME.fullmatch(short):
        raise ConfigError(f"{name!r} is not an image name; expected NAME or NAME:TAG, such as debian:bookworm")
    return short if ":" in short.rpartition("/")[2] else f"{short}:latest"


class ImageStore:
    """Imported images below a directory.

    Args:
        root: The directory; made, closed to other users, with the first import.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else data_root() / "images"

    def all(self) -> list[Image]:
        """Every image, by name."""
        names: dict[str, list[str]] = {}
        for name, digest in self._names().items():
            names.setdefault(digest, []).append(name)
        digests = [entry.name for entry in self._entries("rootfs") if not entry.name.startswith(".")]
        found = [self._read(digest, names.get(digest, [])) for digest in digests]
        return sorted((image for image in found if image is not None), key=lambda image: (image.names, image.digest))

    def get(self, name: str) -> Image | None:
        """The image of this name, or of this digest; None if there is none."""
        if name.startswith("sha256:"):
            wanted = [image for image in self.all() if image.digest.startswith(name)] if len(name) >= len("sha256:") + 6 else []
            return wanted[0] if len(wanted) == 1 else None
        digest = self._names().get(normalise(name))
        return None if digest is None else self._read(digest, [normalise(name)])

    def find(self, name: str) -> Found | None:
        """What the name after ``FROM`` stands for; None if it must not be replaced and is not there.

        An entry of the map decides first, then an imported image of that name, and last the host's own system directories.
        """
        full = normalise(name)
        for pattern, target in self.map().items():
            if fnmatch.fnmatchcase(full, pattern) or fnmatch.fnmatchcase(name, pattern):
                if target == REFUSE:
                    return None
                image = None if target == HOST else self.get(target)
                if target != HOST and image is None:
                    raise ImageError(f"the map of image names says {pattern} = {target}, but no image {target!r} was imported")
                return _found(image, f"{name} = {target} (map of image names)")
        image = self.get(name)
        if image is not None:
            return _found(image, f"{full} (imported)")
        if "@" in full:
            return None
        return _found(None, f"this machine's own system directories (no image {full} was imported)")

    def hold(self, image: Image) -> int | None:
        """Hold an image: while the returned descriptor is open it stays. None if it is gone."""
        try:
            fd = os.open(self.lock_path(image), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        fcntl.flock(fd, fcntl.LOCK_SH)
        if not os.path.exists(f"{image.rootfs}/../{_MANIFEST}"):
            os.close(fd)
            return None
        return fd

    def lock_path(self, image: Image) -> str:
        """The file that stands for an image when it is locked."""
        return os.path.normpath(f"{image.rootfs}/../lock")

    def name(self, digest: str, name: str) -> None:
        """Call an image (also) ``name``, which another one may have had."""
        directory = self.root / "names"
        directory.mkdir(parents=True, exist_ok=True)
        _write_json(directory / quote(normalise(name), safe=""), {"digest": digest})

    def remove(self, name: str) -> tuple[str, bool]:
        """Take a name away, and remove the image if that was its last one.

        Args:
            name: A name, or a digest to remove an image with all of its names.

        Returns:
            The digest, and whether the files were removed.

        Raises:
            ImageError: There is no such image, or a sandbox stands on it.
        """
        image = self.get(name)
        if image is None:
            raise ImageError(f"there is no image {name!r}; see `t1-env images list`")
        others = [each for each, digest in self._names().items() if digest == _hex(image.digest) and each not in image.names]
        gone = name.startswith("sha256:") or not others
        with contextlib.ExitStack() as held:
            if gone:
                fd = os.open(self.lock_path(image), os.O_RDONLY | os.O_CLOEXEC)
                held.callback(os.close, fd)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise ImageError(f"image {name!r} is in use by a sandbox; close that first") from error
            for each in image.names:
                (self.root / "names" / quote(each, safe="")).unlink(missing_ok=True)
            if gone:
                directory = self.root / "rootfs" / _hex(image.digest)
                trash = self.root / "rootfs" / f"{_PRIVATE}gone-{_hex(image.digest)[:16]}-{os.getpid()}"
                directory.rename(trash)
                trees.remove_tree(str(trash))
        return image.digest, gone

    def map(self) -> dict[str, str]:
        """Pattern over image names -> name of an imported image, ``HOST`` or ``REFUSE``; the first that matches decides."""
        try:
            return dict(json.loads((self.root / "map.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}

    def set_map(self, pattern: str, target: str | None) -> None:
        """Add, change or (None) remove an entry of the map.

        Raises:
            ConfigError: The target is neither ``HOST``, ``REFUSE`` nor the name of an image, or there is no such entry to remove.
        """
        entries = self.map()
        if target is None:
            if entries.pop(pattern, None) is None:
                raise ConfigError(f"the map of image names has no entry {pattern!r}; it has {', '.join(entries) or 'none'}")
        else:
            entries[pattern] = target if target in (HOST, REFUSE) else normalise(target)
        self.root.mkdir(parents=True, exist_ok=True)
        _write_json(self.root / "map.json", entries)

    @contextlib.contextmanager
    def importing(self) -> Iterator[str]:
        """A private, locked directory to unpack into; whatever is left of it at the end is removed.

        Directories that a killed import left are removed as well.
        """
        home = self.root / "rootfs"
        home.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)  # what an image holds, set-user-id programs for instance, is not for other users of this machine
        for entry in self._entries("rootfs"):
            if entry.name.startswith(_PRIVATE):
                _remove_if_abandoned(entry.path)
        private = tempfile.mkdtemp(dir=home, prefix=_PRIVATE)
        fd = os.open(f"{private}/unlocked", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.rename(f"{private}/unlocked", f"{private}/lock")  # never seen under this name without its lock: that would look abandoned
            yield private
        finally:
            trees.remove_tree(private)
            os.close(fd)

    def commit(self, private: str, digest: str, manifest: Mapping[str, Any]) -> Image:
        """Put what was unpacked into place, unless the same contents are there already.

        Args:
            private: From ``importing``; holds ``fs``.
            digest: ``sha256:`` and the digest of the contents.
            manifest: The other fields of ``Image``.
        """
        target = self.root / "rootfs" / _hex(digest)
        if not (target / _MANIFEST).exists():
            _write_json(Path(private) / _MANIFEST, manifest)
            os.chmod(private, 0o755)
            try:
                os.rename(private, target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another process has imported the same
                    raise
        image = self._read(_hex(digest), [])
        if image is None:
            raise ImageError(f"image {digest} was removed while it was imported; import it again")
        return image

    # ---------------------------------------------------------------------------------------------------------------- internals
    def _entries(self, kind: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.root / kind) as entries:
                return list(entries)
        except FileNotFoundError:
            return []

    def _names(self) -> dict[str, str]:
        found = {}
        for entry in self._entries("names"):
            if not entry.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    found[unquote(entry.name)] = _hex(json.loads(Path(entry.path).read_text(encoding="utf-8"))["digest"])
        return found

    def _read(self, digest: str, names: Sequence[str]) -> Image | None:
        directory = self.root / "rootfs" / digest
        try:
            data = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        data["notes"] = tuple(data["notes"])
        return Image(digest=f"sha256:{digest}", rootfs=str(directory / "fs"), names=tuple(sorted(names)), **data)


@functools.cache
def host_digest() -> str:
    """Names the state of this machine's own system directories, as far as that can be told without reading them all."""
    digest = hashlib.sha256(f"host {platform.machine()} {os.geteuid() == 0}".encode())
    for path in _HOST_MARKS:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            digest.update(f"{path} {status.st_ino} {status.st_size} {status.st_mtime_ns}\n".encode())
    digest.update(etc.digest().encode())
    return f"host:{digest.hexdigest()}"


def _found(image: Image | None, said: str) -> Found:
    return Found(None, host_digest(), said) if image is None else Found(image, image.digest, said)


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file at once or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False, encoding="utf-8") as stream:
        json.dump(data, stream)
    os.rename(stream.name, path)


def _remove_if_abandoned(directory: str) -> None:
    """Remove what an import that was killed has left; one that still runs holds the lock in it."""
    try:
        fd = os.open(f"{directory}/lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - os.stat(directory).st_mtime > _YOUNG_S:  # else it may be about to be locked
                trees.remove_tree(directory)
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        trees.remove_tree(directory)
    except BlockingIOError:
        return
    finally:
        os.close(fd)
