"""An outpost in native mode: a sandbox's processes, files and shells through one connection."""

from __future__ import annotations

import errno
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t1_env.errors import ConfigError, SandboxDied, ShellError, TransportLost
from t1_env.protocol import ShellState
from t1_env.sandbox.base import KillsAll, ReportsIncidents, Sandbox
from t1_env.sandbox.local import SandboxFileError
from t1_env.shell import OffersShell, Session, ShellConfig

FAST = ShellConfig(timeout_s=60, interrupt_grace_s=0.3, quit_grace_s=0.2, kill_grace_s=0.6)
PATIENCE_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def box(outpost: Callable[..., Any]) -> Any:
    return outpost("native")


# ------------------------------------------------------------------------------------------------------------------------ protocol
def test_it_is_a_sandbox(box: Any, tmp_path: Path) -> None:
    assert isinstance(box, Sandbox)
    assert isinstance(box, OffersShell)
    assert isinstance(box, KillsAll)
    assert isinstance(box, ReportsIncidents)
    assert (box.mode, box.isolation, box.alive, box.incidents) == ("native", "none", True, ())
    assert box.run(["pwd"]).stdout == f"{tmp_path}/work\n".encode()
    box.close()
    box.close()
    assert not box.alive
    with pytest.raises(SandboxDied):
        box.run(["true"])
    with pytest.raises(SandboxDied):
        box.start()


def test_run(box: Any) -> None:
    result = box.run(["sh", "-c", "cat; echo err >&2; echo $A $PWD; exit 3"], stdin=b"in\n", env={"A": "b"}, cwd="/usr")
    assert (result.exit_code, result.stdout, result.stderr, result.timed_out) == (3, b"in\nb /usr\n", b"err\n", False)
    assert box.run(["sh", "-c", "kill -9 $$"]).exit_code == 137
    assert box.run(["pwd"], cwd="/does/not/exist").stdout == b"/\n"
    assert box.run(["sh", "-c", "yes | head -c 1000000"], max_output_bytes=10).stdout == b"y\ny\ny\ny\ny\n"
    assert box.run(["sh", "-c", "ls /proc/self/fd | wc -l"]).stdout.strip() == b"4"  # and the listing's own
    assert b"T1_" not in box.run(["env"]).stdout
    assert box.run(["cat"], stdin=b"x" * 3_000_000, max_output_bytes=1 << 22).stdout == b"x" * 3_000_000


def test_a_program_that_cannot_be_executed_says_so_as_in_a_shell(box: Any) -> None:
    missing = box.run(["no-such-program"])
    assert (missing.exit_code, missing.stderr) == (127, b"t1: no-such-program: No such file or directory\n")
    refused = box.run(["/etc/passwd"])
    assert (refused.exit_code, refused.stderr) == (126, b"t1: /etc/passwd: Permission denied\n")
    process = box.spawn(["no-such-program"], pty_size=(4, 20))
    assert process.wait(PATIENCE_S) == 127
    process.kill()
    os.close(process.pty_fd)


