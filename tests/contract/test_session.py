"""What a shell session promises, on every backend that this machine can run."""

from __future__ import annotations

import gc
import importlib.util
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from t1_env.errors import SandboxDied, ShellError
from t1_env.protocol import ShellState
from t1_env.sandbox.base import SandboxSpec
from t1_env.shell import Session, ShellConfig, ShellResult

FAST = ShellConfig(timeout_s=20, interrupt_grace_s=0.3, quit_grace_s=0.2, kill_grace_s=0.6)
IDLE, WAITING, RUNNING = ShellState.IDLE, ShellState.WAITING_FOR_INPUT, ShellState.RUNNING
FULLSCREEN, EXITED = ShellState.FULLSCREEN, ShellState.SHELL_EXITED


def _process_spawner(workdir: Path) -> Any:
    path = Path(__file__).parents[1] / "env" / "process_spawner.py"
    spec = importlib.util.spec_from_file_location("process_spawner", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ProcessSpawner(workdir)


def _local_sandbox(spec: SandboxSpec | None = None) -> Any:
    local = pytest.importorskip("t1_env.sandbox.local")
    reason = local.unavailable_reason()
    if reason:
        pytest.skip(f"no local sandbox on this machine: {reason}")
    return local.LocalSandbox(spec or SandboxSpec(workdir="/app"))


@pytest.fixture(scope="module", params=["process", pytest.param("local", marks=pytest.mark.namespaces)])
def sandbox(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if request.param == "process":
        backend = _process_spawner(tmp_path_factory.mktemp("work"))
    else:
        backend = _local_sandbox()
        backend.start()
    yield backend
    backend.close()


@pytest.fixture(params=["process", pytest.param("local", marks=pytest.mark.namespaces)])
def sandbox_factory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    made = []

    def make() -> Any:
        backend = _process_spawner(tmp_path) if request.param == "process" else _local_sandbox()
        made.append(backend)
        if request.param == "local":
            backend.start()
        return backend

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def session(sandbox: Any) -> Iterator[Session]:
    with Session(sandbox, FAST) as session:
        yield session


def ok(result: ShellResult, output: str | None = None, *, code: int = 0) -> ShellResult:
    assert (result.exit_code, result.state, result.timed_out) == (code, IDLE, False), result
    if output is not None:
        assert result.output == output
    return result


def has(session: Session, program: str) -> None:
    if session.run(f"command -v {program} >/dev/null").exit_code != 0:
        pytest.skip(f"{program} is not installed in this sandbox")


# ------------------------------------------------------------------------------------------------------------------ plain commands
def test_output_exit_code_and_cwd(session: Session) -> None:
    result = ok(session.run("cd /usr/bin && echo hello"), "hello\n")
    assert result.cwd == "/usr/bin"
    assert result.output_bytes == 6
    assert result.elided_bytes == 0
    assert result.seconds >= 0
    ok(session.run("(exit 42)"), "", code=42)
    ok(session.run("echo $?"), "42\n")
    ok(session.run("definitely_not_a_command"), code=127)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("echo hi # comment", "hi\n"),
        ("# only a comment", ""),
        ("", ""),
        ("   \n\n", ""),
        ("echo a\\\nb", "ab\n"),
        ("echo one; \necho two", "one\ntwo\n"),
        ("cat <<'E'\n$x `y` \\z 'q' \"d\"\nE", "$x `y` \\z 'q' \"d\"\n"),
        ("for i in 1 2 3\ndo\n  echo $i\ndone", "1\n2\n3\n"),
        ("printf 'no newline'", "no newline"),
        ("printf '\\n\\n'", "\n\n"),
        ("echo $((6*7)) && { echo x; } | tr x y", "42\ny\n"),
        ("printf '%s\\n' 'tab\there'", "tab\there\n"),
        ("echo ünïcode → 漢字 🙂", "ünïcode → 漢字 🙂\n"),
        ("echo \0a\0b", "ab\n"),
        ("echo $0", "bash\n"),
        ("echo '!!' \"wow!\"", "!! wow!\n"),
    ],
)
def test_text_is_read_as_bash_reads_it(session: Session, text: str, output: str) -> None:
    ok(session.run(text), output)


