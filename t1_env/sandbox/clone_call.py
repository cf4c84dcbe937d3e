"""One verification clone from the keeper's side: forked, listened to, ended."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from typing import Final

from t1_env.sandbox import clone, namespaces, rootfs, syscalls, wire

_READ_BYTES: Final = 1 << 16
_MAX_RESULT_BYTES: Final = wire.MAX_MESSAGE_BYTES // 4  # it travels as a JSON string, where quotes and backslashes double


def call(
    order: clone.CloneRequest,
    template: rootfs.Template,
    interpreter: clone.Interpreter,
    host: socket.socket,
    deadline: float,
    thaw: Callable[[], None],
) -> tuple[str | None, str | None]:
    """Run a clone to its end.

    Args:
        order: What it is to do.
        template: The zygote's mounts.
        interpreter: What its interpreter needs.
        host: Connection to the host process, which may go away.
        deadline: When it is killed, on the monotonic clock.
        thaw: Lets the agent's processes go on; called early if the clone is to be live, as soon as their files are copied.

    Returns:
        What the function wrote, as JSON, and None; or None and why there is nothing.

    Raises:
        Disconnected: The host process is gone.
        OSError: The clone could not be made.
    """
    read_fd, write_fd = os.pipe()
    ready_read, ready_write = os.pipe() if order.live else (None, None)
    ours = {fd for fd in (read_fd, write_fd, ready_read, ready_write) if fd is not None}
    try:
        flags = namespaces.ALL & ~syscalls.CLONE_NEWNET if order.live else namespaces.ALL
        pid = namespaces.fork_pid_1(lambda: clone.run_clone(order, template, interpreter, write_fd, ready_write), flags=flags)
        for fd in (write_fd, ready_write):
            if fd is not None:
                ours.remove(fd)
                os.close(fd)
        try:
            if ready_read is not None:
                _collect(ready_read, host, deadline)
                thaw()
            data, reason = _collect(read_fd, host, deadline)
        finally:
            status = namespaces.kill_and_reap(pid)
    finally:
        wire.close_all(list(ours))
    if reason is not None:
        return None, f"{order.entry} {reason}"
    if not data:
        return None, f"{order.entry} ended without a result ({_describe(status)})"
    return data.decode("ascii"), None


def _collect(fd: int, host: socket.socket, deadline: float) -> tuple[bytes, str | None]:
    """Read to the end of the pipe, or say why not. Raises ``Disconnected`` if the host goes away."""
    allowed_s = deadline - time.monotonic()
    size_bytes = 0
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    poller.register(host, select.POLLRDHUP)
    chunks: list[bytes] = []
    while True:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return b"", f"ran out of time ({allowed_s:.3g} s) and was killed"
        for ready, _ in poller.poll(remaining_s * 1000):
            if ready != fd:
                raise wire.Disconnected
            chunk = os.read(fd, _READ_BYTES)
            if not chunk:
                return b"".join(chunks), None
            chunks.append(chunk)
            size_bytes += len(chunk)
            if size_bytes > _MAX_RESULT_BYTES:
                return b"", f"returned more than {_MAX_RESULT_BYTES >> 20} MiB"


def _describe(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
