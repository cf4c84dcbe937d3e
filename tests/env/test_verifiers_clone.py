"""Verification through a real local sandbox: what it sees, what it leaves behind, what it cannot be made to believe."""

import os
import time
from dataclasses import replace

import pytest

from t1_env.errors import TaskError
from t1_env.protocol import VerifierStatus
from t1_env.sandbox.base import SandboxSpec
from t1_env.tasks.schema import T1Metadata, TaskConfig
from t1_env.tasks.task import Task
from t1_env.verifiers import collect, run, run_verbatim
from t1_env.verifiers.verbatim import settle

local = pytest.importorskip("t1_env.sandbox.local")
REASON = local.unavailable_reason()
pytestmark = [pytest.mark.namespaces, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

TESTS = """
import os, subprocess
from pathlib import Path

APP = Path("/app")

def test_made():
    assert (APP / "made").read_text() == "yes\\n"

def test_runs():
    assert subprocess.run(["bash", "/app/run.sh"], capture_output=True, text=True).stdout == "ran\\n"

def test_scribbles():
    (APP / "from-the-clone").write_text("x")
    Path("/tmp/from-the-clone").write_text("x")
    subprocess.Popen(["sleep", "1000"], start_new_session=True)

def test_tests_are_read_only():
    try:
        Path("/tests/test_outputs.py").write_text("")
    except OSError:
        return
    raise AssertionError("writable")
"""
TEST_SH = """#!/bin/bash
mkdir -p /logs/verifier
if python3 -m pytest -rA /tests/test_outputs.py; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
MADE, RUNS, SCRIBBLES, READ_ONLY = (f"test_outputs.py::test_{name}" for name in ("made", "runs", "scribbles", "tests_are_read_only"))


def make_task(directory, tests=TESTS, timeout_s=20.0):
    (directory / "tests").mkdir(parents=True, exist_ok=True)
    (directory / "tests" / "test_outputs.py").write_text(tests)
    (directory / "tests" / "test.sh").write_text(TEST_SH)
    config = TaskConfig.model_validate({"verifier": {"timeout_sec": timeout_s}, "environment": {"memory_mb": 256}})
    return Task("seeds/clone", directory, "do", config, T1Metadata(), digest=os.fspath(directory), workdir="/app")


@pytest.fixture
def task(tmp_path):
    return make_task(tmp_path)


@pytest.fixture
def sandbox():
    box = local.LocalSandbox(SandboxSpec(workdir="/app"))
    box.start()
    yield box
    box.close()


def sh(sandbox, command):
    result = sandbox.run(["bash", "-c", command], timeout_s=20.0)
    assert result.exit_code == 0, result
    return result.stdout.decode()


def test_the_count_follows_the_work(sandbox, task):
    ids = collect(sandbox, task)
    assert ids == (MADE, RUNS, SCRIBBLES, READ_ONLY)
    first = run(sandbox, task, ids)
    assert first.infra_error is None
    assert first.as_bools() == {MADE: False, RUNS: False, SCRIBBLES: True, READ_ONLY: True}
    sh(sandbox, "echo yes > made")
    assert run(sandbox, task, ids).passed == 3
    sh(sandbox, "echo 'echo ran' > run.sh")
    assert run(sandbox, task, ids).solved
    sh(sandbox, "rm made")
    assert run(sandbox, task, ids).passed == 3


def test_nothing_of_a_verification_reaches_the_agent(sandbox, task):
    ids = collect(sandbox, task)
    look = "ls -laR --time-style=full-iso /app /tmp /root; ls -d /tests /logs /dev/.t1; cat /proc/mounts; ls /proc | grep -c '^[0-9]'"
    sh(sandbox, "touch made")
    before, generation = sh(sandbox, look), sandbox.generation()
    report = run(sandbox, task, ids)
    assert report.as_bools()[SCRIBBLES]
    assert sandbox.generation() == generation
    assert sh(sandbox, look) == before


def test_an_unchanged_filesystem_has_an_unchanged_generation(sandbox, task):
    generation = sandbox.generation()
    sh(sandbox, "ls / > /dev/null; cat /etc/hostname > /dev/null")
    assert sandbox.generation() == generation
    sh(sandbox, "echo yes > made")
    assert sandbox.generation() != generation


def test_a_background_daemon_cannot_touch_the_clone(sandbox, tmp_path):
    slow = """
import time
from pathlib import Path

def test_made():
    time.sleep(0.5)
    assert Path("/app/made").read_text() == "yes\\n"

def test_alone():
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"made" in path.read_bytes()]
"""
    task = make_task(tmp_path, slow)
    ids = collect(sandbox, task)
    sh(sandbox, "echo no > made")
    daemon = sandbox.spawn(["bash", "-c", "sleep 0.2; while :; do echo yes > made; done"], cwd="/app")
    assert run(sandbox, task, ids).as_bools() == {ids[0]: False, ids[1]: True}
    assert daemon.poll() is None  # thawed, not killed
    deadline = time.monotonic() + 10
    while sh(sandbox, "cat made") != "yes\n":
        assert time.monotonic() < deadline
    daemon.kill()


def test_the_agents_tree_does_not_configure_the_runner(sandbox, task):
    ids = collect(sandbox, task)
    hostile = "import builtins, os; os._exit(0)"
    for path in ("/conftest.py", "/app/conftest.py", "/app/sitecustomize.py", "/app/json.py", "/tmp/usercustomize.py"):
        sandbox.put(hostile.encode(), path)
    sandbox.put(b"[pytest]\naddopts = --collect-only\n", "/app/pytest.ini")
    sandbox.put(b"[pytest]\naddopts = --collect-only\n", "/pytest.ini")
    sandbox.put(b"exit 0\n", "/root/.bashrc")
    sh(sandbox, "mkdir -p /tests /logs/verifier; echo 'def test_made(): pass' > /tests/test_outputs.py; echo 1 > /logs/verifier/reward.txt")
    sh(sandbox, "export PYTEST_ADDOPTS=--co; touch /tmp/pytest-of-root")
    assert run(sandbox, task, ids).as_bools() == {MADE: False, RUNS: False, SCRIBBLES: True, READ_ONLY: True}


def test_ugly_files_where_deliverables_belong_cost_their_verifier_only(sandbox, tmp_path):
    task = make_task(tmp_path, TESTS, timeout_s=12.0)
    ids = collect(sandbox, task)
    for make in ("mkfifo made", "ln -s /dev/zero made", "ln -s made made", "mkdir made", "ln -s /proc/self/mem made"):
        sh(sandbox, f"rm -rf made; {make}")
        report = run(sandbox, task, ids, timeout_s=2.0)
        assert report.infra_error is None, make
        assert report.outcomes[MADE].status in (VerifierStatus.FAILED, VerifierStatus.ERROR), make
    sh(sandbox, "rm -rf made; echo yes > made; echo 'echo ran' > run.sh")
    assert run(sandbox, task, ids).solved


def test_an_agent_that_removed_its_tools_is_judged_all_the_same(sandbox, task):
    ids = collect(sandbox, task)
    sh(sandbox, "rm -rf /usr/lib/python3* /usr/bin/python3* /app /tmp/* || true")
    report = run(sandbox, task, ids)
    assert report.infra_error is None
    assert report.as_bools()[MADE] is False
    assert report.as_bools()[READ_ONLY] is True


def test_tests_that_do_not_collect_are_a_task_error(sandbox, tmp_path):
    with pytest.raises(TaskError, match="no_such_module"):
        collect(sandbox, make_task(tmp_path / "a", "import no_such_module\ndef test_x(): pass\n"))
    bare = make_task(tmp_path / "b", "x = 1\n")
    (bare.tests_dir / "test.sh").unlink()
    with pytest.raises(TaskError, match="no test found"):
        collect(sandbox, bare)


SCORES = """#!/bin/bash
[ "$(cat /app/made 2>/dev/null)" = yes ] && made=1 || made=0
echo "{\\"made\\": $made, \\"tidy\\": 0.5}" > /logs/verifier/reward.json
"""


def test_a_task_whose_script_leaves_scores_has_a_verifier_for_each(sandbox, tmp_path):
    task = make_task(tmp_path, "x = 1\n")
    (task.tests_dir / "test.sh").write_text(SCORES)
    ids = collect(sandbox, task)
    assert (ids, ids.source) == (("made", "tidy"), "reward.json")
    assert run(sandbox, task, ids).passed == 0
    sh(sandbox, "echo yes > made")
    report = run(sandbox, task, ids)
    assert (report.as_bools(), report.source) == ({"made": True, "tidy": False}, "reward.json")
    assert sh(sandbox, "ls -d /logs 2>/dev/null || true") == ""


def test_tests_that_import_what_the_agent_writes_are_listed_before_it_is_written(sandbox, tmp_path):
    task = make_task(tmp_path, "import sys; sys.path.insert(0, '/app')\nimport answer\ndef test_it(): assert answer.value == 42\n")
    (tmp_path / "solution").mkdir()
    (tmp_path / "solution" / "solve.sh").write_text("echo 'value = 42' > /app/answer.py\n")
    ids = collect(sandbox, task)
    assert (ids, ids.source) == (("test_outputs.py::test_it",), "runner")
    assert sh(sandbox, "ls -A /app; ls -d /solution 2>/dev/null || true") == ""
    assert run(sandbox, task, ids).outcomes[ids[0]].status is VerifierStatus.ERROR
    sh(sandbox, "echo 'value = 41' > answer.py")
    assert run(sandbox, task, ids).outcomes[ids[0]].status is VerifierStatus.FAILED
    sh(sandbox, "echo 'value = 42' > answer.py")
    assert run(sandbox, task, ids).solved


def test_a_run_that_is_out_of_time_is_a_verdict_not_an_infra_failure(sandbox, tmp_path):
    task = make_task(tmp_path, "import time\ndef test_a(): pass\ndef test_hang(): time.sleep(100)\n")
    ids = collect(sandbox, task)
    report = run(sandbox, task, ids, timeout_s=1.0)
    assert report.infra_error is None
    assert [outcome.status for outcome in report.outcomes.values()] == [VerifierStatus.PASSED, VerifierStatus.ERROR]


def test_the_tasks_own_script_agrees(sandbox, task):
    ids = collect(sandbox, task)
    for command, passed in (("true", 2), ("echo yes > made", 3), ("echo 'echo ran' > run.sh", 4)):
        sh(sandbox, command)
        verbatim = run_verbatim(sandbox, task, ids)
        assert verbatim.problem is None, verbatim
        settled = settle(run(sandbox, task, ids), verbatim)
        assert (settled.report.passed, settled.agrees, verbatim.report.source) == (passed, True, "pytest")
    assert sh(sandbox, "ls -d /logs 2>/dev/null || true") == ""


@pytest.mark.parametrize("prepare", ["echo x > /logs", "ln -s /app /logs", "mkdir -p /logs; mkfifo /logs/verifier", "ln -s /nowhere /logs"])
def test_the_agent_cannot_prepare_where_the_script_writes(sandbox, task, prepare):
    ids = collect(sandbox, task)
    sh(sandbox, prepare)
    assert run_verbatim(sandbox, task, ids).report.passed == 2


# -------------------------------------------------------------------------------------------------------------------- the base system
TOOLS = """
import subprocess
from pathlib import Path

