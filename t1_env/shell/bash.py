"""The protocol spoken with bash: its start-up file, the text of a command as sent, and the status record that comes back.

An interactive bash sits on a pty, and a loop inside its ``PROMPT_COMMAND`` takes commands from descriptors beside the terminal. Because
the loop lives there, whatever throws bash back to its prompt (^C in a builtin loop, an error under ``set -u``) runs it again.

Descriptors, all above what people use and all close-on-exec, so that no program the agent starts inherits them:

====  ===================  ==============================================================================
 fd    kind                 use
====  ===================  ==============================================================================
 500   pipe, read end       one NUL byte wakes the loop up
 501   memory file          ``sequence NUL text NUL``: seekable, so bash reads it in blocks, not byte by byte
 502   pipe, write end      the status record
 503   memory file          ``export -p`` after each command, read only when a shell has to be replaced
 504   null device          where the loop's own trace output goes
====  ===================  ==============================================================================
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

FD_WAKE = 500
FD_TEXT = 501
FD_STATUS = 502
FD_EXPORTS = 503
FD_NULL = 504

PASSED_AS = {FD_WAKE: 200, FD_TEXT: 201, FD_STATUS: 202, FD_EXPORTS: 203, FD_NULL: 204}
"""The numbers under which the descriptors reach bash; its start-up file moves them."""

PROMPT_MARK = b"\x1b]7771;t1\x07"
"""The default PS1, invisible. Seen at the end of the output it means that bash fell out of the loop; a hint, never the signal."""

# The loop. A `break` at top level leaves it, and so does bash itself when a job is stopped (^Z): hence the L record, which asks for the
# line that takes bash back in, and the status kept in element 4 meanwhile.
# DEBUG is put aside first, in the open (inside a function `trap -p DEBUG` shows nothing), so that the agent's trap does not run for the
# loop's own commands. Everything is written `\builtin x`, so that neither aliases nor functions of the agent get in the way.
_LOOP = (
    r"""while { __t1=("${__t1[4]-$?}" "$-" "${__t1[2]-0}"); \builtin trap -p DEBUG >&502; \builtin trap - DEBUG; """
    r"""case ${__t1[1]} in *[evx]*) \builtin set +evx ;; esac; } >&504 2>&504; __t1_next; """
    r"""do \builtin eval "${__t1[3]-}"; done; { __t1[4]=$?; PS1='\[\e]7771;t1\a\]'; \builtin printf 'L\0\0' >&502; } >&504 2>&504"""
)

_NEXT = r"""
__t1_next() {
    {
        \builtin export -n PROMPT_COMMAND
        [[ ${PROMPT_COMMAND-} == "$__t1_loop" ]] || \builtin printf -v PROMPT_COMMAND %s "$__t1_loop"
        \builtin export -p >&503
        \builtin printf 'S%s\0%s\0%s\0%s.\0\0' "${__t1[2]-}" "${__t1[0]}" "${__t1[1]}" "${DIRSTACK-${PWD-}}" >&502 || \builtin return 1
    } 2>&504
    \builtin mapfile -d '' -n 1 -t -O 3 -u 500 __t1 2>&504 || \builtin return 1
    [[ -v '__t1[3]' ]] || \builtin exit 0
    \builtin mapfile -d '' -n 2 -t -O 2 -u 501 __t1 2>&504
}
__t1_ret() {
    {
        [[ -z $2 ]] || \builtin set "-$2"
        \builtin return "$1"
    } 2>&504
}
"""

# Descriptors arrive without close-on-exec (they had to survive the start of bash). bash sets the flag on the copy it saves when it
# redirects a descriptor below 3, and hands the flag on when such a copy is duplicated: so each is moved to 0 and picked up again from 10,
# where bash saved it.
_CLOEXEC = "\n".join(f"exec 0<&{passed} {passed}<&-; {{ exec {fd}<&10; }} 0<&9" for fd, passed in PASSED_AS.items())


def startup_file() -> bytes:
    """The text bash reads as its rcfile."""
    return (
        f"exec 9<&0\n{_CLOEXEC}\nexec 0<&9 9<&-\n"
        "set +H +o history\nunset HISTFILE\n"
        "PS1='\\[\\e]7771;t1\\a\\]'\n"
        f"{_NEXT}"
        f"__t1_loop={_quote(_LOOP)}\n"
        "PROMPT_COMMAND=$__t1_loop\n"
    ).encode()


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def argv() -> list[str]:
    """The command line that starts the shell; the start-up file is read from the text descriptor."""
    return ["bash", "--noprofile", "--rcfile", f"/proc/self/fd/{PASSED_AS[FD_TEXT]}", "--noediting", "-i"]


@dataclass(frozen=True, slots=True)
class StatusRecord:
    """What the loop reports before it waits for the next command.

    Args:
        sequence: Number of the command it belongs to; an older one is a stray and ignored.
        exit_code: ``$?`` as the command left it.
        flags: ``$-`` as the command left it.
        cwd: Working directory as bash sees it.
        debug_trap: ``trap -p DEBUG``, empty without one.
    """

    sequence: int
    exit_code: int
    flags: str
    cwd: str
    debug_trap: bytes


class LoopLeft:
    """bash left the loop (a ``break`` at top level) and goes to its prompt: type Enter to get it back in."""


_RECORD = re.compile(
    rb"\A.*?(?P<trap>(?:trap -- [^\0]*DEBUG\n)?)S(?P<seq>\d*)\0(?P<code>\d+)\0(?P<flags>[^\0]*)\0(?P<cwd>[^\0]*)\.\Z", re.DOTALL
)


class RecordReader:
    """Cuts the bytes of the status descriptor into records; tolerates junk written there by the agent's own shell code."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[StatusRecord | LoopLeft]:
        """Take what was read, return the records it completes."""
        *complete, self._pending = (self._pending + data).split(b"\0\0")
        self._pending = self._pending[-(1 << 20) :]
        return [record for chunk in complete if (record := self._parse(chunk)) is not None]

    @staticmethod
    def _parse(chunk: bytes) -> StatusRecord | LoopLeft | None:
        if chunk.endswith(b"L"):
            return LoopLeft()
        match = _RECORD.match(chunk)
        if match is None:
            return None
        return StatusRecord(
            sequence=int(match["seq"] or b"-1"),
            exit_code=int(match["code"]),
            flags=os.fsdecode(match["flags"]),
            cwd=os.fsdecode(match["cwd"]),
            debug_trap=match["trap"],
        )


def encode_command(sequence: int, text: str, before: StatusRecord | None) -> bytes:
    """The bytes for the text descriptor: sequence, then the command with what must be as the previous command left it.

    Args:
        sequence: Number of this command.
        text: The agent's command. NUL bytes cannot be part of one and are dropped.
        before: The record of the previous command: its ``$?``, its ``set`` flags and its DEBUG trap are put back first, on lines of
            their own, so that a syntax error in the command does not lose them.
    """
    prefix = b""
    if before is not None:
        flags = "".join(flag for flag in "evx" if flag in before.flags)
        if before.exit_code or flags:
            # left of `&&`: neither `set -e` nor an ERR trap acts on the status put back (and `:` never runs)
            prefix += f"__t1_ret {before.exit_code} '{flags}'{' && :' if before.exit_code else ''}\n".encode()
        if before.debug_trap:
            prefix += before.debug_trap.rstrip(b"\n") + b"\n"
    return f"{sequence}".encode() + b"\0" + prefix + _encode_text(text) + b"\0"


def _encode_text(text: str) -> bytes:
    # surrogateescape: a command may carry arbitrary bytes, e.g. a file name that is not UTF-8
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        data = text.encode("utf-8", "replace")
    return data.replace(b"\0", b"")