def test_state_persists(session: Session) -> None:
    session.run("x=1; export Y=2; f() { echo f$1; }; alias g='echo g'; declare -A m=([k]=v); shopt -s nullglob; umask 027")
    ok(session.run("echo $x $Y ${m[k]}; f 3; g; shopt nullglob; umask"), "1 2 v\nf3\ng\nnullglob       \ton\n0027\n")


@pytest.mark.parametrize("text", ["echo 'unbalanced", 'echo "x', "if true; then", "echo )", "for", "cat <<< 'a"])
def test_incomplete_or_wrong_syntax_answers_at_once(session: Session, text: str) -> None:
    result = session.run(text)
    assert result.exit_code in (1, 2)
    assert result.state is IDLE
    assert "syntax error" in result.output or "unexpected" in result.output
    ok(session.run("echo still here"), "still here\n")


def test_long_heredoc(session: Session) -> None:
    body = "\n".join(f"line {i} $HOME" for i in range(20_000))
    ok(
        session.run(f"cat > /tmp/t1-long <<'EOF'\n{body}\nEOF\nwc -l < /tmp/t1-long; tail -n1 /tmp/t1-long; rm /tmp/t1-long"),
        "20000\nline 19999 $HOME\n",
    )


def test_command_of_a_mebibyte(session: Session) -> None:
    ok(session.run(f"x='{'y' * (1 << 20)}'; echo ${{#x}}"), "1048576\n")


def test_many_commands_keep_in_step(session: Session) -> None:
    for i in range(300):
        ok(session.run(f"echo {i}; (exit {i % 7})"), f"{i}\n", code=i % 7)


# ---------------------------------------------------------------------------------------------------------------------- big output
def test_long_output_is_bounded_and_counted(session: Session) -> None:
    result = ok(session.run("seq 1 300000"))
    size = sum(len(str(i)) + 1 for i in range(1, 300_001))
    assert result.output_bytes == size
    assert len(result.output) <= FAST.max_output_bytes + 64
    assert result.output.startswith("1\n2\n3\n")
    assert result.output.endswith("299999\n300000\n")
    marker = re.search(r"\n\[\.\.\. (\d+) bytes elided \.\.\.\]\n", result.output)
    assert marker is not None
    assert int(marker[1]) == result.elided_bytes
    assert len(result.output) - len(marker[0]) + result.elided_bytes == size


def test_long_output_on_one_line(session: Session) -> None:
    result = ok(session.run("head -c 3000000 /dev/zero | tr '\\0' x"))
    assert result.output_bytes == 3_000_000
    assert set(result.output.replace(f"\n[... {result.elided_bytes} bytes elided ...]\n", "")) == {"x"}


def test_nothing_is_lost_or_shifted(session: Session) -> None:
    sizes = [0, 1, 4095, 4096, 4097, 8191, 20_000, 3, 70_000, 0, 17]
    for i in range(20 * len(sizes)):
        size = sizes[i % len(sizes)]
        command = f"head -c {size} /dev/zero | tr '\\0' y; printf '<{i}>'" if i % 2 else f"printf '%{size}s<{i}>' ''"
        result = ok(session.run(command))
        assert result.output_bytes == size + len(f"<{i}>"), (i, size)
        assert result.output.endswith(f"<{i}>")


# --------------------------------------------------------------------------------------------------------------- ugly bytes on screen
@pytest.mark.parametrize(
    ("text", "output"),
    [
        (r"printf 'a\0b'", "ab"),
        (r"printf 'bad \xff\xfe utf8'", "bad \ufffd\ufffd utf8"),
        (r"printf '\xe2\x82'; sleep 0.05; printf '\xac'", "€"),
        (r"printf '\xe2\x82'", "\ufffd"),
        (r"printf '\e[1;31mred\e[0m plain\n'", "red plain\n"),
        (r"printf '\e]0;title\a\e(Btext\n'", "text\n"),
        (r"printf '10%%\r50%%\r100%%\n'", "100%\n"),
        (r"printf 'loading...\r\e[Kdone\n'", "done\n"),
        (r"printf 'abc\b\bX\n'", "aXc\n"),
        (r"printf 'a\r\nb\r\n'", "a\nb\n"),
        (r"printf 'bell\a\n'", "bell\n"),
        (r"for i in 1 2 3; do printf '\r%d/3' $i; sleep 0.02; done", "3/3"),
    ],
)
def test_output_is_what_the_eye_sees(session: Session, text: str, output: str) -> None:
    ok(session.run(text), output)


