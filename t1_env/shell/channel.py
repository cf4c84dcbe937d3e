"""The channels to a running shell: its terminal, and the plain descriptors beside it.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, Self

from t1_env.errors import ShellError
from t1_env.sandbox.base import SandboxProcess
from t1_env.shell.dialect import Channel, Dialect

READ_SIZE: Final = 1 << 16
_TIOCSIG: Final = 0x40045436
_TIOCGPTPEER: Final = 0x5441
_TERMIOS_SIZE: Final = 256  # larger than any kernel's struct termios
_LOCAL_MODES: Final = struct.Struct("=I")
_LOCAL_MODES_OFFSET: Final = 12  # after the modes of input, output and line


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


class Descriptors:
    """Both sides of the channels beside the terminal, as they are made for one shell.

    Attributes:
        theirs: The shell's side, to be given to it.
    """

    def __init__(self, channels: Iterable[Channel]) -> None:
        self.theirs: dict[Channel, int] = {}
        self._ours: dict[Channel, int] = {}
        for channel in channels:
            try:
                self._make(channel)
            except OSError:
                self.close()
                raise

    def _make(self, channel: Channel) -> None:
        match channel:
            case Channel.WAKE:
                self.theirs[channel], self._ours[channel] = os.pipe2(os.O_CLOEXEC)
            case Channel.STATUS:
                self._ours[channel], self.theirs[channel] = os.pipe2(os.O_CLOEXEC)
            case Channel.NULL:
                self.theirs[channel] = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            case Channel.TEXT | Channel.EXPORTS:
                self.theirs[channel] = os.memfd_create(channel.value, os.MFD_CLOEXEC)
                self._ours[channel] = os.dup(self.theirs[channel])
                if channel is Channel.EXPORTS:  # emptied between commands, whatever offset the shell's side has
                    fcntl.fcntl(self._ours[channel], fcntl.F_SETFL, os.O_APPEND)

    def take(self) -> dict[Channel, int]:
        """Our side; from now on the caller closes it. The shell's side is closed."""
        ours, self._ours = self._ours, {}
        for channel in (Channel.WAKE, Channel.STATUS):
            os.set_blocking(ours[channel], False)
        self.close()
        return ours

    def close(self) -> None:
        """Close what was not taken."""
        for fd in [*self.theirs.values(), *self._ours.values()]:
            os.close(fd)
        self.theirs, self._ours = {}, {}