def test_a_program_over_its_time_is_killed_with_its_session(box: Any, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    result = box.run(["sh", "-c", f"echo partial; sleep 1000 & echo $! > {pid}; wait"], timeout_s=1)
    assert (result.exit_code, result.stdout, result.timed_out) == (None, b"partial\n", True)
    assert not runs(int(pid.read_text()))


def test_spawn_with_a_terminal(box: Any) -> None:
    process = box.spawn(["sh", "-c", "tty; stty size; read x; echo got:$x; exit 4"], pty_size=(7, 33))
    assert process.pid == 0
    assert process.poll() is None
    seen = b""
    os.write(process.pty_fd, b"word\n")
    while select.select([process.pty_fd], [], [], PATIENCE_S)[0] and (data := os.read(process.pty_fd, 4096)):
        seen += data
    assert b"/dev/pts/" in seen
    assert b"7 33" in seen
    assert b"got:word" in seen
    assert process.wait(PATIENCE_S) == 4
    os.close(process.pty_fd)


def test_letting_go_of_a_terminal_hangs_up(box: Any) -> None:
    process = box.spawn(["sleep", "1000"], pty_size=(24, 80))
    os.close(process.pty_fd)
    assert process.wait(PATIENCE_S) == 129


def test_spawn_wait_and_kill(box: Any) -> None:
    process = box.spawn(["sleep", "1000"])
    assert process.wait(0.05) is None
    process.kill(15)
    assert process.wait(PATIENCE_S) == 143
    process.kill()
    with pytest.raises(ConfigError, match="fds"):
        box.spawn(["true"], fds={3: 0})
    with pytest.raises(ConfigError, match="argv"):
        box.run("not a list")
    forgotten = box.spawn(["sleep", "1000"])
    box.kill_all()
    assert forgotten.wait(PATIENCE_S) == 137
    assert box.run(["echo", "still there"]).stdout == b"still there\n"


def test_the_end_of_a_sandbox_ends_all_it_started(box: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    box.run(["sh", "-c", f"(setsid sh -c 'echo $$ >> {pids}; trap \"\" TERM HUP; sleep 1000' &) ; sleep 1000 & echo $! >> {pids}"])
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    box.close()
    until(lambda: not any(runs(int(pid)) for pid in pids.read_text().split()))


# --------------------------------------------------------------------------------------------------------------------------- files
def test_put_and_get(box: Any, tmp_path: Path) -> None:
    there = tmp_path / "there"
    box.put(b"text", f"{there}/a/b", mode=0o640)
    assert box.get(f"{there}/a/b") == b"text"
    assert (there / "a/b").stat().st_mode & 0o7777 == 0o640
    box.put(b"", f"{there}/empty")
    assert box.get(f"{there}/empty") == b""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(2_500_001))
    source.chmod(0o755)
    os.utime(source, ns=(10**18, 10**18 + 5))
    box.put(source, f"{there}/a/b")
    assert box.get(f"{there}/a/b") == source.read_bytes()
    assert ((there / "a/b").stat().st_mode & 0o7777, (there / "a/b").stat().st_mtime_ns) == (0o755, 10**18 + 5)
    with pytest.raises(ConfigError, match="absolute"):
        box.put(b"", "relative")
    with pytest.raises(ConfigError, match="mode"):
        box.put(tmp_path, "/x", mode=0o644)


def test_a_file_larger_than_a_message_comes_in_parts(box: Any, tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        for block in range(40):
            file.write(bytes([block]) * (1 << 20))
    assert box.get(str(large), max_bytes=1 << 26) == large.read_bytes()
    for limit in ((40 << 20) - 1, 20 << 20, 10):
        with pytest.raises(SandboxFileError) as failure:
            box.get(str(large), max_bytes=limit)
        assert failure.value.errno == errno.EFBIG
    assert len(box.get(str(large), max_bytes=40 << 20)) == 40 << 20


def test_put_a_tree(box: Any, tmp_path: Path) -> None:
    source = tmp_path / "tree"
    (source / "deep/er").mkdir(parents=True)
    (source / "deep/er/file").write_bytes(b"1")
    (source / "script").write_bytes(b"#!/bin/sh\n")
    (source / "script").chmod(0o755)
    (source / "big").write_bytes(os.urandom(3 << 20))
    (source / "link").symlink_to("../outside")
    for number in range(700):
        (source / f"n{number}").write_bytes(b"%d" % number)
    (source / "deep").chmod(0o711)
    os.utime(source / "deep", ns=(1, 10**18))
    there = tmp_path / "there"
    box.put(source, str(there))
    compare = subprocess.run(["diff", "-r", "--no-dereference", source, there], capture_output=True, text=True, check=False)
    assert compare.stdout == ""
    assert (there / "link").readlink() == Path("../outside")
    assert (there / "deep").stat().st_mode & 0o7777 == 0o711
    assert (there / "deep").stat().st_mtime_ns == 10**18
    assert (there / "script").stat().st_mode & 0o111
    os.mkfifo(source / "fifo")
    with pytest.raises(SandboxFileError, match="Not a regular file") as failure:
        box.put(source, str(there))
    assert failure.value.filename == str(source / "fifo")


def test_files_that_cannot_be_moved(box: Any, tmp_path: Path) -> None:
    def failing(call: Callable[[], object]) -> tuple[int | None, str | None]:
        with pytest.raises(SandboxFileError) as failure:
            call()
        return failure.value.errno, failure.value.filename

    os.mkfifo(tmp_path / "fifo")
    assert failing(lambda: box.get("/no/such")) == (errno.ENOENT, "/no/such")
    assert failing(lambda: box.get("/tmp")) == (errno.EISDIR, "/tmp")
    assert failing(lambda: box.get(str(tmp_path / "fifo")))[0] == errno.EINVAL
    assert failing(lambda: box.put(tmp_path / "none", "/tmp/x")) == (errno.ENOENT, str(tmp_path / "none"))
    assert failing(lambda: box.put(b"x", "/proc/version/x")) == (errno.ENOTDIR, "/proc/version/x")
    assert failing(lambda: box.put(b"x", "/"))[0] == errno.EISDIR


def test_generation_changes_with_every_change(box: Any, tmp_path: Path) -> None:
    work = tmp_path / "work"
    seen = [box.generation()]
    assert box.generation() == seen[0]
    for command in ("echo a > f", "echo b > f", "chmod 600 f", "mkdir -p d/e", "touch d/e/g", "ln -s x l", "mv f d/f", "rm -r d"):
        box.run(["sh", "-c", command], cwd=str(work))
        seen.append(box.generation())
    assert len(set(seen)) == len(seen)
    assert box.system_changes() == {}


# -------------------------------------------------------------------------------------------------------------------------- shells
def test_shell(box: Any, tmp_path: Path) -> None:
    with Session(box, FAST) as session:
        result = session.run("cd /usr && echo hello; (exit 3)")
        assert (result.output, result.exit_code, result.state, result.cwd) == ("hello\n", 3, ShellState.IDLE, "/usr")
        assert (session.cwd, session.state, session.pid) == ("/usr", ShellState.IDLE, 0)
        assert session.run("echo $?").output == "3\n"
        assert session.run("read -p 'name? ' x; echo got:$x").state is ShellState.WAITING_FOR_INPUT
        assert session.keys("bob\n", wait_s=PATIENCE_S).output == "bob\ngot:bob\n"
        over = session.run("echo partial; sleep 1000", timeout_s=0.5)
        assert (over.output.rstrip(), over.timed_out, over.exit_code) == ("partial", True, 124)
        assert session.run("kill -9 $$").state is ShellState.SHELL_EXITED
        assert session.run("pwd").output == "/usr\n"
        assert session.run("printf '\\xff\\0ü\\n'").output == "\ufffdü\n"
        large = session.run("head -c 3000000 /dev/zero | tr '\\0' x")
        assert large.output_bytes == 3_000_000
        assert session.run(f"x='{'y' * (1 << 20)}'; echo ${{#x}}").output == "1048576\n"
    with pytest.raises(ShellError, match="not started"):
        session.run("true")
    session.close()


def test_screen_and_size(box: Any) -> None:
    with Session(box, ShellConfig(rows=5, cols=30)) as session:
        session.run("printf 'ab\\ncd'")
        assert session.screen_text() == "ab\ncd"
        assert session.cursor == (1, 2)
        session.run("clear; printf 'second'")
        assert session.screen_text() == "second"
        session.resize(9, 44)
        assert session.screen().shape == (9, 44)
        assert session.run("stty size").output == "9 44\n"


def test_the_screen_travels_with_the_answer_while_somebody_looks(box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    client = box._client
    submit = client.submit
    monkeypatch.setattr(client, "submit", lambda operation, *a, **k: (asked.append(operation), submit(operation, *a, **k))[1])
    with Session(box, FAST) as session:
        asked.clear()
        session.run("echo 1")
        session.run("echo 2")
        session.screen()
        assert asked == ["shell.run", "shell.run", "shell.screen"]
        asked.clear()
        for number in range(3):
            session.run(f"clear; echo {number}")
            assert session.screen_text() == str(number)
        assert asked == ["shell.run"] * 3


def test_the_log_can_be_read_by_offset(box: Any) -> None:
    with Session(box, FAST) as session:
        session.run("echo first")
        second = session.run("printf '\\e[31msecond\\e[0m'")
        assert session.log(second.log_start, second.log_end - second.log_start) == b"\x1b[31msecond\x1b[0m"


def test_a_slow_step_blocks_nothing_else(box: Any) -> None:
    with Session(box, FAST) as slow, Session(box, FAST) as quick:
        done = threading.Event()
        threads = [threading.Thread(target=lambda: (slow.run("sleep 1000", timeout_s=1000), done.set()), daemon=True)]
        threads += [threading.Thread(target=lambda: box.run(["sleep", "1000"], timeout_s=1000), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(20):
            assert quick.run(f"echo {number}").output == f"{number}\n"
        assert box.run(["echo", "also"]).stdout == b"also\n"
        assert not done.is_set()
        box.kill_all()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)


def test_closing_with_a_step_in_flight(box: Any) -> None:
    session = Session(box, FAST)
    session.start()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(session.run("sleep 1000", timeout_s=1000)), daemon=True)
    thread.start()
    time.sleep(0.3)
    box.close()
    thread.join(PATIENCE_S)
    assert [result.state for result in results] == [ShellState.SANDBOX_DEAD]
    assert session.run("true").state is ShellState.SANDBOX_DEAD


def test_many_threads_and_shells(box: Any) -> None:
    failures: list[str] = []

    def play(number: int) -> None:
        with Session(box, FAST) as session:
            for step in range(25):
                output = session.run(f"echo {number}.{step}").output
                if output != f"{number}.{step}\n":
                    failures.append(f"{number}.{step}: {output!r}")

    threads = [threading.Thread(target=play, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failures == []


# --------------------------------------------------------------------------------------------------------------------------- pid 1
@pytest.fixture
def container(outpost: Callable[..., Any], tmp_path: Path) -> Any:
    """An outpost that is pid 1 of a pid namespace."""
    before = ("unshare", "--fork", "--pid", "--mount", "--mount-proc", "--kill-child", "--")
    if os.geteuid() != 0:
        before = (*before[:1], "--user", "--map-root-user", *before[1:])
    probe = [*before, "true"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let us make a pid namespace with unshare(1)")
    return outpost("native", before=before)


@pytest.mark.namespaces
def test_as_pid_1_it_survives_everything_the_agent_can_send(container: Any) -> None:
    with Session(container, FAST) as session:
        assert session.run("export A=7; cat /proc/1/comm").exit_code == 0
        for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "ALRM", "CHLD", "PIPE", "TSTP", "STOP", "ABRT", "SEGV", "KILL"):
            assert session.run(f"kill -{name} 1").exit_code == 0
        assert session.run("echo alive").output == "alive\n"
        assert container.run(["bash", "-c", "kill -9 -1; echo not only builtins | cat"]).stdout == b"not only builtins\n"
        assert session.run("echo $A").state is ShellState.SHELL_EXITED
        assert session.run("echo $A").output == "7\n"


@pytest.mark.namespaces
def test_as_pid_1_it_reaps_orphans(container: Any) -> None:
    container.run(["sh", "-c", "for i in 1 2 3 4 5; do (setsid sh -c 'exit 3' &) ; done"])
    until(lambda: b"Z" not in container.run(["sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null | sed 's/.*) //' | cut -c1"]).stdout)


@pytest.mark.namespaces
def test_its_children_die_first_when_memory_runs_out(container: Any) -> None:
    own = Path(f"/proc/{container.stream.pid}/oom_score_adj").read_text().strip()
    assert container.run(["cat", "/proc/self/oom_score_adj"]).stdout.strip() in (b"500", own.encode())
    with Session(container, FAST) as session:
        assert session.run("cat /proc/$$/oom_score_adj").output.strip() == "500"


@pytest.mark.namespaces
def test_the_end_of_the_connection_ends_the_container(container: Any) -> None:
    container.spawn(["sleep", "1000"])
    children = Path(f"/proc/{container.stream.pid}/task/{container.stream.pid}/children").read_text().split()
    assert children
    os.kill(container.stream.pid, 0)
    container._client._stream._stdin.close()  # as if this process had died
    until(lambda: not any(runs(int(pid)) for pid in children))
    until(lambda: not container.alive)


# ----------------------------------------------------------------------------------------------------------------- what may go wrong
def test_a_killed_outpost_is_a_lost_transport(box: Any) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            box.run(["sleep", "1000"], timeout_s=1000)
        except TransportLost as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    os.kill(box.stream.pid, 9)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(errors) == 3
    assert not box.alive
    with pytest.raises(TransportLost):
        box.run(["true"])


def test_an_agent_that_takes_all_processes_is_not_a_failure_of_the_machinery(outpost: Callable[..., Any]) -> None:
    """The kernel refuses the outpost a process twice: what the agent runs is ended, and it is tried again."""
    script = """
import errno, os, sys, threading
sys.path.insert(0, sys.argv[1])
import t1_env
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.outpost.children import Children
from t1_env.sandbox.outpost.native import NativeSandbox
from t1_env.sandbox import syscalls
syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
box = NativeSandbox(SandboxSpec(workdir="/tmp"), Children())
box.start()
greedy = box.spawn(["sleep", "1000"])
real, refused = os.posix_spawn, []
def posix_spawn(*args, **kwargs):
    if len(refused) < 2:
        refused.append(1)
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
    return real(*args, **kwargs)
os.posix_spawn = posix_spawn
print(box.run(["echo", "there is room"]).stdout, greedy.wait(30))
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parents[2])], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert result.stdout == "b'there is room\\n' 137\n", result.stderr