def test_escape_sequences_can_be_kept(sandbox: Any) -> None:
    with Session(sandbox, ShellConfig(keep_ansi=True)) as session:
        ok(session.run(r"printf '\e[31mred\e[0m\r\n'"), "\x1b[31mred\x1b[0m\n")


def test_printing_the_protocol_changes_nothing(session: Session) -> None:
    ok(session.run(r"printf 'S1\0000\0himBHs\0/x.\0\0'; printf '\e]7771;t1\a'; false"), code=1)
    ok(session.run(r"printf 'S99\0000\0h\0/x.\0\0junk' >&502; (exit 3)"), "", code=3)
    ok(session.run("echo fine"), "fine\n")


# ------------------------------------------------------------------------------------------------------------------ background jobs
def test_background_job_does_not_hold_the_step(session: Session) -> None:
    started = time.monotonic()
    result = session.run("sleep 50 &")
    assert result.exit_code == 0
    ok(session.run("(sleep 50; echo never) & echo now"))
    ok(session.run("jobs -r | wc -l"), "2\n")
    ok(session.run("kill %1 %2; wait"), code=session.run("true").exit_code or 0)
    assert time.monotonic() - started < 20


def test_late_output_goes_to_the_next_step(session: Session) -> None:
    session.run("(sleep 0.1; echo late) & true")
    time.sleep(0.4)
    ok(session.run("echo next"), "late\nnext\n")


def test_flooding_background_job_does_not_hang_the_session(session: Session) -> None:
    session.run("yes flood & true")
    result = session.run("echo through; kill %1; wait; true")
    assert result.exit_code == 0
    ok(session.run("true"))
    ok(session.run("echo quiet"), "quiet\n")


# ---------------------------------------------------------------------------------------------------------------------- input wanted
def test_read_builtin_waits_for_input(session: Session) -> None:
    result = session.run("read -p 'name? ' x; echo got:$x")
    assert (result.state, result.exit_code, result.output) == (WAITING, None, "name? ")
    ok(session.keys("bob\n"), "bob\ngot:bob\n")
    ok(session.run("echo $x"), "bob\n")


def test_program_waits_for_input_and_run_types_into_it(session: Session) -> None:
    has(session, "python3")
    result = session.run('python3 -c \'print("hi " + input("name: "))\'')
    assert (result.state, result.exit_code, result.output) == (WAITING, None, "name: ")
    ok(session.run("eve"), "eve\nhi eve\n")


def test_password_style_prompt_does_not_echo(session: Session) -> None:
    assert session.run("read -s -p 'pw: ' p").state is WAITING
    ok(session.run("secret"), "")
    ok(session.run("echo $p"), "secret\n")


def test_pipeline_that_reads_the_terminal(session: Session) -> None:
    assert session.run("cat | tr a-z A-Z").state is WAITING
    assert session.keys("abc\n", wait_s=0.5).output == "abc\nABC\n"
    ok(session.keys("C-d", wait_s=5), "")


def test_interactive_python_and_back(session: Session) -> None:
    has(session, "python3")
    assert session.run("python3 -q").state is WAITING
    result = session.run("print(6*7)")
    assert result.state is WAITING
    assert "42" in result.output
    ok(session.run("raise SystemExit(3)"), code=3)


def test_interactive_subshell_and_back(session: Session) -> None:
    assert session.run("bash --norc").state is WAITING
    result = session.run("echo in $((1+1))")
    assert result.state is WAITING
    assert "in 2" in result.output
    ok(session.run("exit 5"), code=5)
    ok(session.run("echo out"), "out\n")


def test_a_program_that_only_sleeps_is_not_waiting(session: Session) -> None:
    ok(session.run("sleep 0.6; echo done"), "done\n")


