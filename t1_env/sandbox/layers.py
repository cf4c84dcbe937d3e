"""The store of image layers: directories on disk, each named by everything it was made from.

A layer is written into a private directory and renamed into place, so it is either whole or not there. Its lock file says who cares:
whoever makes it holds an exclusive lock, every sandbox that stands on it a shared one for as long as it lives; pruning takes an exclusive
one without waiting. The time of the lock file is when the layer was last used.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from t1_env.errors import ConfigError, ImageBuildError
from t1_env.sandbox import trees
from t1_env.sandbox.stacking import Layer

FORMAT: Final = 1
"""Version of what a layer's directory holds; a part of every digest."""

_MANIFEST: Final = "layer.json"
_PRIVATE: Final = ".new-"
_TRASH: Final = ".trash-"
_LAST_PRUNED: Final = "last-pruned"
_DEFAULT_MAX_MB: Final = 20_000
_MAX_LAYERS: Final = 20_000
_PRUNE_INTERVAL_S: Final = 3600.0
_LOCK_POLL_S: Final = 0.02


def cache_root() -> Path:
    """``$T1_CACHE_DIR``, else ``t1-env`` below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("T1_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "t1-env"


def chain_digest(parent: str, key: str) -> str:
    """Name of the layer that a step makes on top of ``parent``."""
    return hashlib.sha256(f"{FORMAT}\n{parent}\n{key}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """A layer that is in the store.

    Args:
        digest: Its name.
        ancestors: Digests of the layers below it, bottom first.
        layers: What to stack to have it: itself and what is below, bottom first, without empty ones.
        account: The user that processes run as from here on, as JSON; None for root.
        instruction: What made it.
        size_bytes: Sum of the sizes of its files.
        used: When it was last used, in seconds since the epoch.
    """

    digest: str
    ancestors: tuple[str, ...]
    layers: tuple[Layer, ...]
    account: dict[str, Any] | None
    instruction: str
    size_bytes: int
    used: float


@dataclass(frozen=True, slots=True)
class Pruned:
    """What pruning did.

    Args:
        removed: Layers that were removed.
        freed_bytes: Sum of their sizes.
        in_use: Layers that stay because a sandbox stands on them.
        kept_bytes: Sum of the sizes of what is left.
    """

    removed: int
    freed_bytes: int
    in_use: int
    kept_bytes: int


class LayerStore:
    """Layers below a directory.

    Args:
        root: The directory; made, closed to other users, when the first layer is.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = str(root if root is not None else cache_root() / "layers")

    def lock_path(self, digest: str) -> str:
        """The file that stands for a layer when it is locked."""
        return f"{self._root}/locks/{digest}"

    def acquire(self, digest: str) -> tuple[LayerInfo, int] | None:
        """Look a layer up and hold it.

        Returns:
            The layer and a descriptor; while that is open the layer stays. None if it is not there.
        """
        fd = self._lock(digest, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if fd is None:
            return None
        info = self._read(digest)
        if info is not None and self._survived(digest):
            os.utime(fd)
            return info, fd
        os.close(fd)
        if info is not None:
            self._remove(digest)
        return None

    @contextlib.contextmanager
    def making(self, digest: str, deadline: float) -> Iterator[str]:
        """Hold a digest alone; inside, one may look again whether the layer is there, and commit it if it is not.

        Yields:
            A private, empty directory for the layer's files; whatever is left of it is removed.

        Raises:
            ImageBuildError: Another process held it until the deadline (``time.monotonic``).
        """
        os.makedirs(f"{self._root}/locks", exist_ok=True)
        os.chmod(self._root, 0o700)  # what an image holds, set-user-id programs for instance, is not for other users of this machine
        while (fd := self._lock(digest, fcntl.LOCK_EX | fcntl.LOCK_NB, create=True)) is None:
            if time.monotonic() > deadline:
                raise ImageBuildError("the build ran out of time while another process was building the same layer")
            time.sleep(_LOCK_POLL_S)
        try:
            self._remove_leftovers(f"{_PRIVATE}{digest[:16]}-")
            private = tempfile.mkdtemp(dir=self._root, prefix=f"{_PRIVATE}{digest[:16]}-")
            try:
                yield private
            finally:
                trees.remove_tree(private)
        finally:
            os.close(fd)

    def has(self, digest: str) -> bool:
        """Whether the layer is there; only sure inside ``making``."""
        return os.path.exists(f"{self._root}/{digest}/{_MANIFEST}")

    def commit(self, private: str, digest: str, manifest: dict[str, Any], parent: LayerInfo | None) -> None:
        """Put a finished layer into place; the caller is inside ``making``.

        Args:
            private: The directory that ``making`` gave.
            digest: Its name.
            manifest: ``parts``, ``marked``, ``account``, ``instruction``, ``size_bytes``, ``entries``.
            parent: The layer below.
        """
        below = [] if parent is None else [{"digest": Path(layer.path).name, **_layer_fields(layer)} for layer in parent.layers]
        own = [{"digest": digest, "parts": manifest["parts"], "marked": manifest["marked"]}] if manifest["parts"] else []
        ancestors = [] if parent is None else [*parent.ancestors, parent.digest]
        data = {**manifest, "chain": [*below, *own], "ancestors": ancestors, "boot": _boot_id()}
        with open(f"{private}/{_MANIFEST}", "w", encoding="utf-8") as stream:
            json.dump(data, stream)
        os.chmod(private, 0o755)
        os.rename(private, f"{self._root}/{digest}")

    def all(self) -> list[LayerInfo]:
        """Every layer, least recently used first."""
        found = [info for name in self._names() if not name.startswith(".") and (info := self._read(name)) is not None]
        return sorted(found, key=lambda info: info.used)

    def prune(self, *, max_bytes: int | None = None, max_layers: int | None = None, unused_for_s: float | None = None) -> Pruned:
        """Remove layers, least recently used first, never one that a sandbox stands on.

        Args:
            max_bytes: Stop when the rest is no larger than this; None for no limit on size.
            max_layers: Stop when no more than this many are left; None for no limit on their number.
            unused_for_s: Remove what nobody used for this long; None for no limit on age. Without any limit, everything goes.

        Returns:
            What was done.
        """
        for name in self._names():
            if name.startswith(_TRASH) or (name.startswith(_PRIVATE) and self._is_abandoned(name)):
                _discard(f"{self._root}/{name}")
        layers = {info.digest: info for info in self.all()}
        # A layer is needed for as long as one that stands on it.
        used = {digest: info.used for digest, info in layers.items()}
        for info in layers.values():
            for digest in info.ancestors:
                used[digest] = max(used.get(digest, 0.0), info.used)
        total, removed, freed = sum(info.size_bytes for info in layers.values()), 0, 0
        kept: set[str] = set()
        everything = max_bytes is None and max_layers is None and unused_for_s is None
        for info in sorted(layers.values(), key=lambda info: (used[info.digest], -len(info.ancestors))):
            too_old = unused_for_s is not None and time.time() - used[info.digest] > unused_for_s
            too_much = (max_bytes is not None and total > max_bytes) or (max_layers is not None and len(layers) - removed > max_layers)
            if info.digest in kept or not (everything or too_old or too_much):
                continue
            if self._remove(info.digest):
                total, removed, freed = total - info.size_bytes, removed + 1, freed + info.size_bytes
            else:
                kept.update((info.digest, *info.ancestors))
        return Pruned(removed, freed, len(kept), total)

    def prune_now_and_then(self) -> None:
        """Keep the store from growing for ever: once an hour, remove what is over ``$T1_LAYERS_MAX_MB`` (default 20000) or 20,000 layers.

        Raises:
            ConfigError: The variable is not a number.
        """
        given = os.environ.get("T1_LAYERS_MAX_MB") or str(_DEFAULT_MAX_MB)
        if not given.isdecimal():
            raise ConfigError(f"T1_LAYERS_MAX_MB must be a number of megabytes, got {given!r}")
        last = Path(self._root, _LAST_PRUNED)
        with contextlib.suppress(FileNotFoundError):
            if time.time() - last.stat().st_mtime < _PRUNE_INTERVAL_S:
                return
        last.touch()
        self.prune(max_bytes=int(given) * 10**6, max_layers=_MAX_LAYERS)

    # ---------------------------------------------------------------------------------------------------------------- internals
    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._root) if name not in ("locks", _LAST_PRUNED))
        except FileNotFoundError:
            return []

    def _read(self, digest: str) -> LayerInfo | None:
        directory = f"{self._root}/{digest}"
        try:
            with open(f"{directory}/{_MANIFEST}", encoding="utf-8") as stream:
                data = json.load(stream)
            used = os.stat(self.lock_path(digest)).st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return None
        layers = tuple(Layer(f"{self._root}/{each['digest']}", tuple(each["parts"]), each["marked"]) for each in data["chain"])
        return LayerInfo(digest, tuple(data["ancestors"]), layers, data["account"], data["instruction"], data["size_bytes"], used)

    def _lock(self, digest: str, kind: int, *, create: bool = False) -> int | None:
        """Lock a digest's file; None if there is none (and none is to be made), or it is held and the caller would not wait."""
        path = self.lock_path(digest)
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
            except FileNotFoundError:
                return None
            try:
                fcntl.flock(fd, kind)
            except BlockingIOError:
                os.close(fd)
                return None
            except BaseException:
                os.close(fd)
                raise
            if _is_still(fd, path):
                return fd
            os.close(fd)  # removed between the two calls: look again

    def _survived(self, digest: str) -> bool:
        """Whether a layer is still whole. After a power failure files may be there without their contents, so it is counted once a boot."""
        path = f"{self._root}/{digest}/{_MANIFEST}"
        with open(path, encoding="utf-8") as stream:
            data = json.load(stream)
        if data["boot"] == _boot_id():
            return True
        counted = trees.Copied()
        for part in data["parts"]:
            counted = counted.plus(trees.measure(f"{self._root}/{digest}/{part}"))
        if (counted.entries, counted.size_bytes) != (data["entries"], data["size_bytes"]):
            return False
        fresh = f"{path}.{os.getpid()}"
        Path(fresh).write_text(json.dumps({**data, "boot": _boot_id()}), encoding="utf-8")
        os.rename(fresh, path)
        return True

    def _remove(self, digest: str) -> bool:
        fd = self._lock(digest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if fd is None:
            return False
        try:
            trash = f"{self._root}/{_TRASH}{digest[:16]}-{os.getpid()}"
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{self._root}/{digest}", trash)
            os.unlink(self.lock_path(digest))
        finally:
            os.close(fd)
        trees.remove_tree(trash)
        return True

    def _is_abandoned(self, name: str) -> bool:
        """Whether nobody is filling a private directory any more."""
        short = name.removeprefix(_PRIVATE).partition("-")[0]
        with contextlib.suppress(FileNotFoundError):
            for digest in os.listdir(f"{self._root}/locks"):
                if digest.startswith(short):
                    fd = self._lock(digest, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if fd is None:
                        return False
                    os.close(fd)
        return True

    def _remove_leftovers(self, prefix: str) -> None:
        """What a killed process left of the same layer; nobody else can be at it now."""
        for name in self._names():
            if name.startswith(prefix):
                trees.remove_tree(f"{self._root}/{name}")


def _discard(path: str) -> None:
    """Remove what another process may be removing too."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.isdir(path):
            trees.remove_tree(path)
        else:
            os.unlink(path)


def _layer_fields(layer: Layer) -> dict[str, Any]:
    return {"parts": list(layer.parts), "marked": layer.marked}


def _is_still(fd: int, path: str) -> bool:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    own = os.fstat(fd)
    return (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino)


@functools.cache
def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        return stream.read().strip()
