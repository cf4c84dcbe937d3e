"""``t1-env``: help, mistakes (one line, status 2, nothing half-written), Ctrl-C, and what the commands print."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t1_env.cli.main import main
from t1_env.sandbox.local import unavailable_reason

needs_namespaces = [pytest.mark.namespaces, pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))]
HELLO = "seeds/hello-file"


@pytest.fixture
def t1_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process: (status, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def default_sigint() -> None:
    """A job in the background of a script ignores SIGINT, and Python then raises no KeyboardInterrupt: undo that in the child."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def assert_one_line(error: str) -> None:
    assert error.endswith("\n")
    assert error.count("\n") == 1, error
    assert "Traceback" not in error


# ------------------------------------------------------------------------------------------------------------------------ usage
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["tasks", "check", "--help"], ["play", "--help"]])
def test_help_and_version(t1_env: Any, arguments: list[str]) -> None:
    status, out, err = t1_env(*arguments)
    assert (status, err) == (0, "")
    assert "t1-env" in out


def test_no_command_prints_help(t1_env: Any) -> None:
    status, out, _ = t1_env()
    assert status == 2
    assert "doctor" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["docter"], "did you mean 'doctor'"),
        (["fly"], "expected one of doctor, "),
        (["tasks", "lst"], "did you mean 'list'"),
        (["tasks"], "ACTION"),
        (["run"], "TASK"),
        (["run", HELLO, "--agent", "expert"], "invalid choice"),
        (["run", HELLO, "--seed", "-1"], "not an integer of at least 0"),
        (["run", HELLO, "--seed", "one"], "not an integer"),
        (["run", HELLO, "--max-turns", "0"], "not an integer of at least 1"),
        (["run", HELLO, "--fast"], "--fast"),
        (["run", "seeds/helo-file"], "hello-file"),
        (["run", "families/nothing"], "families/nothing"),
        (["run", "families/tidy-files?level=99"], "no level 99"),
        (["run", "./does-not-exist"], "does-not-exist"),
        (["run", ""], "empty"),
        (["run", HELLO, "--reward", "dleta"], "did you mean 'delta'"),
        (["run", HELLO, "--sandbox", "lokal"], "did you mean 'local'"),
        (["run", HELLO, "--step-timeout", "0"], "step_timeout_s"),
        (["run", HELLO, "--record", "/proc/nowhere"], "cannot be made"),
        (["play", "seeds/unknown"], "seeds/unknown"),
        (["tasks", "check", "seeds/unknown"], "seeds/unknown"),
        (["tasks", "check", "--jobs", "0"], "not an integer of at least 1"),
        (["tasks", "list", "nothing/*"], "nothing/*"),
    ],
)
def test_mistakes_give_one_line_and_status_2(t1_env: Any, arguments: list[str], message: str) -> None:
    status, out, err = t1_env(*arguments)
    assert status == 2
    assert_one_line(err)
    assert message in err
    assert out == ""