def test_by_a_program():
    assert subprocess.run(["sha256sum", "/app/made"], capture_output=True, text=True).stdout.startswith("5ad5")

def test_by_a_path():
    assert subprocess.run(["/usr/bin/env", "cat", "/app/made"], capture_output=True, text=True).stdout == "expected\\n"

def test_by_reading():
    assert Path("/app/made").read_text() == "expected\\n"
"""


def test_programs_that_lie_earn_nothing(sandbox, tmp_path):
    task = make_task(tmp_path, TOOLS)
    ids = collect(sandbox, task)
    sh(sandbox, "echo wrong > made")
    for name, said in (("sha256sum", "5ad5"), ("cat", "expected")):
        sh(sandbox, f"mkdir -p /usr/local/bin; printf '#!/bin/sh\\necho {said}\\n' > /usr/local/bin/{name}; chmod +x /usr/local/bin/{name}")
    report = run(sandbox, task, ids)
    assert report.passed == 0
    assert report.masked == ("/usr/local/bin/cat", "/usr/local/bin/sha256sum")
    sh(sandbox, "echo expected > made")
    report = run(sandbox, task, ids)
    assert report.as_bools() == {ids[0]: False, ids[1]: True, ids[2]: True}  # honest work counts beside them
    for restored, passed in ((False, 3), (True, 2)):
        assert run_verbatim(sandbox, task, ids, restored=restored).report.passed == passed
    assert settle(report, run_verbatim(sandbox, task, ids, restored=bool(report.masked))).agrees
    sh(sandbox, "rm /usr/local/bin/cat /usr/local/bin/sha256sum")
    assert run(sandbox, task, ids).masked == ()


def test_new_programs_and_packages_of_the_agent_count(sandbox, tmp_path):
    task = make_task(tmp_path, "import subprocess\ndef test_x(): assert subprocess.check_output('greet') == b'hello\\n'\n")
    ids = collect(sandbox, task)
    sh(sandbox, "mkdir -p /usr/local/bin /usr/local/lib/greet; echo hello > /usr/local/lib/greet/text")
    sh(sandbox, "printf '#!/bin/sh\\ncat /usr/local/lib/greet/text\\n' > /usr/local/bin/greet; chmod +x /usr/local/bin/greet")
    report = run(sandbox, task, ids)
    assert (report.passed, report.masked) == (1, ())


SERVICE = """
import socket

