"""A local sandbox as its users see it: processes, files, isolation, life and death."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from t1_env.errors import ConfigError, SandboxDied, SandboxError
from t1_env.sandbox.base import Sandbox, SandboxSpec
from t1_env.sandbox.local import LocalSandbox, SandboxFileError, unavailable_reason
from t1_env.sandbox.stacking import Stack

pytestmark = pytest.mark.namespaces


@pytest.fixture(autouse=True, scope="module")
def _needs_namespaces():
    if reason := unavailable_reason():
        pytest.skip(reason)


@pytest.fixture
def sandbox():
    with LocalSandbox() as box:
        yield box


@pytest.fixture(scope="module")
def shared():
    """For tests that only look."""
    with LocalSandbox() as box:
        yield box


def sh(box: LocalSandbox, script: str, **options) -> str:
    result = box.run(["bash", "-c", script], **options)
    assert result.exit_code == 0, result
    return result.stdout.decode()


# ---------------------------------------------------------------------------------------------------------------------- processes
def test_it_is_a_sandbox(shared):
    assert isinstance(shared, Sandbox)
    assert shared.isolation == "namespaces"
    assert shared.alive
    assert {"clone", "freeze", "storage_limit", "network_off"} <= shared.capabilities


def test_run_captures_output_status_and_input(shared):
    result = shared.run(["bash", "-c", "cat; echo err >&2; exit 7"], stdin=b"in\n")
    assert (result.exit_code, result.stdout, result.stderr, result.timed_out) == (7, b"in\n", b"err\n", False)


def test_run_reports_signals_as_shells_do(shared):
    assert shared.run(["bash", "-c", "kill -TERM $$"]).exit_code == 128 + signal.SIGTERM


def test_a_missing_program_is_127_and_an_unexecutable_one_126(shared):
    assert shared.run(["no-such-program"]).exit_code == 127
    result = shared.run(["/etc/passwd"])
    assert result.exit_code == 126
    assert b"Permission denied" in result.stderr


def test_run_bounds_output(shared):
    result = shared.run(["bash", "-c", "head -c 5000000 /dev/zero"], max_output_bytes=1000)
    assert result.exit_code == 0
    assert len(result.stdout) == 1000


def test_run_kills_the_session_at_its_time_limit(shared):
    result = shared.run(["bash", "-c", "echo begun; sleep 1000 & sleep 1001"], timeout_s=0.3)
    assert result.timed_out
    assert result.exit_code is None
    assert result.stdout == b"begun\n"
    assert "sleep" not in sh(shared, "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -x '[s]leep' || true")


def test_run_does_not_wait_for_background_processes(shared):
    started = time.monotonic()
    assert shared.run(["bash", "-c", "sleep 30 & echo done"], timeout_s=20).stdout == b"done\n"
    assert time.monotonic() - started < 15
    sh(shared, "pkill sleep || true")


def test_spawn_on_a_terminal(shared):
    process = shared.spawn(["bash", "-c", "tty; stty size; ps -o tty= -p $$; exit 3"], pty_size=(31, 97))
    output = b""
    try:
        while chunk := os.read(process.pty_fd, 4096):
            output += chunk
    except OSError:
        pass  # EIO: the last process on the terminal has ended
    os.close(process.pty_fd)
    assert process.wait(10) == 3
    assert re.fullmatch(rb"/dev/pts/\d+\r\n31 97\r\npts/\d+\r\n", output.replace(b" pts", b"pts")), output


def test_spawn_puts_descriptors_where_asked_and_closes_the_rest(shared):
    low_read, low_write = os.pipe()
    high_read, high_write = os.pipe()
    # The targets collide with each other's sources on purpose.
    process = shared.spawn(["bash", "-c", "echo to-3 >&3; echo to-9 >&9; ls /proc/self/fd >&9"], fds={3: low_write, 9: high_write})
    os.close(low_write)
    os.close(high_write)
    with os.fdopen(low_read) as low, os.fdopen(high_read) as high:
        assert low.read() == "to-3\n"
        marker, *numbers = high.read().split()
    assert marker == "to-9"
    assert set(numbers) == {"0", "1", "2", "3", "9", "4"}  # 4 is ls reading the directory
    assert process.wait(10) == 0
    assert process.pty_fd is None


def test_spawned_pid_is_the_hosts(shared):
    process = shared.spawn(["sleep", "100"])
    assert process.poll() is None
    deadline = time.monotonic() + 10
    while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n"
    process.kill()
    assert process.wait(10) == 128 + signal.SIGKILL
    assert process.poll() == 128 + signal.SIGKILL
    process.kill()  # once more, after the end


def test_wait_runs_out_of_time(shared):
    process = shared.spawn(["sleep", "100"])
    assert process.wait(0.05) is None
    process.kill(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM


def test_environment_is_fixed_and_nothing_is_inherited(monkeypatch):
    monkeypatch.setenv("T1_SECRET", "hunter2")
    with LocalSandbox(SandboxSpec(env={"GREETING": "hello there"}, hostname="box")) as box:
        env = dict(line.split("=", 1) for line in sh(box, "env", env={"EXTRA": "1"}).splitlines())
        assert "T1_SECRET" not in env
        assert env["GREETING"] == "hello there"
        assert env["EXTRA"] == "1"
        assert (env["HOME"], env["TZ"], env["PAGER"], env["TERM"], env["LANG"]) == ("/root", "UTC", "cat", "xterm-256color", "C.UTF-8")
        assert sh(box, "hostname; cat /etc/hostname; id -u; date +%Z") == "box\nbox\n0\nUTC\n"


def test_working_directory_falls_back_to_root(shared):
    assert sh(shared, "pwd") == "/app\n"
    assert sh(shared, "pwd", cwd="/usr/bin") == "/usr/bin\n"
    assert sh(shared, "pwd", cwd="/no/such/place") == "/\n"


@pytest.mark.parametrize(
    "call",
    [
        lambda box: box.spawn([]),
        lambda box: box.spawn("ls"),
        lambda box: box.spawn(["a\0b"]),
        lambda box: box.spawn(["true"], env={"A=B": "1"}),
        lambda box: box.spawn(["true"], fds={3: 9999}),
        lambda box: box.spawn(["true"], fds={100000: 0}),
        lambda box: box.put(b"", "relative"),
        lambda box: box.get("/a\0b"),
        lambda box: box.run_in_clone("t1_env.sandbox.probe:echo", 1, mounts={"/x": Path("/no/such/host/path")}),
    ],
)
def test_bad_arguments_are_refused_and_do_no_harm(shared, call):
    with pytest.raises(ConfigError):
        call(shared)
    assert shared.run(["true"]).exit_code == 0


@pytest.mark.parametrize(
    "spec",
    [
        SandboxSpec(workdir="app"),
        SandboxSpec(hostname="bad host"),
        SandboxSpec(storage_mb=0),
        SandboxSpec(memory_mb=1),
        SandboxSpec(max_processes=0),
        SandboxSpec(cpus=0),
        SandboxSpec(env={"": "x"}),
    ],
)
def test_bad_specifications_are_refused(spec):
    with pytest.raises(ConfigError):
        LocalSandbox(spec)


# ----------------------------------------------------------------------------------------------------------------------- isolation
def test_nothing_of_the_host_but_its_system_directories(shared, tmp_path):
    (tmp_path / "host-file").write_text("secret")
    assert shared.run(["test", "-e", str(tmp_path / "host-file")]).exit_code == 1
    assert sh(shared, "ls -A /home /root /srv /mnt /media /boot /sys /tmp /var/log /var/lib /run/lock") == "".join(
        f"{name}:\n\n" for name in ("/boot", "/home", "/media", "/mnt", "/root", "/run/lock", "/srv", "/sys", "/tmp", "/var/lib")
    ) + ("/var/log:\n")
    mounted = sh(shared, "cat /proc/self/mounts")
    assert {line.split()[2] for line in mounted.splitlines()} <= {"tmpfs", "overlay", "proc", "devtmpfs", "devpts"}


def test_no_host_secrets_in_etc(shared):
    shadow = sh(shared, "cat /etc/shadow")
    assert all(line.split(":")[1] in ("*", "!") for line in shadow.splitlines())
    assert sh(shared, "ls -A /etc/ssh /etc/ssl/private /etc/sudoers /etc/gitconfig /etc/environment 2>/dev/null || true") == ""
    assert {line.split(":")[0] for line in sh(shared, "cat /etc/passwd").splitlines()} >= {"root", "nobody"}
    host_users = {line.split(":")[0] for line in Path("/etc/passwd").read_text().splitlines() if int(line.split(":")[2]) >= 1000}
    assert not ({line.split(":")[0] for line in sh(shared, "cat /etc/passwd").splitlines()} & host_users) - {"nobody"}


def test_a_task_that_asks_for_the_network_gets_loopback_and_is_told():
    with LocalSandbox(SandboxSpec(network=True)) as sandbox:
        assert "network_off" in sandbox.capabilities
        assert sandbox.run(["bash", "-c", "echo >/dev/tcp/198.51.100.1/80"]).exit_code == 1


def test_no_network_but_loopback(shared):
    interfaces = [line.split(":")[0].strip() for line in sh(shared, "cat /proc/net/dev").splitlines()[2:]]
    assert interfaces == ["lo"]
    script = "exec 3<>/dev/tcp/{}/9; echo open"
    assert b"unreachable" in shared.run(["bash", "-c", script.format("192.0.2.1")], timeout_s=10).stderr
    assert b"refused" in shared.run(["bash", "-c", script.format("127.0.0.1")], timeout_s=10).stderr  # it is up


def test_processes_of_the_host_are_not_visible(shared):
    assert sh(shared, "cat /proc/1/comm") == "t1-init\n"
    assert len(sh(shared, "ls -d /proc/[0-9]*").split()) < 10


def test_pid_1_cannot_be_read_killed_or_traced(shared):
    for path in ("environ", "maps", "fd/", "root/", "cwd/", "mem"):
        assert shared.run(["bash", "-c", f"ls /proc/1/{path} && head -c1 /proc/1/{path}"]).exit_code != 0, path
    assert sys.executable not in sh(shared, "cat /proc/1/cmdline | tr '\\0' ' '")
    shared.run(["bash", "-c", "kill -KILL 1; kill -STOP 1; kill -TERM 1"])
    assert shared.alive
    assert shared.run(["true"]).exit_code == 0


@pytest.mark.parametrize(
    "script",
    [
        "mount -t tmpfs none /mnt",
        "umount /proc",
        "umount /usr",
        "mount -o remount,rw /dev",
        "unshare --user --map-root-user true",
        "mknod /tmp/disk b 8 0",
        "echo x > /proc/sys/kernel/core_pattern",
        "echo 1 > /proc/sys/vm/drop_caches",
        "echo b > /proc/sysrq-trigger",
        "chmod 600 /dev/null",
        "rm -f /dev/null",
        "chroot /proc/1/root true",
        "hostname other",
        "ip link add dummy0 type dummy",
        "date -s 2001-01-01",
    ],
)
def test_root_inside_has_no_rights_outside(shared, script):
    before = Path("/dev/null").stat().st_mode, Path("/proc/sys/kernel/core_pattern").read_text()
    assert shared.run(["bash", "-c", script]).exit_code != 0
    assert (Path("/dev/null").stat().st_mode, Path("/proc/sys/kernel/core_pattern").read_text()) == before


def test_writes_to_system_directories_stay_inside(sandbox):
    sh(sandbox, "mkdir -p /usr/t1-test-dir /opt/t1-test-dir && echo x > /etc/t1-test-file && echo 127.0.0.9 pwned >> /etc/hosts")
    assert sh(sandbox, "ls -d /usr/t1-test-dir /opt/t1-test-dir /etc/t1-test-file").count("t1-test") == 3
    assert not any(Path(path).exists() for path in ("/usr/t1-test-dir", "/opt/t1-test-dir", "/etc/t1-test-file"))
    assert "pwned" not in Path("/etc/hosts").read_text()


def test_removing_everything_harms_only_the_sandbox(sandbox):
    entries = len(list(Path("/usr/bin").iterdir()))
    # Only what is quick to remove: a whole /usr is thousands of whiteouts.
    sandbox.run(["bash", "-c", "rm -rf --no-preserve-root /etc /app /tmp /root /home /var /usr/sbin /usr/games"], timeout_s=50)
    assert len(list(Path("/usr/bin").iterdir())) == entries
    assert Path("/etc/passwd").exists()
    assert sandbox.run(["true"]).exit_code == 0
    with LocalSandbox() as fresh:
        assert fresh.run(["test", "-f", "/etc/passwd"]).exit_code == 0


def test_hidden_paths_do_not_exist_inside_nor_in_clones():
    visible = next(path for path in sorted(Path("/usr/share").iterdir()) if path.is_dir() and any(path.iterdir()))
    with LocalSandbox(SandboxSpec(hide=(visible, Path("/usr/bin/cat"), visible / "deeper", Path("/not/there")))) as box:
        assert box.run(["ls", "-d", str(visible)]).exit_code == 2
        assert box.run(["cat", "/etc/hostname"]).exit_code == 127
        assert str(visible) + "\n" not in sh(box, "ls -d /usr/share/*")
        assert sh(box, "stat -c %a /usr/share") == f"{Path('/usr/share').stat().st_mode & 0o7777:o}\n"
        result = box.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["ls", "-d", str(visible)]})
        assert result.payload["exit_code"] == 2
    assert visible.exists()


def test_a_whole_system_directory_can_be_hidden():
    with LocalSandbox(SandboxSpec(hide=(Path("/opt"), Path("/")))) as box:
        assert sh(box, "ls -A /opt; touch /opt/mine; ls /opt") == "mine\n"
        assert box.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["ls", "/opt"]}).payload["stdout"] == "mine\n"


def test_t1_itself_is_always_hidden():
    import t1_env
    from t1_env.sandbox.launcher import installation_paths

    assert Path(t1_env.__file__).resolve().parent in installation_paths()
    assert any(path.name == "tasks" or (path / "_tasks").is_dir() for path in installation_paths())


# -------------------------------------------------------------------------------------------------------------------------- files
def test_changes_persist_between_processes(sandbox):
    sh(sandbox, "echo one > a; mkdir -p /home/user && echo two > /home/user/b; echo three > /dev/shm/c")
    assert sh(sandbox, "cat /app/a /home/user/b /dev/shm/c") == "one\ntwo\nthree\n"


def test_put_and_get_bytes(sandbox):
    sandbox.put(b"\0\xffdata", "/a/b/c.bin", mode=0o751)
    assert sandbox.get("/a/b/c.bin") == b"\0\xffdata"
    assert sh(sandbox, "stat -c '%a %U:%G %s' /a/b/c.bin") == "751 root:root 6\n"
    sandbox.put(b"x", "/a/b/c.bin")
    assert sandbox.get("/a/b/c.bin") == b"x"


def test_put_a_file_keeps_mode_and_time(sandbox, tmp_path):
    source = tmp_path / "run.sh"
    source.write_text("#!/bin/sh\necho ran\n")
    source.chmod(0o755)
    os.utime(source, (1_000_000_000, 1_000_000_000))
    sandbox.put(source, "/app/run.sh")
    assert sh(sandbox, "./run.sh; stat -c '%a %Y' run.sh") == "ran\n755 1000000000\n"


def test_put_a_directory(sandbox, tmp_path):
    (tmp_path / "sub" / "empty").mkdir(parents=True)
    (tmp_path / "sub" / "file").write_text("text")
    (tmp_path / "link").symlink_to("/etc/shadow")
    sandbox.put(tmp_path, "/app/tree")
    sandbox.put(tmp_path, "/app/tree")  # over itself
    assert (
        sh(sandbox, "cd tree; find . | sort; readlink link; cat sub/file") == ".\n./link\n./sub\n./sub/empty\n./sub/file\n/etc/shadow\ntext"
    )


def test_put_follows_links_inside_only(sandbox, tmp_path):
    sh(sandbox, f"ln -s {tmp_path} /app/out; ln -s /etc/motd /app/motd; ln -s ../../../../../../..{tmp_path} /app/up")
    sandbox.put(b"welcome", "/app/motd")
    assert sh(sandbox, "cat /etc/motd") == "welcome"
    for link in ("out", "up"):
        with pytest.raises(SandboxFileError):
            sandbox.put(b"escaped", f"/app/{link}/file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/app/missing", "No such file"),
        ("/app", "directory"),
        ("/app/fifo", "regular"),
        ("/app/loop", "symbolic links"),
        ("/app/whiteout", "regular|No such|not permitted|Permission denied"),
        ("/app/file/below", "Not a directory"),
    ],
)
def test_get_of_ugly_things_fails_at_once(sandbox, path, reason):
    sh(sandbox, "mkfifo fifo; ln -s loop loop; touch file; mknod whiteout c 0 0 || true")
    with pytest.raises(SandboxFileError, match=reason):
        sandbox.get(path)
    assert sandbox.run(["true"]).exit_code == 0


def test_get_never_reads_the_host(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    sh(sandbox, f"ln -s {secret} direct; ln -s ../../../../../../../..{secret} climbing; ln -s /proc/self/root{secret} magic")
    for name in ("direct", "climbing", "magic"):
        with pytest.raises(SandboxFileError):
            sandbox.get(f"/app/{name}")


def test_get_is_bounded(sandbox):
    sandbox.put(b"12345", "/app/five")
    assert sandbox.get("/app/five", max_bytes=5) == b"12345"
    with pytest.raises(SandboxFileError, match="max_bytes=4"):
        sandbox.get("/app/five", max_bytes=4)


def test_put_into_the_way_of_something(sandbox):
    sh(sandbox, "mkdir dir; mkfifo fifo; touch file")
    for dest in ("/app/dir", "/app/fifo", "/app/file/below"):
        with pytest.raises(SandboxFileError):
            sandbox.put(b"x", dest)


# ----------------------------------------------------------------------------------------------------------------- life and death
def test_closing_is_idempotent_and_final(tmp_path):
    box = LocalSandbox()
    with pytest.raises(SandboxDied, match="not started"):
        box.run(["true"])
    box.start()
    box.start()
    process = box.spawn(["sleep", "1000"])
    box.close()
    box.close()
    assert not box.alive
    assert process.wait(10) == 128 + signal.SIGKILL
    for call in (lambda: box.run(["true"]), box.generation, lambda: box.get("/etc/passwd"), box.start):
        with pytest.raises(SandboxDied):
            call()


def test_daemons_die_with_the_sandbox():
    box = LocalSandbox()
    box.start()
    process = box.spawn(["bash", "-c", "trap '' TERM HUP; setsid sleep 1000 & wait"])
    assert Path(f"/proc/{process.pid}").exists()
    box.close()
    assert not Path(f"/proc/{process.pid}").exists()


def test_killing_everything_inside_leaves_the_sandbox_usable(sandbox):
    victims = [sandbox.spawn(["sleep", "1000"]) for _ in range(3)]
    sandbox.run(["bash", "-c", "kill -9 -1"])
    assert [process.wait(10) for process in victims] == [137] * 3
    assert sandbox.alive
    assert sh(sandbox, "echo still here") == "still here\n"


def test_death_of_pid_1_is_noticed():
    with LocalSandbox() as box:
        process = box.spawn(["sleep", "1000"])
        status = Path(f"/proc/{process.pid}/status").read_text()
        os.kill(int(re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE)[1]), signal.SIGKILL)
        assert process.wait(10) == 137
        deadline = time.monotonic() + 10
        while box.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not box.alive
        with pytest.raises(SandboxDied):
            box.run(["true"])


def test_dropping_the_last_reference_closes():
    box = LocalSandbox()
    box.start()
    pid = box.spawn(["sleep", "1000"]).pid
    del box
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


_HOST = """
import os, sys, time
from t1_env.sandbox.local import LocalSandbox
box = LocalSandbox(); box.start()
a = box.spawn(["setsid", "sleep", "1000"]); b = box.spawn(["bash"], pty_size=(24, 80))
print(a.pid, b.pid, os.getpid(), flush=True)
if sys.argv[1] == "fork" and os.fork() == 0:
    os.close(1)
    time.sleep(60)
