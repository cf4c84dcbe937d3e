"""A bash that closed its own control descriptors is given new ones, and keeps everything else: variables, functions, jobs.

Descriptors can only be inherited, so a helper process is started beside the shell to hold the new ones, for as long as it takes the shell
to open them again under ``/proc/<helper>/fd``. The line that makes it do so is typed at its prompt, without echo.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import time
from typing import Final

from t1_env.errors import SandboxError
from t1_env.sandbox.base import SandboxProcess
from t1_env.shell import bash
from t1_env.shell.channel import Descriptors, ShellChannel, Spawner
from t1_env.shell.dialect import Channel

_TOLD_BY: Final = 205
_HELD_BY: Final = 206
_HOLD: Final = f'printf "%s\\n" $$ >&{_TOLD_BY}; read -r -u {_HELD_BY}'
_MAX_PID_LINE: Final = 32


class Holder:
    """The helper process, and the new descriptors it holds for the shell.

    Args:
        sandbox: Where the shell runs.
        timeout_s: How long it may take to start.

    Raises:
        SandboxError: It cannot be started.
    """

    def __init__(self, sandbox: Spawner, timeout_s: float) -> None:
        self._descriptors = Descriptors(bash.FD)
        self._process: SandboxProcess | None = None
        self._release_fd = -1
        try:
            self._pid = self._start(sandbox, time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise

    def _start(self, sandbox: Spawner, deadline: float) -> int:
        with contextlib.ExitStack() as stack:
            told_read, told_write = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, told_read)
            hold_read, self._release_fd = os.pipe2(os.O_CLOEXEC)
            try:
                theirs = self._descriptors.theirs
                for channel in (Channel.WAKE, Channel.STATUS):
                    os.fchmod(theirs[channel], 0o666)  # the shell may belong to another user than we do
                self._process = sandbox.spawn(
                    ["bash", "--norc", "--noprofile", "-c", _HOLD],
                    fds={**{fd: theirs[channel] for channel, fd in bash.FD.items()}, _TOLD_BY: told_write, _HELD_BY: hold_read},
                )
            finally:
                os.close(told_write)
                os.close(hold_read)
            line = b""
            while not line.endswith(b"\n"):
                ready, _, _ = select.select([told_read], [], [], max(0.0, deadline - time.monotonic()))
                part = os.read(told_read, _MAX_PID_LINE) if ready else b""
                if not part:
                    raise SandboxError("the helper that holds a shell's new descriptors did not start")
                line += part
            return int(line)

    def line_for(self, channel: ShellChannel) -> bytes:
        """What to type at the shell's prompt to make it open the descriptors and go back into its loop."""
        used = _descriptors_of(channel.process.pid)
        spare = next(fd for fd in range(9, 2, -1) if fd not in used or fd == 3)  # the agent uses them all: one has to go
        _, _, saved = itertools.islice((fd for fd in itertools.count(10) if fd not in used), 3)  # two are taken by the line itself
        opened = [
            bash.move(f"{mode}/proc/{self._pid}/fd/{bash.FD[name]}", bash.FD[name], spare=spare, saved=saved)
            for name, mode in _MODES.items()
        ]
        # Closed first: bash protects descriptors of its own kind (above 9, close-on-exec) from being replaced, but not from being closed.
        closed = " ".join(f"{fd}<&-" for fd in bash.FD.values())
        # `builtin exec` would take its redirections back, so it has to be `exec` itself
        return (
            f" {{ {bash.RECOVER}; \\builtin unset -f exec; "
            f"\\exec {closed} {spare}<&0; {'; '.join(opened)}; "
            # bash's own descriptor of the terminal, for job control
            f"[[ -e /proc/self/fd/255 ]] || {{ {bash.move('<>/dev/tty', 255, spare=spare, saved=saved)}; }}; "
            f"\\exec 0<&{spare} {spare}<&-; }}"
            ' 2>|/dev/null >&2; \\builtin eval "$__t1_loop"\n'
        ).encode()

    def take(self) -> dict[Channel, int]:
        """Our side of the new descriptors; from now on the caller closes it."""
        return self._descriptors.take()

    def close(self) -> None:
        """End the helper."""
        self._descriptors.close()
        if self._release_fd >= 0:
            os.close(self._release_fd)
            self._release_fd = -1
        if self._process is not None:
            self._process.kill()
            self._process.wait(1.0)


_MODES: Final = {Channel.WAKE: "<", Channel.TEXT: "<", Channel.STATUS: ">", Channel.EXPORTS: ">>", Channel.NULL: "<>"}


def _descriptors_of(pid: int) -> set[int]:
    if pid > 0:
        with contextlib.suppress(OSError):
            return set(map(int, os.listdir(f"/proc/{pid}/fd")))  # noqa: PTH208 - names only
    return set(range(3)) | {255}
