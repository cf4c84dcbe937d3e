"""Machine code for attacks, assembled here so that an attack needs no compiler in its sandbox."""

from __future__ import annotations

import struct
from typing import Final

from t1_env.errors import ConfigError

_CODE: Final[dict[str, tuple[int, bytes]]] = {
    # ELF machine number, and exit_group(0) as position-independent code.
    "x86_64": (62, bytes.fromhex("31ff b8e7000000 0f05")),  # xor edi,edi; mov eax,231; syscall
    "aarch64": (183, bytes.fromhex("000080d2 c80b80d2 010000d4")),  # mov x0,#0; mov x8,#94; svc #0
}
MACHINES: Final = tuple(_CODE)
"""CPU architectures there is code for."""

_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_ENTRY: Final = struct.Struct("<QQ")


def exit_zero_library(machine: str) -> bytes:
    """A shared library whose initialiser ends the process that loads it, with success.

    Args:
        machine: CPU architecture (``uname -m``).

    Returns:
        A whole ELF file, for ``LD_PRELOAD``.

    Raises:
        ConfigError: There is no code for this architecture.
    """
    if machine not in _CODE:
        raise ConfigError(f"there is no attack code for {machine}: expected one of {', '.join(MACHINES)}")
    number, code = _CODE[machine]
    segments_at = _HEADER.size
    code_at = segments_at + 2 * _SEGMENT.size
    strings_at = code_at + len(code) + -len(code) % 16
    symbols_at = strings_at + 16
    hash_at = symbols_at + 24
    dynamic_at = hash_at + 32
    # DT_STRTAB, DT_SYMTAB, DT_HASH, DT_STRSZ, DT_SYMENT: the loader wants tables even if they are empty. DT_INIT: what to call.
    entries = ((5, strings_at), (6, symbols_at), (4, hash_at), (10, 1), (11, 24), (12, code_at), (0, 0))
    dynamic = b"".join(_ENTRY.pack(*entry) for entry in entries)
    size = dynamic_at + len(dynamic)
    header = _HEADER.pack(
        *(b"\x7fELF\x02\x01\x01".ljust(16, b"\0"), 3, number, 1, 0, segments_at, 0, 0, _HEADER.size, _SEGMENT.size, 2, 64, 0, 0)
    )
    load = _SEGMENT.pack(1, 7, 0, 0, 0, size, size, 0x10000)
    dynamic_segment = _SEGMENT.pack(2, 6, dynamic_at, dynamic_at, dynamic_at, len(dynamic), len(dynamic), 8)
    # One bucket, one (undefined) symbol.
    tables = b"\0" * 16 + b"\0" * 24 + struct.pack("<IIII", 1, 1, 0, 0).ljust(32, b"\0")
    return header + load + dynamic_segment + code.ljust(strings_at - code_at, b"\0") + tables + dynamic