time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["plain", "fork"])
def test_nothing_is_left_when_the_host_process_is_killed(how):
    """Even if it had forked a child that still lives and holds copies of what it had open."""
    host = subprocess.Popen([sys.executable, "-c", _HOST, how], stdout=subprocess.PIPE, text=True)
    with host:
        pids = host.stdout.readline().split()
        children = [path.parent.name for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == pids[2]]
        host.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/exe").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    for child in children:
        if how == "fork" and Path(f"/proc/{child}/cmdline").read_bytes().startswith(os.fsencode(sys.executable)):
            os.kill(int(child), signal.SIGKILL)
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)
    while _cgroups_of(pids[2]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _cgroups_of(pids[2]) == []


def _parent(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[1]
    except OSError:
        return ""


def _cgroups_of(pid: str) -> list[str]:
    return [path for path, names, _ in os.walk("/sys/fs/cgroup") for name in names if re.fullmatch(rf"t1-\d+-{pid}-.*", name)]


def test_a_forked_child_does_not_disturb_its_parents_sandbox(sandbox):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        verdict = b"bad"
        try:
            dead = not sandbox.alive
            sandbox.close()
            with LocalSandbox() as own:
                verdict = b"ok" if dead and own.run(["echo", "x"]).stdout == b"x\n" else b"bad"
        finally:
            os.write(write, verdict)
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        assert stream.read() == b"ok"
    os.waitpid(pid, 0)
    assert sh(sandbox, "echo fine") == "fine\n"


def test_a_dead_launcher_is_replaced(sandbox):
    from t1_env.sandbox.launcher import LAUNCHER

    os.kill(LAUNCHER._zygote.process.pid, signal.SIGKILL)
    LAUNCHER._zygote.process.wait()
    with LocalSandbox() as fresh:
        assert sh(fresh, "echo fresh") == "fresh\n"
    assert sh(sandbox, "echo old") == "old\n"


def test_many_at_once_from_threads():
    boxes = [LocalSandbox(SandboxSpec(storage_mb=8)) for _ in range(64)]
    outputs: dict[int, bytes] = {}

    def play(index: int) -> None:
        box = boxes[index]
        box.start()
        box.put(str(index).encode(), "/app/n")
        outputs[index] = box.run(["cat", "/app/n"]).stdout

    threads = [threading.Thread(target=play, args=(index,)) for index in range(len(boxes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for box in boxes:
        box.close()
    assert outputs == {index: str(index).encode() for index in range(len(boxes))}


def test_one_sandbox_from_many_threads(sandbox):
    outputs: list[bytes] = []

    def play(index: int) -> None:
        for turn in range(5):
            sandbox.put(b"x", f"/app/{index}-{turn}")
            outputs.append(sandbox.run(["echo", f"{index}-{turn}"]).stdout)

    threads = [threading.Thread(target=play, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outputs) == sorted(f"{i}-{t}\n".encode() for i in range(6) for t in range(5))
    assert sh(sandbox, "ls /app | wc -l") == "30\n"


def test_closing_wakes_a_thread_that_waits():
    box = LocalSandbox()
    box.start()
    seen: list[BaseException] = []

    def play() -> None:
        try:
            box.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["sleep", "100"]})
        except SandboxDied as error:
            seen.append(error)

    thread = threading.Thread(target=play)
    thread.start()
    time.sleep(0.2)
    box.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(seen) == 1


def test_what_is_mounted_elsewhere_is_no_base(tmp_path):
    """A mount that the launcher does not see would show an empty directory, and every verifier would fail without an error."""
    rootfs = tmp_path / "rootfs"
    rootfs.mkdir()
    status = rootfs.stat()
    with LocalSandbox(SandboxSpec(), stack=Stack(rootfs=str(rootfs), foreign=True, identity=(status.st_dev, status.st_ino))) as box:
        assert box.alive
    with pytest.raises(SandboxError, match="does not reach the launcher"):
        LocalSandbox(SandboxSpec(), stack=Stack(rootfs=str(rootfs), foreign=True, identity=(status.st_dev, status.st_ino + 1))).start()
