"""Verification clones and fingerprints: exact, one-way, and of bounded life."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.local import LocalSandbox, unavailable_reason

pytestmark = pytest.mark.namespaces

AS_ROOT = os.getuid() == 0
AS_ROOT_ONLY = pytest.mark.skipif(not AS_ROOT, reason="an ordinary user's sandbox has one user; the host's files belong to nobody in it")
ECHO = "t1_env.sandbox.probe:echo"
EXECUTE = "t1_env.sandbox.probe:execute"


@pytest.fixture(autouse=True, scope="module")
def _needs_namespaces():
    if reason := unavailable_reason():
        pytest.skip(reason)


@pytest.fixture
def sandbox():
    with LocalSandbox() as box:
        yield box


def sh(box: LocalSandbox, script: str) -> str:
    result = box.run(["bash", "-c", script])
    assert result.exit_code == 0, result
    return result.stdout.decode()


def in_clone(box: LocalSandbox, script: str, **options) -> str:
    result = box.run_in_clone(EXECUTE, {"argv": ["bash", "-c", script]}, **options)
    assert result.error is None, result.error
    assert result.payload["exit_code"] == 0, result.payload
    return result.payload["stdout"]


# -------------------------------------------------------------------------------------------------------------------------- clones
@pytest.mark.parametrize("payload", [None, 0, "text", {"a": [1, 2.5, None, "\u2028\U0001f600"]}, []])
def test_payloads_come_back_as_they_went(sandbox, payload):
    result = sandbox.run_in_clone(ECHO, payload)
    assert (result.payload, result.error) == (payload, None)
    assert result.seconds > 0


def test_large_payloads_travel(sandbox):
    text = '0123456789"\\\n' * 400_000
    assert sandbox.run_in_clone(ECHO, text).payload == text


def test_a_clone_sees_exactly_the_sandboxs_files(sandbox):
    sh(
        sandbox,
        "echo a > /app/a; mkdir -m 750 /app/d; ln -s a /app/l; echo t > /tmp/t; echo s > /dev/shm/s; mkdir /srv/new; "
        "rm /etc/nsswitch.conf; rm -r /etc/pam.d; mkdir /etc/pam.d; echo o > /etc/pam.d/only; "
        "echo x >> /etc/profile; mkdir /opt/new /usr/new; chmod 700 /opt /",
    )
    if AS_ROOT:
        sh(sandbox, "chown 1000:1000 /app; rm /usr/bin/nohup; chmod 711 /usr/bin/env")
    script = (
        "cd /; find app tmp srv home root dev/shm opt/new etc/pam.d -printf '%p %y %m %U %G %s %l\\n' | sort; "
        "stat -c '%n %a' / /usr /opt /etc /tmp; cat /app/a /tmp/t /dev/shm/s; tail -n1 /etc/profile; "
        "ls -l /usr/bin/nohup /usr/bin/env /etc/nsswitch.conf 2>/dev/null; hostname; pwd; umask; env | sort | grep -Ev '^_=|SHLVL|PWD'"
    )
    # The size of a directory belongs to the filesystem that holds it, an overlay or a tmpfs.
    normal = "| sed -E 's/^(.*) d ([0-9]+ [0-9]+ [0-9]+) [0-9]+ $/\\1 d \\2/'"
    assert in_clone(sandbox, f"({script}) {normal}") == sh(sandbox, f"({script}) {normal}")
    sh(sandbox, "chmod 755 /")


def test_nothing_written_in_a_clone_reaches_the_sandbox(sandbox):
    sh(sandbox, "echo original > /app/file; mkdir /app/keep")
    before = sandbox.generation()
    in_clone(
        sandbox,
        "echo changed > /app/file; echo more >> /etc/passwd; rm -r /app/keep; touch /tmp/new /dev/shm/new /usr/new /new; chmod 777 /app; "
        "rm /etc/profile; mkfifo /app/fifo",
    )
    assert sandbox.generation() == before
    assert sh(sandbox, "cat /app/file; ls /app; ls /tmp /dev/shm; ls /etc/profile; stat -c %a /app") == (
        "original\nfile\nkeep\n/dev/shm:\n\n/tmp:\n/etc/profile\n755\n"
    )
    assert in_clone(sandbox, "cat /app/file; ls /tmp") == "original\n"  # nor the next clone


def test_the_agents_processes_stand_still_and_go_on(sandbox):
    process = sandbox.spawn(["bash", "-c", "i=0; while :; do i=$((i+1)); echo $i >> /app/n; done"])
    _wait_for_file(sandbox, "/app/n")
    first, second = in_clone(sandbox, "stat -c %s /app/n; sleep 0.3; stat -c %s /app/n").split()
    assert first == second
    now = sandbox.get("/app/n")
    deadline = time.monotonic() + 10
    while sandbox.get("/app/n") == now and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sandbox.get("/app/n") != now
    process.kill()


def test_a_clone_has_processes_network_and_ipc_of_its_own(sandbox):
    process = sandbox.spawn(["sleep", "1000"])
    sh(sandbox, "ipcmk -Q >/dev/null")
    assert "sleep" not in in_clone(sandbox, "cat /proc/[0-9]*/comm")
    assert in_clone(sandbox, "wc -l < /proc/sysvipc/msg") == "1\n"
    assert in_clone(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") == "lo\n"
    in_clone(sandbox, "kill -9 -1 || true")
    assert process.poll() is None
    process.kill()


def test_mounts_are_visible_read_only_and_in_the_clone_alone(sandbox, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "expected.txt").write_text("42\n")
    (tmp_path / "single.txt").write_text("one file\n")
    mounts = {"/tests": tmp_path / "tests", "/srv/deep/down": tmp_path / "tests", "/etc/single": tmp_path / "single.txt"}
    script = (
        "cat /tests/expected.txt /srv/deep/down/expected.txt /etc/single; "
        "! touch /tests/x 2>/dev/null && ! rm /tests/expected.txt 2>/dev/null"
    )
    assert in_clone(sandbox, script, mounts=mounts) == "42\n42\none file\n"
    assert sandbox.run(["ls", "/tests", "/srv/deep", "/etc/single"]).stdout == b""
    assert (tmp_path / "tests" / "expected.txt").read_text() == "42\n"


def test_what_the_agent_plants_at_a_mount_point_does_not_divert_it(sandbox, tmp_path):
    (tmp_path / "expected.txt").write_text("42\n")
    sh(sandbox, "mkdir /app/fake; echo 43 > /app/fake/expected.txt; ln -s /app/fake /tests; ln -s / /deep; echo file > /plain")
    mounts = {"/tests": tmp_path, "/deep/down": tmp_path, "/plain": tmp_path}
    assert in_clone(sandbox, "cat /tests/expected.txt /deep/down/expected.txt /plain/expected.txt", mounts=mounts) == "42\n42\n42\n"
    assert sh(sandbox, "cat /tests/expected.txt; readlink /deep; cat /plain") == "43\n/\nfile\n"


@pytest.mark.parametrize("target", ["/proc/x", "/dev/x", "/sys", "/", "/a/../dev"])
def test_kernel_filesystems_cannot_be_mounted_over(sandbox, tmp_path, target):
    result = sandbox.run_in_clone(ECHO, 1, mounts={target: tmp_path})
    assert result.payload is None
    assert "cannot mount" in result.error


def test_hidden_host_paths_are_not_in_clones(sandbox):
    """The interpreter is mounted there, the tasks and their solutions are not."""
    listing = in_clone(sandbox, "cd /dev/.??*; find . -maxdepth 4 -name tasks -o -maxdepth 4 -name '*.toml' -path '*tasks*'; ls -d 0")
    root = Path(__file__).resolve().parents[2]
    assert all(not (root / line.removeprefix("./")).exists() or "t1_env/tasks" in line for line in listing.split())
    assert in_clone(sandbox, "find / -xdev -path '*/hello-file/*' -o -path '*/solution/solve.sh' 2>/dev/null | head") == ""


def test_the_interpreters_library_is_somewhere_else_each_time(sandbox):
    first, second = (in_clone(sandbox, "ls -A /dev | grep '^\\.'") for _ in range(2))
    assert first != second
    assert len(first.strip()) > 32
    assert in_clone(sandbox, "touch /dev/.*/x /dev/.*/0/x 2>/dev/null; echo $?") == "1\n"


def test_a_root_without_the_mounts_can_be_entered_and_not_left(sandbox, tmp_path):
    (tmp_path / "secret").write_text("42")
    sh(sandbox, "echo agent > /app/file; mkdir /usr/local/lib/new")
    script = r"""
        bare=$(echo /dev/.??*/bare)
        cat /tests/secret; echo
        ls /tests; ls -d $bare/app $bare/usr/local/lib/new $bare/proc/1; ls -A $bare/tests $bare/dev/.*/bare; cat $bare/app/file
        echo clone > $bare/app/file; cat /app/file; echo x > $bare/dev/shm/x; cat /dev/shm/x
        test -e $bare/dev/null && echo device; chroot / true 2>&1 | grep -c -i permitted; touch $bare/dev/new 2>&1 | grep -c -i read-only
    """
    said = in_clone(sandbox, script.replace("chroot / true", "(chroot / true || /usr/sbin/chroot / true)"), mounts={"/tests": tmp_path})
    lines = said.replace("\n\n", "\n").splitlines()
    assert lines[0] == "42"
    assert [line for line in lines if "secret" in line] == ["secret"]
    assert lines[-5:-3] == ["clone", "x"]
    assert lines[-3] == "device"
    assert int(lines[-2]) >= 1
    assert sh(sandbox, "cat /app/file; ls -d /tests 2>/dev/null; true") == "agent\n"


# ----------------------------------------------------------------------------------------------------------- what can go wrong in one
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("t1_env.sandbox.probe:nothing_there", "nothing_there"),
        ("t1_env.no_such_module:f", "no_such_module"),
        ("not an entry", "package.module:function"),
        ("t1_env.sandbox.base:CloneResult", "CloneResult"),
        ("math:sqrt", "must be real number"),
        ("sys:exit", "SystemExit"),
        ("os:_exit", "integer"),
    ],
)
def test_errors_come_back_as_errors(sandbox, entry, message):
    result = sandbox.run_in_clone(entry, "payload")
    assert result.payload is None
    assert message in result.error
    assert sandbox.run_in_clone(ECHO, 1).payload == 1


def test_a_function_that_dies_without_a_word(sandbox):
    result = sandbox.run_in_clone("os:_exit", 3)
    assert result.payload is None
    assert "without a result (exit status 3)" in result.error


def test_a_result_that_is_not_json(sandbox):
    result = sandbox.run_in_clone("builtins:memoryview", "x")
    assert "memoryview" in result.error
    result = sandbox.run_in_clone("builtins:set", "x")
    assert "not JSON serializable" in result.error


def test_time_limit_kills_everything_in_the_clone_and_thaws(sandbox):
    process = sandbox.spawn(["bash", "-c", "while :; do echo beat >> /app/beat; sleep 0.01; done"])
    _wait_for_file(sandbox, "/app/beat")
    started = time.monotonic()
    marker = "1234567"
    result = sandbox.run_in_clone(EXECUTE, {"argv": ["bash", "-c", f"setsid sleep {marker} & sleep {marker}"]}, timeout_s=0.5)
    assert result.payload is None
    assert "ran out of time" in result.error
    assert time.monotonic() - started < 20
    assert subprocess.run(["pgrep", "-f", f"sleep {marker}"], check=False, capture_output=True).stdout == b""
    beats = len(sandbox.get("/app/beat"))
    deadline = time.monotonic() + 10
    while (now := len(sandbox.get("/app/beat"))) == beats and time.monotonic() < deadline:
        time.sleep(0.01)
    assert now > beats  # thawed
    process.kill()


def test_a_clone_starts_from_the_hosts_python_not_the_agents(sandbox):
    """Whatever the agent leaves where Python looks for modules is not imported."""
    sh(
        sandbox,
        "for d in /app /usr/lib/python3 /usr/lib/python3/dist-packages /tmp /root; do "
        "mkdir -p $d; echo 'raise SystemExit(99)' | tee $d/sitecustomize.py $d/antigravity.py $d/cmd.py $d/this.py >&2; done",
    )
    result = sandbox.run_in_clone("importlib:import_module", "cmd")
    assert "not JSON serializable" in result.error  # imported: a module came back
    assert sandbox.run_in_clone(ECHO, "fine").payload == "fine"


def test_lazy_imports_work_in_a_clone(sandbox):
    result = sandbox.run_in_clone("importlib:import_module", "wsgiref.simple_server")
    assert "Object of type module is not JSON serializable" in result.error


def test_clones_of_different_sandboxes_at_once():
    with LocalSandbox(SandboxSpec(storage_mb=8)) as one, LocalSandbox(SandboxSpec(storage_mb=8)) as two:
        one.put(b"1", "/app/n")
        two.put(b"2", "/app/n")
        assert in_clone(one, "cat /app/n") + in_clone(two, "cat /app/n") == "12"


def test_a_clone_costs_the_same_however_much_was_written(sandbox):
    """Not timed: the clone's own layer must stay empty, whatever lies below."""
    sh(sandbox, "head -c 100M /dev/zero > /app/big; mkdir /app/many; cd /app/many; touch $(seq 1000)")
    used = in_clone(sandbox, "ls /app/many | wc -l; stat -c %s /app/big; df --output=used -k / | tail -n1")
    assert used.split()[:2] == ["1000", str(100 << 20)]
    assert int(used.split()[2]) < 1024