def test_answers():
    with socket.create_connection(("127.0.0.1", 8124), timeout=5) as client:
        assert client.recv(5) == b"hello"

def test_file():
    assert open("/app/made").read() == "yes\\n"
"""
SERVER = """
import socket
server = socket.socket(); server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", 8124)); server.listen(); open("/tmp/ready", "w").close()
while True:
    client, _ = server.accept(); client.sendall(b"hello"); client.close()
"""


def test_a_server_of_the_agent_is_asked_where_it_runs(sandbox, tmp_path):
    if sandbox.run(["python3", "-c", "import socket"]).exit_code != 0:
        pytest.skip("no Python in the sandbox")
    task = make_task(tmp_path, SERVICE)
    ids = collect(sandbox, task)
    assert run(sandbox, task, ids).passed == 0
    sandbox.put(SERVER.encode(), "/app/server.py")
    sh(sandbox, "echo yes > made")
    server = sandbox.spawn(["python3", "/app/server.py"])
    sh(sandbox, "until test -e /tmp/ready; do sleep 0.02; done")
    report = run(sandbox, task, ids)
    assert [outcome.message for outcome in report.outcomes.values()] == ["", ""]
    verbatim = run_verbatim(sandbox, task, ids)
    assert (verbatim.problem, verbatim.report.passed) == (None, 2)
    assert server.poll() is None
    server.kill()
    server.wait(10)
    assert run(sandbox, task, ids).as_bools() == {ids[0]: False, ids[1]: True}


# ----------------------------------------------------------------------------------------------------------------- what a test finds
SURROUNDINGS = """
import os, site, sys, importlib.metadata

