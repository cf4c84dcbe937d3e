"""Options, traps, functions and whatever else can be done to a shell from inside."""

from __future__ import annotations

from typing import Final

from t1_env.testing.terminal import ALL_SHELLS, EXITED, IDLE, CaseTable, Check, Terminal

TABLE = CaseTable("options")

MISCHIEF: Final = {
    "nounset": "set -u; echo $undefined_variable",
    "verbose": "set -v",
    "noglob": "set -f",
    "noclobber": "set -C",
    "allexport": "set -a",
    "noexec": "set -n",
    "keyword_assignments": "set -k",
    "no_job_control": "set +m",
    "functrace": "set -T -E; trap 'true' RETURN ERR",
    "extdebug": "shopt -s extdebug",
    "posix_mode": "set -o posix",
    "failglob": "shopt -s failglob; true",
    "field_separator": "IFS=0123456789S",
    "prompt": "PS1='$(echo prompt)'; PS2=x; PROMPT_COMMAND='echo mine'",
    "prompt_unset": "unset PROMPT_COMMAND PS1",
    "prompt_readonly": "readonly PROMPT_COMMAND",
    "prompt_array": "PROMPT_COMMAND+=('echo mine')",
    "idle_timeout": "TMOUT=1",
    "directory_variables_unset": "unset PWD OLDPWD DIRSTACK",
    "break_at_top_level": "break",
    "break_two_levels": "break 2",
    "continue_at_top_level": "continue",
    "return_at_top_level": "return 3",
    "interrupt_itself": "kill -INT $$",
    "stty_without_echo": "stty -echo",
    "stty_raw": "stty raw -echo",
    "descriptors_opened": "exec 3>&1 4</dev/null 10>/dev/null 11>/dev/null",
    "standard_input_closed": "exec <&-",
    "aliases_named_like_tools": (
        "for w in builtin command eval printf read trap set mapfile export return case while do '{' '[['; do alias $w='echo oops'; done"
    ),
    "functions_named_like_tools": (
        "for w in printf trap set mapfile export return read command typeset unset jobs exit shopt eval; "
        'do source /dev/stdin <<<"function $w { echo oops; }"; done'
    ),
    "function_named_builtin": "builtin() { echo oops; }",
    "function_named_builtin_that_recurses": 'builtin() { builtin "$@"; }',
    "all_functions_at_once": (
        "for w in printf trap set mapfile export return read command typeset unset jobs exit shopt builtin eval; "
        'do source /dev/stdin <<<"function $w { echo oops; }"; done'
    ),
    "builtins_disabled": "enable -n printf mapfile export eval trap set jobs",
    "exit_trap_set": "trap 'true' EXIT",
    "child_trap": "trap 'true' CHLD",
    "ignored_pipe_signal": "trap '' PIPE",
    "lastpipe": "shopt -s lastpipe; echo 1 | read x",
    "few_open_files": "ulimit -n 64",
    "variables_unset": "export PATH=/usr/bin:/bin HOME=/ ; unset TERM LANG",
}
_ECHO_SHADOWED: Final = {"functrace", "verbose"}


def _mischief(name: str, text: str) -> Check:
    def check(t: Terminal) -> None:
        t.answers("shell_is=same; cd /usr")
        first = t.run(text)
        t.equal("state", first.state, IDLE)
        t.check("oops" not in first.output and "t1" not in first.output, f"output is {first.output!r}")
        for _ in range(2):
            t.answers("echo $shell_is; true", None if name in _ECHO_SHADOWED else "same\n")
        if name not in _ECHO_SHADOWED | {"noexec"}:
            t.answers("/bin/sh -c 'echo a; exit 9'", "a\n", code=9)
            t.answers("pwd", "/usr\n")

    return check


for _name, _text in MISCHIEF.items():
    TABLE.add(_name, f"After `{_text}` the same shell goes on.", _mischief(_name, _text))

_PLAIN_MISCHIEF: Final = {
    "nounset_in_plain_mode": "set -u; echo $undefined_variable",
    "field_separator_in_plain_mode": "IFS=0123456789S",
    "prompt_in_plain_mode": "PS1='oops '; PS2=x",
    "functions_named_like_tools_in_plain_mode": (
        "printf() { echo oops; }; read() { echo oops; }; command() { echo oops; }; builtin() { echo oops; }"
    ),
    "return_in_plain_mode": "return 3",
    "stty_raw_in_plain_mode": "stty raw -echo",
    "descriptors_opened_in_plain_mode": "exec 3>&1 4</dev/null; exec 7>/dev/null 8</dev/null 9>/dev/null",
    "interrupt_itself_in_plain_mode": "kill -INT $$",
}
for _name, _text in _PLAIN_MISCHIEF.items():
    TABLE.add(_name, f"After `{_text}` the same shell goes on.", _mischief(_name, _text), ("sh", "zsh"))


@TABLE.case()
def nounset_stays_on(t: Terminal) -> None:
    """``set -u`` stays on: every use of an unset variable is an error of that command, and nothing more."""
    for text in ("set -u; echo $undefined_variable", "echo $other_undefined"):
        result = t.run(text)
        t.check(result.exit_code in (1, 127) and "unbound variable" in result.output, f"it gave {result.exit_code}, {result.output!r}")


@TABLE.case()
def errexit_stays_on(t: Terminal) -> None:
    """``set -e`` stays on; ``false`` then ends the shell, as it does in a script."""
    t.run("set -e")
    t.check("e" in t.answers("echo $-; true | true; if false; then :; fi").output, "the option is gone")
    t.equal("state", t.run("false").state, EXITED)
    t.usable()