# --------------------------------------------------------------------------------------------------------------------------- keys
@pytest.mark.parametrize(("key", "code"), [("C-c", 130), ("C-\\", 131), ("C-z", 148)])
def test_signal_keys_on_a_program(session: Session, key: str, code: int) -> None:
    assert session.keys("sleep 50\n", wait_s=0.1).state is RUNNING
    result = session.keys(key, wait_s=5)
    assert (result.exit_code, result.state) == (code, IDLE)
    ok(session.run("echo usable"), "usable\n")
    session.run("kill -9 %1 2>/dev/null")


def test_interrupt_key_on_a_builtin_loop(session: Session) -> None:
    assert session.keys("while :; do :; done\n", wait_s=0.1).state is RUNNING
    assert session.keys("C-c", wait_s=5).exit_code == 130
    ok(session.run("echo usable"), "usable\n")


def test_end_of_file_key(session: Session) -> None:
    assert session.run("cat").state is WAITING
    assert session.keys("C-d", wait_s=5).exit_code == 0


def test_keys_at_the_prompt_make_a_command(session: Session) -> None:
    assert session.keys("echo a", wait_s=0).state is IDLE
    session.keys("bX", wait_s=0)
    session.keys("BSpace", wait_s=0)
    ok(session.keys("Enter", wait_s=5), "ab\n")
    session.keys("rm -rf everything", wait_s=0)
    session.keys("C-c", wait_s=0)
    assert session.keys("Enter", wait_s=0.1).output == ""
    assert session.keys("C-d", wait_s=5).state is EXITED


def test_running_program_finishes_between_steps(session: Session) -> None:
    assert session.keys("sleep 0.3; echo over\n", wait_s=0.05).state is RUNNING
    time.sleep(0.6)
    ok(session.run("echo next"), "over\nnext\n")


# ----------------------------------------------------------------------------------------------------------------------- time limits
def check_timeout(result: ShellResult) -> None:
    assert result.timed_out
    assert result.exit_code == 124


def test_time_limit_keeps_partial_output(session: Session) -> None:
    session.run("sleep 99 & true")  # a job of an earlier step: not to be touched
    result = session.run("echo partial; sleep 100; echo not this", timeout_s=0.3)
    check_timeout(result)
    assert result.state is IDLE
    assert result.output.startswith("partial\n")
    assert "not this" not in result.output
    ok(session.run("echo $?; jobs -r | wc -l; pgrep -x -P $$ sleep | wc -l"), "130\n1\n1\n")


def test_time_limit_on_a_builtin_loop(session: Session) -> None:
    session.run("x=kept")
    check_timeout(session.run("while :; do :; done", timeout_s=0.2))
    ok(session.run("echo $x"), "kept\n")


def test_time_limit_against_ignored_signals(session: Session) -> None:
    result = session.run("(trap '' INT QUIT TERM; exec sleep 100)", timeout_s=0.2)
    check_timeout(result)
    assert result.state is IDLE
    ok(session.run("pgrep -x -P $$ sleep | wc -l"), "0\n")


def test_time_limit_against_a_shell_that_ignores_signals(session: Session) -> None:
    session.run("export KEPT=1; cd /usr")
    result = session.run("trap '' INT TERM; while :; do sleep 0.05; done", timeout_s=0.2)
    check_timeout(result)
    assert result.state is EXITED
    ok(session.run("echo $KEPT; pwd"), "1\n/usr\n")


def test_time_limit_against_children_in_sessions_of_their_own(session: Session) -> None:
    check_timeout(session.run("setsid -w sh -c 'trap \"\" INT; sleep 77.125' ; true", timeout_s=0.3))
    ok(session.run("pgrep -f 'sleep 77.12[5]' | wc -l"), "0\n")


def test_limit_on_silence(sandbox: Any) -> None:
    config = ShellConfig(timeout_s=20, quiet_timeout_s=0.4, interrupt_grace_s=0.3)
    with Session(sandbox, config) as session:
        ok(session.run("for i in 1 2 3 4; do echo $i; sleep 0.2; done"), "1\n2\n3\n4\n")
        result = session.run("echo a; sleep 30")
        check_timeout(result)
        assert result.seconds < 5


