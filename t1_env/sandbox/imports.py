"""Importing a root filesystem: a directory, a tar archive of one, or an image saved by a container engine."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from t1_env.errors import ConfigError, DependencyMissing
from t1_env.sandbox import accounts, archives, files, trees
from t1_env.sandbox.images import Image, ImageError, ImageStore, normalise

_CHUNK_BYTES: Final = 1 << 20
_MAX_JSON_BYTES: Final = 16 << 20
_SYSTEM_DIRECTORIES: Final = ("bin", "usr", "etc", "sbin", "lib")


@dataclass(frozen=True, slots=True)
class _Saved:
    """One image of an archive that a container engine saved.

    Args:
        layers: Paths of its layers, bottom first.
        diff_ids: ``sha256:`` digests of the unpacked archives of those.
        config: The ``config`` part of its configuration.
        names: What the archive calls it.
    """

    layers: tuple[str, ...]
    diff_ids: tuple[str, ...]
    config: Mapping[str, Any]
    names: tuple[str, ...]


def import_image(source: Path, name: str | None = None, *, store: ImageStore | None = None) -> Image:
    """Import a root filesystem into the user's image store.

    Args:
        source: A directory, a tar archive of one (plain or compressed with gzip, bzip2, xz or zstd; what ``docker export`` or
            ``debootstrap`` and ``tar`` make), or an archive of ``docker save`` or in the OCI layout.
        name: What to call it; default what the archive says, else the name of the file.
        store: Where to put it; default the user's store.

    Returns:
        The image.

    Raises:
        ConfigError: The name cannot be used, or the archive holds several images and the name is none of theirs.
        ImageError: The source is damaged, cannot be read, or there is no room. Nothing is left behind.
    """
    store = store if store is not None else ImageStore()
    wanted = None if name is None else normalise(name)
    if not source.exists():
        raise ImageError(f"{source}: there is no such file or directory")
    with store.importing() as private:
        root = f"{private}/fs"
        os.mkdir(root, 0o755)
        try:
            saved, notes = _fill(source, root, private, wanted)
            if saved is not None and saved.config.get("WorkingDir"):
                _make_directory(root, str(saved.config["WorkingDir"]))
            account = _account(root, saved)
            digest, entries, size_bytes = _survey(root)
        except OSError as error:
            place = f": {error.filename}" if error.filename else ""
            raise ImageError(f"{source} cannot be imported: {error.strerror or error}{place}") from error
        config = {} if saved is None else saved.config
        manifest = {
            "env": dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry),
            "workdir": config.get("WorkingDir") or None,
            "user": str(config.get("User") or ""),
            "account": account,
            "entries": entries,
            "size_bytes": size_bytes,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "notes": notes,
        }
        digest = (
            f"sha256:{hashlib.sha256((digest + json.dumps([manifest[key] for key in ('env', 'workdir', 'user')])).encode()).hexdigest()}"
        )
        image = store.commit(private, digest, manifest)
        names = [wanted] if wanted is not None else [normalise(each) for each in saved.names] if saved is not None else []
        for each in names or [normalise(_name_of(source))]:
            store.name(digest, each)
    found = store.get(digest)
    return image if found is None else found


def _fill(source: Path, root: str, private: str, wanted: str | None) -> tuple[_Saved | None, list[str]]:
    """Put the source's files below ``root``."""
    owners = os.geteuid() == 0
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if source.is_dir():
            source_fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
            try:
                copied, _ = trees.copy_tree(source_fd, root_fd, overlay="drop", owners=owners)
            finally:
                os.close(source_fd)
            return None, _notes(archives.Unpacked(copied.entries, copied.skipped))
        with _open_archive(source) as stream:
            unpacked = archives.unpack(stream, root_fd, owners=owners)
    finally:
        os.close(root_fd)
    saved = None if any(os.path.isdir(f"{root}/{name}") for name in _SYSTEM_DIRECTORIES) else _saved_image(root, wanted)
    if saved is None:
        return None, _notes(unpacked)
    outer = f"{private}/saved"
    os.rename(root, outer)
    os.mkdir(root, 0o755)
    return saved, _apply_layers(outer, saved, root, owners)


