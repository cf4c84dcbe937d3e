"""A fingerprint of everything that can be written in the mount namespace that the caller is in."""

from __future__ import annotations

import hashlib
import marshal
import os
import platform
import stat
import time
from typing import Final

# File systems that show the kernel's state, not files.
_KERNEL_FILE_SYSTEMS: Final = frozenset(
    {"autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs", "fusectl", "hugetlbfs"}
    | {"mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs", "tracefs"}
)
_DEVICES: Final = "/dev"
_CLOCK_REALTIME_COARSE: Final = 5  # linux/time.h; the clock of file timestamps, not named by the time module
# From 6.13 the kernel gives a changed file a timestamp later than any that was read before; older ones tick every few milliseconds.
_FINE_TIMESTAMPS: Final = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit()) >= (6, 13)
_FORMAT: Final = 2  # of marshal: plain values, no references, so equal data make equal bytes


def writable_places() -> tuple[tuple[str, ...], frozenset[str]]:
    """Where files can be written, by the mount table.

    Returns:
        Directories to start from, none below another, and directories below them to leave out.
    """
    starts = ["/"]
    left_out: set[str] = set()
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.rstrip("\n").partition(" - ")
            fields = left.split(" ")
            point = (
                fields[4].encode("utf-8", "surrogateescape").decode("unicode_escape").encode("latin-1").decode("utf-8", "surrogateescape")
            )
            closed = right.split(" ")[0] in _KERNEL_FILE_SYSTEMS or "ro" in fields[5].split(",") or _is_below(point, _DEVICES)
            starts = [start for start in starts if start != point]  # a later mount hides an earlier one at the same place
            left_out.discard(point)
            if closed:
                left_out.add(point)
            else:
                starts.append(point)
    return tuple(starts), frozenset(left_out | {_DEVICES})


def fingerprint(starts: tuple[str, ...], left_out: frozenset[str]) -> str:
    """Digest of names and metadata of everything below ``starts``; contents are not read.

    A change of contents, owner, mode, links or attributes moves a file's change time, which no process can set back.

    Args:
        starts: Directories.
        left_out: Directories not to look into.
    """
    below = _without_nested(starts, left_out)
    while True:
        digest, newest_ns = _scan(below, left_out)
        if _FINE_TIMESTAMPS or newest_ns < time.clock_gettime_ns(_CLOCK_REALTIME_COARSE):
            return digest
        # The latest change was in the present clock tick: one more change in it could not be told apart. Wait for the next tick.
        time.sleep(0.0005)


def _without_nested(starts: tuple[str, ...], left_out: frozenset[str]) -> list[str]:
    """The starts that no walk from another start comes to."""
    kept = []
    for start in sorted(starts):
        holders = [other for other in starts if other != start and _is_below(start, other)]
        nearest = max(holders, key=len, default=None)
        if nearest is None or any(_is_below(start, place) and _is_below(place, nearest) for place in left_out):
            kept.append(start)
    return kept


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory.rstrip('/')}/")


def _scan(starts: list[str], left_out: frozenset[str]) -> tuple[str, int]:
    digest = hashlib.blake2b(digest_size=16)
    newest_ns = 0
    pending = list(starts)
    scandir, is_directory, join = os.scandir, stat.S_ISDIR, os.path.join
    while pending:
        directory = pending.pop()
        try:
            own = os.lstat(directory)
            with scandir(directory) as entries:
                found = []
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError:  # removed while we looked; the directory's times say so
                        continue
                    mode, changed_ns = status.st_mode, status.st_ctime_ns
                    found.append((entry.name, status.st_ino, mode, status.st_size, changed_ns))
                    newest_ns = max(newest_ns, changed_ns)
                    if is_directory(mode):
                        path = join(directory, entry.name)
                        if path not in left_out:
                            pending.append(path)
        except OSError:  # removed while we looked, or closed to us: then nothing of ours can have written there
            continue
        newest_ns = max(newest_ns, own.st_ctime_ns)
        found.sort()
        digest.update(marshal.dumps((directory, own.st_ino, own.st_ctime_ns, found), _FORMAT))
    return digest.hexdigest(), newest_ns
