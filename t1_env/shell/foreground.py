"""What the kernel says about the foreground of a terminal: who is there, and is it blocked reading the terminal?

Independent of anything the programs print. Answers None ("unknown") where ``/proc`` does not tell.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import select
import signal
import struct
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_UNIX98_PTY_MAJORS: Final = range(136, 144)
_TTY_DEVICE: Final = (5, 0)

# numbers of the calls in which a program waits for input, by machine
_READ_CALLS: Final = {"x86_64": frozenset({0, 19}), "aarch64": frozenset({63, 65})}  # read, readv
_WAIT_CALLS: Final = {
    "x86_64": frozenset({7, 23, 232, 270, 271, 281, 441}),  # poll select epoll_wait pselect6 ppoll epoll_pwait epoll_pwait2
    "aarch64": frozenset({22, 72, 73, 441}),  # epoll_pwait pselect6 ppoll epoll_pwait2
}
_MAX_THREADS: Final = 16
_MAX_PROCESSES: Final = 4096


@dataclass(frozen=True, slots=True)
class Foreground:
    """The foreground of a terminal at one moment.

    Args:
        group: Its process group, 0 if there is none.
        is_shell: Whether that is the shell's own group.
        blocked_on_read: Whether one of its processes is blocked reading the terminal.
        blocked_on_wait: Whether one of them sits in a poll or select call (it may or may not be about the terminal).
    """

    group: int
    is_shell: bool
    blocked_on_read: bool
    blocked_on_wait: bool


def foreground_group(master_fd: int) -> int:
    """Process group in the foreground of the terminal, in the caller's pid namespace; 0 if unknown."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(master_fd, termios.TIOCGPGRP, bytes(4)))[0])
    except OSError:
        return 0


def probe(master_fd: int, shell_pid: int) -> Foreground | None:
    """Look at the foreground; None where the kernel does not let us see it."""
    group = foreground_group(master_fd)
    if group <= 0 or shell_pid <= 0:
        return None
    candidates = [shell_pid] if group == shell_pid else [group]
    calls = [_blocked_call(pid) for pid in candidates]
    if not any(calls):
        candidates = [pid for pid in descendants(shell_pid) if _group_of(pid) == group]
        calls = [_blocked_call(pid) for pid in candidates]
    return Foreground(group, group == shell_pid, "read" in calls, "wait" in calls)


def _blocked_call(pid: int) -> str:
    """``"read"`` if a thread of the process is blocked reading a terminal, ``"wait"`` if one waits for events, else ``""``."""
    machine = platform.machine()
    reads, waits = _READ_CALLS.get(machine, frozenset()), _WAIT_CALLS.get(machine, frozenset())
    found = ""
    try:
        threads = os.listdir(_PROC / str(pid) / "task")[:_MAX_THREADS]  # noqa: PTH208 - hot path
    except OSError:
        return ""
    for thread in threads:
        try:
            fields = (_PROC / str(pid) / "task" / thread / "syscall").read_text().split()
        except OSError:
            continue
        if len(fields) < 2 or not fields[0].isdigit():  # "running"
            continue
        number = int(fields[0])
        if number in reads and _is_terminal(pid, int(fields[1], 16)):
            return "read"
        if number in waits:
            found = "wait"
    return found


def _is_terminal(pid: int, fd: int) -> bool:
    try:
        device = (_PROC / str(pid) / "fd" / str(fd)).stat().st_rdev
    except OSError:
        return False
    return os.major(device) in _UNIX98_PTY_MAJORS or (os.major(device), os.minor(device)) == _TTY_DEVICE


def has_descriptor(pid: int, fd: int) -> bool:
    """Whether a process has that descriptor open, as far as the kernel tells."""
    return os.path.lexists(f"/proc/{pid}/fd/{fd}")


def _stat_fields(pid: int) -> list[str]:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return []
    return text[text.rfind(")") + 2 :].split()  # the name may hold anything, also ")"


def _group_of(pid: int) -> int:
    fields = _stat_fields(pid)
    return int(fields[2]) if fields else -1


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``."""
    found: list[int] = []
    queue = [pid]
    while queue and len(found) < _MAX_PROCESSES:
        children = _children(queue.pop())
        found += children
        queue += children
    return found


def shell_children(shell_pid: int) -> frozenset[int]:
    """Direct children of the shell (which has one thread); empty where the kernel does not tell."""
    if shell_pid <= 0:
        return frozenset()
    try:
        with open(f"/proc/{shell_pid}/task/{shell_pid}/children", "rb", buffering=0) as file:  # noqa: PTH123 - once a command
            return frozenset(map(int, file.read().split()))
    except OSError:
        return frozenset()


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(_PROC / str(pid) / "task"):  # noqa: PTH208 - hot path
            text = (_PROC / str(pid) / "task" / thread / "children").read_text()
            children += [int(child) for child in text.split()]
    return children


class ForegroundJob:
    """The processes of a command that has to end, held by pidfd so that no stranger with a reused id is ever hit.

    They are the foreground process group and everything below the shell's children that belong to it, also what moved to a session of its
    own. Background jobs, of this command or of earlier ones, are not part of it.

    Args:
        master_fd: The terminal.
        shell_pid: The shell, which is never part of a job.
        spare: Children of the shell that were there before the command began.
    """

    def __init__(self, master_fd: int, shell_pid: int, spare: frozenset[int]) -> None:
        self._master_fd = master_fd
        self._shell_pid = shell_pid
        self._spare = spare
        self._held: dict[int, int] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look again: the shell may have gone on to its next program."""
        if self._shell_pid <= 0:
            return
        group = foreground_group(self._master_fd)
        children = [pid for pid in _children(self._shell_pid) if pid not in self._spare]
        if group not in (0, self._shell_pid):
            children = [pid for pid in children if _group_of(pid) == group]
        for pid in children + [below for child in children for below in descendants(child)]:
            if pid not in self._held:
                with contextlib.suppress(OSError):
                    self._held[pid] = os.pidfd_open(pid)

    def kill(self) -> None:
        """SIGKILL to all of them."""
        group = foreground_group(self._master_fd)
        if group > 0 and group != self._shell_pid and self._shell_pid > 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        for pid_fd in self._held.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(pid_fd, signal.SIGKILL)

    def await_end(self, timeout_s: float) -> None:
        """Wait until all of them are gone; SIGKILL takes effect only when the process runs next."""
        poll = select.poll()
        for pid_fd in self._held.values():
            poll.register(pid_fd, select.POLLIN)
        left, deadline = len(self._held), time.monotonic() + timeout_s
        while left and (left_s := deadline - time.monotonic()) > 0:
            for pid_fd, _ in poll.poll(left_s * 1000):
                poll.unregister(pid_fd)
                left -= 1

    def close(self) -> None:
        """Give the descriptors back."""
        for pid_fd in self._held.values():
            os.close(pid_fd)
        self._held.clear()