# -------------------------------------------------------------------------------------------------------------------- fingerprints
@pytest.mark.parametrize(
    "change",
    [
        "echo b > /app/file",
        "echo a > /app/file",
        "echo >> /app/file",
        "touch /app/file",
        "touch -d '1 hour ago' /app/file",
        "chmod 600 /app/file",
        pytest.param("chown 5:5 /app/file", marks=AS_ROOT_ONLY),
        "mv /app/file /app/other",
        "rm /app/file",
        "ln /app/file /app/second",
        "ln -s nowhere /app/link",
        "mkdir /app/dir/sub",
        "rmdir /app/dir",
        "mkfifo /app/pipe",
        "touch /tmp/x",
        "touch /dev/shm/x",
        "touch /x",
        "chmod 700 /app",
        "chmod 711 /",
        "touch /root/x",
        "touch /home/x",
        "touch /run/x",
        "touch /var/tmp/x",
        "touch /srv/x",
        "rm /etc/profile",
        "echo >> /etc/profile",
        "touch /usr/x /opt/x",
        pytest.param("rm /usr/bin/nohup", marks=AS_ROOT_ONLY),
        pytest.param("touch /usr/local/x", marks=AS_ROOT_ONLY),
        "chmod 700 /usr",
        "chmod 700 /opt",
        "touch /etc/x",
        "truncate -s 100 /app/file",
        "cp --preserve=all /app/file /app/new && mv /app/new /app/file",
    ],
)
def test_every_change_changes_the_fingerprint(sandbox, change):
    sh(sandbox, "echo a > /app/file; mkdir /app/dir")
    before = sandbox.generation()
    sh(sandbox, change)
    assert sandbox.generation() != before


