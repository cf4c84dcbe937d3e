r"""The protocol spoken with bash: its start-up file and the text of a command as sent.

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

from collections.abc import Mapping
from typing import Final

from t1_env.shell.dialect import Channel, ShellName, command_bytes
from t1_env.shell.records import StatusRecord

FD: Final[Mapping[Channel, int]] = {Channel.WAKE: 500, Channel.TEXT: 501, Channel.STATUS: 502, Channel.EXPORTS: 503, Channel.NULL: 504}
PASSED_AS: Final[Mapping[Channel, int]] = {channel: fd - 300 for channel, fd in FD.items()}
"""The numbers under which the descriptors reach bash; its start-up file moves them."""

# The loop. A `break` at top level leaves it, and so does bash itself when a job is stopped (^Z): hence the L record, which asks for the
# line that takes bash back in, and the status kept in element 4 meanwhile (element 3 tells whether a command has run in between).
# DEBUG and ERR are put aside first, in the open (inside a function `trap -p DEBUG` shows nothing): the agent's traps do not run for the
# loop's own commands, and not a second time for the `eval` when what it ran has failed. SIGINT is ignored while the loop itself runs: a
# ^C that comes just before a command begins must not take the command away after half of its text was read.
# Everything is written `\builtin x`, so that neither aliases nor functions of the agent get in the way, and a function called `builtin` is
# put aside too. The outer redirection is for an agent that closed descriptor 504, and would otherwise read bash's complaint about it.
# `jobs -n` makes bash forget jobs that ended; it does not by itself here, and would list programs long gone.
_LOOP: Final = (
    r"""while { { __t1=("${__t1[4]-$?}" "$-" "${__t1[2]-0}" [5]="${__t1[5]-}"); \typeset -F builtin && __t1_free; \enable eval; """
    r"""\builtin trap -p DEBUG ERR INT >&502; \builtin trap - DEBUG ERR; \builtin trap '' INT; """
    r"""case ${__t1[1]} in *[evx]*) \builtin set +evx ;; esac; } >&504 2>&504 && __t1_next; } 2>|/dev/null; """
    r"""do \builtin trap - INT; \builtin eval "${__t1[3]-}"; done; """
    r"""{ __t1[6]=$?; if [[ -v '__t1[3]' ]]; then __t1[4]=${__t1[6]}; elif ! [[ -v '__t1[4]' ]]; then __t1[4]=${__t1[0]-0}; fi; """
    r"""\typeset -F builtin && __t1_free; \builtin unset '__t1[3]'; PS1='\[\e]7771;t1\a\]'; """
    r"""\builtin printf 'L\0\0' >&502; } >|/dev/null 2>&1"""
)
RECOVER: Final = r"\enable builtin eval exit export jobs mapfile printf return set shopt trap unset; \typeset -F builtin && __t1_free"
"""What makes the loop's builtins usable again, whatever the agent did to them."""

# A function called `builtin` is handed over with the record, to be defined again before the next command. In POSIX mode the special
# builtins come before functions: `unset` is itself there even if the agent has functions of that name too.
_FUNCTIONS: Final = r"""
__t1_free() {
    __t1[5]=$(\typeset -f builtin)$'\n'
    if [[ -o posix ]]; then
        \unset -f builtin typeset unset
    else
        __t1_opts=:$BASHOPTS: POSIXLY_CORRECT=
        \unset -f builtin typeset unset
        \builtin unset POSIXLY_CORRECT
        for __t1_opt in expand_aliases inherit_errexit interactive_comments shift_verbose sourcepath; do
            case $__t1_opts in
                *:$__t1_opt:*) \builtin shopt -s "$__t1_opt" ;;
                *) \builtin shopt -u "$__t1_opt" ;;
            esac
        done
        \builtin unset __t1_opts __t1_opt
    fi
}
__t1_next() {
    {
        \builtin export -n PROMPT_COMMAND
        [[ ${PROMPT_COMMAND-} == "$__t1_loop" ]] || \builtin printf -v PROMPT_COMMAND %s "$__t1_loop"
        \builtin export -p >&503 || \builtin return 1
        \builtin jobs -n >&504
        \builtin printf '%sS%s\0%s\0%s\0%s.\0\0' "${__t1[5]-}" "${__t1[2]-}" "${__t1[0]}" "${__t1[1]}" "${DIRSTACK-${PWD-}}" >&502 ||
            \builtin return 1
    } 2>&504
    if \builtin mapfile -d '' -n 1 -t -O 3 -u 500 __t1; then
        [[ -v '__t1[3]' ]] || \builtin exit 0
        __t1[5]=
        \builtin mapfile -d '' -n 2 -t -O 2 -u 501 __t1 || \builtin unset '__t1[3]'
    fi 2>&504
    [[ -v '__t1[3]' ]] || {
        \builtin printf 'B\0\0' >&502 2>&504
        [[ -v '__t1[3]' ]]
    }
}
__t1_ret() {
    {
        [[ -z $2 ]] || \builtin set "-$2"
        [[ -z ${3-} ]] || \builtin eval "$3"
        case ${4-} in
            '') \builtin return "$1" ;;
            *) \builtin eval "$4"; __t1[6]=$(POSIXLY_CORRECT=; \exit "$1") ;;
        esac
    } >&504 2>&504
}
__t1_exit() {
    \typeset -F builtin && __t1_free
    \builtin export -n PROMPT_COMMAND
    \builtin export -p >&503
    \builtin printf 'X%s.\0\0' "${DIRSTACK-${PWD-}}" >&502
}
"""