def test_isolated():
    assert sys.flags.isolated and sys.flags.no_user_site and sys.flags.ignore_environment and sys.flags.no_site

def test_environment():
    expected = {"PATH", "HOME", "HOSTNAME", "LANG", "LOGNAME", "SHELL", "TERM", "TZ", "USER", "PAGER", "GIT_PAGER", "DEBIAN_FRONTEND", "A"}
    assert {name for name in os.environ if not name.startswith("PYTEST_")} == expected
    assert "PYTEST_ADDOPTS" not in os.environ and "PYTEST_PLUGINS" not in os.environ

def test_no_user_site():
    assert not [path for path in sys.path if path.startswith(("/root", "/app", "/home", "/tmp", "/usr"))]
    assert "sitecustomize" not in sys.modules and "usercustomize" not in sys.modules

def test_no_agents_conftest(pytestconfig):
    files = [getattr(plugin, "__file__", "") or "" for plugin in pytestconfig.pluginmanager.get_plugins()]
    assert [file for file in files if file.endswith("conftest.py")] == ["/tests/conftest.py"]

def test_no_plugins(pytestconfig):
    assert pytestconfig.pluginmanager.list_plugin_distinfo() == []
    assert pytestconfig.inipath is None or str(pytestconfig.inipath) == "/dev/null"

def test_library_is_trusted():
    library = [path for path in sys.path if path != "/tests"]
    assert library and all(path.startswith("/dev/.") for path in library)
    for path in library:
        if os.path.isdir(path):
            try:
                open(path + "/new", "w")
            except OSError:
                continue
            raise AssertionError(path)
"""


def test_the_toolchain_is_trusted(sandbox, tmp_path):
    task = make_task(tmp_path, SURROUNDINGS)
    task = replace(task, config=task.config.model_copy(update={"verifier": task.config.verifier.model_copy(update={"env": {"A": "1"}})}))
    (task.tests_dir / "conftest.py").write_text("")
    ids = collect(sandbox, task)
    site = "/root/.local/lib/python3.11/site-packages"
    sh(sandbox, f"mkdir -p {site}; for name in sitecustomize usercustomize conftest; do echo 'raise SystemExit' > {site}/$name.py; done")
    for path in ("/", "/app", "/root"):
        sh(sandbox, f"echo 'raise SystemExit' > {path}/conftest.py; printf '[pytest]\\naddopts=--co' > {path}/pytest.ini")
    report = run(sandbox, task, ids)
    assert [outcome.message for outcome in report.outcomes.values()] == [""] * len(ids)


PROGRAMS = """
import os, pty, subprocess, sys
from pathlib import Path

