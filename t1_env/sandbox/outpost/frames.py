"""How requests and answers are cut out of a stream of bytes.

A frame is two 4-byte big-endian lengths, that many bytes of JSON (the header) and that many bytes as they are (the blob). Either side's
stream begins with ``MAGIC``, so that what a login script printed before it is skipped, and can be shown if it never comes.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final, TypeAlias

from t1_env.errors import TransportLost

Header: TypeAlias = dict[str, Any]
Frame: TypeAlias = tuple[Header, bytes]

PROTOCOL: Final = 1
"""Number of the conversation's rules; both sides must speak the same."""
MAGIC: Final = b"\0T1-outpost-1\n"
MAX_HEADER_BYTES: Final = 128 << 20
"""A verification's payload or result may be this large; everything else is far smaller."""
MAX_BLOB_BYTES: Final = 16 << 20
MAX_PREFACE_BYTES: Final = 1 << 16

_LENGTHS: Final = struct.Struct("!II")


def pack(header: Header, blob: bytes = b"") -> bytes:
    """Return the bytes of one frame.

    Args:
        header: JSON-compatible mapping.
        blob: Bytes that travel beside it.

    Raises:
        ValueError: One of the two is over its limit.
    """
    body = json.dumps(header, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_HEADER_BYTES or len(blob) > MAX_BLOB_BYTES:
        raise ValueError(
            f"a message of {len(body)} + {len(blob)} bytes is over the limit of {MAX_HEADER_BYTES} bytes of JSON + {MAX_BLOB_BYTES} bytes"
        )
    return _LENGTHS.pack(len(body), len(blob)) + body + blob


class FrameReader:
    """Cuts received bytes into frames. Not thread-safe: one thread receives."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether the other side's ``MAGIC`` was seen."""
        return self._begun

    @property
    def preface(self) -> bytes:
        """What came instead of ``MAGIC`` so far."""
        return b"" if self._begun else bytes(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """Take received bytes, return the frames they complete.

        Raises:
            TransportLost: These are not the bytes of an outpost; nothing after them can be understood.
        """
        self._buffer += data
        if not self._begun and not self._begin():
            return []
        found: list[Frame] = []
        offset = 0
        while len(self._buffer) - offset >= _LENGTHS.size:
            header_size, blob_size = _LENGTHS.unpack_from(self._buffer, offset)
            if header_size > MAX_HEADER_BYTES or blob_size > MAX_BLOB_BYTES:
                raise TransportLost(f"the other side sent what is not a message (lengths {header_size} and {blob_size} bytes)")
            start = offset + _LENGTHS.size
            end = start + header_size + blob_size
            if len(self._buffer) < end:
                break
            found.append((_parse(bytes(self._buffer[start : start + header_size])), bytes(self._buffer[start + header_size : end])))
            offset = end
        if offset:
            del self._buffer[:offset]
        return found

    def _begin(self) -> bool:
        before, magic, after = bytes(self._buffer).partition(MAGIC)
        if not magic:
            if len(before) > MAX_PREFACE_BYTES:
                raise TransportLost(f"no outpost answers there: {len(before)} bytes of something else came first: {before[:200]!r}")
            return False
        self._buffer = bytearray(after)
        self._begun = True
        return True


def _parse(body: bytes) -> Header:
    try:
        header = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise TransportLost(f"the other side sent what is not a message: {error}") from None
    if not isinstance(header, dict):
        raise TransportLost(f"the other side sent what is not a message: expected a JSON object, got {type(header).__name__}")
    return header
