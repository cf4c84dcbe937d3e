"""Every limit, exceeded: as root with cgroups, as root where cgroups are closed, and as an ordinary user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from t1_env.sandbox.local import unavailable_reason

pytestmark = [pytest.mark.namespaces, pytest.mark.timeout(600)]

NOBODY = 65534
ROOT = Path(__file__).resolve().parents[2]
MAX_PROCESSES = 40

# Runs in a process of its own. It imports the sandbox alone, without what the rest of the package imports: an ordinary user may not be
# able to read where that is installed.
_SCRIPT = """
import json, os, sys, time, types
package = types.ModuleType("t1_env")
package.__path__ = [sys.argv[1]]
sys.modules["t1_env"] = package
from t1_env.errors import SandboxError
from t1_env.sandbox import hierarchies
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.local import LocalSandbox, unavailable_reason
if reason := unavailable_reason():
    print(json.dumps({"reason": reason}))
    raise SystemExit
report = {"uid": os.getuid()}

def outcome(result):
    return [result.exit_code, (result.stdout + result.stderr).decode("utf-8", "replace")[-400:]]

def sh(box, script, **options):
    return outcome(box.run(["bash", "-c", script], timeout_s=100, **options))

with LocalSandbox(SandboxSpec(max_processes=40, memory_mb=96, storage_mb=32)) as box:
    report["capabilities"] = sorted(box.capabilities)
    bystander = box.spawn(["sleep", "1000"])

    report["environment"] = sh(box, "env")[1]
    report["private"] = {path: sorted(os.listdir(path)) for path in ("/tmp", "/dev/shm")}
    report["inside"] = {path: sh(box, f"ls -A {path}")[1].split() for path in ("/tmp", "/dev/shm", "/dev", "/var/tmp")}
    report["processes inside"] = sh(box, "cat /proc/[0-9]*/comm")[1].split()

    report["memory"] = outcome(box.run(["perl", "-e", "my @x; push @x, 'x' x (1 << 20) while 1"], timeout_s=100))
    report["memory after"] = [bystander.poll(), *sh(box, "true | true; echo alive")]

    report["disk"] = sh(box, "head -c 99000000 /dev/zero > /app/full")
    report["disk in shm"] = sh(box, "head -c 99000000 /dev/zero > /dev/shm/full")
    report["disk after"] = [bystander.poll(), *sh(box, "rm /app/full /dev/shm/full; echo text > /app/text; cat /app/text")]

    count = "my @x; while (open my $f, '<', '/dev/null') { push @x, $f } print scalar(@x), ' ', $! + 0"
    report["open files"] = outcome(box.run(["perl", "-e", count], timeout_s=100))
    report["raise open files"] = sh(box, "ulimit -Hn 1000000")

    report["file size"] = sh(box, "perl -e 'open my $f, q(>), q(/app/big); truncate $f, 1 << 30 or print $! + 0'; rm -f /app/big")
    report["core"] = sh(box, "cd /app; bash -c 'kill -SEGV $$'; echo $?; ls /app; ulimit -c unlimited")

    bomb = box.spawn(["bash", "-c", "bomb() { bomb | bomb & }; while :; do bomb; done 2> /dev/null"])
    time.sleep(1.5)
    try:
        report["processes"] = sh(box, "set -- /proc/[0-9]*; echo $#")  # builtins only: nothing may be able to fork
    except SandboxError as error:
        report["processes"] = [None, str(error)]
    report["clone"] = box.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["bash", "-c", "echo $(echo cloned)"]}).payload
    box.kill_all()
    report["processes after"] = [bomb.wait(60), *sh(box, "true | true; echo recovered")]

with LocalSandbox(SandboxSpec(cpus=0.1)) as box:
    report["cpu capabilities"] = sorted(box.capabilities)
    spin = "(while :; do :; done) & (while :; do :; done) & sleep 1; kill %1 %2; wait; times"
    report["cpu"] = sh(box, spin)
    report["throttled"] = [line.split()[1] for root in hierarchies.find_hierarchies().roots
        for path, label in hierarchies.sandbox_directories(hierarchies.everywhere((root,))) if f"-{os.getpid()}-" in path
        for line in hierarchies.read_or_empty(f"{path}/cpu.stat").splitlines() if line.startswith("nr_throttled")]
