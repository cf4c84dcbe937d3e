"""Removes what runs that were killed left behind, and nothing else.

Nothing of a local sandbox needs the reaper while any of its processes lives: mounts, network and files exist only in namespaces, which end
with their last process, and every process of a sandbox ends when the host process does. What can stay are directories: cgroups whose
keeper was killed too, and temporary directories of builds. They carry their owner's label; here the owner is looked for, and what a dead
one left is removed. What cannot be told (another machine's, another container's) is kept and said so.

Containers, images and remote directories are looked after by their backends; see ``t1_env.cli.reap``.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import select
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from t1_env.sandbox import hierarchies, owner

Action = Literal["removed", "would be removed", "kept", "failed"]

PROCESS_NAMES: Final = ("t1-zygote", "t1-keeper")
"""Names of the processes that are a sandbox's; their command lines hold the owner."""

_GRACE_S: Final = 5.0
_DEAD: Final = "its owner is gone"
_REASONS: Final = {True: "its owner is running", None: "its owner cannot be seen from here"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a run left or still uses.

    Args:
        kind: ``"process"``, ``"cgroup"``, ``"directory"``, ``"container"``, ``"image"``, ``"remote directory"`` ...
        name: Path, process or id.
        action: What was done with it.
        reason: Why.
    """

    kind: str
    name: str
    action: Action
    reason: str


def reap_local(*, dry_run: bool = False, everywhere: bool = True) -> list[Finding]:
    """Remove what killed runs left on this machine.

    Args:
        dry_run: Only say what would be removed.
        everywhere: Look at all processes and in all cgroups; otherwise only where this process's own sandboxes would be, which takes
            well under a millisecond. Every process does that before its first sandbox.

    Returns:
        What was found, in the order in which it was dealt with.
    """
    is_alive = functools.cache(owner.is_alive)
    found = _processes(is_alive, dry_run) if everywhere else []
    found += _cgroups(is_alive, dry_run, everywhere)
    found += _directories(is_alive, dry_run)
    return found


def decide(label: str | None, is_alive: Callable[[str], bool | None] = owner.is_alive) -> str | None:
    """Whether something with this owner label must stay.

    Args:
        label: Its label, or None if it has none.
        is_alive: As ``owner.is_alive``.

    Returns:
        Why it must stay; None if it is to be removed.
    """
    if label is None:
        return "it has no owner label"
    alive = is_alive(label)
    return None if alive is False else _REASONS[alive]


def _settle(kind: str, name: str, keep: str | None, dry_run: bool, remove: Callable[[], bool]) -> Finding:
    if keep is not None:
        return Finding(kind, name, "kept", keep)
    if dry_run:
        return Finding(kind, name, "would be removed", _DEAD)
    if remove():
        return Finding(kind, name, "removed", _DEAD)
    return Finding(kind, name, "failed", f"{_DEAD}, but it could not be removed: in use, or another user's")


# ------------------------------------------------------------------------------------------------------------------------- processes
def _processes(is_alive: Callable[[str], bool | None], dry_run: bool) -> list[Finding]:
    found = []
    for pid, name, label in _sandbox_processes():
        end = functools.partial(_end, pid, label)
        found.append(_settle("process", f"{name} (pid {pid})", decide(label, is_alive), dry_run, end))
    return found


def _sandbox_processes() -> Iterator[tuple[int, str, str]]:
    """(pid, name, owner label) of every zygote and keeper of this user, or of anybody for root."""
    mine = os.geteuid()
    for entry in _listdir("/proc"):
        if not entry.isdecimal():
            continue
        words = hierarchies.read_or_empty(f"/proc/{entry}/cmdline").rstrip("\0").split(" ")
        if len(words) != 2 or words[0] not in PROCESS_NAMES:
            continue
        uid = next((line for line in hierarchies.read_or_empty(f"/proc/{entry}/status").splitlines() if line.startswith("Uid:")), "")
        if mine == 0 or uid.split()[1:2] == [str(mine)]:
            yield int(entry), words[0], words[1]


def _end(pid: int, label: str) -> bool:
    """Give a process whose owner is gone the time to clean up after itself, then kill it."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        if label not in hierarchies.read_or_empty(f"/proc/{pid}/cmdline"):
            return True  # ended in between; the number is another's
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        if poller.poll(_GRACE_S * 1000):
            return True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return bool(poller.poll(_GRACE_S * 1000))
    except PermissionError:
        return False
    finally:
        os.close(pidfd)


# --------------------------------------------------------------------------------------------------------------------------- cgroups
def _cgroups(is_alive: Callable[[str], bool | None], dry_run: bool, everywhere: bool) -> list[Finding]:
    where = hierarchies.find_hierarchies()
    places: Iterable[str] = hierarchies.everywhere(where.roots) if everywhere else where.parents
    decisions = [(directory, decide(label, is_alive)) for directory, label in hierarchies.sandbox_directories(places)]
    doomed = [directory for directory, keep in decisions if keep is None and not dry_run]
    left = hierarchies.empty_and_remove(doomed, timeout_s=_GRACE_S if everywhere else 0.1)
    return [
        _settle("cgroup", directory, keep, dry_run, functools.partial(operator.not_, directory in left)) for directory, keep in decisions
    ]


# ----------------------------------------------------------------------------------------------------------------------- directories
def _directories(is_alive: Callable[[str], bool | None], dry_run: bool) -> list[Finding]:
    found = []
    place = tempfile.gettempdir()
    for name in _listdir(place):
        label = owner.owner_of_directory(name)
        path = os.path.join(place, name)
        if label is not None and _is_own_directory(path):
            found.append(_settle("directory", path, decide(label, is_alive), dry_run, functools.partial(remove_tree, path)))
    return found


def _is_own_directory(path: str) -> bool:
    """In a directory that is open to everybody, a name proves nothing."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def remove_tree(path: str) -> bool:
    """Remove a directory of our own with whatever is in it, also while something still writes there; tells whether it is gone."""
    deadline = time.monotonic() + _GRACE_S
    while os.path.lexists(path) and time.monotonic() < deadline:
        shutil.rmtree(path, ignore_errors=True)
        if os.path.lexists(path):
            _open_up(path)
    return not os.path.lexists(path)


def _open_up(path: str) -> None:
    """Make read-only directories removable."""
    for directory, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(directory, 0o700)


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
