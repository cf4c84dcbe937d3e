"""What one sandbox may use: resource limits on every process and, where this user may make them, cgroups around all of them.

Cgroups (version 1, version 2 or the two side by side) bound memory, processes and CPU time of the sandbox as a whole and freeze it in
one write. Without them, ``RLIMIT_NPROC`` still bounds the processes of an ordinary user's sandbox and ``RLIMIT_DATA`` the memory of each
process. ``Cgroup.capabilities`` says which bounds are real.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time
from dataclasses import dataclass, field
from typing import Final

_PREFIX: Final = "t1"
_FREEZE_TIMEOUT_S: Final = 5.0
_REMOVE_TIMEOUT_S: Final = 2.0
_V1_CONTROLLERS: Final = ("memory", "pids", "cpu", "freezer")
_CPU_PERIOD_US: Final = 100_000
_MAX_OPEN_FILES: Final = 4096
_EXTRA_PROCESSES: Final = 4  # the keeper, pid 1 and a clone's first processes count against the same user


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one sandbox; the fields are those of ``SandboxSpec``."""

    memory_mb: int | None
    storage_mb: int
    max_processes: int
    cpus: float | None


@dataclass(slots=True)
class Cgroup:
    """The cgroup directories of one sandbox (none, if this user may not make any).

    Args:
        directories: One directory per hierarchy.
        capabilities: Which of "memory_limit", "process_limit" and "cpu_limit" hold.
        freezer: Path of the file that freezes, or None.
        procs_fds: Open descriptors of the ``cgroup.procs`` files: a process joins by writing "0".
        homes: Paths of the ``cgroup.procs`` files of the process that made the directories.
    """

    directories: list[str] = field(default_factory=list)
    capabilities: set[str] = field(default_factory=set)
    freezer: str | None = None
    procs_fds: list[int] = field(default_factory=list)
    homes: list[str] = field(default_factory=list)

    def freeze(self) -> None:
        """Stop every process; returns once none of them can run.

        Raises:
            TimeoutError: Some process could not be stopped in time; everything has been thawed again.
        """
        if self.freezer is None:
            return
        version_2 = self.freezer.endswith("cgroup.freeze")
        _write(self.freezer, "1" if version_2 else "FROZEN")
        probe = os.path.join(os.path.dirname(self.freezer), "cgroup.events") if version_2 else self.freezer
        wanted = "frozen 1" if version_2 else "FROZEN"
        deadline = time.monotonic() + _FREEZE_TIMEOUT_S
        pause_s = 0.0
        while wanted not in _read(probe):
            if time.monotonic() > deadline:
                self.thaw()
                raise TimeoutError(f"the sandbox's processes did not freeze within {_FREEZE_TIMEOUT_S:g} s")
            time.sleep(pause_s)
            pause_s = min(pause_s + 0.0001, 0.005)

    def thaw(self) -> None:
        """Let the processes run again."""
        if self.freezer is not None:
            _write(self.freezer, "0" if self.freezer.endswith("cgroup.freeze") else "THAWED")

    def leave(self) -> None:
        """Move the calling process, which had joined, back to where it came from."""
        for home in self.homes:
            _try_write(home, "0")

    def remove(self) -> None:
        """Remove the directories; every process in them has been killed."""
        for fd in self.procs_fds:
            os.close(fd)
        self.procs_fds.clear()
        deadline = time.monotonic() + _REMOVE_TIMEOUT_S
        for directory in self.directories:
            while not _rmdir(directory) and time.monotonic() < deadline:
                time.sleep(0.001)
        self.directories.clear()


def create_cgroup(name: str, limits: Limits, *, freezer: bool = True) -> Cgroup:
    """Make the cgroup directories that this user may make.

    Args:
        name: Directory name; made unique by the caller.
        limits: Bounds to set.
        freezer: Whether it will be frozen.

    Returns:
        A cgroup; with no directories and no capabilities where cgroups are closed to this user.
    """
    cgroup = Cgroup()
    parents_v1, parents_v2 = _parents()
    for controller in _V1_CONTROLLERS:
        if controller in parents_v1 and (freezer or controller != "freezer") and not (controller == "cpu" and limits.cpus is None):
            _create_v1(cgroup, controller, os.path.join(parents_v1[controller], name), limits)
    needs_freezer = freezer and cgroup.freezer is None
    if parents_v2 and (needs_freezer or not cgroup.directories):
        _create_v2(cgroup, parents_v2, name, limits, freezer=needs_freezer)
    return cgroup


