"""How the text of a command is read."""

from __future__ import annotations

from t1_env.testing.terminal import ALL_SHELLS, IDLE, CaseTable, Terminal

TABLE = CaseTable("commands")


@TABLE.case(shells=ALL_SHELLS)
def output_exit_code_and_directory(t: Terminal) -> None:
    """A command's output, exit code and working directory come back; ``$?`` is the exit code of the one before."""
    result = t.answers("cd /usr/bin && echo hello", "hello\n")
    t.equal("cwd", (result.cwd, t.session.cwd), ("/usr/bin", "/usr/bin"))
    t.equal("sizes", (result.output_bytes, result.elided_bytes), (6, 0))
    t.answers("(exit 42)", "", code=42)
    t.answers("echo $?", "42\n")
    t.answers("definitely_not_a_command_at_all 2>/dev/null", code=127)


@TABLE.case(shells=ALL_SHELLS)
def trailing_comment(t: Terminal) -> None:
    """A comment at the end of the text ends with it."""
    t.answers("echo hi # comment", "hi\n")
    t.answers("# only a comment", "")
    t.answers("(exit 3) # with a 'quote", "", code=3)


@TABLE.case(shells=ALL_SHELLS)
def empty_text(t: Terminal) -> None:
    """Nothing, blanks and empty lines are commands that do nothing."""
    for text in ("", "   \n\n", "\n"):
        t.expect(t.run(text), "")


@TABLE.case(shells=ALL_SHELLS)
def trailing_ampersand(t: Terminal) -> None:
    """A command that ends with ``&`` runs in the background, and the step is over at once."""
    t.check(t.run("sleep 99.101 &").exit_code == 0, "expected exit code 0")
    t.answers("kill $!")
    t.expect(t.run("echo now; sleep 99.102 &"))
    t.await_running("99.102", 1)
    t.answers("kill $!")


@TABLE.case(shells=ALL_SHELLS)
def several_lines(t: Terminal) -> None:
    """Loops, lists and blank lines may span lines."""
    t.answers("for i in 1 2 3\ndo\n  echo $i\ndone", "1\n2\n3\n")
    t.answers("echo one; \n\necho two", "one\ntwo\n")
    t.answers("echo $((6*7)) && { echo x; } | tr x y", "42\ny\n")


@TABLE.case(shells=ALL_SHELLS)
def line_continuation(t: Terminal) -> None:
    """A backslash at the end of a line joins it with the next."""
    t.answers("echo a\\\nb", "ab\n")
    t.answers("echo a \\\n  b \\\n  c", "a b c\n")


@TABLE.case(shells=ALL_SHELLS)
def heredoc(t: Terminal) -> None:
    """The text of a here-document arrives unchanged."""
    t.answers("cat <<'E'\n$x `y` \\z 'q' \"d\"\nE", "$x `y` \\z 'q' \"d\"\n")


@TABLE.case(shells=ALL_SHELLS)
def heredoc_of_20000_lines(t: Terminal) -> None:
    """A here-document of 20,000 lines arrives complete."""
    path, body = t.path("long"), "\n".join(f"line {i} $HOME" for i in range(20_000))
    t.answers(f"cat > {path} <<'EOF'\n{body}\nEOF\nwc -l < {path}; tail -n1 {path}; rm {path}", "20000\nline 19999 $HOME\n")


@TABLE.case(shells=ALL_SHELLS)
def command_of_a_mebibyte(t: Terminal) -> None:
    """A command of 1 MiB arrives complete."""
    t.answers(f"x='{'y' * (1 << 20)}'; echo ${{#x}}", "1048576\n")


@TABLE.case(shells=ALL_SHELLS)
def unbalanced_quote(t: Terminal) -> None:
    """An unbalanced quote, or another incomplete command, is a syntax error at once; the session stays usable."""
    for text in ("echo 'unbalanced", 'echo "x', "if true; then", "echo )", "echo `x"):
        result = t.run(text)
        t.check(result.state is IDLE and result.exit_code in (1, 2), f"{text!r} ended with {result.exit_code}, expected 1 or 2")
        t.check(bool(result.output), f"{text!r} gave no message")
        t.answers("echo still here", "still here\n")


@TABLE.case()
def unfinished_heredoc(t: Terminal) -> None:
    """A here-document that is not closed ends with the text, and nothing but the text is in it."""
    result = t.run("cat <<EOF\nalpha")
    t.check(result.state is IDLE and result.output.endswith("alpha\n"), f"output is {result.output!r}")
    t.usable()


@TABLE.case(shells=ALL_SHELLS)
def bytes_of_all_kinds(t: Terminal) -> None:
    """Unicode, tabs and bytes that are not UTF-8 reach the shell as they are; NUL bytes, which no command can hold, are dropped."""
    t.answers("echo ünïcode → 漢字 🙂", "ünïcode → 漢字 🙂\n")
    t.answers("printf '%s\\n' 'tab\there'", "tab\there\n")
    t.answers("echo \0a\0b", "ab\n")
    t.answers("printf %s '\udcff\udcfe' | od -An -tx1", " ff fe\n")


@TABLE.case()
def history_characters(t: Terminal) -> None:
    """``!`` is an ordinary character, and ``$0`` is the shell's name."""
    t.answers("echo '!!' \"wow!\" $0", "!! wow! bash\n")


@TABLE.case()
def state_persists(t: Terminal) -> None:
    """Variables, functions, aliases, options and the file mode mask persist."""
    t.answers("x=1; export Y=2; f() { echo f$1; }; alias g='echo g'; declare -A m=([k]=v); shopt -s nullglob; umask 027")
    t.answers("echo $x $Y ${m[k]}; f 3; g; shopt nullglob; umask", "1 2 v\nf3\ng\nnullglob       \ton\n0027\n")


@TABLE.case(shells=("sh", "zsh"))
def state_persists_in_plain_mode(t: Terminal) -> None:
    """Variables, functions, aliases and the file mode mask persist."""
    t.answers("x=1; export Y=2; f() { echo f$1; }; alias g='echo g'; umask 027")
    t.answers("echo $x $Y; f 3; g; umask | tail -c 4", "1 2\nf3\ng\n027\n")


@TABLE.case(shells=ALL_SHELLS)
def many_commands_keep_in_step(t: Terminal) -> None:
    """Over hundreds of steps every answer belongs to its command."""
    for i in range(300):
        t.answers(f"echo {i}; (exit {i % 7})", f"{i}\n", code=i % 7)


@TABLE.case(shells=ALL_SHELLS)
def it_is_a_terminal(t: Terminal) -> None:
    """Programs have a terminal of the configured size as descriptors 0-2, and no other descriptor."""
    t.answers("[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && stty size && echo $TERM", "24 80\nxterm-256color\n")
    t.answers("ls /proc/self/fd | wc -l", "4\n")
