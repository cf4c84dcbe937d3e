"""A session's life, and what it makes of a sandbox that cannot run a shell (any more)."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from t1_env.errors import SandboxDied, SandboxError, ShellError
from t1_env.protocol import ShellState
from t1_env.shell import Session, ShellConfig, ShellResult
from t1_env.shell.dialect import ShellName

FAST = ShellConfig(timeout_s=60, interrupt_grace_s=0.3, quit_grace_s=0.2, kill_grace_s=0.6)
IDLE, EXITED = ShellState.IDLE, ShellState.SHELL_EXITED


@pytest.fixture
def spawner(process_spawner: type[Any], tmp_path: Path) -> Iterator[Any]:
    made = process_spawner(tmp_path)
    yield made
    made.close()


@pytest.fixture
def bare(process_spawner: type[Any], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a spawner whose PATH has the given programs and no other."""
    made = []

    def make(**programs: str) -> Any:
        directory = tmp_path / "bin"
        directory.mkdir(exist_ok=True)
        for name, target in programs.items():
            (directory / name).symlink_to(target)
        made.append(process_spawner(tmp_path, {"PATH": str(directory)}))
        return made[-1]

    yield make
    for spawner in made:
        spawner.close()


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if "bare" in request.fixturenames:  # a child is looked up in its own PATH, `execvpe` sees to that
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_is_left_open(spawner: Any) -> None:
    with Session(spawner, FAST) as warm:
        warm.run("true")
    before = descriptors()
    for _ in range(5):
        with Session(spawner, FAST) as session:
            session.run("sleep 20", timeout_s=0.05)
            session.run("exit")
            session.run("exec 500<&- 501<&- 502>&- 503>&- 504>&-")
            session.run("seq 1 10000")
    assert descriptors() <= before


def test_a_sandbox_that_is_gone_before_the_start() -> None:
    class Broken:
        alive = True

        def spawn(self, *arguments: Any, **options: Any) -> Any:
            raise SandboxDied("gone")

    before = descriptors()
    with pytest.raises(SandboxDied):
        Session(Broken(), FAST).start()  # type: ignore[arg-type]
    assert descriptors() == before


@pytest.mark.parametrize(
    ("shell", "programs", "advice"),
    [
        ("bash", {"sh": "/bin/sh"}, r"bash is not installed in this sandbox: use shell='sh'"),
        ("bash", {}, r"bash is not installed in this sandbox: expected it, or sh, in the PATH"),
        ("zsh", {"bash": "/bin/bash"}, r"zsh is not installed in this sandbox: use shell='bash'"),
        ("sh", {"bash": "/bin/bash"}, r"sh is not installed in this sandbox: use shell='bash'"),
    ],
)
def test_a_missing_shell(bare: Callable[..., Any], shell: ShellName, programs: dict[str, str], advice: str) -> None:
    sandbox = bare(**programs)
    before = descriptors()
    with pytest.raises(ShellError, match=advice):
        Session(sandbox, ShellConfig(shell=shell)).start()
    assert descriptors() <= before


def test_a_shell_that_does_not_work(bare: Callable[..., Any]) -> None:
    with pytest.raises(ShellError, match=r"bash ended with status 1 while starting; it printed ''\. Expected bash 5\.0 or later"):
        Session(bare(bash=shutil.which("false") or "/bin/false"), FAST).start()
    sandbox = bare(sh=shutil.which("cat") or "/bin/cat")
    with pytest.raises(ShellError, match="sh ended with status 1 while starting"):  # `cat -i`
        Session(sandbox, ShellConfig(shell="sh")).start()