@pytest.mark.parametrize(
    "look", ["cat /etc/passwd /app/file", "ls -lR /app /etc /usr/lib/python3* > /dev/null || true", "true", "cat /proc/[0-9]*/stat || true"]
)
def test_looking_does_not_change_the_fingerprint(sandbox, look):
    sh(sandbox, "echo a > /app/file")
    before = sandbox.generation()
    sh(sandbox, look)
    assert sandbox.generation() == before
    assert sandbox.generation() == before


def test_same_size_rewrites_in_quick_succession_are_told_apart(sandbox):
    """Within one tick of the clock of file timestamps, a change of contents alone may leave the times as they were."""
    root = f"/proc/{_first_process(sandbox)}/root/app/file"
    seen = set()
    sandbox.put(b"00", "/app/file")
    for turn in range(30):
        with Path(root).open("r+b") as stream:
            stream.write(b"%02d" % turn)
        seen.add(sandbox.generation())
    assert len(seen) == 30


def test_first_write_through_a_mapping_is_seen(sandbox):
    sandbox.put(bytes(4096), "/app/mapped")
    before = sandbox.generation()
    fd = os.open(f"/proc/{_first_process(sandbox)}/root/app/mapped", os.O_RDWR)
    try:
        with mmap.mmap(fd, 4096) as mapping:
            mapping[0] = 1
    finally:
        os.close(fd)
    assert sandbox.generation() != before