def test_time_limit_when_the_agent_replaced_the_prompt(session: Session) -> None:
    check_timeout(session.run("PS1=mine PROMPT_COMMAND='echo p'; PS1=x; PROMPT_COMMAND=; sleep 100", timeout_s=0.2))
    ok(session.run("echo back"), "back\n")


def test_text_typed_into_a_program_that_does_not_read_is_dropped_with_it(session: Session) -> None:
    assert session.keys("sleep 50\n", wait_s=0.1).state is RUNNING
    check_timeout(session.run("echo never", timeout_s=0.3))
    ok(session.run("read -t 0.1 x; echo $x"), "\n")
    assert session.keys("sleep 0.2\n", wait_s=0.05).state is RUNNING
    session.keys("typed ahead\n", wait_s=0.6)
    ok(session.run("read -t 0.1 x; echo $x"), "\n")


def test_stopped_shell_is_replaced(session: Session) -> None:
    result = session.run("kill -STOP $$", timeout_s=0.2)
    check_timeout(result)
    assert result.state is EXITED
    ok(session.run("echo new"), "new\n")


def test_flow_control_does_not_stop_the_terminal(session: Session) -> None:
    assert session.run("cat").state is WAITING
    session.keys("C-s", wait_s=0.05)
    session.keys("C-c")
    ok(session.run("echo flows"), "flows\n")


# ------------------------------------------------------------------------------------------------------------ the end of the shell
def test_exit(session: Session) -> None:
    session.run("export A='x y\nz'; cd /usr; export -f 2>/dev/null; B=local; f() { :; }")
    result = session.run("exit 3")
    assert (result.exit_code, result.state) == (3, EXITED)
    ok(session.run('echo "$A" ${B-unset}; pwd'), "x y\nz unset\n/usr\n")


@pytest.mark.parametrize(("text", "code"), [("exec sh -c 'exit 7'", 7), ("kill -9 $$", 137), ("set -e; false", 1), ("exec true", 0)])
def test_shell_ends(session: Session, text: str, code: int) -> None:
    session.run("export A=1")
    result = session.run(text)
    assert (result.exit_code, result.state) == (code, EXITED)
    ok(session.run("echo $A"), "1\n")


def test_exec_of_a_program_that_reads(session: Session) -> None:
    assert session.run("exec cat").state is WAITING
    assert "hello\nhello" in session.keys("hello\n", wait_s=0.4).output
    result = session.keys("C-d", wait_s=5)
    assert (result.exit_code, result.state) == (0, EXITED)
    ok(session.run("echo new"), "new\n")


def test_shell_killed_between_steps(session: Session) -> None:
    session.run("(sleep 0.1; kill -9 $$) & true")
    time.sleep(0.4)
    assert session.run("echo unheard").state is EXITED
    ok(session.run("echo new"), "new\n")


def test_exit_with_a_background_job_that_holds_the_terminal(session: Session) -> None:
    session.run("(trap '' HUP; sleep 30) & true")
    started = time.monotonic()
    assert session.run("exit").state is EXITED
    assert time.monotonic() - started < 10


def test_exit_trap_runs(session: Session) -> None:
    session.run("trap 'echo bye' EXIT")
    result = session.run("exit 4")
    assert (result.exit_code, result.state) == (4, EXITED)
    assert "bye" in result.output