def join(procs_fds: list[int]) -> None:
    """Move the calling process into the cgroups whose ``cgroup.procs`` files are open as ``procs_fds``."""
    for fd in procs_fds:
        os.write(fd, b"0")


def apply_rlimits(limits: Limits, *, memory_is_bounded: bool) -> None:
    """Set the resource limits of the calling process, just before it executes a program.

    Args:
        limits: Bounds to set.
        memory_is_bounded: Whether a cgroup bounds memory, so that no per-process limit is needed.
    """
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)
    _lower(resource.RLIMIT_NPROC, limits.max_processes + _EXTRA_PROCESSES)
    _lower(resource.RLIMIT_FSIZE, limits.storage_mb << 20)
    if limits.memory_mb is not None and not memory_is_bounded:
        _lower(resource.RLIMIT_DATA, limits.memory_mb << 20)


def cgroup_name(pid: int, serial: int) -> str:
    """Directory name for a sandbox of host process ``pid``; tells later starts whether that process still lives.

    Holds the pid namespace, the pid and the start time, so that neither a reused pid nor a process of another container is mistaken.
    """
    return f"{_name_prefix()}{pid}-{_start_time(pid)}-{serial}"


def remove_stale_cgroups() -> None:
    """Remove directories that a host process left behind when it and its keepers were killed at once."""
    parents_v1, parents_v2 = _parents()
    for parent in {*parents_v1.values(), *parents_v2}:
        try:
            names = [name for name in os.listdir(parent) if name.startswith(_name_prefix())]
        except OSError:
            continue
        for name in names:
            pid, start_time = name.removeprefix(_name_prefix()).split("-")[:2]
            if start_time != _start_time(int(pid)):
                _empty_and_remove(os.path.join(parent, name), timeout_s=0.0)


def remove_cgroup(name: str) -> None:
    """Remove what a keeper left of its sandbox because it was killed itself: nobody else would while the host process lives.

    Args:
        name: What ``cgroup_name`` returned for that sandbox.
    """
    parents_v1, parents_v2 = _parents()
    for parent in {*parents_v1.values(), *parents_v2}:
        for directory in (os.path.join(parent, name), os.path.join(parent, f"{name}-clone")):
            if os.path.isdir(directory):
                _empty_and_remove(directory, timeout_s=_REMOVE_TIMEOUT_S)


def _empty_and_remove(directory: str, *, timeout_s: float) -> None:
    """Kill what is in a directory and remove it, waiting so long for the processes to be gone."""
    # Version 1 does not let a frozen process die, and with it hangs the end of its pid namespace.
    _try_write(f"{directory}/freezer.state", "THAWED")
    _try_write(f"{directory}/cgroup.freeze", "0")
    deadline = time.monotonic() + timeout_s
    while True:
        for line in _read_or_empty(f"{directory}/cgroup.procs").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line), signal.SIGKILL)
        if _rmdir(directory) or time.monotonic() >= deadline:
            return
        time.sleep(0.001)


def _name_prefix() -> str:
    return f"{_PREFIX}-{os.stat('/proc/self/ns/pid').st_ino}-"