print(json.dumps(report))
"""


@pytest.fixture(scope="module", params=["this user", "root without cgroups", "an ordinary user"])
def report(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the script saw."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    if request.param == "this user":
        return run_script([sys.executable], ROOT / "t1_env")
    if os.getuid() != 0:
        pytest.skip("this test run is an ordinary user's already")
    if request.param == "root without cgroups":
        hide = 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"'
        return run_script(["unshare", "--mount", "sh", "-c", hide, "sh", sys.executable], ROOT / "t1_env")
    # A checkout and a virtual environment often lie in directories closed to others; a copy in /tmp does not.
    with tempfile.TemporaryDirectory(prefix="t1-ordinary-") as copy:
        package = Path(copy, "t1_env")
        shutil.copytree(ROOT / "t1_env", package, ignore=shutil.ignore_patterns("__pycache__"))
        Path(copy).chmod(0o755)
        return run_script([python_for_nobody(package)], package, user=NOBODY, group=NOBODY, extra_groups=[], env={})


def run_script(command: list[str], package: Path, **options: Any) -> dict[str, Any]:
    line = [*command, "-c", _SCRIPT, str(package)]
    environment = {**options.pop("env", os.environ), "T1_TEST_SECRET": "secret"}
    with tempfile.NamedTemporaryFile(prefix="t1-witness-", dir="/tmp"):
        result = subprocess.run(line, cwd="/", env=environment, capture_output=True, text=True, timeout=500, check=False, **options)
    if result.returncode != 0 and result.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stderr
    seen: dict[str, Any] = json.loads(result.stdout)
    if "reason" in seen:
        pytest.skip(seen["reason"])
    return seen


def python_for_nobody(package: Path) -> str:
    """An interpreter of this version that a user without privileges may execute and import from."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        if not Path(candidate).exists():
            continue
        probe = [candidate, "-c", f"import os; os.stat({str(package)!r}); import json"]
        try:
            if subprocess.run(probe, user=NOBODY, group=NOBODY, extra_groups=[], env={}, capture_output=True, check=False).returncode == 0:
                return candidate
        except PermissionError:
            continue
    pytest.skip("no Python of this version that user nobody may execute: it lies in a directory closed to others")


def test_nothing_of_the_host_is_inside(report: dict[str, Any]) -> None:
    assert "T1_TEST_SECRET" not in report["environment"]
    assert set(report["inside"]["/dev"]) == {
        *("fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero")
    }
    for path in ("/tmp", "/dev/shm", "/var/tmp"):
        assert report["inside"][path] == []
    assert any(name.startswith("t1-witness-") for name in report["private"]["/tmp"])
    assert set(report["processes inside"]) <= {"t1-init", "sleep", "bash", "cat"}


def test_memory(report: dict[str, Any]) -> None:
    code, text = report["memory"]
    if "memory_limit" in report["capabilities"]:
        assert code == 137
    else:  # a limit on each process, which is told so
        assert code == 1
        assert "Out of memory" in text
    assert report["memory after"] == [None, 0, "alive\n"]


def test_disk(report: dict[str, Any]) -> None:
    assert "storage_limit" in report["capabilities"]
    for where in ("disk", "disk in shm"):
        assert report[where][0] == 1
        assert "No space left on device" in report[where][1]
    assert report["disk after"] == [None, 0, "text\n"]


def test_open_files(report: dict[str, Any]) -> None:
    code, text = report["open files"]
    opened, errno_of_the_last = map(int, text.split())
    assert (code, errno_of_the_last) == (0, 24)
    assert 100 < opened < 4096
    assert report["raise open files"][0] == 1


def test_file_size(report: dict[str, Any]) -> None:
    code, text = report["file size"]
    assert "File size limit exceeded" in text or text == "27", (code, text)


def test_core_dumps(report: dict[str, Any]) -> None:
    code, text = report["core"]
    lines = text.splitlines()
    assert "139" in lines
    assert "core" not in lines
    assert (code, "cannot modify limit" in text) == (1, True)


def test_processes(report: dict[str, Any]) -> None:
    assert report["processes after"] == [137, 0, "recovered\n"]
    if "process_limit" not in report["capabilities"]:
        pytest.skip(f"not enforced here (capabilities: {report['capabilities']})")
    by_pid_namespace = "memory_limit" not in report["capabilities"] and report["uid"] == 0
    most = MAX_PROCESSES + (300 if by_pid_namespace else 0) + 10
    code, text = report["processes"]
    if by_pid_namespace:
        assert code is None or int(text) <= most
        assert "Resource temporarily unavailable" in text or code == 0
    else:
        assert 10 <= int(text) <= most
    assert report["clone"]["stdout"] == "cloned\n"


def test_cpu(report: dict[str, Any]) -> None:
    if "cpu_limit" not in report["cpu capabilities"]:
        pytest.skip(f"not enforced here (capabilities: {report['cpu capabilities']})")
    assert any(int(count) > 0 for count in report["throttled"])
    # Two loops for a second and more, a tenth of a CPU: the last line of `times` is the children's, "0m0.081s 0m0.010s".
    consumed_s = sum(
        60 * float(minutes) + float(seconds.rstrip("s")) for minutes, seconds in (word.split("m") for word in report["cpu"][1].split()[-2:])
    )
    assert consumed_s < 0.6
