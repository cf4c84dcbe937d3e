"""What a sandbox may use, as root with cgroups and as an ordinary user without."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from t1_env.errors import SandboxUnavailable
from t1_env.sandbox import launcher, seccomp
from t1_env.sandbox.base import KillsAll, SandboxSpec
from t1_env.sandbox.local import LocalSandbox, SandboxFileError, unavailable_reason

pytestmark = pytest.mark.namespaces

NOBODY = 65534
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def _needs_namespaces():
    if reason := unavailable_reason():
        pytest.skip(reason)


def needs(box: LocalSandbox, capability: str) -> None:
    if capability not in box.capabilities:
        pytest.skip(f"this machine cannot enforce {capability} (capabilities: {sorted(box.capabilities)})")


def test_the_number_of_processes_is_limited():
    with LocalSandbox(SandboxSpec(max_processes=40)) as box:
        needs(box, "process_limit")
        box.spawn(["bash", "-c", "for i in {1..100}; do sleep 1000 & done 2> /dev/null"])
        deadline = time.monotonic() + 20
        while _count(box) < 38 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        assert 38 <= _count(box) <= 45  # pid 1 and the counting shell are not of the 40
        box.run(["bash", "-c", "kill -9 -1"])
        assert box.run(["bash", "-c", "true | true; echo fine"]).stdout == b"fine\n"


def test_a_fork_bomb_is_contained():
    with LocalSandbox(SandboxSpec(max_processes=40)) as box:
        needs(box, "process_limit")
        bomb = box.spawn(["bash", "-c", "bomb() { bomb | bomb & }; while :; do bomb; done"])
        time.sleep(0.5)
        assert _count(box) <= 45
        assert box.run(["bash", "-c", "kill -9 -1"]).exit_code == 0
        assert bomb.wait(10) == 137
        assert box.run_in_clone("t1_env.sandbox.probe:echo", 1).payload == 1
        assert box.run(["bash", "-c", "true | true; echo recovered"]).stdout == b"recovered\n"


def test_kill_all_empties_the_sandbox_and_keeps_it():
    with LocalSandbox() as box:
        assert isinstance(box, KillsAll)
        box.kill_all()  # with nothing to kill
        box.put(b"kept", "/app/kept")
        stubborn = box.spawn(["bash", "-c", "trap '' TERM INT HUP; setsid sleep 1000 & sleep 1000 & wait"], pty_size=(24, 80))
        stopped = box.spawn(["bash", "-c", "kill -STOP $$"])
        while _count(box) < 6:
            time.sleep(0.01)
        box.kill_all()
        assert (stubborn.wait(0), stopped.wait(0)) == (137, 137)
        assert _count(box) == 2  # pid 1 and the counting shell
        assert box.get("/app/kept") == b"kept"


def test_kill_all_ends_a_fork_bomb_under_a_full_limit():
    with LocalSandbox(SandboxSpec(max_processes=40)) as box:
        needs(box, "process_limit")
        bomb = box.spawn(["bash", "-c", "bomb() { bomb | bomb & }; while :; do bomb; done 2> /dev/null"])
        time.sleep(0.5)
        box.kill_all()
        assert bomb.wait(10) == 137
        assert box.run(["bash", "-c", "true | true; echo recovered"]).stdout == b"recovered\n"


def _count(box: LocalSandbox) -> int:
    return int(box.run(["bash", "-c", "set -- /proc/[0-9]*; echo $#"]).stdout)  # builtins only: nothing may be able to fork


def test_a_full_disk_is_enospc_and_nothing_worse():
    with LocalSandbox(SandboxSpec(storage_mb=4)) as box:
        result = box.run(["bash", "-c", "head -c 3000000 /dev/zero > a && head -c 9000000 /dev/zero > b"])
        assert b"No space left on device" in result.stderr
        with pytest.raises(SandboxFileError, match="No space left"):
            box.put(bytes(2 << 20), "/tmp/c")
        assert b"No space left on device" in box.run(["bash", "-c", "head -c 9000000 /dev/zero > /dev/shm/d"]).stderr
        assert b"No space left on device" in box.run(["bash", "-c", "head -c 9000000 /dev/zero > /usr/e"]).stderr
        assert box.generation() == box.generation()
        assert box.run_in_clone("t1_env.sandbox.probe:echo", 1).payload == 1
        assert box.run(["bash", "-c", "rm -f a b /tmp/c /dev/shm/d /usr/e; echo text > a; cat a"]).stdout == b"text\n"


def test_running_out_of_inodes_is_enospc():
    with LocalSandbox(SandboxSpec(storage_mb=1)) as box:
        result = box.run(["bash", "-c", "mkdir d; cd d; seq 70000 | xargs touch 2>&1 | tail -n1"], timeout_s=60)
        assert b"No space left on device" in result.stdout
        assert box.run(["bash", "-c", "rm -rf /app/d; echo fine"]).stdout == b"fine\n"


def test_too_much_memory_kills_the_culprit_alone():
    with LocalSandbox(SandboxSpec(memory_mb=64)) as box:
        needs(box, "memory_limit")
        bystander = box.spawn(["sleep", "1000"])
        assert box.run(["perl", "-e", "my $x = 'x' x (1 << 20); $x .= $x while 1"], timeout_s=30).exit_code == 137
        assert bystander.poll() is None
        assert box.run(["echo", "alive"]).stdout == b"alive\n"


def test_cpu_share_is_reported_when_enforced():
    with LocalSandbox(SandboxSpec(cpus=0.5)) as box:
        needs(box, "cpu_limit")
        assert box.run(["true"]).exit_code == 0
    with LocalSandbox(SandboxSpec(cpus=None)) as box:
        assert "cpu_limit" not in box.capabilities


def test_resource_limits_are_always_set():
    with LocalSandbox(SandboxSpec(max_processes=77, storage_mb=5)) as box:
        out = box.run(["bash", "-c", "ulimit -c; ulimit -u; ulimit -f; ulimit -Hn"]).stdout.split()
        assert out[:3] == [b"0", b"81", b"5120"]
        assert int(out[3]) <= 4096


def test_cgroup_directories_are_removed():
    with LocalSandbox() as box:
        if "memory_limit" not in box.capabilities:
            pytest.skip("this user makes no cgroups here")
        mine = _cgroups(f"-{os.getpid()}-")
        assert mine
    assert _cgroups(f"-{os.getpid()}-") == []


def _cgroups(part: str) -> list[str]:
    return [name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names if name.startswith("t1-") and part in name]


# ------------------------------------------------------------------------------------------------------------------ ordinary user
_ORDINARY = """
import json, os, sys, time, types
# The sandbox alone, without what the rest of the package imports: this user may not read where that is installed.
package = types.ModuleType("t1_env")
package.__path__ = [sys.argv[1]]
sys.modules["t1_env"] = package
from t1_env.sandbox.base import KillsAll, SandboxSpec
from t1_env.sandbox.local import LocalSandbox, unavailable_reason
assert os.getuid() != 0
reason = unavailable_reason()
if reason:
    print(json.dumps({"reason": reason}))
    raise SystemExit
