"""Messages between the host process and the sandbox's own processes.

A message is a 4-byte big-endian length and that many bytes of JSON, on a Unix stream socket; open descriptors travel beside it
(``SCM_RIGHTS``). Both ends are T1's own processes, so there is no version negotiation; sizes are bounded all the same.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from t1_env.sandbox.syscalls import unpack_descriptors

Message: TypeAlias = dict[str, Any]

MAX_MESSAGE_BYTES: Final = 256 << 20
MAX_DESCRIPTORS: Final = 64

_HEADER: Final = struct.Struct("!I")


class Disconnected(Exception):
    """The other end of the socket is gone."""


def send(sock: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message.

    Args:
        sock: Connected Unix stream socket.
        message: JSON-compatible mapping.
        fds: Descriptors to hand over; the caller keeps (and closes) its own copies.

    Raises:
        Disconnected: The peer is gone.
        ValueError: The message is larger than ``MAX_MESSAGE_BYTES``.
    """
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES} bytes")
    data = memoryview(_HEADER.pack(len(body)) + body)
    try:
        sent = 0
        if fds:
            rights = array.array("i", fds)
            sent = sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        sock.sendall(data[sent:])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Disconnected from error


def receive(sock: socket.socket) -> tuple[Message, list[int]]:
    """Receive one message and the descriptors that came with it (close-on-exec, owned by the caller).

    Raises:
        Disconnected: The peer is gone, before or in the middle of the message.
        TimeoutError: The socket has a timeout and it ran out.
    """
    fds: list[int] = []
    try:
        header = _read(sock, _HEADER.size, fds)
        (size,) = _HEADER.unpack(header)
        if size > MAX_MESSAGE_BYTES:
            raise Disconnected
        message: Message = json.loads(_read(sock, size, fds))
    except BaseException:
        close_all(fds)
        raise
    return message, fds


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that nobody took over."""
    for fd in fds:
        os.close(fd)


def _read(sock: socket.socket, size: int, fds: list[int]) -> bytes:
    buffer = bytearray(size)
    view = memoryview(buffer)
    room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    filled = 0
    while filled < size:
        try:
            count, ancillary, _, _ = sock.recvmsg_into([view[filled:]], room, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError as error:
            raise Disconnected from error
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds += unpack_descriptors(data)
        if count == 0:
            raise Disconnected
        filled += count
    return bytes(buffer)
