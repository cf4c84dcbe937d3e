"""What must exist at the far side before an outpost can run there: T1's modules, the packages they need, and perhaps an interpreter.

A *pure* runtime needs Python 3.11 or later over there. A *complete* one also holds this host's interpreter with its standard library, its
shared libraries and the loader that puts them together, so that it runs beside any C library or none at all, on the same kind of CPU.

Each is built once, into the user's cache, and known by the digest of its contents.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import platform
import shutil
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from t1_env.errors import ConfigError
from t1_env.sandbox.outpost import layout
from t1_env.sandbox.outpost.interpreter import Member, interpreter_members, package_members
from t1_env.tasks.families import cache_dir

_PACKAGE: Final = Path(__file__).resolve().parents[2]
# Of T1 itself: what the outpost, its shells, its sandboxes and the verifiers in their clones import.
_OWN: Final = ("_version.py", "errors.py", "protocol.py", "sandbox", "shell", "verifiers")
_FORMAT: Final = "2"
_COPY_BYTES: Final = 1 << 20
_UNUSED_S: Final = 14 * 24 * 3600.0
_LOCK: Final = ".lock"


@dataclass(frozen=True, slots=True)
class Runtime:
    """One bundle, ready to be sent.

    Args:
        kind: ``"pure"`` or ``"complete"``.
        digest: Of its contents; equal digests are equal bundles.
        machine: CPU architecture it runs on (``uname -m``); a pure one runs on any.
        size_bytes: Size of the archive.
        archive: The archive in this user's cache.
    """

    kind: Literal["pure", "complete"]
    digest: str
    machine: str
    size_bytes: int
    archive: Path

    def tar(self) -> Path:
        """Return the archive, an uncompressed tar whose top is the runtime's root. Do not change it."""
        return self.archive

    def command(self, root: str, *arguments: str, python: str = "python3") -> list[str]:
        """Return the command line that starts it at the far side.

        Args:
            root: Absolute path at the far side at which the archive was unpacked.
            arguments: Of the outpost: ``native``, ``namespaces`` or ``auto``, ``--lease-s``, ``--listen``, ``--attach``.
            python: Interpreter at the far side, for a pure runtime; a complete one brings its own.
        """
        interpreter = layout.interpreter_command(root, python if self.kind == "pure" else None)
        return [*interpreter, *layout.FLAGS, f"{root.rstrip('/')}/{layout.BOOT}", *arguments]

    def unpack(self) -> Path:
        """Return a directory of this host that holds it, for an outpost of this host; made when it is first asked for. Do not change it."""
        target = self.archive.with_suffix("")
        if not target.is_dir():
            private = Path(tempfile.mkdtemp(dir=target.parent, prefix=".new-"))
            try:
                with tarfile.open(self.archive) as archive:
                    archive.extractall(private, filter="tar")
                private.chmod(0o755)
                with contextlib.suppress(OSError):  # another process was first
                    private.rename(target)
            finally:
                shutil.rmtree(private, ignore_errors=True)
        return target


_lock: Final = threading.Lock()
_made: Final[dict[str, Runtime]] = {}


def make_runtime(kind: Literal["pure", "complete"]) -> Runtime:
    """Return a runtime of this T1, building it if this user's cache does not have it.

    Args:
        kind: ``"pure"`` or ``"complete"``.

    Returns:
        The runtime; the same for the whole life of this process.

    Raises:
        SandboxUnavailable: A complete one cannot be made of this host's interpreter; says why.
        ConfigError: The cache directory cannot be written.
    """
    with _lock:
        if kind not in _made:
            try:
                _made[kind] = _find_or_build(kind)
            except OSError as error:
                where = error.filename or cache_dir().parent
                raise ConfigError(f"cannot write {where}: {error.strerror}; set T1_CACHE_DIR to a writable directory") from error
        return _made[kind]