_EXIT_TRAP: Final = r"trap '{ __t1_exit; } >&504 2>&504' EXIT"
"""How exports made by the very command that ends the shell get out. An agent's own EXIT trap takes its place."""


def move(source: str, fd: int, *, spare: int = 9, saved: int = 10) -> str:
    """Source that opens ``source`` as descriptor ``fd``, close-on-exec; ``spare`` must be a copy of descriptor 0."""
    # bash sets close-on-exec on the copy it saves when it redirects a descriptor below 3, and hands the flag on when such a copy is
    # duplicated: so each is moved to 0 and picked up again from where bash saved it, the lowest free descriptor from 10 on.
    return f"\\exec 0{source}; {{ \\exec {fd}<&{saved}; }} 0<&{spare}"


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


class BashDialect:
    """bash 5, in the full mode: everything the session promises."""

    name: ShellName = "bash"
    passed: Mapping[Channel, int] = PASSED_AS
    env: Mapping[str, str] = {}
    argv: list[str] = ["bash", "--noprofile", "--rcfile", f"/proc/self/fd/{PASSED_AS[Channel.TEXT]}", "--noediting", "-i"]  # noqa: RUF012
    start_line = b""
    return_line = f' {{ {RECOVER}; }} 2>|/dev/null >&504; \\builtin eval "$__t1_loop"\n'.encode()
    wake_byte = b"\0"
    rereads_text = False
    prompt_fd: int | None = None

    def startup_file(self) -> bytes:
        """The text bash reads as its rcfile."""
        moves = "\n".join(move(f"<&{passed} {passed}<&-", FD[channel]) for channel, passed in PASSED_AS.items())
        return (
            f"exec 9<&0\n{moves}\nexec 0<&9 9<&-\n"
            "set +H +o history\nunset HISTFILE\n"
            "PS1='\\[\\e]7771;t1\\a\\]'\n"
            f"{_FUNCTIONS}"
            f"__t1_loop={_quote(_LOOP)}\n"
            f"PROMPT_COMMAND=$__t1_loop\n"
            f"{_EXIT_TRAP}\n"
        ).encode()

    def encode(self, sequence: int, text: str, before: StatusRecord | None) -> bytes:
        """``sequence NUL text NUL``; what the loop put aside comes back on lines of its own, safe from a syntax error in the command."""
        prefix = b""
        if before is not None:
            flags = "".join(flag for flag in "evx" if flag in before.flags)
            if before.exit_code or flags or before.traps or before.functions:
                words = [str(before.exit_code), _quote(flags), _quote(before.traps), _quote(before.functions)]
                while words[-1] == "''" and len(words) > 2:
                    words.pop()
                # left of `&&`: neither `set -e` nor an ERR trap acts on the status put back (and `:` never runs)
                line = f"__t1_ret {' '.join(words)}{' && :' if before.exit_code else ''}\n"
                prefix = line.encode("utf-8", "surrogateescape")
        return f"{sequence}".encode() + b"\0" + prefix + command_bytes(text) + b"\0"