@TABLE.case()
def xtrace(t: Terminal) -> None:
    """``set -x`` shows the agent's commands and none of the session's."""
    t.run("set -x")
    for text, lines in (("echo a; (exit 3)", ["echo a", "a", "exit 3"]), ("echo $?", ["echo 3", "3"])):
        t.equal("trace", [line.lstrip("+ ") for line in t.run(text).output.splitlines()], lines)
    t.run("set +x")
    t.answers("echo quiet", "quiet\n")


@TABLE.case()
def debug_trap(t: Terminal) -> None:
    """A DEBUG trap runs for the agent's commands and none of the session's; ``$?`` survives it."""
    t.run("trap 'echo D' DEBUG")
    t.answers("echo a", "D\na\n")
    t.answers("echo b; sh -c 'exit 3'", "D\nb\nD\n", code=3)
    t.answers("echo $?", "D\n3\n")
    t.run("trap - DEBUG")
    t.answers("echo quiet", "quiet\n")


@TABLE.case()
def err_trap(t: Terminal) -> None:
    """An ERR trap runs once for each command that fails."""
    t.expect(t.run("trap 'echo E' ERR; false"), "E\n", code=1)
    t.expect(t.run("false"), "E\n", code=1)
    t.answers("false; true", "E\n")
    t.answers("true", "")
    t.answers("trap -p ERR", "trap -- 'echo E' ERR\n")


@TABLE.case()
def function_named_builtin_is_kept(t: Terminal) -> None:
    """A function called ``builtin`` stays the agent's, with ``$?`` and across ^Z and ``break``."""
    t.answers("builtin() { echo mine $1; }; (exit 3)", "", code=3)
    t.answers("echo $?; builtin x", "3\nmine x\n")
    t.run("break")
    t.keys("sleep 99.601\n", wait_s=0.5)
    t.equal("exit code", t.keys("C-z").exit_code, 148)
    t.answers("kill -9 %1; wait; builtin y", None)
    t.answers("builtin z", "mine z\n")


@TABLE.case()
def the_protocol_does_not_leak(t: Terminal) -> None:
    """Nothing of the session is in the environment of programs, even with ``set -a``."""
    t.answers("env | grep -c t1_", "0\n", code=1)
    t.run("set -a")
    t.answers("env | grep -c -e t1_ -e PROMPT_COMMAND", "0\n", code=1)


@TABLE.case(shells=ALL_SHELLS)
def terminal_modes_are_put_back(t: Terminal) -> None:
    """Modes that a program leaves behind do not reach the next command."""
    t.run("stty raw -echo -onlcr")
    t.answers("echo a; echo b; stty -a | grep -c -e ' -icanon' -e ' -echo '", "a\nb\n0\n", code=1)


@TABLE.case()
def standard_descriptors_closed(t: Terminal) -> None:
    """A shell with descriptors 0-2 redirected or closed still runs commands; their output comes back when they do."""
    t.answers("exec >/dev/null 2>&1")
    t.expect(t.run("echo lost; (exit 5)"), "", code=5)
    t.answers("exec >/dev/tty 2>&1")
    t.answers("echo back", "back\n")
    t.run("exec 0<&- 1>&- 2>&-")
    t.expect(t.run("(exit 6)"), code=6)
    t.run("exec </dev/tty >/dev/tty 2>&1")
    t.answers("echo again", "again\n")


@TABLE.case()
def every_other_descriptor_closed(t: Terminal) -> None:
    """A shell that closes every descriptor above 2 keeps its state, and the output has nothing of the repair."""
    t.run("cd /usr; export A=1; x=2; f() { echo f; }")
    result = t.run('for fd in /proc/$$/fd/*; do n=${fd##*/}; [ $n -gt 2 ] && eval "exec $n>&-"; done; echo closed; (exit 7)')
    t.expect(result, "closed\n", code=7)
    t.answers("echo $? $A $x $(f); pwd; ls /proc/self/fd | wc -l", "7 1 2 f\n/usr\n4\n")
    t.equal("exit code", t.run("sleep 99.602", timeout_s=0.3).exit_code, 124)
    t.answers("echo $x", "2\n")


def _one_closed(redirection: str) -> Check:
    def check(t: Terminal) -> None:
        t.run("x=2")
        for _ in range(3):
            t.answers(f"echo a; exec {redirection}; (exit 5)", "a\n", code=5)
            t.answers("echo $? $x", "5 2\n")
        t.answers("echo again", "again\n")

    return check


for _redirection in ("500<&-", "501<&-", "502>&-", "503>&-", "504>&-", "255>&-", "500<&- 501<&-", "502>&- 504>&-"):
    _name = "descriptor_closed_" + "_".join(word[:3] for word in _redirection.split())
    TABLE.add(_name, f"A shell that closes {_redirection} keeps its state.", _one_closed(_redirection))


@TABLE.case()
def every_descriptor_closed(t: Terminal) -> None:
    """A shell without any descriptor left ends or is replaced; the session goes on with directory and exported variables."""
    t.run("cd /usr; export A=1")
    result = t.run('for fd in /proc/$$/fd/*; do eval "exec ${fd##*/}>&-"; done', timeout_s=5)
    t.check(result.state in (IDLE, EXITED), f"state is {result.state}")
    t.run("exec </dev/tty >/dev/tty 2>&1")
    t.answers("echo $A; pwd", "1\n/usr\n")
