"""The terminal as a picture: pyte's screen, with the alternate screen added and its weak spots kept away from it.

pyte does the hard part (cursor, scrolling, erasing, wide characters). Here escape sequences are taken apart first, because pyte 0.8
raises on sequences that real programs send (``CSI > 4 ; 2 m`` by vim) and swallows output after an unterminated title. Feeding is lazy:
bytes are collected, and drawn when somebody looks.
"""

from __future__ import annotations

import array
import codecs
import copy
import re
import sys
from typing import Any, Final

import pyte

_KEPT_BYTES: Final = 32 * 1024
"""Only so much of what was printed since the last look is drawn: many screens full, at pyte's 0.2 MB/s."""

_ALTERNATE_MODES: Final = frozenset({47, 1047, 1049})
_ALTERNATE_SWITCH: Final = re.compile(rb"\x1b\[\?(?:1049|1047|47)([hl])")
_SPLIT: Final = re.compile(
    r"(\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[PX^_][^\x1b]*\x1b\\|\x1b[ -/]+[0-~]|\x1b[0-OQ-WYZ\\`-~])"
)
_UNFINISHED: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?|[PX^_][^\x1b]*\x1b?|[ -/]*)\Z")
_COLOURS: Final = re.compile(rb"\x1b\[[0-9;:]*m")
_NOT_DRAWN: Final = re.compile(r"[\x00\x0e\x0f\x1b\x7f\x9b\x9d]")

_CSI: Final[dict[str, tuple[str, int]]] = {
    "@": ("insert_characters", 1),
    "A": ("cursor_up", 1),
    "B": ("cursor_down", 1),
    "C": ("cursor_forward", 1),
    "D": ("cursor_back", 1),
    "E": ("cursor_down1", 1),
    "F": ("cursor_up1", 1),
    "G": ("cursor_to_column", 1),
    "H": ("cursor_position", 2),
    "J": ("erase_in_display", 1),
    "K": ("erase_in_line", 1),
    "L": ("insert_lines", 1),
    "M": ("delete_lines", 1),
    "P": ("delete_characters", 1),
    "X": ("erase_characters", 1),
    "`": ("cursor_to_column", 1),
    "a": ("cursor_forward", 1),
    "d": ("cursor_to_line", 1),
    "e": ("cursor_down", 1),
    "f": ("cursor_position", 2),
    "g": ("clear_tab_stop", 1),
    "r": ("set_margins", 2),
}
_ESCAPES: Final = {
    "D": "index",
    "E": "linefeed",
    "H": "set_tab_stop",
    "M": "reverse_index",
    "7": "save_cursor",
    "8": "restore_cursor",
    "c": "reset",
}
_MAX_REPEAT: Final = 1000
_MAX_SAVED: Final = 16
"""Cursors that were saved and not restored; pyte keeps them all."""


