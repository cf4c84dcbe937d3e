"""Who made a thing that may outlive a run: a label that later tells a dead owner from a live one.

Everything T1 makes outside its own memory (cgroups, containers, committed images, remote directories, temporary directories) carries
the label of the process that made it. ``t1_env.sandbox.reaper`` removes what a dead owner left, and nothing else.

A label is ``<machine>:<pid>:<start time>``. The machine is the boot and the pid namespace that the pid counts in, so that neither a
reused pid, nor another container's process of the same number, nor another machine's is mistaken for the owner.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from dataclasses import dataclass
from typing import Final

LABEL: Final = "t1.owner"
"""Name of the label on containers, images and volumes, and of the file in directories."""

_FORM: Final = re.compile(r"(?P<boot>[0-9A-Za-z-]+)\.(?P<namespace>[0-9]+):(?P<pid>[0-9]+):(?P<start>[0-9]+)")
_FILE_NAME: Final = re.compile(r"(?P<machine>[0-9A-Za-z-]+\.[0-9]+)-(?P<pid>[0-9]+)-(?P<start>[0-9]+)")
_DIRECTORY: Final = re.compile(r"t1-[a-z]+-(?P<owner>.+)-[^-]+")
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel: the namespace in which every process is seen


@dataclass(frozen=True, slots=True)
class _Owner:
    boot: str
    namespace: int
    pid: int
    start: int


def owner_id() -> str:
    """The label of the calling process; another one in a forked child.

    Returns:
        ``"<boot id>.<pid namespace>:<pid>:<start time>"``. Its characters are letters, digits, ``-``, ``.`` and ``:``, at most 90.
    """
    pid = os.getpid()
    _, start, _ = _status("self") or ("", 0, 1)
    return f"{_boot_id()}.{_own_pid_namespace()}:{pid}:{start}"


def is_alive(owner: str) -> bool | None:
    """Whether the process that a label names still runs.

    Args:
        owner: A label made by ``owner_id``, here or elsewhere.

    Returns:
        True or False where it can be told; None for a label of another machine or boot, of a pid namespace that cannot be seen from
        here, of a process that this user may not look at, or of another form.
    """
    parsed = _parse(owner)
    if parsed is None or parsed.boot != _boot_id():
        return None
    if parsed.namespace == _own_pid_namespace():
        return _runs(parsed.pid, parsed.start)
    return _runs_in_namespace(parsed)


def file_name(owner: str) -> str:
    """A label in the form in which it is part of a file's name."""
    return owner.replace(":", "-")


def from_file_name(name: str) -> str | None:
    """The label that ``file_name`` turned into ``name``; None if ``name`` is no such thing."""
    match = _FILE_NAME.fullmatch(name)
    return None if match is None else f"{match['machine']}:{match['pid']}:{match['start']}"


def directory_prefix(kind: str) -> str:
    """Prefix for the name of a temporary directory of this process, so that it is removed even if the process is killed.

    Args:
        kind: One word that says what it is for, e.g. ``"build"``; use as ``tempfile.TemporaryDirectory(prefix=directory_prefix("build"))``.
    """
    return f"t1-{kind}-{file_name(owner_id())}-"


def owner_of_directory(name: str) -> str | None:
    """The label in the name of a directory made with ``directory_prefix``; None if it is no such directory."""
    match = _DIRECTORY.fullmatch(name)
    return None if match is None else from_file_name(match["owner"])


def _parse(owner: str) -> _Owner | None:
    match = _FORM.fullmatch(owner)
    if match is None:
        return None
    return _Owner(match["boot"], int(match["namespace"]), int(match["pid"]), int(match["start"]))


def _runs(pid: int, start: int) -> bool | None:
    status = _status(str(pid))
    if status is not None:
        state, started, threads = status
        # A zombie that nobody waited for is dead; one whose other threads go on is not.
        return started == start and not (state in "ZX" and threads <= 1)
    if os.name != "posix" or pid <= 0:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return None  # another user's, on a /proc that hides it
    return True if start == 0 else None  # no /proc here: the number is all there is to go by


def _runs_in_namespace(owner: _Owner) -> bool | None:
    """Look for the owner among the processes of pid namespaces below this one."""
    incomplete = _own_pid_namespace() != _FIRST_PID_NAMESPACE
    for name in _process_names():
        namespace = _pid_namespace(name)
        if namespace is None:
            status = _status(name)
            incomplete = incomplete or (status is not None and status[0] not in "ZX")  # may be the owner, but this user cannot see
        elif namespace == owner.namespace and _innermost_pid(name) == owner.pid:
            status = _status(name)
            if status is not None:
                return status[1] == owner.start and not (status[0] in "ZX" and status[2] <= 1)
    return None if incomplete else False


def _process_names() -> list[str]:
    try:
        return [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _innermost_pid(name: str) -> int:
    """The pid of a process in its own pid namespace; -1 if it is gone."""
    for line in _read(f"/proc/{name}/status").splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return -1


def _pid_namespace(name: str) -> int | None:
    try:
        return os.stat(f"/proc/{name}/ns/pid").st_ino
    except OSError:
        return None


def _own_pid_namespace() -> int:
    return _pid_namespace("self") or 0


@functools.cache
def _boot_id() -> str:
    identifier = _read("/proc/sys/kernel/random/boot_id").strip()
    if identifier:
        return identifier
    return re.sub(r"[^0-9A-Za-z-]", "-", platform.node()) or "unknown"  # not Linux: the host's name has to do


def _status(name: str) -> tuple[str, int, int] | None:
    """State, start time in clock ticks since boot and number of threads; None if there is no such process or no /proc."""
    fields = _read(f"/proc/{name}/stat").rpartition(")")[2].split()
    return (fields[0], int(fields[19]), int(fields[17])) if fields else None


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