def _apply_layers(outer: str, saved: _Saved, root: str, owners: bool) -> list[str]:
    total = archives.Unpacked()
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for path, diff_id in zip(saved.layers, saved.diff_ids, strict=True):
            with _open_archive(Path(outer, path)) as stream:
                hashing = _Hashing(stream)
                unpacked = archives.unpack(hashing, root_fd, owners=owners, whiteouts=True)  # type: ignore[arg-type]
                if hashing.digest() != diff_id:
                    raise ImageError(f"layer {path} of the saved image is damaged: its digest is {hashing.digest()}, expected {diff_id}")
            total.entries += unpacked.entries
            total.skipped += unpacked.skipped
            total.foreign_owners += unpacked.foreign_owners
    finally:
        os.close(root_fd)
    trees.remove_tree(outer)
    return _notes(total)


def _make_directory(root: str, path: str) -> None:
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        files.make_directories(root_fd, path)
    finally:
        os.close(root_fd)


def _notes(unpacked: archives.Unpacked) -> list[str]:
    notes = []
    if unpacked.skipped:
        notes.append(f"left out: {unpacked.skipped} device nodes or sockets (a sandbox has its own)")
    if unpacked.foreign_owners:
        notes.append(f"given to nobody: {unpacked.foreign_owners} files of users above 65535")
    return notes


# -------------------------------------------------------------------------------------------------------------------- saved images
def _saved_image(root: str, wanted: str | None) -> _Saved | None:
    """The image in what an engine saved; None if this is no such archive."""
    if os.path.isfile(f"{root}/manifest.json"):
        images = [_from_manifest(root, entry) for entry in _json(root, "manifest.json")]
    elif os.path.isfile(f"{root}/index.json") and os.path.isfile(f"{root}/oci-layout"):
        images = [_from_oci(root, entry) for entry in _json(root, "index.json")["manifests"]]
    else:
        return None
    if len(images) == 1:
        return images[0]
    known = [name for image in images for name in image.names]
    chosen = [image for image in images if wanted is not None and wanted in map(normalise, image.names)]
    if len(chosen) != 1:
        raise ConfigError(
            f"the archive holds {len(images)} images; say which with --name, one of {', '.join(known) or '(none has a name)'}"
        )
    return chosen[0]


def _from_manifest(root: str, entry: Mapping[str, Any]) -> _Saved:
    config = _json(root, entry["Config"])
    layers = tuple(_checked(root, layer) for layer in entry["Layers"])
    return _make_saved(layers, config, entry.get("RepoTags") or ())


def _from_oci(root: str, entry: Mapping[str, Any]) -> _Saved:
    manifest = _json(root, _blob(entry["digest"]))
    if "layers" not in manifest:
        raise ImageError("the archive is an index of images for several architectures; save one image for this machine")
    config = _json(root, _blob(manifest["config"]["digest"]))
    layers = tuple(_checked(root, _blob(layer["digest"])) for layer in manifest["layers"])
    annotations = entry.get("annotations") or {}
    name = annotations.get("io.containerd.image.name") or annotations.get("org.opencontainers.image.ref.name")
    return _make_saved(layers, config, (name,) if name and ":" in name else ())


def _make_saved(layers: tuple[str, ...], config: Mapping[str, Any], names: Sequence[str]) -> _Saved:
    diff_ids = tuple(config.get("rootfs", {}).get("diff_ids") or ())
    if len(diff_ids) != len(layers):
        raise ImageError(f"the saved image is damaged: {len(layers)} layers, but digests for {len(diff_ids)}")
    return _Saved(layers, diff_ids, config.get("config") or {}, tuple(names))


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _checked(root: str, path: str) -> str:
    """A path that an archive's manifest names, if it stays within the archive."""
    resolved = os.path.realpath(f"{root}/{path}")
    if not resolved.startswith(f"{os.path.realpath(root)}/") or not os.path.isfile(resolved):
        raise ImageError(f"the saved image is damaged: it names {path!r}, which is not in it")
    return os.path.relpath(resolved, os.path.realpath(root))


def _json(root: str, path: str) -> Any:
    with open(f"{root}/{_checked(root, path)}", "rb") as stream:
        data = stream.read(_MAX_JSON_BYTES)
    try:
        return json.loads(data)
    except ValueError as error:
        raise ImageError(f"the saved image is damaged: {path} is not JSON ({error})") from error