LOOK = "cat /tests/expected.txt 2>/dev/null || echo nothing"

def test_run():
    assert subprocess.run(["bash", "/app/look.sh"], capture_output=True, text=True).stdout == "nothing\\n"

def test_a_path_that_only_looks_like_it():
    assert subprocess.run(["bash", "/app/look.sh", "/app/tests", "/testsuite"], capture_output=True, text=True).stdout == "nothing\\n"

def test_shell():
    os.system("bash /app/look.sh > /tmp/seen")
    assert Path("/tmp/seen").read_text() == "nothing\\n"
    assert os.popen("bash /app/look.sh").read() == "nothing\\n"

def test_terminal():
    pid, fd = pty.fork()
    if pid == 0:
        os.execvp("bash", ["bash", "/app/look.sh"])
    assert os.read(fd, 100) == b"nothing\\r\\n"
    os.waitpid(pid, 0)

def test_helper_of_the_tests():
    assert subprocess.check_output(["bash", "/tests/helper.sh"]) == b"42\\n"
    assert subprocess.check_output(["cat", "expected.txt"], cwd="/tests") == b"42\\n"
    env = {"TEST_DIR": "/tests", "PATH": os.environ["PATH"]}
    assert subprocess.check_output("cat $TEST_DIR/expected.txt", shell=True, env=env) == b"42\\n"

def test_where_it_runs():
    out = subprocess.run("pwd; ls /app; echo x > made-by-program; exit 3", shell=True, capture_output=True, text=True, cwd="/app")
    assert (out.returncode, out.stdout.split()[:2]) == (3, ["/app", "look.sh"])
    assert Path("/app/made-by-program").read_text() == "x\\n"
    assert os.system("kill -9 $$") == 9 and os.system("exit 3") == 3 << 8
    assert subprocess.run([sys.executable, "-I", "-c", "print(1)"], capture_output=True, cwd="/app").returncode == 0
"""


def test_programs_do_not_see_the_tests(sandbox, tmp_path):
    task = make_task(tmp_path, PROGRAMS)
    (task.tests_dir / "expected.txt").write_text("42\n")
    (task.tests_dir / "helper.sh").write_text("cat /tests/expected.txt\n")
    ids = collect(sandbox, task)
    escape = " ".join(f"{path}/tests/expected.txt" for path in ("", "/proc/1/root", "/proc/$PPID/root", "/proc/*/cwd/..", "/proc/*/root"))
    sandbox.put(f"cat {escape} 2>/dev/null | grep . || echo nothing\n".encode(), "/app/look.sh")
    report = run(sandbox, task, ids)
    assert [outcome.message for outcome in report.outcomes.values()] == [""] * len(ids)


def test_modules_kept_apart_do_not_see_the_tests(sandbox, tmp_path):
    task = make_task(tmp_path, "import sys; sys.path.insert(0, '/app')\nimport solution\ndef test_it(): assert solution.look() == '42'\n")
    task = replace(task, metadata=T1Metadata(imports="apart"))
    (task.tests_dir / "expected.txt").write_text("42")
    (tmp_path / "solution").mkdir()
    (tmp_path / "solution" / "solve.sh").write_text("echo 'def look(): return str(6 * 7)' > /app/solution.py\n")
    ids = collect(sandbox, task)
    look = """
import os
def look():
    for path in ("/tests", "/proc/self/root/tests", "/proc/1/root/tests", f"/proc/{os.getppid()}/root/tests", "../tests"):
        try: return open(path + "/expected.txt").read()
        except OSError: pass
    for _ in range(20):
        try:
            os.chroot("/app")
            os.chdir("../../../..")
            os.chroot(".")
            return open("/tests/expected.txt").read()
        except OSError as error: last = repr(error)
    return last
"""
    sandbox.put(look.encode(), "/app/solution.py")
    report = run(sandbox, task, ids)
    assert (report.passed, report.tainted) == (0, ())
    sh(sandbox, "echo 'def look(): return str(6 * 7)' > /app/solution.py")
    report = run(sandbox, task, ids)
    assert (report.passed, report.tainted) == (1, ())