def _start_time(pid: int) -> str:
    """Field 22 of proc(5) stat; empty if there is no such process."""
    fields = _read_or_empty(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields else ""


def prefer_as_victim() -> None:
    """Have the kernel kill this process and its children first when their cgroup runs out of memory; the keeper shares a clone's."""
    _try_write("/proc/self/oom_score_adj", "500")


def _create_v1(cgroup: Cgroup, controller: str, directory: str, limits: Limits) -> None:
    if not _mkdir(directory):
        return
    cgroup.directories.append(directory)
    if controller == "memory" and limits.memory_mb is not None:
        size = str(limits.memory_mb << 20)
        if _try_write(f"{directory}/memory.limit_in_bytes", size):
            _try_write(f"{directory}/memory.memsw.limit_in_bytes", size)
            cgroup.capabilities.add("memory_limit")
    elif controller == "pids" and _try_write(f"{directory}/pids.max", str(limits.max_processes)):
        cgroup.capabilities.add("process_limit")
    elif controller == "cpu" and limits.cpus is not None:
        _try_write(f"{directory}/cpu.cfs_period_us", str(_CPU_PERIOD_US))
        if _try_write(f"{directory}/cpu.cfs_quota_us", str(int(limits.cpus * _CPU_PERIOD_US))):
            cgroup.capabilities.add("cpu_limit")
    elif controller == "freezer":
        cgroup.freezer = f"{directory}/freezer.state"
    cgroup.procs_fds.append(os.open(f"{directory}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
    cgroup.homes.append(f"{os.path.dirname(directory)}/cgroup.procs")


def _create_v2(cgroup: Cgroup, parents: list[str], name: str, limits: Limits, *, freezer: bool) -> None:
    for parent in parents:
        directory = os.path.join(parent, name)
        if not _mkdir(directory):
            continue
        try:
            procs_fd = os.open(f"{directory}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            if not _can_join(procs_fd):
                os.close(procs_fd)
                _rmdir(directory)
                continue
        except OSError:
            _rmdir(directory)
            continue
        cgroup.directories.append(directory)
        cgroup.procs_fds.append(procs_fd)
        cgroup.homes.append(f"{parents[-1]}/cgroup.procs")
        if limits.memory_mb is not None and _try_write(f"{directory}/memory.max", str(limits.memory_mb << 20)):
            _try_write(f"{directory}/memory.swap.max", "0")
            cgroup.capabilities.add("memory_limit")
        if _try_write(f"{directory}/pids.max", str(limits.max_processes)):
            cgroup.capabilities.add("process_limit")
        if limits.cpus is not None and _try_write(f"{directory}/cpu.max", f"{int(limits.cpus * _CPU_PERIOD_US)} {_CPU_PERIOD_US}"):
            cgroup.capabilities.add("cpu_limit")
        if freezer and os.path.exists(f"{directory}/cgroup.freeze"):
            cgroup.freezer = f"{directory}/cgroup.freeze"
        return


def _can_join(procs_fd: int) -> bool:
    """Whether a process of ours may move in: checked with a child, since moving back may be refused."""
    pid = os.fork()
    if pid == 0:
        try:
            os.write(procs_fd, b"0")
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def _parents() -> tuple[dict[str, str], list[str]]:
    """Where directories may be made.

    Returns:
        Version 1: controller -> this process's own directory. Version 2: candidate directories, best first: the nearest ancestor that
        passes the memory and pids controllers on, then this process's own (which can at least freeze).
    """
    own = {}
    for line in _read_or_empty("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    v1: dict[str, str] = {}
    v2: list[str] = []
    for line in _read_or_empty("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        root, mount_point = left.split()[3:5]
        fstype, _, options = right.split()[:3]
        if fstype == "cgroup":
            for controller in set(_V1_CONTROLLERS) & set(options.split(",")):
                v1[controller] = _beneath(mount_point, root, own.get(controller, "/"))
        elif fstype == "cgroup2" and not v2:
            v2 = _v2_candidates(mount_point, _beneath(mount_point, root, own.get("", "/")))
    return v1, v2


def _v2_candidates(mount_point: str, own: str) -> list[str]:
    candidates = []
    current = own
    while True:
        passed_on = _read_or_empty(os.path.join(current, "cgroup.subtree_control")).split()
        if "pids" in passed_on and "memory" in passed_on:
            candidates.append(current)
        if current == mount_point or len(current) <= 1:
            break
        current = os.path.dirname(current)
    return [*candidates, own]


def _beneath(mount_point: str, root: str, path: str) -> str:
    relative = path if root == "/" else path.removeprefix(root)
    return os.path.normpath(f"{mount_point}/{relative}")


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bound, bound))


def _mkdir(directory: str) -> bool:
    try:
        os.mkdir(directory, 0o755)
    except OSError:
        return False  # closed to this user or not writable here: the capabilities say what is missing
    return True


def _rmdir(directory: str) -> bool:
    try:
        os.rmdir(directory)
    except OSError as error:
        return error.errno == errno.ENOENT
    return True


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read()


def _read_or_empty(path: str) -> str:
    try:
        return _read(path)
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)


def _try_write(path: str, text: str) -> bool:
    try:
        _write(path, text)
    except OSError:
        return False
    return True
