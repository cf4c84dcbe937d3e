"""Programs and libraries of a runtime, made independent of the system they will run on.

They find each other in the runtime's own directory and look nowhere else: what an agent plants in ``/etc/ld.so.preload``, in the linker's
cache, in the system's library directories or where this host's interpreter happens to be installed is never loaded into a verifier.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from t1_env.errors import SandboxUnavailable

_MAGIC_64: Final = b"\x7fELF\x02"
_LITTLE_ENDIAN: Final = 1
_PT_DYNAMIC: Final = 2
_PT_INTERP: Final = 3
_DT_NULL: Final = 0
_SEARCH_PATHS: Final = frozenset({15, 29})  # DT_RPATH, DT_RUNPATH
_DT_UNKNOWN: Final = 0x6000000D  # in the range for operating systems, and used by none: loaders ignore it
_PRELOAD: Final = b"/etc/ld.so.preload\0"
_CACHE: Final = b"\0/etc/ld.so.cache\0"
_SYSTEM_DIRECTORY: Final = re.compile(rb"/(?:usr/|usr/local/)?(?:lib|libx?(?:32|64))/(?:[A-Za-z0-9_.-]+/)?(?=\0)")
_NOWHERE: Final = b"/dev"  # which every container and every sandbox gets afresh, so that nothing an agent wrote is there


def is_elf(data: bytes) -> bool:
    """Whether these are the first bytes of a 64-bit ELF file."""
    return data[:5] == _MAGIC_64


def loader_of(binary: Path) -> Path:
    """Return the loader that a program names.

    Raises:
        SandboxUnavailable: It is not a 64-bit ELF program with a loader that is there.
    """
    data = binary.read_bytes()
    if not is_elf(data):
        raise SandboxUnavailable(f"a complete runtime needs a 64-bit ELF interpreter, {binary} is not one")
    for kind, offset, size in _segments(data):
        if kind == _PT_INTERP:
            loader = Path(os.fsdecode(data[offset : offset + size].rstrip(b"\0")))
            if not loader.is_file():
                raise SandboxUnavailable(f"a complete runtime needs the loader {loader} that {binary} names, and it is not there")
            return loader.resolve()
    raise SandboxUnavailable(f"a complete runtime needs an interpreter with a loader, and {binary} is linked statically")


def without_search_paths(data: bytes) -> bytes:
    """Return a program or library that names no directories of its own to find libraries in."""
    changed = bytearray(data)
    entry = struct.Struct(f"{_byte_order(data)}qQ")
    for kind, offset, size in _segments(data):
        if kind == _PT_DYNAMIC:
            for position in range(offset, offset + size, entry.size):
                tag, value = entry.unpack_from(data, position)
                if tag == _DT_NULL:
                    break
                if tag in _SEARCH_PATHS:
                    entry.pack_into(changed, position, _DT_UNKNOWN, value)
    return bytes(changed)


def isolated_loader(data: bytes, name: str) -> bytes:
    """Return a loader that reads none of the system's files and looks into none of the system's directories.

    Args:
        data: The loader.
        name: Its path, for messages.

    Raises:
        SandboxUnavailable: It is of an unknown kind.
    """
    if b"musl" in data and _PRELOAD not in data:
        return data  # reads no such files; its directories are named in a file beside it, which is not part of the runtime
    if data.count(_PRELOAD) != 1 or not _SYSTEM_DIRECTORY.search(data):
        raise SandboxUnavailable(f"a complete runtime cannot be made with the loader {name}: it is neither glibc's nor musl's")
    changed = data.replace(_PRELOAD, _PRELOAD.replace(b"/etc", _NOWHERE)).replace(_CACHE, _CACHE.replace(b"/etc", _NOWHERE))
    return _SYSTEM_DIRECTORY.sub(lambda match: _NOWHERE.ljust(len(match[0]), b"/"), changed)


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(type, offset in the file, size in the file) of every program header."""
    order = _byte_order(data)
    (table,) = struct.unpack_from(f"{order}Q", data, 32)
    entry_size, count = struct.unpack_from(f"{order}HH", data, 54)
    for index in range(count):
        kind, _, offset, _, _, size = struct.unpack_from(f"{order}IIQQQQ", data, table + index * entry_size)
        yield kind, offset, size


def _byte_order(data: bytes) -> str:
    return "<" if data[5] == _LITTLE_ENDIAN else ">"