def _first_process(box: LocalSandbox) -> int:
    process = box.spawn(["sleep", "1000"])
    deadline = time.monotonic() + 10
    while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n" and time.monotonic() < deadline:
        time.sleep(0.005)
    return process.pid


def _wait_for_file(box: LocalSandbox, path: str) -> None:
    deadline = time.monotonic() + 10
    while box.run(["test", "-s", path]).exit_code != 0 and time.monotonic() < deadline:
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------------------------------------ host death
_HOST = """
from t1_env.sandbox.local import LocalSandbox
box = LocalSandbox(); box.start()
print(box.spawn(["sleep", "1000"]).pid, flush=True)
box.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["sleep", "7654321"]}, timeout_s=1000)
"""


def test_a_clone_dies_with_the_host_process():
    with subprocess.Popen([sys.executable, "-c", _HOST], stdout=subprocess.PIPE, text=True) as host:
        pid = int(host.stdout.readline())
        deadline = time.monotonic() + 20
        while not _find("sleep 7654321") and time.monotonic() < deadline:
            time.sleep(0.01)
        clone = _find("sleep 7654321")
        assert len(clone) == 1
        host.send_signal(signal.SIGKILL)
    while (Path(f"/proc/{pid}/exe").exists() or _find("sleep 7654321")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}/exe").exists()
    assert _find("sleep 7654321") == []


def _find(command: str) -> list[str]:
    return subprocess.run(["pgrep", "-xf", command], check=False, capture_output=True, text=True).stdout.split()
