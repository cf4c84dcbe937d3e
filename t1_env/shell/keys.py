"""Keystrokes by name, in tmux notation, as the bytes a terminal sends for them."""

from __future__ import annotations

import re
from typing import Final

_NAMED: Final[dict[str, bytes]] = {
    "Enter": b"\r",
    "Tab": b"\t",
    "BTab": b"\x1b[Z",
    "Escape": b"\x1b",
    "Space": b" ",
    "BSpace": b"\x7f",
    "Insert": b"\x1b[2~",
    "IC": b"\x1b[2~",
    "Delete": b"\x1b[3~",
    "DC": b"\x1b[3~",
    "PageUp": b"\x1b[5~",
    "PgUp": b"\x1b[5~",
    "PPage": b"\x1b[5~",
    "PageDown": b"\x1b[6~",
    "PgDn": b"\x1b[6~",
    "NPage": b"\x1b[6~",
    "F1": b"\x1bOP",
    "F2": b"\x1bOQ",
    "F3": b"\x1bOR",
    "F4": b"\x1bOS",
    **{f"F{n}": f"\x1b[{code}~".encode() for n, code in zip(range(5, 13), (15, 17, 18, 19, 20, 21, 23, 24), strict=True)},
}
_CURSOR: Final = {"Up": b"A", "Down": b"B", "Right": b"C", "Left": b"D", "Home": b"H", "End": b"F"}
_MODIFIED: Final = re.compile(r"(?P<modifiers>(?:[CMS]-)+)(?P<key>.+)", re.DOTALL)


def encode_keys(text: str, *, application_cursor: bool = False) -> bytes:
    r"""The bytes to type for an agent's ``Keys``.

    A whole string that is a key name (``Enter``, ``Escape``, ``Up``, ``F1``, ``C-c``, ``M-x``, ``C-Up`` ...) is that key; anything else
    is literal text, with ``\n`` typed as it is.

    Args:
        text: Key name or text.
        application_cursor: Whether the program switched cursor keys to application mode.

    Returns:
        What to write to the terminal.
    """
    key = _encode_key(text, application_cursor)
    return key if key is not None else text.encode("utf-8", "replace")


def _encode_key(name: str, application_cursor: bool) -> bytes | None:
    if name in _NAMED:
        return _NAMED[name]
    if name in _CURSOR:
        return (b"\x1bO" if application_cursor else b"\x1b[") + _CURSOR[name]
    match = _MODIFIED.fullmatch(name)
    if match is None:
        return None
    modifiers, key = set(match["modifiers"].replace("-", "")), match["key"]
    if key in _CURSOR:
        code = 1 + ("S" in modifiers) + 2 * ("M" in modifiers) + 4 * ("C" in modifiers)
        return f"\x1b[1;{code}".encode() + _CURSOR[key]
    if key in _NAMED:
        base = _NAMED[key]
        if "C" in modifiers and key == "Space":
            base = b"\0"
    elif len(key) == 1:
        plain = key.upper() if "S" in modifiers else key
        control = _control(key) if "C" in modifiers else plain.encode("utf-8", "replace")
        if control is None:
            return None
        base = control
    else:
        return None
    return b"\x1b" + base if "M" in modifiers else base


def _control(key: str) -> bytes | None:
    if key == "?":
        return b"\x7f"
    code = ord(key.upper())
    return bytes([code & 0x1F]) if 0x40 <= code <= 0x5F else None