def _find_or_build(kind: Literal["pure", "complete"]) -> Runtime:
    directory = cache_dir().parent / "runtimes"
    directory.mkdir(parents=True, exist_ok=True)
    index = directory / f"{kind}-{_key(kind)}.json"
    found = _read_index(kind, index)
    if found is not None:
        return found
    with open(directory / _LOCK, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others wait for this one instead of building the same
        found = _read_index(kind, index)
        if found is not None:
            return found
        built = _build(kind, index)
        _remove_unused(directory)
        return built


def _read_index(kind: Literal["pure", "complete"], index: Path) -> Runtime | None:
    try:
        fields = json.loads(index.read_text(encoding="utf-8"))
        archive = index.with_name(f"{kind}-{fields['digest']}.tar")
        if archive.stat().st_size != fields["size_bytes"]:
            return None
        os.utime(index)  # in use
    except (OSError, ValueError, KeyError):
        return None  # not built yet, or damaged: built again
    return Runtime(kind, fields["digest"], platform.machine(), fields["size_bytes"], archive)


def _build(kind: Literal["pure", "complete"], index: Path) -> Runtime:
    private = Path(tempfile.mkdtemp(dir=index.parent, prefix=".new-"))
    try:
        members = [*_own_members(), *package_members(compiled=kind == "complete", scratch=private)]
        if kind == "complete":
            members += interpreter_members(private)
        members.append(Member(layout.BOOT, Path(layout.__file__).with_name("boot.py"), 0o644))
        archive = private / "runtime.tar"
        with open(archive, "wb") as file:
            _write_tar(file, members)
        digest = _digest_of(archive)
        target = index.with_name(f"{kind}-{digest}.tar")
        archive.rename(target)
        size_bytes = target.stat().st_size
        note = private / "index"
        note.write_text(json.dumps({"digest": digest, "size_bytes": size_bytes}), encoding="utf-8")
        note.rename(index)
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return Runtime(kind, digest, platform.machine(), size_bytes, target)


def _remove_unused(directory: Path) -> None:
    """Remove runtimes that nobody asked for in a long time: each version of T1 makes its own. The caller holds the lock."""
    limit = time.time() - _UNUSED_S
    kept = set()
    for index in directory.glob("*.json"):
        try:
            if index.stat().st_mtime < limit:
                index.unlink()
            else:
                kept.add(f"{index.name.partition('-')[0]}-{json.loads(index.read_text(encoding='utf-8'))['digest']}")
        except (OSError, ValueError, KeyError):
            continue  # damaged: it is replaced when it is asked for
    for path in directory.iterdir():
        if path.suffix != ".json" and path.name != _LOCK and path.name.removesuffix(".tar") not in kept:
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < limit:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _own_members() -> Iterator[Member]:
    for path in _own_files():
        yield Member(f"{layout.PACKAGES}/t1_env/{path.relative_to(_PACKAGE).as_posix()}", path, 0o644)


def _own_files() -> list[Path]:
    tops = [_PACKAGE / name for name in _OWN]
    return sorted(path for top in tops for path in ([top] if top.is_file() else top.rglob("*.py")) if "__pycache__" not in path.parts)


def _key(kind: str) -> str:
    """Digest of what a runtime is made of, without reading the interpreter's own files."""
    digest = hashlib.sha256(f"{_FORMAT}\0{kind}\0".encode())
    for path in _own_files():
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode())
        digest.update(path.read_bytes())
    for member in package_members(compiled=False, scratch=None):
        status = member.source.stat()
        digest.update(f"{member.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    if kind == "complete":
        binary = Path(sys.executable).resolve()
        status = binary.stat()
        digest.update(f"{sys.version}\0{binary}\0{status.st_size}\0{status.st_mtime_ns}\0{platform.libc_ver()}\0".encode())
        digest.update(f"{sysconfig.get_path('stdlib')}\0{platform.machine()}".encode())
    return digest.hexdigest()[:32]


def _write_tar(file: io.BufferedWriter, members: Iterable[Member]) -> None:
    """The same members always give the same bytes."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        directories: set[str] = set()
        for member in sorted(members, key=lambda each: each.name):
            for parent in reversed(Path(member.name).parents[:-1]):
                if str(parent) not in directories:
                    directories.add(str(parent))
                    info = tarfile.TarInfo(str(parent))
                    info.type, info.mode = tarfile.DIRTYPE, 0o755
                    archive.addfile(info)
            info = tarfile.TarInfo(member.name)
            info.mode, info.size = member.mode, member.source.stat().st_size
            with open(member.source, "rb") as source:
                archive.addfile(info, source)


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(_COPY_BYTES):
            digest.update(data)
    return digest.hexdigest()[:32]
