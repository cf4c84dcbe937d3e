"""Where this user may make cgroup directories, whose a directory is, and how one is emptied and removed.

Version 1 has one tree per controller, version 2 one for all; a machine may have either or the two side by side. Directories of a sandbox
are made beside the caller's own processes and carry its owner label (``t1_env.sandbox.owner``) in their names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from t1_env.sandbox import owner

V1_CONTROLLERS: Final = ("memory", "pids", "cpu", "freezer")
V2_CONTROLLERS: Final = ("memory", "pids", "cpu")
_PREFIX: Final = "t1-"
_REMOVE_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where directories may be tried.

    Args:
        v1: Controller -> directory of the calling process.
        v2: Candidates, best first: the nearest ancestor that passes the memory and pids controllers on, then the process's own (which can
            at least freeze).
        roots: Mount points, for looking everywhere.
    """

    v1: Mapping[str, str]
    v2: tuple[str, ...]
    roots: tuple[str, ...]

    @property
    def parents(self) -> tuple[str, ...]:
        """Every directory in which sandboxes of this process could have theirs."""
        return tuple(dict.fromkeys((*self.v1.values(), *self.v2)))


def find_hierarchies(cgroup: str | None = None, mountinfo: str | None = None) -> Hierarchies:
    """Look at what is mounted and where the calling process is.

    Args:
        cgroup: Contents of ``/proc/self/cgroup``; read from there if None.
        mountinfo: Contents of ``/proc/self/mountinfo``, likewise.
    """
    own: dict[str, str] = {}
    for line in (read_or_empty("/proc/self/cgroup") if cgroup is None else cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    v1: dict[str, str] = {}
    v2: tuple[str, ...] = ()
    roots: list[str] = []
    for line in (read_or_empty("/proc/self/mountinfo") if mountinfo is None else mountinfo).splitlines():
        left, _, right = line.partition(" - ")
        root, mount_point = left.split()[3:5]
        fstype, _, options = right.split()[:3]
        if fstype == "cgroup":
            for controller in set(V1_CONTROLLERS) & set(options.split(",")):
                v1[controller] = _beneath(mount_point, root, own.get(controller, "/"))
                roots.append(mount_point)
        elif fstype == "cgroup2" and not v2:
            v2 = _v2_candidates(mount_point, _beneath(mount_point, root, own.get("", "/")))
            roots.append(mount_point)
    return Hierarchies(v1, v2, tuple(dict.fromkeys(roots)))


def pass_on(parent: str) -> frozenset[str]:
    """Have a version 2 directory pass its controllers on to those below it, as far as it may.

    Returns:
        The controllers that it passes on. A directory that holds processes cannot pass on more than it does, unless it is the root.
    """
    passed_on = set(read_or_empty(f"{parent}/cgroup.subtree_control").split())
    for controller in read_or_empty(f"{parent}/cgroup.controllers").split():
        if controller in V2_CONTROLLERS and controller not in passed_on and try_write(f"{parent}/cgroup.subtree_control", f"+{controller}"):
            passed_on.add(controller)
    return frozenset(passed_on)


# ------------------------------------------------------------------------------------------------------------------ names and owners
def cgroup_name(serial: int) -> str:
    """Directory name for the ``serial``-th sandbox of this process."""
    return f"{_PREFIX}{owner.file_name(owner.owner_id())}-{serial}"


def owner_of(name: str) -> str | None:
    """The owner label in a directory's name; None if no sandbox has such a name."""
    if not name.startswith(_PREFIX):
        return None
    return owner.from_file_name(name.removeprefix(_PREFIX).removesuffix("-clone").rpartition("-")[0])


def sandbox_directories(places: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(path, owner label) of every sandbox's directory in these directories."""
    for place in places:
        try:
            names = os.listdir(place)
        except OSError:
            continue  # closed to this user, or gone
        for name in names:
            if (label := owner_of(name)) is not None:
                yield os.path.join(place, name), label


def everywhere(roots: tuple[str, ...]) -> Iterator[str]:
    """Every directory of the given trees: a killed run may have been elsewhere in them than this process is."""
    for root in roots:
        for directory, below, _ in os.walk(root):
            below[:] = [name for name in below if owner_of(name) is None]
            yield directory


# ------------------------------------------------------------------------------------------------------------------------- removal
def remove_cgroup(name: str) -> None:
    """Remove what a keeper left of its sandbox because it was killed itself: nobody else would while the host process lives.

    Args:
        name: What ``cgroup_name`` returned for that sandbox.
    """
    candidates = [os.path.join(parent, f"{name}{end}") for parent in find_hierarchies().parents for end in ("", "-clone")]
    empty_and_remove([directory for directory in candidates if os.path.isdir(directory)])


def empty_and_remove(directories: Iterable[str], *, timeout_s: float = _REMOVE_TIMEOUT_S) -> list[str]:
    """Kill what is in some directories and remove them.

    Args:
        directories: All directories of one sandbox, or of several: a process that one of them keeps frozen cannot leave the others.
        timeout_s: How long to wait for the processes to be gone.

    Returns:
        Those that are still there.
    """
    left = list(directories)
    deadline = time.monotonic() + timeout_s
    while True:
        for directory in left:
            # Version 1 does not let a frozen process die, and with it hangs the end of its pid namespace.
            try_write(f"{directory}/freezer.state", "THAWED")
            try_write(f"{directory}/cgroup.freeze", "0")
            _kill_members(directory)
        left = [directory for directory in left if not remove_directory(directory)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.001)


def _kill_members(directory: str) -> None:
    if try_write(f"{directory}/cgroup.kill", "1"):  # version 2, Linux 5.14
        return
    for line in read_or_empty(f"{directory}/cgroup.procs").split():
        if line != "0":  # of a pid namespace that cannot be seen from here; to kill(2) it would mean our own group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(line), signal.SIGKILL)


def make_directory(directory: str) -> bool:
    """Make a cgroup; False where this user may not, or where the tree is read-only."""
    try:
        os.mkdir(directory, 0o755)
    except OSError:
        return False
    return True


def remove_directory(directory: str) -> bool:
    """Remove an empty cgroup; False if it is still in use."""
    try:
        os.rmdir(directory)
    except OSError as error:
        return error.errno == errno.ENOENT
    return True


# --------------------------------------------------------------------------------------------------------------------------- files
def read_file(path: str) -> str:
    """Contents of a control file."""
    with open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read()


def read_or_empty(path: str) -> str:
    """Contents of a file, or nothing if it cannot be read."""
    try:
        return read_file(path)
    except OSError:
        return ""


def write_file(path: str, text: str) -> None:
    """Write to a control file in one piece; it must exist."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)


def try_write(path: str, text: str) -> bool:
    """Write to a control file; False if it is not there or the kernel refuses."""
    try:
        write_file(path, text)
    except OSError:
        return False
    return True


def _v2_candidates(mount_point: str, own: str) -> tuple[str, ...]:
    candidates = []
    current = own
    while True:
        passed_on = read_or_empty(os.path.join(current, "cgroup.subtree_control")).split()
        if "pids" in passed_on and "memory" in passed_on:
            candidates.append(current)
        if current == mount_point or len(current) <= 1:
            break
        current = os.path.dirname(current)
    return tuple(dict.fromkeys((*candidates, own)))


def _beneath(mount_point: str, root: str, path: str) -> str:
    relative = path if root == "/" else path.removeprefix(root)
    return os.path.normpath(f"{mount_point}/{relative}")