# ------------------------------------------------------------------------------------------------ shell options and other mischief
MISCHIEF = {
    "nounset": "set -u; echo $undefined_variable",
    "verbose": "set -v",
    "noglob": "set -f",
    "noclobber": "set -C",
    "allexport": "set -a",
    "noexec": "set -n",
    "keyword": "set -k",
    "no job control": "set +m",
    "functrace": "set -T -E; trap 'true' RETURN ERR",
    "extdebug": "shopt -s extdebug",
    "posix": "set -o posix",
    "failglob": "shopt -s failglob; true",
    "ifs": "IFS=0123456789S",
    "prompt": "PS1='$(echo prompt)'; PS2=x; PROMPT_COMMAND='echo mine'",
    "prompt unset": "unset PROMPT_COMMAND PS1",
    "prompt readonly": "readonly PROMPT_COMMAND",
    "prompt array": "PROMPT_COMMAND+=('echo mine')",
    "tmout": "TMOUT=1",
    "pwd unset": "unset PWD OLDPWD DIRSTACK",
    "break": "break",
    "break 2": "break 2",
    "continue": "continue",
    "return": "return 3",
    "interrupt itself": "kill -INT $$",
    "stty echo": "stty -echo",
    "stty raw": "stty raw -echo",
    "descriptor 3": "exec 3>&1 4</dev/null 10>/dev/null 11>/dev/null",
    "closed stdin": "exec <&-",
    "aliases": "for w in builtin eval printf trap set mapfile export return case while do '{' '[['; do alias $w='echo oops'; done",
    "functions": 'for w in printf trap set mapfile export return read eval; do eval "function $w { echo oops; }"; done',
    "exit trap": "trap 'true' EXIT",
    "sigchld trap": "trap 'true' CHLD",
    "ignored pipe": "trap '' PIPE",
    "lastpipe": "shopt -s lastpipe; echo 1 | read x",
    "low nofile": "ulimit -n 64",
    "restored env": "export PATH=/usr/bin:/bin HOME=/ ; unset TERM LANG",
}


@pytest.mark.parametrize("text", MISCHIEF.values(), ids=MISCHIEF.keys())
def test_session_survives(session: Session, text: str) -> None:
    session.run("shell_is=same; cd /usr")
    first = session.run(text)
    assert first.state is IDLE
    assert "oops" not in first.output
    assert "t1" not in first.output.replace("/t1", "")
    for _ in range(2):
        ok(session.run("command echo $shell_is; command true"), "same\n" if text != MISCHIEF["verbose"] else None)
    if text not in (MISCHIEF["functrace"], MISCHIEF["functions"], MISCHIEF["aliases"], MISCHIEF["verbose"]):
        ok(session.run("/bin/sh -c 'echo a; exit 9'"), "a\n", code=9)
        ok(session.run("pwd"), "/usr\n")


def test_errors_of_unset_variables_keep_the_option(session: Session) -> None:
    result = session.run("set -u; echo $undefined_variable")
    assert result.exit_code in (1, 127)
    assert "unbound variable" in result.output
    assert session.run("echo $other_undefined").exit_code in (1, 127)


def test_xtrace_shows_only_the_agents_commands(session: Session) -> None:
    session.run("set -x")
    assert [line.lstrip("+ ") for line in session.run("echo a; (exit 3)").output.splitlines()] == ["echo a", "a", "exit 3"]
    assert [line.lstrip("+ ") for line in session.run("echo $?").output.splitlines()] == ["echo 3", "3"]
    session.run("set +x")
    ok(session.run("echo quiet"), "quiet\n")


def test_errexit_stays_on(session: Session) -> None:
    session.run("set -e")
    ok(session.run("echo $-; true | true; if false; then :; fi")).output.index("e")
    assert session.run("false").state is EXITED


def test_debug_trap_runs_for_the_agents_commands_only(session: Session) -> None:
    session.run("n=0; trap 'echo D' DEBUG")
    ok(session.run("echo a"), "D\na\n")
    ok(session.run("echo b; echo c"), "D\nb\nD\nc\n")
    session.run("trap - DEBUG")
    ok(session.run("echo quiet"), "quiet\n")


def test_err_trap_survives(session: Session) -> None:
    session.run("trap 'echo E' ERR")
    assert session.run("false; true").output == "E\n"
    ok(session.run("true"), "")


def test_exported_functions_and_options_of_bash_do_not_leak_the_protocol(session: Session) -> None:
    ok(session.run("env | grep -c t1_; ls /proc/self/fd | wc -l"), "0\n4\n")
    session.run("set -a")
    ok(session.run("env | grep -c -e t1_ -e PROMPT_COMMAND"), "0\n", code=1)


def test_closed_terminal_descriptors(session: Session) -> None:
    assert session.run("exec >/dev/null 2>&1").exit_code == 0
    assert session.run("echo lost; (exit 5)").exit_code == 5
    assert session.run("exec >/dev/tty 2>&1").exit_code == 0
    ok(session.run("echo back"), "back\n")
    session.run("exec 0<&- 1>&- 2>&-")
    assert session.run("(exit 6)").exit_code == 6