class _Hashing:
    """A readable stream that knows the digest of all of it, also of what its reader did not want."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._hash.update(data)
        return data

    def digest(self) -> str:
        while self.read(_CHUNK_BYTES):
            pass
        return f"sha256:{self._hash.hexdigest()}"


# ------------------------------------------------------------------------------------------------------------------------ archives
@contextlib.contextmanager
def _open_archive(path: Path) -> Iterator[IO[bytes]]:
    """Open an archive; what Python cannot uncompress itself is uncompressed by a program."""
    with path.open("rb") as stream:
        kind = archives.compression(stream.peek(6))  # not seek: it may be a pipe
        if kind is None:
            yield stream
        elif kind == "zst":
            with _zstd(stream, path) as plain:
                yield plain
        else:
            import bz2
            import gzip
            import lzma

            opener: Any = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}[kind]
            with opener(stream) as plain:
                yield plain


@contextlib.contextmanager
def _zstd(stream: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    program = shutil.which("zstd")
    if program is None:
        raise DependencyMissing(f"{path} is compressed with zstd: install the program zstd, or uncompress it first")
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen([program, "-dcq"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints)
        assert process.stdout is not None
        # By hand, since some of the stream has been read into its buffer already.
        feeder = threading.Thread(target=_feed, args=(stream, process.stdin), daemon=True)
        feeder.start()
        try:
            yield process.stdout
            while process.stdout.read(_CHUNK_BYTES):
                pass
            if process.wait() != 0:
                complaints.seek(0)
                raise ImageError(f"{path} is damaged: {complaints.read(500).decode('utf-8', 'replace').strip()}")
        finally:
            process.kill()
            process.wait()
            feeder.join()
            process.stdout.close()


def _feed(source: IO[bytes], target: Any) -> None:
    with contextlib.suppress(BrokenPipeError), target:
        shutil.copyfileobj(source, target, _CHUNK_BYTES)


def _name_of(source: Path) -> str:
    name = source.resolve().name.lower()
    for suffix in (".gz", ".xz", ".bz2", ".zst", ".tar", ".tgz", ".txz"):
        name = name.removesuffix(suffix)
    cleaned = "".join(character if character.isalnum() or character in "._-" else "-" for character in name).strip("._-")
    if not cleaned.isascii() or not cleaned:
        raise ConfigError(f"{source.name!r} cannot be made the name of an image; give one with --name")
    return cleaned


# ------------------------------------------------------------------------------------------------------------------------ contents
def _account(root: str, saved: _Saved | None) -> dict[str, Any] | None:
    user = "" if saved is None else str(saved.config.get("User") or "")
    if not user:
        return None
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        account = accounts.resolve(root_fd, user)
    finally:
        os.close(root_fd)
    if account.uid == 0:
        return None
    if os.geteuid() != 0:
        raise ImageError(f"the image's processes run as {user!r}, but a sandbox that an ordinary user starts has no users but root")
    return account.to_json()


def _survey(root: str) -> tuple[str, int, int]:
    """Digest, number of entries and size of a tree: names, types, owners, modes, times of files, contents, links."""
    digest = hashlib.sha256()
    counted = trees.Copied()
    first_names: dict[tuple[int, int], str] = {}

    def add(name: str, status: os.stat_result, fd: int) -> None:
        mode, kind = status.st_mode, stat.S_IFMT(status.st_mode)
        record = f"{kind:o} {stat.S_IMODE(mode):o} {status.st_uid} {status.st_gid}"
        if kind != stat.S_IFDIR:  # a directory that an archive does not name gets the time at which it is made
            record += f" {int(status.st_mtime)}"
        if kind == stat.S_IFREG:
            first = first_names.setdefault((status.st_dev, status.st_ino), name) if status.st_nlink > 1 else name
            if first != name:
                record += f" is {first}"
            else:
                counted.size_bytes += status.st_size
                record += f" {status.st_size} {_contents(os.path.basename(name), fd)}"
        elif kind == stat.S_IFLNK:
            record += f" {os.readlink(os.path.basename(name), dir_fd=fd)}"
        line = os.fsencode(f"{name}\0{record}")
        digest.update(len(line).to_bytes(4, "big") + line)
        counted.entries += 1

    trees.visit(root, add)
    return digest.hexdigest(), counted.entries, counted.size_bytes


def _contents(name: str, directory: int) -> str:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    with os.fdopen(fd, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
