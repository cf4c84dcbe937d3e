"""What one sandbox may use: resource limits on every process and, where this user may make them, cgroups around all of them.

Cgroups (version 1, version 2 or the two side by side) bound memory, processes and CPU time of the sandbox as a whole and freeze it in
one write. Without them, ``RLIMIT_NPROC`` still bounds the processes of an ordinary user's sandbox and ``RLIMIT_DATA`` the memory of each
process. ``Cgroup.capabilities`` says which bounds are real.
"""

from __future__ import annotations

import os
import re
import resource
import time
from dataclasses import dataclass, field
from typing import Final

from t1_env.sandbox.hierarchies import (
    V1_CONTROLLERS,
    Hierarchies,
    find_hierarchies,
    make_directory,
    pass_on,
    read_file,
    remove_directory,
    try_write,
    write_file,
)

MEMORY, PROCESSES, CPU = "memory_limit", "process_limit", "cpu_limit"
"""Names of the bounds in ``Sandbox.capabilities``."""

_FREEZE_TIMEOUT_S: Final = 5.0
_REMOVE_TIMEOUT_S: Final = 2.0
_CPU_PERIOD_US: Final = 100_000
_MAX_OPEN_FILES: Final = 4096
_RESERVED_PIDS: Final = 300
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
        capabilities: Which of ``MEMORY``, ``PROCESSES`` and ``CPU`` hold.
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
        write_file(self.freezer, "1" if version_2 else "FROZEN")
        probe = os.path.join(os.path.dirname(self.freezer), "cgroup.events") if version_2 else self.freezer
        wanted = "frozen 1" if version_2 else "FROZEN"
        deadline = time.monotonic() + _FREEZE_TIMEOUT_S
        pause_s = 0.0
        while wanted not in read_file(probe):
            if time.monotonic() > deadline:
                self.thaw()
                raise TimeoutError(f"the sandbox's processes did not freeze within {_FREEZE_TIMEOUT_S:g} s")
            time.sleep(pause_s)
            pause_s = min(pause_s + 0.0001, 0.005)

    def thaw(self) -> None:
        """Let the processes run again."""
        if self.freezer is not None:
            write_file(self.freezer, self.thaw_word)

    @property
    def thaw_word(self) -> str:
        """What to write to ``freezer`` to let the processes run again."""
        return "0" if (self.freezer or "").endswith("cgroup.freeze") else "THAWED"

    def leave(self) -> None:
        """Move the calling process, which had joined, back to where it came from."""
        for home in self.homes:
            try_write(home, "0")

    def remove(self) -> None:
        """Remove the directories; every process in them has been killed."""
        for fd in self.procs_fds:
            os.close(fd)
        self.procs_fds.clear()
        deadline = time.monotonic() + _REMOVE_TIMEOUT_S
        for directory in self.directories:
            while not remove_directory(directory) and time.monotonic() < deadline:
                time.sleep(0.001)
        self.directories.clear()


def create_cgroup(name: str, limits: Limits, *, freezer: bool = True, hierarchies: Hierarchies | None = None) -> Cgroup:
    """Make the cgroup directories that this user may make.

    Args:
        name: Directory name; made unique by the caller.
        limits: Bounds to set.
        freezer: Whether it will be frozen.
        hierarchies: Where to try; default: as this machine has them.

    Returns:
        A cgroup; with no directories and no capabilities where cgroups are closed to this user.
    """
    cgroup = Cgroup()
    where = hierarchies if hierarchies is not None else find_hierarchies()
    for controller in V1_CONTROLLERS:
        wanted = {"freezer": freezer, "cpu": limits.cpus is not None, "memory": limits.memory_mb is not None}.get(controller, True)
        if wanted and controller in where.v1:
            _create_v1(cgroup, controller, os.path.join(where.v1[controller], name), limits)
    needs_freezer = freezer and cgroup.freezer is None
    if needs_freezer or not _wanted(limits) <= cgroup.capabilities:
        _create_v2(cgroup, where.v2, name, limits, freezer=needs_freezer)
    return cgroup


def _wanted(limits: Limits) -> set[str]:
    wanted = {MEMORY: limits.memory_mb is not None, PROCESSES: True, CPU: limits.cpus is not None}
    return {name for name, asked in wanted.items() if asked}


def join(procs_fds: list[int]) -> None:
    """Move the calling process into the cgroups whose ``cgroup.procs`` files are open as ``procs_fds``."""
    for fd in procs_fds:
        os.write(fd, b"0")


def warm_up(cgroup: Cgroup) -> int:
    """Have a child join and end, so that whoever joins within the next milliseconds need not wait.

    The first process in a while that moves between cgroups waits until every CPU has taken note (some 8 ms); those right behind it do not.
    Beside the assembly of a root that wait costs nothing.

    Returns:
        Pid of the child, for the caller to wait for; 0 if there is nothing to join.
    """
    if not cgroup.procs_fds:
        return 0
    pid = os.fork()
    if pid == 0:
        try:
            join(cgroup.procs_fds)
        finally:
            os._exit(0)
    return pid


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