class ShellChannel:
    """A shell that was started in a sandbox, with its terminal and the channels beside it."""

    def __init__(self, process: SandboxProcess, master_fd: int, ours: dict[Channel, int], dialect: Dialect) -> None:
        self.process = process
        self.master_fd = master_fd
        self.dialect = dialect
        self._fds = ours
        self._retired: list[int] = []
        self._pid_fd = _open_pidfd(process.pid)
        self._saved_termios = self._quiet_termios = b""
        self._text_offset = 0
        self._exports = b""
        self._typed = False
        self.status_open = True
        self._output_open = True
        self._poll = select.poll()
        for fd in (master_fd, ours[Channel.STATUS], self._pid_fd):
            if fd is not None:
                self._poll.register(fd, select.POLLIN)
        os.set_blocking(master_fd, False)

    @classmethod
    def open(cls, sandbox: Spawner, dialect: Dialect, *, rows: int, cols: int, env: Mapping[str, str], cwd: str | None) -> Self:
        """Start a shell on a terminal of the given size.

        Args:
            sandbox: Where to start it.
            dialect: Which one.
            rows: Terminal height.
            cols: Terminal width.
            env: Variables on top of the sandbox's.
            cwd: Working directory, None for the sandbox's.

        Returns:
            The channel; the shell is still reading its start-up file and reports when it is ready.

        Raises:
            SandboxError: If the sandbox cannot start it.
            ShellError: If the sandbox gave no terminal.
        """
        descriptors = Descriptors(dialect.passed)
        try:
            os.pwrite(descriptors.theirs[Channel.TEXT], dialect.startup_file(), 0)
            process = sandbox.spawn(
                dialect.argv,
                env={**env, **dialect.env},
                cwd=cwd,
                pty_size=(rows, cols),
                fds={number: descriptors.theirs[channel] for channel, number in dialect.passed.items()},
            )
            if process.pty_fd is None:
                process.kill()
                raise ShellError(
                    f"the sandbox started {dialect.name} without a terminal: expected SandboxProcess.pty_fd to be its pty's master side"
                )
            channel = cls(process, process.pty_fd, descriptors.take(), dialect)
        finally:
            descriptors.close()
        channel.save_termios()
        if dialect.start_line:
            channel.restore_termios(echo=False)
            channel.write_keys(dialect.start_line)
        return channel

    def replace(self, ours: dict[Channel, int]) -> None:
        """Go on over other channels, which the shell is given.

        The old ones stay open until ``retire``: a shell that still writes to one would die of a pipe that nobody reads.
        """
        self._exports = self.exports()
        if self.status_open:
            self._poll.unregister(self._fds[Channel.STATUS])
        self._retired += self._fds.values()
        self._fds = ours
        self._text_offset = 0
        self.status_open = True
        self._poll.register(ours[Channel.STATUS], select.POLLIN)

    def retire(self) -> None:
        """Close channels that were replaced."""
        while self._retired:
            os.close(self._retired.pop())

    # ------------------------------------------------------------------------------------------------------------------ commands
    def send(self, payload: bytes) -> None:
        """Put a command on the text channel and wake the loop up."""
        text_fd = self._fds[Channel.TEXT]
        os.ftruncate(text_fd, 0)
        # The shell reads on from where it stopped, also if its descriptor is not a copy of ours; what lies before is a hole.
        os.lseek(text_fd, self._text_offset, os.SEEK_SET)
        view, written = memoryview(payload), 0
        while written < len(payload):
            written += os.pwrite(text_fd, view[written:], self._text_offset + written)
        if not self.dialect.rereads_text:
            self._text_offset += len(payload)
        self._exports = self.exports()
        if Channel.EXPORTS in self._fds:
            os.ftruncate(self._fds[Channel.EXPORTS], 0)
        self.wake()

    def wake(self) -> None:
        """Make the loop read the text channel."""
        # a full pipe means a shell that no longer reads: the caller sees that no status arrives; a closed one means that it is gone
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._fds[Channel.WAKE], self.dialect.wake_byte)

    def read_status(self) -> bytes:
        """Whatever the status channel holds, without waiting."""
        if not self.status_open:
            return b""
        try:
            data = os.read(self._fds[Channel.STATUS], READ_SIZE)
        except BlockingIOError:
            return b""
        if not data:
            self.status_open = False
            self._poll.unregister(self._fds[Channel.STATUS])
        return data

    def exports(self) -> bytes:
        """The exported variables as the last finished command left them, as shell source."""
        fd = self._fds.get(Channel.EXPORTS)
        return (os.pread(fd, os.fstat(fd).st_size, 0) if fd is not None else b"") or self._exports

    def note_exports(self, source: bytes) -> None:
        """Remember exported variables that came with a record."""
        self._exports = source

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
        local_modes = _LOCAL_MODES.unpack_from(self._saved_termios, _LOCAL_MODES_OFFSET)[0] & ~termios.ECHO
        quiet = bytearray(self._saved_termios)
        _LOCAL_MODES.pack_into(quiet, _LOCAL_MODES_OFFSET, local_modes)
        self._quiet_termios = bytes(quiet)

    def restore_termios(self, *, echo: bool = True) -> None:
        """Put the modes back as saved: a program may have left echo off or raw mode on.

        Never with TCSADRAIN or TCSAFLUSH: from the master's side these wait for writers of the other side, who may wait for us to read.

        Args:
            echo: Whether to show what is typed next. Never switched on and off again in a moment: the kernel takes what was typed, and
                shows it, some time after it was written.
        """
        wanted = self._saved_termios if echo else self._quiet_termios
        with contextlib.suppress(OSError):  # hung up
            if fcntl.ioctl(self.master_fd, termios.TCGETS, bytes(_TERMIOS_SIZE)) != wanted:
                fcntl.ioctl(self.master_fd, termios.TCSETS, wanted)

    def discard_input(self) -> None:
        """Drop what was typed and not read yet, if anything was typed.

        What was written may still be on its way: looking for input that is not there makes the kernel deliver it (``n_tty_poll`` calls
        ``tty_buffer_flush_work``), and only what was delivered can be dropped. Echo must be as it was when it was typed.
        """
        if not self._typed:
            return
        self._typed = False
        with contextlib.suppress(OSError, termios.error):  # hung up
            slave = fcntl.ioctl(self.master_fd, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                termios.tcflush(slave, termios.TCIFLUSH)
                peer = select.poll()
                peer.register(slave, select.POLLIN)
                peer.poll(0)
                termios.tcflush(slave, termios.TCIFLUSH)
            finally:
                os.close(slave)

    def is_canonical(self) -> bool:
        """Whether the terminal collects whole lines; full-screen programs and line editors switch that off."""
        return bool(self._local_modes() & termios.ICANON)

    def is_cooked(self) -> bool:
        """Whether the terminal collects whole lines and shows what is typed, as most programs leave it."""
        return self._local_modes() & (termios.ICANON | termios.ECHO) == termios.ICANON | termios.ECHO

    def _local_modes(self) -> int:
        try:
            return int(termios.tcgetattr(self.master_fd)[3])
        except termios.error:
            return termios.ICANON | termios.ECHO

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
            status=self._fds[Channel.STATUS] in ready,
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
        self.retire()
        for fd in (self.master_fd, self._pid_fd, *self._fds.values()):
            if fd is not None and fd >= 0:
                os.close(fd)
        self.master_fd, self._pid_fd, self._fds = -1, None, {}


def _open_pidfd(pid: int) -> int | None:
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # already gone, or a kernel without it: poll() and the hang-up tell
        return None
