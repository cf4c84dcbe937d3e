"""What a shell's loop reports on the status descriptor."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final, TypeAlias


@dataclass(frozen=True, slots=True)
class StatusRecord:
    """A command is over and the loop waits for the next one.

    Args:
        sequence: Number of the command it belongs to; an older one is a stray and ignored.
        exit_code: ``$?`` as the command left it.
        flags: ``$-`` as the command left it.
        cwd: Working directory as the shell sees it.
        functions: Shell source of functions that were in the loop's way and have to be defined again.
        traps: Shell source of traps that were put aside and have to be set again.
        exports: The exported variables as shell source, where the loop sends them along; None where it writes them elsewhere.
    """

    sequence: int
    exit_code: int
    flags: str
    cwd: str
    functions: str = ""
    traps: str = ""
    exports: bytes | None = None


@dataclass(frozen=True, slots=True)
class LoopLeft:
    """The shell left the loop (a ``break`` at top level) and goes to its prompt: type Enter to get it back in."""


@dataclass(frozen=True, slots=True)
class ChannelBroken:
    """The loop cannot read commands any more: the agent closed a descriptor of ours."""


@dataclass(frozen=True, slots=True)
class ShellLeft:
    """The shell ends.

    Args:
        cwd: Its working directory at the end.
    """

    cwd: str


Record: TypeAlias = StatusRecord | LoopLeft | ChannelBroken | ShellLeft

_STATUS: Final = re.compile(
    rb"\A.*?(?P<traps>(?:trap -- [^\0]* (?:DEBUG|ERR|SIGINT)\n)?)"  # greedy: up to the end of the last one
    rb"(?P<functions>(?:builtin \(\) *\n\{[^\0]*\n\}\n)?)"
    rb"S(?P<seq>\d*)\0(?P<code>\d+)\0(?P<flags>[^\0]*)\0(?P<cwd>[^\0]*)\.(?:\0X(?P<exports>[^\0]*))?\Z",
    re.DOTALL,
)
_LEFT: Final = re.compile(rb"X(?P<cwd>[^\0]*)\.\Z")
_END: Final = b"\0\0"
_MAX_RECORD: Final = 4 << 20


class RecordReader:
    """Cuts the bytes of the status descriptor into records; tolerates junk written there by the agent's own shell code."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> list[Record]:
        """Take what was read, return the records it completes."""
        self._pending += data
        records: list[Record] = []
        begin = 0
        while (end := self._pending.find(_END, max(begin, self._searched))) >= 0:
            record = _parse(bytes(self._pending[begin:end]))
            if record is not None:
                records.append(record)
            begin = self._searched = end + len(_END)
        del self._pending[: max(begin, len(self._pending) - _MAX_RECORD)]
        self._searched = max(0, len(self._pending) - 1)  # the last byte may be half of an end
        return records


def _parse(chunk: bytes) -> Record | None:
    if chunk.endswith(b"L"):
        return LoopLeft()
    if chunk.endswith(b"B"):
        return ChannelBroken()
    if match := _STATUS.match(chunk):
        return StatusRecord(
            sequence=int(match["seq"] or b"-1"),
            exit_code=int(match["code"]),
            flags=os.fsdecode(match["flags"]),
            cwd=os.fsdecode(match["cwd"]),
            functions=os.fsdecode(match["functions"]),
            traps=os.fsdecode(match["traps"]),
            exports=match["exports"],
        )
    if match := _LEFT.search(chunk):
        return ShellLeft(os.fsdecode(match["cwd"]))
    return None
