"""Forking a process that is pid 1 of new namespaces."""

from __future__ import annotations

import os
import select
import signal
import struct
from collections.abc import Callable
from typing import Final, NoReturn

from t1_env.sandbox import syscalls

ALL: Final = (
    syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWCGROUP
)
"""What a sandbox's processes, and a clone's, have of their own beside the keeper's user namespace."""

_PID: Final = struct.Struct("=i")


def fork_pid_1(body: Callable[[], NoReturn], *, tied: bool = True, flags: int = ALL) -> int:
    """Fork a child that is pid 1 of new namespaces and runs ``body`` there.

    A pid namespace starts with the *next* child of the process that asked for it, and asking twice is refused; so a middleman asks,
    forks pid 1 and ends, and pid 1 becomes the caller's child (which is why the caller must be a child subreaper). Only then is pid 1
    told to go on, and tied to the caller's life.

    Args:
        body: Never returns.
        tied: Whether the child is killed when the caller dies; one that notices by itself can clean up first.
        flags: Which namespaces.

    Returns:
        Pid of the child, as the caller sees it.

    Raises:
        OSError: The namespaces were refused.
    """
    pid_read, pid_write = os.pipe()
    go_read, go_write = os.pipe()
    caller = os.pidfd_open(os.getpid())
    middleman = os.fork()
    if middleman == 0:
        _middleman(_tie(body, caller) if tied else body, flags, pid_write, go_read, go_write)
    for fd in (pid_write, go_read, caller):
        os.close(fd)
    try:
        data = os.read(pid_read, _PID.size)
        status = os.waitpid(middleman, 0)[1]
        if len(data) != _PID.size:
            code = os.waitstatus_to_exitcode(status)
            raise OSError(code, os.strerror(code), "unshare")
        os.write(go_write, b"1")
    finally:
        os.close(pid_read)
        os.close(go_write)
    return int(_PID.unpack(data)[0])


def kill_and_reap(pid: int) -> int:
    """SIGKILL pid 1 of a namespace; returns its wait status once everything in the namespace is gone."""
    os.kill(pid, signal.SIGKILL)  # a zombie of ours until we wait, so the number cannot have been reused
    return os.waitpid(pid, 0)[1]


def _tie(body: Callable[[], NoReturn], caller: int) -> Callable[[], NoReturn]:
    """Have the process that runs ``body`` killed when the process behind the pidfd ``caller``, its parent, dies."""

    def tied() -> NoReturn:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        if select.select([caller], [], [], 0)[0]:
            os._exit(1)  # it died just before
        body()

    return tied


def _middleman(body: Callable[[], NoReturn], flags: int, pid_write: int, go_read: int, go_write: int) -> NoReturn:
    code = 1
    try:
        syscalls.unshare(flags)
        pid = os.fork()
        if pid == 0:
            os.close(go_write)
            os.close(pid_write)
            if os.read(go_read, 1) != b"1":
                os._exit(1)  # the caller died in between
            os.close(go_read)
            body()
        os.write(pid_write, _PID.pack(pid))
        code = 0
    except OSError as error:
        code = error.errno or 1
    finally:
        os._exit(code)