with LocalSandbox(SandboxSpec(max_processes=40, memory_mb=256, storage_mb=16)) as box:
    box.put(b"put", "/app/put")
    running = box.spawn(["bash", "-c", "while :; do echo x >> /tmp/loop; done"], pty_size=(24, 80))
    stopped = box.spawn(["bash", "-c", "kill -STOP $$; echo woken > /tmp/woken"])
    time.sleep(0.3)
    clone = box.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["bash", "-c",
        "id -u; cat /app/put; stat -c %s /tmp/loop; sleep 0.2; stat -c %s /tmp/loop; rm /app/put; cat /proc/net/dev | wc -l"]})
    size = len(box.get("/tmp/loop"))
    time.sleep(0.3)
    report = {
        "capabilities": sorted(box.capabilities),
        "clone": clone.payload, "error": clone.error,
        "grew": len(box.get("/tmp/loop")) > size,
        "woken": box.run(["test", "-e", "/tmp/woken"]).exit_code == 0,
        "put": box.get("/app/put").decode(),
        "id": box.run(["id", "-u"]).stdout.decode(),
        "tty": open(f"/proc/{running.pid}/stat").read().rpartition(")")[2].split()[4] != "0",
        "syscall_readable": bool(open(f"/proc/{running.pid}/syscall").read()),
        "escape": box.run(["bash", "-c",
            "chmod 0 /dev/null || mount -t tmpfs x /mnt || unshare -Ur true || echo 1 > /proc/sys/vm/drop_caches"]).exit_code,
        "full": box.run(["bash", "-c", "head -c 99M /dev/zero > /app/full"]).stderr.decode(),
    }
    running.kill(); stopped.kill()
    box.run(["bash", "-c", "rm -f /app/full /tmp/loop"])
    report["bomb"] = box.run(["bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 1000"], timeout_s=1).timed_out
    box.spawn(["bash", "-c", "for i in {1..100}; do sleep 1000 & done"])
    time.sleep(0.5)
    report["processes"] = int(box.run(["bash", "-c", "set -- /proc/[0-9]*; echo $#"]).stdout)
    box.run(["bash", "-c", "kill -9 -1"])
    report["after_bomb"] = box.run(["bash", "-c", "true | true; echo fine"]).stdout.decode()
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def ordinary():
    """What the script above saw as a user without privileges."""
    if os.getuid() != 0:
        pytest.skip("this test run already is an ordinary user's: every other test covers it")
    # A checkout and a virtual environment often lie in directories closed to others; a copy in /tmp does not.
    with tempfile.TemporaryDirectory(prefix="t1-ordinary-") as copy:
        shutil.copytree(ROOT / "t1_env", Path(copy, "t1_env"), ignore=shutil.ignore_patterns("__pycache__"))
        Path(copy).chmod(0o755)
        result = subprocess.run(
            [_python_for_nobody(copy), "-c", _ORDINARY, str(Path(copy, "t1_env"))],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
            env={},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    if "reason" in report:
        pytest.skip(report["reason"])
    return report


def _python_for_nobody(readable: str) -> str:
    """An interpreter of this version that a user without privileges may execute and import from."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        if Path(candidate).exists():
            probe = [candidate, "-c", f"import os; os.stat({readable + '/t1_env'!r}); import json"]
            try:
                if (
                    subprocess.run(probe, user=NOBODY, group=NOBODY, extra_groups=[], env={}, capture_output=True, check=False).returncode
                    == 0
                ):
                    return candidate
            except PermissionError:
                continue
    pytest.skip("no Python of this version that user nobody may execute: it lies in a directory closed to others")


def test_an_ordinary_user_has_a_whole_sandbox(ordinary):
    assert {"clone", "freeze", "storage_limit", "network_off", "process_limit"} <= set(ordinary["capabilities"])
    assert ordinary["id"] == "0\n"
    assert ordinary["put"] == "put"
    assert ordinary["tty"]
    assert ordinary["syscall_readable"]
    assert ordinary["escape"] != 0


def test_an_ordinary_users_clone_is_frozen_and_one_way(ordinary):
    assert ordinary["error"] is None
    uid, put_and_before, after, interfaces = ordinary["clone"]["stdout"].split()
    assert (uid, interfaces) == ("0", "3")
    assert put_and_before == f"put{after}"  # nothing grew while it was frozen
    assert ordinary["grew"]  # and it went on afterwards
    assert not ordinary["woken"]  # but what was stopped already stays so


def test_an_ordinary_users_limits_hold(ordinary):
    assert "No space left on device" in ordinary["full"]
    assert ordinary["bomb"]
    assert 10 <= ordinary["processes"] <= 40 + 5
    assert ordinary["after_bomb"] == "fine\n"


_IGNORING = """
from t1_env.sandbox.local import LocalSandbox
with LocalSandbox() as box:
    print(box.run(["grep", "SigIgn", "/proc/self/status"]).stdout.decode())
"""


def test_signals_the_host_ignores_work_inside():
    """A job in the background of a script ignores SIGINT and SIGQUIT; the agent's processes must not inherit that."""
    line = ["bash", "-c", 'trap "" INT QUIT TERM; exec "$0" -c "$1"', sys.executable, _IGNORING]
    result = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
    assert int(result.stdout.split()[1], 16) == 0, result.stdout


# ------------------------------------------------------------------------------------------------------------------- no namespaces
_REFUSED = """
import ctypes, json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
from t1_env.sandbox.local import LocalSandbox, unavailable_reason
from t1_env.errors import SandboxUnavailable
open("/proc/sys/user/max_user_namespaces", "w").write("0")
try:
    LocalSandbox().start()
except SandboxUnavailable as error:
    print(json.dumps([str(error), unavailable_reason(), len(os.listdir("/proc/self/fd"))]))
"""


def test_refused_namespaces_are_explained():
    """In a user namespace of its own whose quota of further ones is nought."""
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", _REFUSED, json.dumps([str(ROOT)])]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("util-linux unshare is not installed")
    if result.returncode != 0 and "unshare:" in result.stderr:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stderr
    message, reason, open_fds = json.loads(result.stdout)
    assert message == reason
    assert "needs Linux namespaces" in message
    assert "user.max_user_namespaces=10000" in message
    assert "\n" not in message
    assert open_fds < 12


_FILTERED = """
import json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
from t1_env.errors import SandboxUnavailable
from t1_env.sandbox import seccomp, syscalls
from t1_env.sandbox.local import LocalSandbox, unavailable_reason
before = len(os.listdir("/proc/self/fd"))
syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
seccomp.install()  # denies what a container engine's default profile denies
try:
    LocalSandbox().start()
except SandboxUnavailable as error:
    print(json.dumps([str(error), unavailable_reason(), len(os.listdir("/proc/self/fd")) - before]))
"""


def test_a_filter_that_denies_namespaces_is_explained():
    """As in a container with the engine's default profile, where root is refused as well."""
    if not seccomp.available():
        pytest.skip("this machine has no system-call filters")
    command = [sys.executable, "-c", _FILTERED, json.dumps([str(ROOT)])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    message, reason, leaked = json.loads(result.stdout)
    assert message == reason
    assert "the kernel refused: Operation not permitted" in message
    assert "To enable them" in message
    assert leaked <= 0


def test_explanations_name_what_to_do(monkeypatch):
    settings = {"kernel/unprivileged_userns_clone": "0", "kernel/apparmor_restrict_unprivileged_userns": "1"}
    monkeypatch.setattr(launcher, "_setting", settings.get)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    message = launcher.explain_refusal("Operation not permitted: unshare", 1)
    assert "unprivileged_userns_clone=1" in message
    assert "apparmor_restrict_unprivileged_userns=0" in message


def test_a_python_that_cannot_be_started_is_explained(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(SandboxUnavailable, match="/no/such/python"):
        launcher.Launcher().request({"op": "start"}, 0)
