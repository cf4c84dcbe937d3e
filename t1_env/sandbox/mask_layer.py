"""A layer above what the agent wrote that takes part of it back: see masking.py for what is found, clone_root.py for where it goes."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from typing import Final

from t1_env.sandbox.masking import Masks, Part, find_original

_MAX_COPY_BYTES: Final = 1 << 16
"""Files up to this size are copied into the layer; larger ones are mounted over a place-holder."""


def lay_masks(layer: str, part: Part, masks: Masks, *, restored: bool) -> list[tuple[str, str]]:
    """Fill a directory that is to lie above what the agent wrote to one part.

    Args:
        layer: The empty directory.
        part: The part.
        masks: What to take back.
        restored: False for the caches only.

    Returns:
        (place-holder's path inside, host path to mount over it) for what is too large to copy: a file, or a directory that comes from all
        of the part's lower directories (see `masking.layers_of`).

    Raises:
        OSError: A file could not be written.
    """
    mounts = []
    chosen = [masks.caches] if not restored else [masks.caches, masks.shadows, masks.changed]
    paths = sorted(path for found in chosen for path, name in found.items() if name == part.name)
    inside: tuple[str, ...] = ()
    for path in paths:
        if inside and path.startswith(inside):
            continue  # below a directory that comes back as a whole
        relative = path[len(part.at) :]
        _make_parents(layer, part, relative)
        target = f"{layer}{relative}"
        original = find_original(part.lowers, relative) if path in masks.changed else None
        if original is None:
            os.mknod(target, stat.S_IFCHR | 0o600, os.makedev(0, 0))
            continue
        status = os.lstat(original)
        if stat.S_ISDIR(status.st_mode):
            os.mkdir(target)
            _copy_look(original, target)
            mounts.append((path, original))
            inside = (*inside, f"{path}/")
        elif stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(original), target)
        elif stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_COPY_BYTES:
            shutil.copyfile(original, target)
            _copy_look(original, target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            mounts.append((path, original))
    return mounts


def _make_parents(layer: str, part: Part, relative: str) -> None:
    done = ""
    for name in relative.split("/")[1:-1]:
        done = f"{done}/{name}"
        if os.path.isdir(f"{layer}{done}") and not os.path.islink(f"{layer}{done}"):
            continue
        os.mkdir(f"{layer}{done}", 0o755)
        source = find_original(part.lowers, done) or f"{part.written}{done}"
        if os.path.isdir(source) and not os.path.islink(source):
            _copy_look(source, f"{layer}{done}")


def _copy_look(source: str, target: str) -> None:
    """Owner, mode and times."""
    status = os.stat(source, follow_symlinks=False)
    with contextlib.suppress(OSError):  # an owner that does not exist inside
        os.chown(target, status.st_uid, status.st_gid)
    os.chmod(target, stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