def test_all_descriptors_closed_keeps_the_shell(session: Session) -> None:
    session.run("cd /usr; export A=1; x=2; f() { echo f; }")
    result = session.run('for fd in /proc/$$/fd/*; do n=${fd##*/}; [ $n -gt 2 ] && eval "exec $n>&-"; done; echo closed; (exit 7)')
    ok(result, "closed\n", code=7)
    ok(session.run("echo $? $A $x $(f); pwd; ls /proc/self/fd | wc -l"), "7 1 2 f\n/usr\n4\n")


@pytest.mark.parametrize("fd", ["500<", "501<", "502>", "503>", "504>", "255>"])
def test_one_descriptor_closed_keeps_the_shell(session: Session, fd: str) -> None:
    session.run("x=2")
    ok(session.run(f"echo a; exec {fd}&-; (exit 5)"), "a\n", code=5)
    ok(session.run("echo $? $x"), "5 2\n")
    ok(session.run("echo again"), "again\n")


def test_directory_that_is_deleted(session: Session) -> None:
    session.run("mkdir -p /tmp/t1-gone && cd /tmp/t1-gone && rmdir /tmp/t1-gone")
    ok(session.run("echo alive"), "alive\n")
    assert session.run("exit").state is EXITED
    ok(session.run("pwd"))
    ok(session.run("cd /tmp && pwd"), "/tmp\n")


def test_odd_directory_names(session: Session) -> None:
    result = ok(session.run('d=$\'/tmp/t1 \\n\\\'"$x\\\\\'; mkdir -p "$d"; cd "$d"'))
    assert result.cwd == "/tmp/t1 \n'\"$x\\"
    assert session.run("exit").state is EXITED
    assert session.run("true").cwd == result.cwd
    session.run('cd /; rmdir "$OLDPWD"')


# ------------------------------------------------------------------------------------------------------------------ terminal matters
def test_it_is_a_terminal(session: Session) -> None:
    ok(session.run("[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && stty size && echo $TERM"), "24 80\nxterm-256color\n")


def test_resize(session: Session) -> None:
    session.resize(40, 100)
    ok(session.run("stty size"), "40 100\n")
    assert session.screen().shape == (40, 100)


def test_modes_left_by_a_program_do_not_reach_the_next_command(session: Session) -> None:
    session.run("stty raw -echo -onlcr")
    ok(session.run("echo a; echo b; stty -a | grep -c -- ' -icanon'"), "a\nb\n0\n", code=1)


def test_screen_follows_the_output(session: Session) -> None:
    session.run("clear; echo top; printf '\\e[10;20Hmiddle'")
    lines = session.screen_text().split("\n")
    assert lines[0] == "top"
    assert lines[9] == " " * 19 + "middle"


def test_killed_fullscreen_program_leaves_a_usable_terminal(session: Session) -> None:
    ok(session.run("echo before; printf '\\e[?1049h\\e[Hgarbage'"), "before\n")
    ok(session.run("echo after"), "after\n")
    assert "garbage" not in session.screen_text()


def test_cost_does_not_grow_with_history(session: Session) -> None:
    times = []
    for i in range(310):
        started = time.perf_counter()
        ok(session.run(f"echo turn {i}; x{i}={i}"), f"turn {i}\n")
        session.screen()
        times.append(time.perf_counter() - started)
    assert sum(sorted(times[-50:])[:25]) < 20 * sum(sorted(times[:50])[:25])  # not a benchmark: only that it is not O(history)


def test_less(session: Session) -> None:
    has(session, "less")
    session.run("echo before")
    result = session.run("seq 1 500 | LESS= less")
    assert result.state is FULLSCREEN
    assert session.screen_text().split("\n")[:2] == ["1", "2"]
    assert session.keys("G").state is FULLSCREEN
    assert "500" in session.screen_text()
    result = session.keys("q", wait_s=5)
    assert (result.exit_code, result.state) == (0, IDLE)
    assert session.screen_text().split("\n")[0] == "before"