def test_a_shell_that_the_agent_deleted(bare: Callable[..., Any], tmp_path: Path) -> None:
    """It is no error: the steps say what is missing, until the agent's world has a shell again."""
    sandbox = bare(bash="/bin/bash", rm="/bin/rm", true="/bin/true")
    with Session(sandbox, FAST) as session:
        assert session.run("export A=1; rm $(type -P bash)").exit_code == 0
        gone = session.run("exit 3")
        assert (gone.state, gone.exit_code) == (EXITED, 3)
        for step in (session.run("echo x"), session.keys("echo y\n")):
            assert (step.state, step.exit_code) == (EXITED, 127)
            assert "bash is not installed in this sandbox" in step.output
        assert session.pid == 0
        session.resize(30, 90)
        (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
        back = session.run("echo $A; echo $LINES")
        assert (back.state, back.output) == (IDLE, "1\n30\n")
        sandbox.close()
        assert session.run("x").state is ShellState.SANDBOX_DEAD


class Full:
    """A sandbox that starts no process while it is full, and is emptied by ``kill_all`` if it has that."""

    def __init__(self, spawner: Any) -> None:
        self.spawner = spawner
        self.alive = True
        self.is_full = False
        self.attempts = 0

    def spawn(self, *arguments: Any, **options: Any) -> Any:
        self.attempts += 1
        if self.is_full:
            raise SandboxError("fork: Resource temporarily unavailable")
        return self.spawner.spawn(*arguments, **options)


class Clearable(Full):
    """One that can be emptied."""

    cleared = 0

    def kill_all(self) -> None:
        self.cleared += 1
        self.is_full = False


class Stubborn(Full):
    """One that cannot be emptied although it says so."""

    def kill_all(self) -> None:
        raise SandboxError("some process could not be killed in time")


def test_room_is_made_for_a_new_shell(spawner: Any) -> None:
    sandbox = Clearable(spawner)
    with Session(sandbox, FAST) as session:
        session.run("export A=1")
        sandbox.is_full = True
        ended = session.run("exit 5")
        assert (ended.state, ended.exit_code, sandbox.cleared) == (EXITED, 5, 1)
        assert session.run("echo $A").output == "1\n"


@pytest.mark.parametrize("kind", [Full, Stubborn])
def test_a_full_sandbox_is_no_error(spawner: Any, kind: type[Full]) -> None:
    sandbox = kind(spawner)
    with Session(sandbox, FAST) as session:
        session.run("export A=1")
        sandbox.is_full = True
        assert session.run("exit 5").state is EXITED
        assert "Resource temporarily unavailable" in session.run("echo x").output
        sandbox.is_full = False
        assert session.run("echo $A").output == "1\n"


def test_a_sandbox_that_goes_while_room_is_made(spawner: Any) -> None:
    sandbox = Stubborn(spawner)
    with Session(sandbox, FAST) as session:
        sandbox.is_full, sandbox.alive = True, False
        assert session.run("exit").state is ShellState.SANDBOX_DEAD


def test_no_room_for_the_helper_of_a_repair(spawner: Any) -> None:
    """The shell is replaced, with its exports, without junk in the output."""
    sandbox = Clearable(spawner)
    with Session(sandbox, FAST) as session:
        session.run("export A=1")
        sandbox.is_full = True
        result = session.run("echo a; exec 500<&- 501<&- 502>&- 503>&- 504>&-")
        assert (result.state, result.output) == (EXITED, "a\n")
        assert session.run("echo $A").output == "1\n"


def test_a_mendable_shell_may_use_every_low_descriptor(spawner: Any) -> None:
    with Session(spawner, FAST) as session:
        session.run('for n in 3 4 5 6 7 8 9 10 11 12 13; do eval "exec $n</dev/null"; done; x=1')
        closed = session.run("exec 500<&- 501<&- 502>&- 503>&- 504>&-; (exit 3)")
        assert (closed.state, closed.exit_code, closed.output) == (IDLE, 3, "")
        assert session.run("echo $x; ls /proc/self/fd | wc -l").output == "1\n14\n"  # 0-13, of which the listing itself uses one of 3-9


def test_a_program_that_holds_our_descriptors_does_not_hide_that_they_are_closed(spawner: Any) -> None:
    with Session(spawner, FAST) as session:
        result = session.run("x=1; (while :; do sleep 0.1; done) & exec 500<&- 501<&- 502>&- 503>&- 504>&-; (exit 4)")
        assert (result.state, result.exit_code) == (IDLE, 4)
        assert session.run("kill $!; echo $x").output.endswith("1\n")


@pytest.mark.parametrize("target", ["/bin/bash", "/bin/dash", "/bin/busybox"])
def test_sh_is_whatever_the_sandbox_calls_so(bare: Callable[..., Any], target: str) -> None:
    if not Path(target).exists():
        pytest.skip(f"{target} is not installed here")
    tools = {name: shutil.which(name, path="/usr/bin:/bin") or "" for name in ("sleep", "cat", "true")}
    with Session(bare(sh=target, **tools), ShellConfig(shell="sh", timeout_s=60, interrupt_grace_s=0.3, quit_grace_s=0.2)) as session:

        def ok(result: ShellResult, output: str, code: int = 0) -> None:
            assert (result.output, result.exit_code, result.state) == (output, code, IDLE)

        ok(session.run("x=1; export A=2; echo $0; (exit 3)"), "sh\n", 3)
        ok(session.run("echo $? $x"), "3 1\n")
        assert session.run("echo 'unbalanced").exit_code in (1, 2)
        assert session.run("break").state is IDLE
        ok(session.run("echo back"), "back\n")
        assert session.keys("sleep 50\n", wait_s=0.5).state is ShellState.RUNNING
        assert session.keys("C-c", wait_s=60).exit_code == 130
        ok(session.run("echo usable"), "usable\n")
        assert session.run("cat").state is ShellState.WAITING_FOR_INPUT
        assert session.keys("C-d", wait_s=60).exit_code == 0
        assert session.run("sleep 70", timeout_s=0.3).timed_out
        ended = session.run("exit 6")
        assert (ended.state, ended.exit_code) == (EXITED, 6)
        ok(session.run("echo $A"), "2\n")


def test_a_command_that_the_caller_turned_away_from_is_ended(spawner: Any) -> None:
    def turn_away(*_: object) -> None:
        raise KeyboardInterrupt

    with Session(spawner, FAST) as session:
        session.run("x=kept")
        before = signal.signal(signal.SIGALRM, turn_away)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                session.run("sleep 50; echo slept")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        result = session.run("echo $x")
        assert (result.exit_code, result.state, result.output.splitlines()[-1]) == (0, IDLE, "kept")
        assert "slept" not in result.output


def test_a_forked_child_has_no_shell_and_takes_none_away(spawner: Any) -> None:
    with Session(spawner, FAST) as session:
        session.run("x=kept")
        pid = os.fork()
        if pid == 0:
            try:
                dead = session.run("x=changed").state is ShellState.SANDBOX_DEAD
                session.close()
            finally:
                os._exit(0 if dead else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        result = session.run("echo $x")
        assert (result.output, result.state) == ("kept\n", IDLE)


def test_closing_from_another_thread_waits_for_the_step(spawner: Any, tmp_path: Path) -> None:
    session = Session(spawner, FAST)
    session.start()
    results: list[ShellResult] = []
    step = threading.Thread(target=lambda: results.append(session.run("touch begun; sleep 0.5; echo over")))
    step.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    session.close()
    step.join(60)
    assert [result.output for result in results] == ["over\n"]