@pytest.mark.parametrize("command", [["run"], ["play"], ["tasks", "check"]])
@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("schema_version = ", "not valid TOML"),
        ('[verifier]\ntimeout_sec = "soon"\n', "verifier.timeout_sec"),
        ("[environment]\ncpus = -1\n", "environment.cpus"),
        (None, "task.toml is missing"),
    ],
)
def test_a_malformed_task_is_named(t1_env: Any, tmp_path: Path, command: list[str], toml: str | None, message: str) -> None:
    task = tmp_path / "broken"
    task.mkdir()
    (task / "instruction.md").write_text("Do it.")
    if toml is not None:
        (task / "task.toml").write_text(toml)
    status, _, err = t1_env(*command, str(task))
    assert status == 2
    assert_one_line(err)
    assert message in err
    assert sorted(path.name for path in task.iterdir()) == (["instruction.md"] if toml is None else ["instruction.md", "task.toml"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_directory_is_a_mistake(t1_env: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    status, _, err = t1_env("run", HELLO, "--record", str(tmp_path))
    assert status == 2
    assert_one_line(err)


def test_a_missing_extra_names_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from t1_env.integrations import sb3

    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    assert sb3.main(["--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert_one_line(error)
    assert "python -m pip install 't1-terminal[sb3]'" in error
    assert not (tmp_path / "out").exists()


def test_no_namespaces_is_one_line(t1_env: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from t1_env.errors import SandboxUnavailable
    from t1_env.sandbox.local import LocalSandbox

    def cannot(self: LocalSandbox) -> None:
        raise SandboxUnavailable("this machine has no\nuser namespaces: enable them")

    monkeypatch.setattr(LocalSandbox, "start", cannot)
    for command in (["run"], ["play"], ["tasks", "check"]):
        status, _, err = t1_env(*command, HELLO)
        assert status == 2
        assert_one_line(err)
        assert "no user namespaces" in err


def test_debug_shows_the_traceback() -> None:
    from t1_env.errors import UnknownTask

    with pytest.raises(UnknownTask):
        main(["--debug", "run", "seeds/unknown"])


# ----------------------------------------------------------------------------------------------------------------------- doctor
def test_doctor_says_what_works(t1_env: Any) -> None:
    status, out, err = t1_env("doctor")
    for name in ("local", "docker", "ssh", "agent", "sb3"):
        assert f" {name} " in out
    assert (status == 0) == (unavailable_reason() is None)
    assert (err == "") == (status == 0)
    assert ("cgroups" in out and "storage" in out) == (status == 0)


def test_doctor_fails_without_namespaces_and_names_missing_extras(t1_env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from t1_env.cli import doctor
    from t1_env.errors import SandboxUnavailable

    def refuse(*_: object) -> None:
        raise SandboxUnavailable("user namespaces are off: sysctl kernel.unprivileged_userns_clone=1")

    monkeypatch.setattr(doctor, "LocalSandbox", refuse)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    status, out, err = t1_env("doctor")
    assert status == 1
    assert "sysctl" in out
    for extra in ("docker", "ssh", "agent", "sb3"):
        assert f"pip install 't1-terminal[{extra}]'" in "".join(out.split("│")).replace("\n", "").replace("  ", "")
    assert_one_line(err)


def test_doctor_says_which_limits_do_not_hold() -> None:
    from t1_env.cli import doctor

    all_of_them = doctor._limits(frozenset(doctor._LIMITS))
    assert all_of_them.ok
    assert "not enforced" not in all_of_them.detail
    some = doctor._limits(frozenset({"storage_limit", "freeze", "network_off", "process_limit"}))
    assert not some.ok
    assert "not enforced: memory, CPU time (run as root" in some.detail


def test_doctor_says_that_no_engine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("docker")
    from t1_env.cli import doctor

    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    finding = doctor._docker()
    assert not finding.ok
    assert "/nonexistent/docker.sock" in finding.detail
    assert "DOCKER_HOST" in finding.detail


def test_doctor_says_whether_ssh_knows_a_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("paramiko")
    from t1_env.cli import doctor

    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("T1_SSH_")]:
        monkeypatch.delenv(name)
    assert not doctor._ssh().ok
    assert "T1_SSH_HOST" in doctor._ssh().detail
    monkeypatch.setenv("T1_SSH_HOST", "somewhere.example")
    assert doctor._ssh().ok
    assert "somewhere.example" in doctor._ssh().detail


# ------------------------------------------------------------------------------------------------------------------------ tasks
def test_tasks_list(t1_env: Any) -> None:
    status, out, err = t1_env("tasks", "list")
    assert (status, err) == (0, "")
    assert HELLO in out
    assert "families/tidy-files?level=1" in out
    status, out, _ = t1_env("tasks", "list", "seeds/*")
    assert "families/" not in out


def copy_of_hello(tmp_path: Path, name: str = "mine") -> Path:
    from t1_env.tasks import load_task

    return Path(shutil.copytree(load_task(HELLO).path, tmp_path / name))


class TestWithSandbox:
    pytestmark = needs_namespaces

    def test_tasks_check(self, t1_env: Any) -> None:
        status, out, err = t1_env("tasks", "check", HELLO, "families/tidy-files?level=1&n=2", "--jobs", "2")
        assert (status, err) == (0, "")
        assert out.count("ok  ") == 3
        assert "3 of 3 tasks are sound" in out
        assert "slips" not in out

    def test_tasks_check_plays_slips_when_asked_to(self, t1_env: Any, tmp_path: Path) -> None:
        assert f"ok    {HELLO}  verifiers: 3, oracle steps: 1, slips: 3" in t1_env("tasks", "check", HELLO, "--slips")[1]
        task = copy_of_hello(tmp_path, "hello-file")
        slip = '[{"step": 0, "command": "echo hi > /app/hello.txt", "kind": "none"}]'
        (task / "solution" / "slips.json").write_text(slip)
        assert t1_env("tasks", "check", str(task))[0] == 0
        status, out, _ = t1_env("tasks", "check", str(task), "--slips")
        assert status == 1
        assert "the slip 'none' at step 0 costs no verifier" in out

    def test_tasks_check_finds_what_is_wrong(self, t1_env: Any, tmp_path: Path) -> None:
        free = copy_of_hello(tmp_path, "free")
        (free / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\nRUN echo hi > /app/hello.txt\n")
        wrong = copy_of_hello(tmp_path, "wrong")
        (wrong / "solution" / "solve.sh").write_text("# step: nothing\ntrue\n")
        status, out, _ = t1_env("tasks", "check", str(free), str(wrong))
        assert status == 1
        assert "doing nothing passes" in out
        assert "the oracle fails" in out
        assert "task.name ends in 'hello-file', but the directory is 'wrong'" in out
        assert "0 of 2 tasks are sound" in out

    def test_run_oracle(self, t1_env: Any, tmp_path: Path) -> None:
        status, out, err = t1_env("run", "--agent", "oracle", HELLO, "--record", str(tmp_path / "records"))
        assert (status, err) == (0, "")
        assert "3/3" in out
        assert "solved after 1 step (solved), return +3" in out
        assert out.count("│ pass │") == 3
        assert [path.name for path in (tmp_path / "records").iterdir()] == ["episode-000000.jsonl"]

    def test_run_says_where_the_tasks_script_disagrees(self, t1_env: Any, tmp_path: Path) -> None:
        task = copy_of_hello(tmp_path)
        (task / "tests" / "test.sh").write_text("mkdir -p /logs/verifier; echo 0 > /logs/verifier/reward.txt\n")
        status, out, _ = t1_env("run", str(task))
        assert status == 1
        assert "not solved after 1 step (solved), return +0" in out
        assert "test.sh disagrees: all verifiers pass: runner True, reward.txt False" in out

    def test_run_noop(self, t1_env: Any) -> None:
        status, out, err = t1_env("run", "--agent", "noop", HELLO)
        assert (status, err) == (0, "")
        assert "not solved after 1 step (submitted), return +0" in out

    def test_run_without_an_oracle_is_a_mistake(self, t1_env: Any, tmp_path: Path) -> None:
        task = copy_of_hello(tmp_path)
        shutil.rmtree(task / "solution")
        status, _, err = t1_env("run", str(task))
        assert status == 2
        assert_one_line(err)
        assert "no oracle" in err

    def test_play_from_a_pipe(self, t1_env: Any) -> None:
        status, out, err = t1_env("play", HELLO, stdin="pwd\n\n:help\n:screen\nfalse\necho hi > hello.txt\n")
        assert (status, err) == (0, "")
        assert "[1] /app $ pwd\n/app\n" in out
        assert "[exit 1]" in out
        assert "commands: :submit" in out
        assert "solved after 3 steps (solved), return +3" in out

    def test_play_submits_at_the_end_of_input_and_can_be_left(self, t1_env: Any) -> None:
        assert "(submitted)" in t1_env("play", HELLO, stdin="ls")[1]
        assert "(submitted)" in t1_env("play", HELLO, stdin=":submit\nls\n")[1]
        assert "after 0 steps (not ended)" in t1_env("play", HELLO, stdin=":quit\n")[1]

    def test_play_sends_keys(self, t1_env: Any) -> None:
        status, out, _ = t1_env("play", HELLO, stdin="read -r answer\n:keys hi\n:keys Enter\necho got $answer\n")
        assert status == 0
        assert "[waiting for input]" in out
        assert "got hi" in out

    def test_control_c_is_130_and_leaves_nothing(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "t1_env", "play", HELLO]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=tmp_path, text=True, preexec_fn=default_sigint) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert "verifiers" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
            assert_one_line(process.stderr.read())
        assert list(tmp_path.iterdir()) == []

    def test_control_c_stops_a_long_check(self) -> None:
        command = [sys.executable, "-m", "t1_env", "tasks", "check", "families/tidy-files?level=1&n=5000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=default_sigint) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert "families/tidy-files" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
            assert_one_line(process.stderr.read())

    def test_output_into_a_closed_pipe_is_no_error(self) -> None:
        line = f"{sys.executable} -m t1_env tasks list | head -n 1; echo status ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True)
        assert done.stderr == ""
        assert "status 0" in done.stdout
