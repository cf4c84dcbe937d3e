"""The two channels to a running bash: its terminal, and the plain descriptors beside it.

``ShellChannel`` is the seam for backends: everything above it speaks to a terminal, a command channel and a status channel, and asks the
kernel questions only through :mod:`t1_env.shell.foreground`, which answers "unknown" where there is no process id to ask about.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, Self

from t1_env.errors import ShellError
from t1_env.sandbox.base import SandboxProcess
from t1_env.shell import bash

READ_SIZE: Final = 1 << 16
_TIOCSIG: Final = 0x40045436
_TIOCGPTPEER: Final = 0x5441
_TERMIOS_SIZE: Final = 256  # larger than any kernel's struct termios


class Spawner(Protocol):
    """The part of a sandbox a session needs."""

    def spawn(
        self,
        argv: list[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pty_size: tuple[int, int] | None = None,
        fds: Mapping[int, int] | None = None,
    ) -> SandboxProcess:
        """Start a process: see ``t1_env.sandbox.base.Sandbox.spawn``."""

    @property
    def alive(self) -> bool:
        """Whether processes can be started."""


@dataclass(frozen=True, slots=True)
class Events:
    """What became readable.

    Args:
        output: The terminal has output, or was hung up.
        status: The status channel has bytes, or was closed.
        ended: The shell's process ended.
        writable: The terminal takes keystrokes (only if asked for).
    """

    output: bool = False
    status: bool = False
    ended: bool = False
    writable: bool = False


class ShellChannel:
    """A bash that was started in a sandbox, with its terminal and its command and status channels."""

    def __init__(self, process: SandboxProcess, master_fd: int, wake_fd: int, text_fd: int, status_fd: int, exports_fd: int) -> None:
        self.process = process
        self.master_fd = master_fd
        self._wake_fd = wake_fd
        self._text_fd = text_fd
        self._status_fd = status_fd
        self._exports_fd = exports_fd
        self._pid_fd = _open_pidfd(process.pid)
        self._saved_termios = b""
        self._exports = b""
        self._typed = False
        self.status_open = True
        self._output_open = True
        self._poll = select.poll()
        for fd in (master_fd, status_fd, self._pid_fd):
            if fd is not None:
                self._poll.register(fd, select.POLLIN)
        for fd in (master_fd, status_fd, wake_fd):
            os.set_blocking(fd, False)

    @classmethod
    def open(cls, sandbox: Spawner, *, rows: int, cols: int, env: Mapping[str, str], cwd: str | None) -> Self:
        """Start bash on a terminal of the given size.

        Args:
            sandbox: Where to start it.
            rows: Terminal height.
            cols: Terminal width.
            env: Variables on top of the sandbox's.
            cwd: Working directory, None for the sandbox's.

        Returns:
            The channel; bash is still reading its start-up file and reports when it is ready.

        Raises:
            SandboxError: If the sandbox cannot start it.
            ShellError: If the sandbox gave no terminal.
        """
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:

            def own(fd: int, stack: contextlib.ExitStack) -> int:
                stack.callback(os.close, fd)
                return fd

            wake_read, wake_write = os.pipe2(os.O_CLOEXEC)
            own(wake_read, theirs)
            own(wake_write, ours)
            status_read, status_write = os.pipe2(os.O_CLOEXEC)
            own(status_read, ours)
            own(status_write, theirs)
            text = own(os.memfd_create("command", os.MFD_CLOEXEC), ours)
            exports = own(os.memfd_create("exports", os.MFD_CLOEXEC), ours)
            null = own(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), theirs)
            os.pwrite(text, bash.startup_file(), 0)
            process = sandbox.spawn(
                bash.argv(),
                env=dict(env),
                cwd=cwd,
                pty_size=(rows, cols),
                fds={
                    bash.PASSED_AS[bash.FD_WAKE]: wake_read,
                    bash.PASSED_AS[bash.FD_TEXT]: text,
                    bash.PASSED_AS[bash.FD_STATUS]: status_write,
                    bash.PASSED_AS[bash.FD_EXPORTS]: exports,
                    bash.PASSED_AS[bash.FD_NULL]: null,
                },
            )
            if process.pty_fd is None:
                process.kill()
                raise ShellError("the sandbox started bash without a terminal: expected SandboxProcess.pty_fd to be its pty's master side")
            ours.pop_all()
            return cls(process, process.pty_fd, wake_write, text, status_read, exports)

    # ------------------------------------------------------------------------------------------------------------------ commands
    def send(self, payload: bytes) -> None:
        """Put a command on the text channel and wake the loop up."""
        os.lseek(self._text_fd, 0, os.SEEK_SET)  # the descriptor is shared: bash reads from where we leave it
        os.ftruncate(self._text_fd, 0)
        view, offset = memoryview(payload), 0
        while offset < len(payload):
            offset += os.pwrite(self._text_fd, view[offset:], offset)
        self._exports = self.exports()
        os.lseek(self._exports_fd, 0, os.SEEK_SET)
        os.ftruncate(self._exports_fd, 0)
        # a full pipe means a shell that no longer reads: the caller sees that no status arrives; a closed one means that it is gone
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._wake_fd, b"\0")

    def read_status(self) -> bytes:
        """Whatever the status channel holds, without waiting."""
        if not self.status_open:
            return b""
        try:
            data = os.read(self._status_fd, READ_SIZE)
        except BlockingIOError:
            return b""
        if not data:
            self.status_open = False
            self._poll.unregister(self._status_fd)
        return data

    def exports(self) -> bytes:
        """``export -p`` as the last finished command left it, as bash source."""
        size = os.fstat(self._exports_fd).st_size
        return os.pread(self._exports_fd, size, 0) or self._exports

    # ------------------------------------------------------------------------------------------------------------------ terminal
    def read_output(self) -> bytes:
        """Whatever the terminal holds, up to one block, without waiting; empty when there is nothing left.

        A read that would block first makes the kernel flush what is still on its way from the other side (``n_tty_read`` calls
        ``tty_buffer_flush_work``), so "nothing left" is exact: bytes written before a status record are there when the record is.
        """
        if not self._output_open:
            return b""
        blocks, size = [], 0
        while size < READ_SIZE:
            try:
                block = os.read(self.master_fd, READ_SIZE)
            except BlockingIOError:
                break
            except OSError:  # EIO: the other side is closed and drained
                block = b""
            if not block:
                self._output_open = False
                self._poll.unregister(self.master_fd)
                break
            blocks.append(block)
            size += len(block)
        return b"".join(blocks)

    def write_keys(self, data: bytes) -> int:
        """Type bytes; returns how many the terminal took."""
        self._typed = True
        try:
            return os.write(self.master_fd, data)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: nobody is there any more
            return len(data)

    def save_termios(self) -> None:
        """Remember the terminal's modes as the ones every command starts with, less ^S, which would stop the terminal for good."""
        attributes = termios.tcgetattr(self.master_fd)
        attributes[0] &= ~termios.IXON
        termios.tcsetattr(self.master_fd, termios.TCSANOW, attributes)
        self._saved_termios = fcntl.ioctl(self.master_fd, termios.TCGETS, bytes(_TERMIOS_SIZE))

    def restore_termios(self) -> None:
        """Put the modes back as saved: a program may have left echo off or raw mode on.

        Never with TCSADRAIN or TCSAFLUSH: from the master's side these wait for writers of the other side, who may wait for us to read.
        """
        with contextlib.suppress(OSError):  # hung up
            if fcntl.ioctl(self.master_fd, termios.TCGETS, bytes(_TERMIOS_SIZE)) != self._saved_termios:
                fcntl.ioctl(self.master_fd, termios.TCSETS, self._saved_termios)

    def discard_input(self) -> None:
        """Drop what was typed and not read yet, if anything was typed."""
        if not self._typed:
            return
        self._typed = False
        with contextlib.suppress(OSError, termios.error):  # hung up
            slave = fcntl.ioctl(self.master_fd, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                termios.tcflush(slave, termios.TCIFLUSH)
            finally:
                os.close(slave)

    def echo_off(self) -> None:
        """Do not show what is typed next."""
        with contextlib.suppress(termios.error):
            attributes = termios.tcgetattr(self.master_fd)
            attributes[3] &= ~termios.ECHO
            termios.tcsetattr(self.master_fd, termios.TCSANOW, attributes)

    def is_canonical(self) -> bool:
        """Whether the terminal collects whole lines; full-screen programs and line editors switch that off."""
        try:
            return bool(termios.tcgetattr(self.master_fd)[3] & termios.ICANON)
        except termios.error:
            return True

    def signal_foreground(self, signal_number: int) -> None:
        """SIGINT, SIGQUIT or SIGTSTP to the foreground process group, whatever modes the terminal is in."""
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.master_fd, _TIOCSIG, signal_number)

    def resize(self, rows: int, cols: int) -> None:
        """Change the size; the kernel tells the foreground program by SIGWINCH."""
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.master_fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    # ------------------------------------------------------------------------------------------------------------------ waiting
    def wait(self, timeout_s: float, *, writable: bool = False) -> Events:
        """Wait until something happens or the time is up."""
        if writable and self._output_open:
            self._poll.modify(self.master_fd, select.POLLIN | select.POLLOUT)
        ready = dict(self._poll.poll(max(0.0, timeout_s) * 1000))
        if writable and self._output_open:
            self._poll.modify(self.master_fd, select.POLLIN)
        on_master = ready.get(self.master_fd, 0)
        return Events(
            output=bool(on_master & ~select.POLLOUT),
            status=self._status_fd in ready,
            ended=self._pid_fd is not None and self._pid_fd in ready,
            writable=bool(on_master & select.POLLOUT),
        )

    @property
    def ended(self) -> bool:
        """Whether the shell's process has ended, as far as can be told without waiting."""
        return self.wait(0).ended if self._pid_fd is not None else self.process.poll() is not None

    @property
    def hung_up(self) -> bool:
        """Whether the terminal's other side is closed and everything from it was read."""
        return not self._output_open

    def exit_code(self, timeout_s: float = 0.0) -> int | None:
        """Exit status of the shell's process if it ended (waiting up to ``timeout_s`` for the news), else None."""
        if timeout_s <= 0:
            return self.process.poll()
        deadline = time.monotonic() + timeout_s
        while (code := self.process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return code

    def close(self) -> None:
        """End the shell and give the descriptors back. Idempotent."""
        with contextlib.suppress(OSError, ProcessLookupError):
            self.process.kill()
        for fd in (self.master_fd, self._wake_fd, self._text_fd, self._status_fd, self._exports_fd, self._pid_fd):
            if fd is not None and fd >= 0:
                os.close(fd)
        self.master_fd = self._wake_fd = self._text_fd = self._status_fd = self._exports_fd = -1
        self._pid_fd = None


def _open_pidfd(pid: int) -> int | None:
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # already gone, or a kernel without it: poll() and the hang-up tell
        return None
