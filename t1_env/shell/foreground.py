"""What the kernel says about the foreground of a terminal: who is there, and is it blocked reading the terminal?

Independent of anything the programs print.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import termios
import time
from dataclasses import dataclass
from typing import Final

from t1_env.shell.blocked import PROC, blocked_call, stat_fields

_MAX_PROCESSES: Final = 4096


@dataclass(frozen=True, slots=True)
class Foreground:
    """The foreground of a terminal at one moment.

    Args:
        group: Its process group, 0 if there is none.
        is_shell: Whether that is the shell's own group.
        blocked_on_read: Whether one of its processes is blocked reading the terminal.
        blocked_on_wait: Whether one of them sits in a poll or select call (it may or may not be about the terminal).
        cpu_ticks: Where the kernel only tells that all of them sleep: the processor time they have used, in clock ticks; else None.
    """

    group: int
    is_shell: bool
    blocked_on_read: bool
    blocked_on_wait: bool
    cpu_ticks: int | None = None


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
    sleeps = [blocked_call(pid) for pid in candidates]
    if not any(sleep.call in ("read", "wait") for sleep in sleeps):
        candidates = [pid for pid in descendants(shell_pid) if _group_of(pid) == group]
        sleeps = [blocked_call(pid) for pid in candidates]
    calls = {sleep.call for sleep in sleeps}
    cpu_ticks = sum(sleep.cpu_ticks for sleep in sleeps) if calls == {"opaque"} else None
    return Foreground(group, group == shell_pid, "read" in calls, "wait" in calls, cpu_ticks)


def _group_of(pid: int) -> int:
    fields = stat_fields(pid)
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
        for thread in os.listdir(PROC / str(pid) / "task"):  # noqa: PTH208 - hot path
            text = (PROC / str(pid) / "task" / thread / "children").read_text()
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
