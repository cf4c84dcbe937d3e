"""From the bytes of a terminal to the text an agent reads: as the eye sees it, in bounded memory, at a cost of O(new bytes).

``TextFilter`` drops escape sequences and control characters, lets carriage returns and backspaces overwrite (a progress bar becomes its
last state) and leaves out what is drawn on the alternate screen. ``HeadTail`` keeps the two ends of a long text and counts the rest.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

_MAX_LINE: Final = 8192
"""A line longer than this is passed on in pieces; a carriage return then only reaches back to the last piece."""
_MAX_SEQUENCE: Final = 4096

_ESCAPE: Final = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC, e.g. a window title
    r"|[PX^_][^\x1b]*\x1b\\"  # DCS, SOS, PM, APC
    r"|[ -/]+[0-~]"  # character sets
    r"|[0-OQ-WYZ\\`-~]"  # everything of two bytes
    r")"
)
_ESCAPE_BEGUN: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?|[PX^_][^\x1b]*\x1b?|[ -/]*)\Z")
_ALTERNATE_ON: Final = re.compile(r"\x1b\[\?(?:1049|1047|47)h")
_ALTERNATE_OFF: Final = re.compile(r"\x1b\[\?(?:1049|1047|47)l")
_SPECIAL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_DROPPED: Final = re.compile(r"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f]")
_TOKEN: Final = re.compile(_ESCAPE.pattern + r"|[\r\b\t]|[^\x1b\r\b\t]+|\x1b")
_MOVES: Final = re.compile(r"[\r\b]|\x1b\[[0-9;]*[CDGKPX@]")
_LINE_ENDS: Final = re.compile(r"\r+\n")


class HeadTail:
    """Text with a size limit: the head and the tail are kept, what falls out between them is counted.

    Args:
        max_bytes: Limit on what is kept, in UTF-8 bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._head_limit = max_bytes // 2
        self._tail_limit = max_bytes - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0

    def append(self, text: str) -> None:
        """Add text at the end."""
        data = text.encode()
        self.total_bytes += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data[-self._tail_limit :]
            if len(self._tail) > 4 * self._tail_limit:
                del self._tail[: -self._tail_limit]

    def take(self) -> tuple[str, int, int]:
        """The text with its marker line, the size before the cut, and the number of bytes left out; starts afresh."""
        head, tail, total = bytes(self._head), bytes(self._tail), self.total_bytes
        self._head, self._tail, self.total_bytes = bytearray(), bytearray(), 0
        if len(head) + len(tail) == total and len(tail) <= self._tail_limit:
            return (head + tail).decode(), total, 0
        # only the two cuts can break a character: drop its rest
        head, tail = (part.decode("utf-8", "ignore").encode() for part in (head, tail[-self._tail_limit :]))
        elided = total - len(head) - len(tail)
        return f"{head.decode()}\n[... {elided} bytes elided ...]\n{tail.decode()}", total, elided