class TerminalScreen:
    """A terminal screen of a fixed size.

    Args:
        rows: Height.
        cols: Width.
    """

    def __init__(self, rows: int, cols: int) -> None:
        self._screen = pyte.Screen(cols, rows)
        self._stream = pyte.Stream(self._screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = bytearray()
        self._lost = False
        self._lost_alternate: bool | None = None
        self._held = ""
        self._last_drawn = ""
        self._picture: bytes | None = None
        self._main: dict[str, Any] | None = None  # the main screen, while the alternate one is shown

    def feed(self, data: bytes) -> None:
        """Take terminal bytes; nothing is drawn yet."""
        self._pending += data
        if len(self._pending) > 2 * _KEPT_BYTES:
            dropped = bytes(self._pending[:-_KEPT_BYTES])
            for switch in _ALTERNATE_SWITCH.finditer(dropped):
                self._lost_alternate = switch[1] == b"h"
            del self._pending[:-_KEPT_BYTES]
            self._lost = True

    def resize(self, rows: int, cols: int) -> None:
        """Change the size, as the terminal's window does."""
        self._draw_pending()
        self._screen.resize(rows, cols)
        self._picture = None

    def reset(self) -> None:
        """A blank screen: the terminal was replaced."""
        self._pending.clear()
        self._held, self._lost, self._lost_alternate, self._main = "", False, None, None
        self._decoder.reset()
        self._screen.reset()
        self._picture = None

    def codes(self) -> bytes:
        """The screen as code points.

        Returns:
            One little-endian uint32 for each cell, row by row. Blank cells and the second half of a wide character are 32 (a space).
        """
        if not self._pending and self._picture is not None:
            return self._picture
        self._draw_pending()
        lines, columns = self._screen.lines, self._screen.columns
        cells = array.array("I", [ord(" ")]) * (lines * columns)
        for y, row in self._screen.buffer.items():
            if y < lines:
                for x, cell in row.items():
                    if x < columns and cell.data:
                        cells[y * columns + x] = ord(cell.data[0])
        if sys.byteorder == "big":
            cells.byteswap()
        self._picture = cells.tobytes()
        return self._picture

    def text(self) -> str:
        """The screen as lines of text, trailing blanks removed."""
        width = 4 * self._screen.columns
        codes = self.codes()
        rows = (codes[start : start + width].decode("utf-32-le", "replace").rstrip() for start in range(0, len(codes), width))
        return "\n".join(rows).rstrip("\n")

    @property
    def cursor(self) -> tuple[int, int]:
        """(row, column) of the cursor, from 0."""
        self._draw_pending()
        return self._screen.cursor.y, min(self._screen.cursor.x, self._screen.columns - 1)

    # ----------------------------------------------------------------------------------------------------------------------- drawing
    def _draw_pending(self) -> None:
        if not self._pending:
            return
        self._picture = None
        data, self._pending = bytes(self._pending), bytearray()
        if self._lost:
            self._recover()
            data = data[data.find(b"\n") + 1 :]
        data = _COLOURS.sub(b"", data)  # not part of the picture
        if b"\x1b" not in data and not self._held and self._main is None and self._screen.margins is None:
            data = self._last_lines(data)
        text = self._held + self._decoder.decode(data)
        unfinished = _UNFINISHED.search(text, max(0, len(text) - 4096))
        self._held = text[unfinished.start() :] if unfinished else ""
        for index, piece in enumerate(_SPLIT.split(text[: len(text) - len(self._held)])):
            if index % 2:
                self._escape(piece)
            elif piece and (plain := _NOT_DRAWN.sub("", piece)):
                self._stream.feed(plain)
                self._last_drawn = plain[-1]

    def _last_lines(self, data: bytes) -> bytes:
        """Plain text that scrolls off anyway need not be drawn."""
        cut = len(data)
        for _ in range(self._screen.lines + 1):
            cut = data.rfind(b"\n", 0, cut)
            if cut < 0:
                return data
        self._screen.carriage_return()
        return data[cut:]

    def _recover(self) -> None:
        """Bytes were left out: what is on the screen no longer matters, which screen is shown does."""
        alternate = self._lost_alternate if self._lost_alternate is not None else self._main is not None
        self._lost, self._lost_alternate, self._held = False, None, ""
        self._decoder.reset()
        self._leave_alternate()
        self._screen.reset()
        if alternate:
            self._enter_alternate()

    def _escape(self, sequence: str) -> None:
        if sequence.startswith("\x1b["):
            self._csi(sequence[2:-1], sequence[-1])
        elif len(sequence) == 2 and (name := _ESCAPES.get(sequence[1])):
            getattr(self._screen, name)()
            del self._screen.savepoints[:-_MAX_SAVED]
        elif sequence == "\x1b#8":
            self._screen.alignment_display()

    def _csi(self, parameters: str, final: str) -> None:
        private = parameters[:1] in "<=>?" and parameters[:1] != ""
        digits = parameters[1:] if private else parameters
        if any(not (char.isdigit() or char in ";:") for char in digits):
            return  # an intermediate byte: nothing that moves or draws
        numbers = [min(int(part), 9999) if part.isdigit() else 0 for part in re.split("[;:]", digits)]
        if final in "hl":
            self._modes(numbers, final == "h", private=parameters[:1] == "?")
        elif private:
            return
        elif final == "b":
            self._stream.feed(self._last_drawn * min(max(1, numbers[0]), _MAX_REPEAT))
        elif final == "s":
            self._screen.save_cursor()
            del self._screen.savepoints[:-_MAX_SAVED]
        elif final == "u":
            self._screen.restore_cursor()
        elif final in "ST":
            self._scroll(max(1, numbers[0]), up=final == "S")
        elif final in _CSI:
            if final in "JK" and numbers[0] > (3 if final == "J" else 2):
                return  # pyte trips over kinds of erasing that do not exist
            name, max_arguments = _CSI[final]
            getattr(self._screen, name)(*numbers[:max_arguments])

    def _scroll(self, count: int, *, up: bool) -> None:
        x, y = self._screen.cursor.x, self._screen.cursor.y
        top = self._screen.margins.top if self._screen.margins else 0
        self._screen.cursor.y = top
        (self._screen.delete_lines if up else self._screen.insert_lines)(count)
        self._screen.cursor.x, self._screen.cursor.y = x, y

    def _modes(self, modes: list[int], on: bool, *, private: bool) -> None:
        if private and _ALTERNATE_MODES & set(modes):
            (self._enter_alternate if on else self._leave_alternate)()
            modes = [mode for mode in modes if mode not in _ALTERNATE_MODES]
        if private and 3 in modes:  # 132 columns: a terminal of fixed size does not obey
            modes = [mode for mode in modes if mode != 3]
        if modes:
            (self._screen.set_mode if on else self._screen.reset_mode)(*modes, private=private)

    def _enter_alternate(self) -> None:
        if self._main is not None:
            return
        screen = self._screen
        self._main = {
            "buffer": {y: dict(row) for y, row in screen.buffer.items()},
            "cursor": copy.copy(screen.cursor),
            "savepoints": list(screen.savepoints),
            "margins": screen.margins,
        }
        screen.erase_in_display(2)

    def _leave_alternate(self) -> None:
        if self._main is None:
            return
        main, self._main = self._main, None
        screen = self._screen
        screen.buffer.clear()
        for y, row in main["buffer"].items():
            screen.buffer[y].update(row)
        screen.cursor, screen.savepoints, screen.margins = main["cursor"], main["savepoints"], main["margins"]
        screen.ensure_hbounds()
        screen.ensure_vbounds()