def bound_pid_namespace(max_processes: int) -> bool:
    """Bound the processes of the calling process's own pid namespace: what is left for root where cgroups are closed.

    ``RLIMIT_NPROC`` does not hold for the machine's root. Since Linux 6.14 every pid namespace has a largest pid of its own. The kernel
    keeps the first 300 numbers back once they have been used, so up to 300 more processes than asked for may run.

    Args:
        max_processes: As ``SandboxSpec.max_processes``.

    Returns:
        Whether they are bounded now; False on an older kernel, where the setting would be the whole machine's.
    """
    return _kernel_version() >= (6, 14) and try_write("/proc/sys/kernel/pid_max", str(_RESERVED_PIDS + max_processes + _EXTRA_PROCESSES))


def _kernel_version() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def prefer_as_victim() -> None:
    """Have the kernel kill this process and its children first when their cgroup runs out of memory; the keeper shares a clone's."""
    try_write("/proc/self/oom_score_adj", "500")


def _memory_bytes(limits: Limits) -> int:
    """What a memory cgroup may hold: it counts the sandbox's files too, which lie in memory.

    Bounded by ``memory_mb`` alone, an agent that writes large files would lose its shell, and every new one, instead of being told that
    the disk is full.
    """
    return ((limits.memory_mb or 0) + limits.storage_mb) << 20


def _create_v1(cgroup: Cgroup, controller: str, directory: str, limits: Limits) -> None:
    if directory not in cgroup.directories:  # controllers may be mounted together
        if not make_directory(directory):
            return
        cgroup.directories.append(directory)
        cgroup.procs_fds.append(os.open(f"{directory}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        cgroup.homes.append(f"{os.path.dirname(directory)}/cgroup.procs")
    if controller == "memory" and limits.memory_mb is not None:
        size = str(_memory_bytes(limits))
        if try_write(f"{directory}/memory.limit_in_bytes", size):
            try_write(f"{directory}/memory.memsw.limit_in_bytes", size)
            cgroup.capabilities.add(MEMORY)
    elif controller == "pids" and try_write(f"{directory}/pids.max", str(limits.max_processes)):
        cgroup.capabilities.add(PROCESSES)
    elif controller == "cpu" and limits.cpus is not None:
        try_write(f"{directory}/cpu.cfs_period_us", str(_CPU_PERIOD_US))
        if try_write(f"{directory}/cpu.cfs_quota_us", str(int(limits.cpus * _CPU_PERIOD_US))):
            cgroup.capabilities.add(CPU)
    elif controller == "freezer":
        cgroup.freezer = f"{directory}/freezer.state"


def _create_v2(cgroup: Cgroup, parents: tuple[str, ...], name: str, limits: Limits, *, freezer: bool) -> None:
    for parent in parents:
        pass_on(parent)
        directory = os.path.join(parent, name)
        if not make_directory(directory):
            continue
        procs_fd = _open_if_joinable(directory)
        if procs_fd is None:
            remove_directory(directory)
            continue
        gained = _set_v2(directory, limits) - cgroup.capabilities
        freezes = freezer and os.path.exists(f"{directory}/cgroup.freeze")
        if not (gained or freezes):
            os.close(procs_fd)
            remove_directory(directory)
            continue
        cgroup.directories.append(directory)
        cgroup.procs_fds.append(procs_fd)
        cgroup.homes.append(f"{parents[-1]}/cgroup.procs")
        cgroup.capabilities |= gained
        if freezes:
            cgroup.freezer = f"{directory}/cgroup.freeze"
        return


def _set_v2(directory: str, limits: Limits) -> set[str]:
    """Write the bounds; returns which of them hold. ``memory.oom.group`` stays 0: running out of memory kills the culprit alone."""
    holds = set()
    if limits.memory_mb is not None and try_write(f"{directory}/memory.max", str(_memory_bytes(limits))):
        try_write(f"{directory}/memory.swap.max", "0")
        holds.add(MEMORY)
    if try_write(f"{directory}/pids.max", str(limits.max_processes)):
        holds.add(PROCESSES)
    if limits.cpus is not None and try_write(f"{directory}/cpu.max", f"{int(limits.cpus * _CPU_PERIOD_US)} {_CPU_PERIOD_US}"):
        holds.add(CPU)
    return holds


def _open_if_joinable(directory: str) -> int | None:
    """Open a version 2 directory's ``cgroup.procs`` if processes of ours may move in."""
    try:
        procs_fd = os.open(f"{directory}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return None
    if _can_join(procs_fd):
        return procs_fd
    os.close(procs_fd)
    return None


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


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bound, bound))
