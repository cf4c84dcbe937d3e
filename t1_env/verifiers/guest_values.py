"""Values as they travel between a test and a module of the agent's that is kept in a process of its own.

Plain values travel as copies, in JSON, so that reading them can run no code. Whatever else there is stays where it was made and travels as
a handle. An instance of a class derived from a plain type travels as both: its data and a handle to the rest of it.
"""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import fractions
import json
import pathlib
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

MAX_MESSAGE_BYTES: Final = 1 << 26
MAX_DEPTH: Final = 60
DERIVED_FROM: Final = (bool, int, float, str, bytes, tuple, list, dict, set, frozenset)

_HEADER: Final = struct.Struct("=Q")
_ATOMS: Final = (bool, float, str, type(None))
_SEQUENCES: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "tuple": tuple,
    "list": list,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
_MAPPINGS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda pairs: collections.Counter(dict(pairs)),
    "defaultdict": lambda pairs: collections.defaultdict(None, pairs),
}
# Types of the library that are values by nature: how to write one down, and how to read it.
_TEXTS: Final[dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]]] = {
    pathlib.PosixPath: (str, pathlib.PosixPath),
    pathlib.PurePosixPath: (str, pathlib.PurePosixPath),
    decimal.Decimal: (str, decimal.Decimal),
    fractions.Fraction: (str, fractions.Fraction),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
}
_READERS: Final = {kind.__name__: read for kind, (_, read) in _TEXTS.items()}
_CONTAINERS: Final[dict[Any, str]] = {
    **dict.fromkeys((tuple, list, set, frozenset, collections.deque), "items"),
    **dict.fromkeys((dict, collections.OrderedDict, collections.Counter, collections.defaultdict), "pairs"),
}


def encode(value: Any, other: Callable[[Any], Any], depth: int = 0) -> Any:
    """Write a value down.

    Args:
        value: The value.
        other: Writes down what is not plain.
        depth: How deep in another one it lies.

    Raises:
        ValueError: It is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"a value nested more than {MAX_DEPTH} deep cannot be handed over")
    kind: Any = type(value)
    if kind in _ATOMS:
        return value
    if kind is int:
        return {"int": hex(value)}
    if kind in (bytes, bytearray):
        return {kind.__name__: base64.b64encode(value).decode("ascii")}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    how = _CONTAINERS.get(kind)
    if how == "items":
        return {kind.__name__: [encode(item, other, depth + 1) for item in value]}
    if how == "pairs":
        return {kind.__name__: [[encode(key, other, depth + 1), encode(item, other, depth + 1)] for key, item in value.items()]}
    if kind in _TEXTS:
        return {kind.__name__: _TEXTS[kind][0](value)}
    return other(value)


def decode(data: Any, other: Callable[[str, Any], Any]) -> Any:
    """Read a value.

    Args:
        data: From `encode`.
        other: Reads what is not plain: given its tag and what was written.

    Raises:
        ValueError: It is no such thing.
    """
    if isinstance(data, _ATOMS):
        return data
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("not a value")
    ((tag, inner),) = data.items()
    if tag == "int":
        return int(inner, 16)
    if tag in ("bytes", "bytearray"):
        read = base64.b64decode(inner)
        return read if tag == "bytes" else bytearray(read)
    if tag == "complex":
        return complex(float(inner[0]), float(inner[1]))
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([decode(item, other) for item in inner])
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]([(decode(key, other), decode(item, other)) for key, item in inner])
    if tag in _READERS:
        return _READERS[tag](inner)
    return other(tag, inner)


def send(connection: socket.socket, message: Any) -> None:
    """Send a message."""
    data = json.dumps(message).encode("ascii")
    connection.sendall(_HEADER.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Receive a message.

    Raises:
        EOFError: The other side is gone.
        ValueError: What came is no message, or too large.
    """
    (size,) = _HEADER.unpack(_exactly(connection, _HEADER.size))
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes; at most {MAX_MESSAGE_BYTES} can be handed over")
    try:
        return json.loads(_exactly(connection, size))
    except RecursionError as error:
        raise ValueError("a message that is nested too deeply") from error


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(1 << 20, size - len(data)))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