def test_vim(session: Session) -> None:
    has(session, "vim")
    result = session.run("vim -u NONE -N /tmp/t1-vim.txt", timeout_s=15)
    assert result.state is FULLSCREEN
    assert "~" in session.screen_text()
    session.keys("ihello vim")
    assert session.screen_text().startswith("hello vim")
    session.keys("Escape", wait_s=0.3)
    result = session.keys(":wq\r", wait_s=10)
    assert (result.exit_code, result.state) == (0, IDLE)
    ok(session.run("cat /tmp/t1-vim.txt; rm /tmp/t1-vim.txt"), "hello vim\n")


def test_top(session: Session) -> None:
    has(session, "top")
    assert session.run("top", timeout_s=10).state in (FULLSCREEN, WAITING)
    assert "load average" in session.screen_text()
    assert session.keys("q", wait_s=5).exit_code == 0


# ------------------------------------------------------------------------------------------------------------------------ the sandbox
def test_dead_sandbox(sandbox_factory: Callable[[], Any]) -> None:
    backend = sandbox_factory()
    session = Session(backend, FAST)
    session.start()
    session.run("cd /usr")
    backend.close()
    result = session.run("echo x")
    assert (result.state, result.exit_code, result.cwd) == (ShellState.SANDBOX_DEAD, None, "/usr")
    assert session.keys("x").state is ShellState.SANDBOX_DEAD
    session.close()


def test_sandbox_that_dies_during_a_command(sandbox_factory: Callable[[], Any]) -> None:
    backend = sandbox_factory()
    session = Session(backend, FAST)
    session.start()
    timer = threading.Timer(0.3, backend.close)
    timer.start()
    result = session.run("echo begun; sleep 30")
    timer.join()
    assert (result.state, result.output) == (ShellState.SANDBOX_DEAD, "begun\n")
    session.close()


def test_life_cycle(sandbox: Any) -> None:
    session = Session(sandbox, FAST)
    with pytest.raises(ShellError, match="not started"):
        session.run("true")
    session.start()
    with pytest.raises(ShellError, match="already started"):
        session.start()
    session.close()
    session.close()
    session.start()
    ok(session.run("echo again"), "again\n")
    session.close()


def test_nothing_is_left_open(sandbox: Any) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with Session(sandbox, FAST) as warm:
        warm.run("true")
    gc.collect()
    before = descriptors()
    for _ in range(5):
        with Session(sandbox, FAST) as session:
            session.run("sleep 20", timeout_s=0.05)
            session.run("exit")
    gc.collect()
    assert descriptors() <= before


def test_sandbox_without_bash() -> None:
    class Broken:
        alive = True

        def spawn(self, *arguments: Any, **options: Any) -> Any:
            raise SandboxDied("gone")

    session = Session(Broken(), FAST)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(SandboxDied):
        session.start()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.fixture
def small_session() -> Iterator[Session]:
    backend = _local_sandbox(SandboxSpec(workdir="/app", storage_mb=16, max_processes=40))
    backend.start()
    with Session(backend, FAST) as session:
        yield session
    backend.close()


@pytest.mark.namespaces
def test_full_disk(small_session: Session) -> None:
    result = small_session.run("cat /dev/zero > /tmp/all; echo more >> /tmp/all")
    assert (result.exit_code, result.state) == (1, IDLE)
    assert "No space left" in result.output
    ok(small_session.run("echo works; rm /tmp/all; echo x > /tmp/b; cat /tmp/b"), "works\nx\n")


@pytest.mark.namespaces
def test_fork_bomb(small_session: Session) -> None:
    small_session.run("bomb() { bomb | bomb & }; bomb", timeout_s=2)
    time.sleep(0.3)
    small_session.run("kill -9 -1; true", timeout_s=5)
    assert small_session.run("echo alive").state is IDLE
    assert small_session.run("/bin/echo alive").output.endswith("alive\n")


@pytest.mark.slow
def test_a_hundred_megabytes(session: Session) -> None:
    result = ok(session.run("head -c 100000000 /dev/zero | tr '\\0' x", timeout_s=120))
    assert result.output_bytes == 100_000_000
    assert result.elided_bytes == 100_000_000 - FAST.max_output_bytes
