r"""Plain mode: ``sh`` (dash, busybox, any POSIX shell) and ``zsh``, by the same out-of-band protocol as far as these shells allow.

A loop, typed at the first prompt and again whenever the shell falls back to one, reads descriptors 7 (pipe: a line wakes it up) and 8
(memory file: the command) and reports on 9 (pipe: the status record with the exported variables). Shells of this kind know single-digit
descriptors only and cannot mark them close-on-exec: they are closed around each command instead, so that no program the agent starts
inherits them. What the agent opens as 7, 8 or 9 is gone after the command.

The text of a command is one quoted word in a file: shells read files in blocks, and a command that is cut short, unbalanced or of 1 MiB
is all the same to them. The loop's own commands pass by the agent's functions: special builtins come before functions in POSIX shells, the
others are called through ``command`` (in zsh: all through ``builtin``), of which a function with that name is removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from t1_env.shell.dialect import Channel, ShellName, command_bytes
from t1_env.shell.records import StatusRecord

_TEXT: Final = "/proc/self/fd/8"
_CLOSED: Final = b"7<&- 8<&- 9>&-"

_LOOP: Final = (
    "while {{ __t1_status=$? __t1_flags=$-; unset -f {by}; {special}set +evx; __t1_next; }} 2>|/dev/null; do {read}; done; "
    "{{ __t1_left=$?; }} 2>|/dev/null"
)
_FUNCTIONS: Final = r"""
__t1_next() {{
    {prompt}
    __t1_status=${{__t1_left:-$__t1_status}} __t1_left=
    {by} printf 'S%s\0%s\0%s\0%s.\0X' "${{__t1_seq-}}" "$__t1_status" "$__t1_flags" "${{PWD-}}" >&9 || {special}return 1
    {special}export -p >&9
    {by} printf '\0\0' >&9
    {by} read -r __t1_wake <&7 || {special}exit 0
}}
__t1_prompt() {{
    unset -f {by} 2>|/dev/null
    {by} printf 'L\0\0' >&9
}}
__t1_ret() {{
    {special}return "$1"
}}
"""


def _quote(data: bytes) -> bytes:
    return b"'" + data.replace(b"'", b"'\\''") + b"'"


class PosixDialect:
    """``sh``: dash, busybox ash, or whatever the sandbox has under that name."""

    name: ShellName = "sh"
    passed: Mapping[Channel, int] = {Channel.WAKE: 7, Channel.TEXT: 8, Channel.STATUS: 9}
    env: Mapping[str, str] = {"ENV": _TEXT}  # the file an interactive POSIX shell reads first
    argv: list[str] = ["sh", "-i"]  # noqa: RUF012
    start_line: bytes = b""
    return_line: bytes = b' eval "$__t1_loop"\n'
    wake_byte: bytes = b"\n"
    rereads_text: bool = True
    prompt_fd: int | None = 9
    _special: str = ""
    _by: str = "command"
    _read: str = f". {_TEXT}"
    # without a line editor, where it has one: that would show what the session types
    _prepare: str = "unset ENV\n(set +o emacs) 2>|/dev/null && set +o emacs\n(set +o vi) 2>|/dev/null && set +o vi"
    _around: tuple[str, str] = ("", "")
    _prompt: str = """PS1='$(__t1_prompt 2>|/dev/null)'"""  # prints nothing, tells the status channel that the shell is at its prompt

    def startup_file(self) -> bytes:
        """The text the shell reads before its first prompt; the prompt itself then asks for the line that starts the loop."""
        words = {"special": self._special, "by": self._by, "read": self._read, "prompt": self._prompt}
        loop = _quote(_LOOP.format(**words).encode()).decode()
        return f"{self._prepare}\n__t1_seq=0\n{_FUNCTIONS.format(**words)}\n__t1_loop={loop}\n{self._prompt}\n".encode()

    def encode(self, sequence: int, text: str, before: StatusRecord | None) -> bytes:
        """A file that evaluates the command, with ``$?`` and the options put back first; once only, however often it is read."""
        prefix = ""
        if before is not None:
            flags = "".join(flag for flag in "evx" if flag in before.flags)
            if before.exit_code or flags:
                options = f"set -{flags}; " if flags else ""
                prefix = f"{{ {options}__t1_ret {before.exit_code}; }} 2>|/dev/null{' && :' if before.exit_code else ''}\n"
        command = _quote(prefix.encode() + command_bytes(text))
        before_it, after_it = self._around
        head = f"case $__t1_seq in {sequence}) ;; *) __t1_seq={sequence}\n{before_it}{self._special}eval ".encode()
        return head + command + b" " + _CLOSED + f"{after_it} ;; esac\n".encode()


class ZshDialect(PosixDialect):
    """zsh, without its line editor."""

    name: ShellName = "zsh"
    env: Mapping[str, str] = {}
    argv: list[str] = ["zsh", "-f", "-i", "-o", "NO_ZLE", "-o", "NO_PROMPT_SP", "-o", "NO_PROMPT_CR"]  # noqa: RUF012
    start_line: bytes = f" . {_TEXT}\n".encode()
    return_line: bytes = b' builtin eval "$__t1_loop"\n'
    _special: str = "builtin "
    _by: str = "builtin"
    _read: str = f"builtin . {_TEXT}"
    _around: tuple[str, str] = ("{ ", " } always { { __t1_left=$?; } 2>|/dev/null; }")  # after ^C the file as a whole ends with status 1
    _prepare: str = "setopt interactive_comments no_bang_hist no_function_argzero\nunset HISTFILE"
    _prompt: str = "PS1= precmd_functions=(__t1_prompt ${precmd_functions:#__t1_prompt})"
