"""What the kernel says a process is blocked on, from three sources in turn, the best first.

1. ``/proc/PID/task/TID/syscall``: the system call and its first argument, so "reading descriptor 0, which is a terminal" is a fact. Needs
   the right to trace the process (the same user, and what the Yama module allows) and the table of call numbers for this architecture.
2. ``wchan``: the kernel function it sleeps in. Reading a terminal and reading a TCP connection look alike (``wait_woken``): a process that
   has sockets counts as waiting for events. Needs less: the right to look at the process, any architecture.
3. ``stat``, which everybody may read: whether it sleeps, and the processor time it has used. What for, it does not say.
"""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

Call: TypeAlias = Literal["read", "wait", "opaque", ""]
"""Blocked reading a terminal; waiting for events; asleep, nobody knows why; anything else."""

PROC: Final = Path("/proc")
_UNIX98_PTY_MAJORS: Final = range(136, 144)
_TTY_DEVICE: Final = (5, 0)
_GENERIC_READS: Final = frozenset({63, 65})  # read, readv
_GENERIC_WAITS: Final = frozenset({22, 72, 73, 441})  # epoll_pwait pselect6 ppoll epoll_pwait2
_READS: Final = {
    "x86_64": frozenset({0, 19}),
    "ppc64le": frozenset({3, 145}),
    "s390x": frozenset({3, 145}),
    **dict.fromkeys(("aarch64", "riscv64", "loongarch64"), _GENERIC_READS),
}
_WAITS: Final = {
    "x86_64": frozenset({7, 23, 232, 270, 271, 281, 441}),  # poll select epoll_wait pselect6 ppoll epoll_pwait epoll_pwait2
    "ppc64le": frozenset({82, 142, 167, 238, 280, 281, 303, 441}),
    "s390x": frozenset({142, 168, 251, 301, 302, 312, 441}),
    **dict.fromkeys(("aarch64", "riscv64", "loongarch64"), _GENERIC_WAITS),
}
_READ_SLEEPS: Final = ("n_tty_read", "wait_woken")
_WAIT_SLEEPS: Final = ("poll_schedule_timeout", "do_poll", "do_sys_poll", "do_select", "core_sys_select", "ep_poll", "do_epoll_wait")
_MAX_THREADS: Final = 16
_MAX_DESCRIPTORS: Final = 256

SOURCES: tuple[str, ...] = ("syscall", "wchan", "stat")
"""What may be asked. Tests leave some out, to be where they cannot be read."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """What one process is doing.

    Args:
        call: What it is blocked on.
        cpu_ticks: Processor time it has used, in clock ticks; 0 unless that was asked for because nothing better was to be had.
    """

    call: Call
    cpu_ticks: int = 0


def blocked_call(pid: int) -> Sleep:
    """What a process is blocked on: reading a terminal if any of its threads is."""
    try:
        threads = os.listdir(PROC / str(pid) / "task")[:_MAX_THREADS]  # noqa: PTH208 - hot path
    except OSError:
        return Sleep("")
    found: Call = ""
    for thread in threads:
        call = _by_syscall(pid, thread)
        if call is None:
            call = _by_wchan(pid, thread)
        if call is None:
            return _by_stat(pid)
        if call == "read":
            return Sleep("read")
        found = call or found
    return Sleep(found)


def _by_syscall(pid: int, thread: str) -> Call | None:
    reads, waits = _READS.get(platform.machine()), _WAITS.get(platform.machine())
    if reads is None or waits is None or "syscall" not in SOURCES:
        return None
    try:
        fields = (PROC / str(pid) / "task" / thread / "syscall").read_text().split()
    except OSError:
        return None
    if len(fields) < 2 or not fields[0].isdigit():  # "running"
        return ""
    number = int(fields[0])
    if number in reads:
        return "read" if _is_terminal(pid, int(fields[1], 16)) else ""
    return "wait" if number in waits else ""


def _by_wchan(pid: int, thread: str) -> Call | None:
    if "wchan" not in SOURCES:
        return None
    try:
        function = (PROC / str(pid) / "task" / thread / "wchan").read_text()
    except OSError:
        return None
    if function in ("", "0"):  # it runs, or we may not know
        fields = stat_fields(pid)
        return "" if fields and fields[0] == "R" else None
    if function.startswith(_READ_SLEEPS):
        terminals, sockets = _descriptors(pid)
        return ("wait" if sockets else "read") if terminals else ""
    return "wait" if function.startswith(_WAIT_SLEEPS) else ""


def _by_stat(pid: int) -> Sleep:
    fields = stat_fields(pid)
    if not fields or fields[0] != "S":
        return Sleep("")
    return Sleep("opaque", int(fields[11]) + int(fields[12]))


def stat_fields(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on; empty if the process is gone."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return []
    return text[text.rfind(")") + 2 :].split()  # the name may hold anything, also ")"


def program_name(pid: int) -> str:
    """Name of the program a process runs (its first 15 bytes); empty if unknown."""
    try:
        return (PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except OSError:
        return ""


def has_descriptor(pid: int, fd: int) -> bool:
    """Whether a process has that descriptor open, as far as the kernel tells."""
    return os.path.lexists(PROC / str(pid) / "fd" / str(fd))


def _is_terminal(pid: int, fd: int) -> bool:
    try:
        device = (PROC / str(pid) / "fd" / str(fd)).stat().st_rdev
    except OSError:
        return False
    return os.major(device) in _UNIX98_PTY_MAJORS or (os.major(device), os.minor(device)) == _TTY_DEVICE


def _descriptors(pid: int) -> tuple[bool, bool]:
    """Whether a process has a terminal open, and whether it has a socket."""
    terminals = sockets = False
    directory = PROC / str(pid) / "fd"
    with contextlib.suppress(OSError):
        for fd in os.listdir(directory)[:_MAX_DESCRIPTORS]:  # noqa: PTH208 - names only
            with contextlib.suppress(OSError):
                sockets = sockets or str((directory / fd).readlink()).startswith("socket:")
            terminals = terminals or _is_terminal(pid, int(fd))
    return terminals, sockets
