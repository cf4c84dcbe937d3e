"""Who waits for input, by every source the kernel may offer, and what its prompt is called."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from t1_env.protocol import ShellState
from t1_env.shell import Session, ShellConfig, blocked
from t1_env.shell.prompts import is_continuation

CONFIG = ShellConfig(timeout_s=30, interrupt_grace_s=0.3, quit_grace_s=0.2)
WAITING, RUNNING = ShellState.WAITING_FOR_INPUT, ShellState.RUNNING


@pytest.fixture
def session(process_spawner: type[Any], tmp_path: Path) -> Iterator[Session]:
    spawner = process_spawner(tmp_path)
    with Session(spawner, CONFIG) as session:
        yield session
    spawner.close()


@pytest.mark.parametrize("sources", [("syscall", "wchan", "stat"), ("wchan", "stat")])
def test_programs_that_read_lines(session: Session, monkeypatch: pytest.MonkeyPatch, sources: tuple[str, ...]) -> None:
    monkeypatch.setattr(blocked, "SOURCES", sources)
    if "syscall" not in sources and Path("/proc/self/wchan").read_text() and not _wchan_works():
        pytest.skip("this kernel does not tell in what a process sleeps")
    assert session.run("read -p 'name? ' x; echo got:$x").state is WAITING
    assert session.run("bob").output == "bob\ngot:bob\n"
    assert session.run("cat | tr a-z A-Z").state is WAITING
    assert session.keys("C-d", wait_s=10).exit_code == 0
    assert session.run("bash --norc").state is WAITING  # raw mode, poll
    assert session.run("exit 4").exit_code == 4
    result = session.run("sleep 0.7; echo slept")
    assert (result.state, result.output) == (ShellState.IDLE, "slept\n")
    assert session.keys("sleep 60\n", wait_s=0.6).state is RUNNING


def _wchan_works() -> bool:
    with subprocess.Popen(["sleep", "30"]) as process:
        time.sleep(0.2)
        found = Path(f"/proc/{process.pid}/wchan").read_text()
        process.kill()
    return found not in ("", "0")


@pytest.mark.parametrize("machine", ["riscv128", ""])
def test_an_unknown_architecture_falls_back(session: Session, monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    if not _wchan_works():
        pytest.skip("this kernel does not tell in what a process sleeps")
    monkeypatch.setattr(blocked.platform, "machine", lambda: machine)
    assert session.run("cat").state is WAITING
    assert session.keys("C-d", wait_s=10).exit_code == 0


def test_where_only_sleeping_is_known_the_terminal_modes_decide(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "SOURCES", ("stat",))
    assert session.run("stty -echo; cat").state is WAITING  # how a password is asked for
    assert session.run("secret").output == "secret\n"
    assert session.keys("C-d", wait_s=10).exit_code == 0
    assert session.run("bash --norc").state is WAITING
    assert session.run("exit 4").exit_code == 4
    assert session.keys("cat\n", wait_s=1).state is RUNNING  # it might as well be computing: the time limit decides
    assert session.keys("C-d", wait_s=10).exit_code == 0
    result = session.run("stty -echo; i=0; while ((i < 200000)); do ((++i)); done; echo $i")
    assert (result.state, result.output) == (ShellState.IDLE, "200000\n")


def test_a_program_with_a_connection_is_not_taken_for_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    if not _wchan_works():
        pytest.skip("this kernel does not tell in what a process sleeps")
    monkeypatch.setattr(blocked, "SOURCES", ("wchan", "stat"))
    master, slave = os.openpty()
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]})).recv(1)"
        with subprocess.Popen([sys.executable, "-c", code], stdin=slave) as process:
            connection, _ = server.accept()
            try:
                deadline = time.monotonic() + 120
                while (call := blocked.blocked_call(process.pid).call) != "wait" and time.monotonic() < deadline:
                    assert call != "read"
                    time.sleep(0.02)
                assert call == "wait"
            finally:
                process.kill()
                connection.close()
    os.close(master)
    os.close(slave)


def test_processes_that_are_gone() -> None:
    assert blocked.blocked_call(2**22 + 1) == blocked.Sleep("")
    assert blocked.program_name(2**22 + 1) == ""
    assert not blocked.has_descriptor(2**22 + 1, 0)


@pytest.mark.parametrize(
    ("program", "line", "expected"),
    [
        ("bash", "> ", True), ("dash", "> ", True), ("sh", "> ", True), ("zsh", "dquote> ", True), ("zsh", "for while> ", True),
        ("python3", "... ", True), ("python3.11", "... ", True), ("pypy3", "... ", True), ("python3", ">>> ", False),
        ("python3", "> ", False), ("bash", "$ ", False), ("bash", ">> ", False), ("node", "> ", False), ("node", "... ", False),
        ("cat", "> ", False), ("", "> ", False), ("zsh", "vm# ", False), ("bash", "", False),
    ],
)  # fmt: skip
def test_continuation_prompts(program: str, line: str, expected: bool) -> None:
    assert is_continuation(program, line) is expected


def test_an_interpreter_that_wants_the_rest_of_a_command(session: Session) -> None:
    assert session.run("bash --norc").state is WAITING
    assert session.run("for i in 1 2").state is ShellState.CONTINUATION
    result = session.run("do echo $i; done")
    assert result.state is WAITING
    assert "1\n2\n" in result.output
    assert session.run("echo 'open").state is ShellState.CONTINUATION
    assert session.keys("C-c").state is WAITING
    assert session.run("exit").state is ShellState.IDLE