class TextFilter:
    """Incremental conversion of terminal bytes to visible text.

    Args:
        keep_ansi: Only decode and normalise line ends.
    """

    def __init__(self, *, keep_ansi: bool = False) -> None:
        self._keep_ansi = keep_ansi
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # an unfinished escape sequence or a carriage return that a line feed may follow
        self._line = ""  # the unfinished line, as plain text ...
        self._cells: list[str] | None = None  # ... or as cells, once something moved the cursor in it
        self._column = 0
        self.alternate = False
        self.application_cursor = False

    def feed(self, data: bytes) -> str:
        """Convert what was read; the unfinished last line is held back, as it may still be overwritten."""
        text = self._held + self._decoder.decode(data)
        self._held = ""
        if self._keep_ansi:
            return self._feed_raw(text)
        if "\x1b" in text:
            text = self._hold_back(text)
            self._note_cursor_mode(text)
            text = self._main_screen(text)
        elif self.alternate:
            return ""
        if text.endswith("\r"):
            text, self._held = text.rstrip("\r"), "\r" + self._held
        if "\r\n" in text:
            text = _LINE_ENDS.sub("\n", text)
        if self._cells is None and not _SPECIAL.search(text):
            return self._feed_plain(text)
        return self._feed_lines(text)

    @property
    def unfinished_line(self) -> str:
        """What the last line holds so far (of this step): a prompt, if a program waits for input."""
        return self._line if self._cells is None else "".join(self._cells)

    def flush(self, *, final: bool = True) -> str:
        """The unfinished line as it looks now.

        Args:
            final: Whether no program continues it, so that a character that is cut off counts as invalid.
        """
        held = self._decoder.decode(b"", final=True) if final else ""
        if final:
            self._held = self._held.split("\x1b")[0]
        text = self._finish_line() + ("" if self.alternate else held)
        if self._keep_ansi:
            text, self._held = text + self._held, ""
        return text

    # -------------------------------------------------------------------------------------------------------------- escape sequences
    def _feed_raw(self, text: str) -> str:
        if "\x1b" in text:
            self._note_cursor_mode(text)
            on, off = _last_end(_ALTERNATE_ON, text), _last_end(_ALTERNATE_OFF, text)
            if on != off:
                self.alternate = on > off
        ended = text.rstrip("\r")
        text, self._held = ended, text[len(ended) :]
        return _LINE_ENDS.sub("\n", text)

    def _hold_back(self, text: str) -> str:
        begun = _ESCAPE_BEGUN.search(text, max(0, len(text) - _MAX_SEQUENCE))
        if begun is None:
            return text
        self._held = text[begun.start() :]
        return text[: begun.start()]

    def _note_cursor_mode(self, text: str) -> None:
        on, off = text.rfind("\x1b[?1h"), text.rfind("\x1b[?1l")
        if on != off:
            self.application_cursor = on > off

    def _main_screen(self, text: str) -> str:
        """What is drawn on the main screen; the alternate one is for ``Session.screen``."""
        parts = []
        position = 0
        while True:
            pattern = _ALTERNATE_OFF if self.alternate else _ALTERNATE_ON
            match = pattern.search(text, position)
            end = match.start() if match else len(text)
            if not self.alternate:
                parts.append(text[position:end])
            if match is None:
                return "".join(parts)
            position = match.end()
            self.alternate = not self.alternate

    # ------------------------------------------------------------------------------------------------------------------------- lines
    def _feed_plain(self, text: str) -> str:
        cut = text.rfind("\n") + 1
        if not cut:
            self._line += text
            if len(self._line) <= _MAX_LINE:
                return ""
            text, self._line = self._line, ""
            return text
        done, self._line = self._line + text[:cut], text[cut:]
        return done

    def _feed_lines(self, text: str) -> str:
        if self._cells is None and not _MOVES.search(text):  # colours and the like: nothing overwrites anything
            return self._feed_plain(_DROPPED.sub("", _ESCAPE.sub("", text)))
        done = []
        *lines, last = text.split("\n")
        for line in lines:
            self._draw(line)
            done.append(self._finish_line() + "\n")
        self._draw(last)
        if self._cells is not None and len(self._cells) > _MAX_LINE:
            done.append(self._finish_line())
        return "".join(done)

    def _draw(self, line: str) -> None:
        if self._cells is None and not _SPECIAL.search(line):
            self._line += line
            return
        if self._cells is None:
            self._cells, self._column, self._line = list(self._line), len(self._line), ""
        for token in _TOKEN.findall(line):
            self._apply(token, self._cells)

    def _apply(self, token: str, cells: list[str]) -> None:
        column = self._column
        if token == "\r":
            self._column = 0
        elif token == "\b":
            self._column = max(0, column - 1)
        elif token[0] == "\x1b":
            if token.startswith("\x1b[") and token[-1] in "CDGKPX@":
                self._edit(token, cells)
        else:
            text = _DROPPED.sub("", token)
            if column > len(cells):
                cells.extend(" " * (column - len(cells)))
            cells[column : column + len(text)] = text
            self._column = column + len(text)

    def _edit(self, token: str, cells: list[str]) -> None:
        """Cursor movement and erasing within the line: what progress bars and line editors use."""
        digits = token[2:-1].split(";")[0]
        count = int(digits) if digits.isdigit() else 0
        column, steps = self._column, min(max(1, count), _MAX_LINE)
        match token[-1]:
            case "C":
                self._column = min(column + steps, _MAX_LINE)
            case "D":
                self._column = max(0, column - steps)
            case "G":
                self._column = steps - 1
            case "K" if count == 0:
                del cells[column:]
            case "K" if count == 2:
                cells.clear()
            case "K":
                cells[: column + 1] = " " * min(column + 1, len(cells))
            case "P":
                del cells[column : column + steps]
            case "X":
                cells[column : column + steps] = " " * len(cells[column : column + steps])
            case "@":
                cells[column:column] = " " * steps

    def _finish_line(self) -> str:
        if self._cells is None:
            text, self._line = self._line, ""
            return text
        text = "".join(self._cells).rstrip(" ") if self._column != len(self._cells) else "".join(self._cells)
        self._cells, self._column = None, 0
        return text


def _last_end(pattern: re.Pattern[str], text: str) -> int:
    end = -1
    for match in pattern.finditer(text):
        end = match.end()
    return end
