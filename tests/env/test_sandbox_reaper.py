"""What killed runs leave, and who removes it: mostly the kernel, the rest the reaper; and never what is another's or in use."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from t1_env.sandbox import hierarchies, owner, reaper
from t1_env.sandbox.local import LocalSandbox, unavailable_reason

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
DEAD = owner.owner_id().rpartition(":")[0] + ":1"  # this pid, but another start


def wait_until(condition) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(done)


# --------------------------------------------------------------------------------------------------------------- killed host processes
_HOST = """
import json, os, sys, threading, time
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.local import LocalSandbox
from t1_env.sandbox.owner import owner_id

def forever(action):
    def loop():
        while True:
            action()
    threading.Thread(target=loop, daemon=True).start()

def start_and_close():
    with LocalSandbox():
        pass

box = LocalSandbox(SandboxSpec(cpus=2.0))
box.start()
box.spawn(["bash", "-c", "trap '' TERM INT HUP; setsid sleep 1000 & while :; do echo x >> /app/x; sleep 0.01; done"], pty_size=(24, 80))
activity = sys.argv[2]
if activity == "clone":
    forever(lambda: box.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["sleep", "0.05"]}))
elif activity == "put":
    tree = Path(sys.argv[3])
    forever(lambda: box.put(tree, "/app/tree"))
elif activity == "start":
    forever(start_and_close)
elif activity == "run":
    forever(lambda: box.run(["bash", "-c", "sleep 0.01 | cat"]))
elif activity == "fingerprint":
    forever(box.generation)
print(json.dumps({"owner": owner_id(), "limited": "memory_limit" in box.capabilities}), flush=True)
time.sleep(1000)
"""


class Host:
    """A process that runs a sandbox, to be killed."""

    def __init__(self, activity: str, tree: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", _HOST, str(ROOT), activity, str(tree)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        report = json.loads(self.process.stdout.readline())
        self.owner: str = report["owner"]
        self.limited: bool = report["limited"]
        self.below = processes_below(self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def cgroups(self) -> list[str]:
        places = hierarchies.everywhere(hierarchies.find_hierarchies().roots)
        return [path for path, label in hierarchies.sandbox_directories(places) if label == self.owner]


def processes_below(pid: int) -> dict[int, str]:
    """Pid -> start time of every descendant."""
    children: dict[int, list[int]] = {}
    starts: dict[int, str] = {}
    for name in (entry.name for entry in Path("/proc").iterdir()):
        if name.isdecimal() and (fields := hierarchies.read_or_empty(f"/proc/{name}/stat").rpartition(")")[2].split()):
            children.setdefault(int(fields[1]), []).append(int(name))
            starts[int(name)] = fields[19]
    found, queue = {}, [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            found[child] = starts[child]
            queue.append(child)
    return found


def running(processes: dict[int, str]) -> list[int]:
    found = []
    for pid, start in processes.items():
        fields = hierarchies.read_or_empty(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if fields and fields[19] == start and fields[0] not in "ZX":
            found.append(pid)
    return found


def kill_at_once(host: Host) -> None:
    """Stop everything, then kill it, so that nobody cleans up after anybody; the agent may be frozen at this moment."""
    pids = [host.process.pid, *sorted(processes_below(host.process.pid))]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    host.kill()


def sandbox_mounts() -> list[str]:
    lines = hierarchies.read_file("/proc/self/mountinfo").splitlines()
    return [line for line in lines if line.partition(" - ")[2].split()[1] == "t1"]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[type[Host]]:
    if reason := unavailable_reason():
        pytest.skip(reason)
    started: list[Host] = []
    tree = tmp_path / "tree"
    for index in range(40):
        (tree / str(index)).mkdir(parents=True)
        (tree / str(index) / "file").write_bytes(bytes(100_000))

    def make(activity: str) -> Host:
        started.append(Host(activity, tree))
        return started[-1]

    yield make  # type: ignore[misc]
    for host in started:
        host.kill()


@pytest.mark.namespaces
@pytest.mark.parametrize("activity", ["idle", "clone", "put", "start", "run", "fingerprint"])
@pytest.mark.parametrize("delay_s", [0.0, 0.037])
def test_a_killed_host_process_takes_everything_with_it(hosts, activity: str, delay_s: float) -> None:
    """Without the reaper: every process ends, and the keepers, which are not killed, remove their cgroups."""
    host = hosts(activity)
    time.sleep(delay_s)
    host.below |= processes_below(host.process.pid)
    assert len(running(host.below)) >= 4
    host.kill()
    assert wait_until(lambda: not running(host.below)), running(host.below)
    assert wait_until(lambda: not host.cgroups()), host.cgroups()
    assert [name for _, name, label in reaper._sandbox_processes() if label == host.owner] == []
    assert sandbox_mounts() == []


@pytest.mark.namespaces
def test_what_stays_when_the_keepers_are_killed_too_is_reaped(hosts) -> None:
    host = hosts("clone")
    survivor = hosts("idle")
    if not host.limited:
        pytest.skip("this user makes no cgroups here")
    kill_at_once(host)
    # Another test's process may start, and reap, at any time: what is there now was there before.
    planned = reaper.reap_local(dry_run=True)
    assert {finding.name for finding in planned if finding.action == "would be removed"} >= set(host.cgroups())
    found = {finding.name: finding for finding in reaper.reap_local()}
    assert host.cgroups() == []
    assert wait_until(lambda: not running(host.below))
    kept = [found[name] for name in survivor.cgroups()]
    assert kept
    assert {(finding.action, finding.reason) for finding in kept} == {("kept", "its owner is running")}
    assert len(running(survivor.below)) >= 4


@pytest.mark.namespaces
def test_the_first_start_of_a_process_reaps(hosts) -> None:
    host = hosts("idle")
    if not host.limited:
        pytest.skip("this user makes no cgroups here")
    kill_at_once(host)
    code = "import sys; sys.path[:0] = [sys.argv[1]]\nfrom t1_env.sandbox.local import LocalSandbox\nwith LocalSandbox(): pass"
    subprocess.run([sys.executable, "-c", code, str(ROOT)], check=True, timeout=120)
    assert host.cgroups() == []


@pytest.mark.namespaces
def test_a_host_that_ends_normally_leaves_nothing() -> None:
    if reason := unavailable_reason():
        pytest.skip(reason)
    with LocalSandbox() as box:
        box.run(["true"])
    left = [f for f in reaper.reap_local(dry_run=True) if f.kind == "cgroup" and f"-{os.getpid()}-" in f.name]
    assert left == []


# --------------------------------------------------------------------------------------------------------------------------- cgroups
def test_directories_of_cgroups_are_removed_only_if_their_owner_is_known_to_be_dead() -> None:
    where = hierarchies.find_hierarchies()
    parent = where.v1.get("pids", "")
    if not os.access(parent, os.W_OK):
        pytest.skip("this user makes no version 1 cgroups here")
    boot, _, rest = owner.owner_id().partition(".")
    stranger = f"{'0' * len(boot)}.{rest}"
    names = {
        "dead": f"t1-{owner.file_name(DEAD)}-0",
        "dead clone": f"t1-{owner.file_name(DEAD)}-0-clone",
        "live": hierarchies.cgroup_name(999_999),
        "another machine's": f"t1-{owner.file_name(stranger)}-0",
        "another program's": "t1-something",
        "a daemon's": f"{owner.file_name(DEAD)}-0",
    }
    directories = {kind: Path(parent, name) for kind, name in names.items()}
    for directory in directories.values():
        directory.mkdir()
    sleeper = subprocess.Popen(["sleep", "1000"])
    try:
        (directories["dead"] / "cgroup.procs").write_text(str(sleeper.pid))
        found = {finding.name: finding.action for finding in reaper.reap_local()}
        assert sleeper.wait(PATIENCE_S) == -signal.SIGKILL
        assert {kind: directory.exists() for kind, directory in directories.items()} == {
            "dead": False,
            "dead clone": False,
            "live": True,
            "another machine's": True,
            "another program's": True,
            "a daemon's": True,
        }
        actions = {kind: found.get(str(directory)) for kind, directory in directories.items()}
        assert {actions["dead"], actions["dead clone"]} <= {"removed", None}  # None: another test's process came first
        assert actions["live"] == actions["another machine's"] == "kept"
        assert actions["another program's"] is actions["a daemon's"] is None
    finally:
        sleeper.kill()
        sleeper.wait()
        for directory in directories.values():
            if directory.exists():
                directory.rmdir()


def test_a_frozen_cgroup_is_thawed_to_be_removed() -> None:
    where = hierarchies.find_hierarchies()
    places = [("freezer.state", "FROZEN", where.v1["freezer"])] if "freezer" in where.v1 else []
    places += [("cgroup.freeze", "1", place) for place in where.v2[-1:]]
    tried = 0
    for file, word, parent in places:
        directory = Path(parent, f"t1-{owner.file_name(DEAD)}-7")
        if not hierarchies.make_directory(str(directory)):
            continue
        sleeper = subprocess.Popen(["sleep", "1000"])
        try:
            (directory / "cgroup.procs").write_text(str(sleeper.pid))
            (directory / file).write_text(word)
            assert hierarchies.empty_and_remove([str(directory)], timeout_s=PATIENCE_S) == []
            assert sleeper.wait(PATIENCE_S) == -signal.SIGKILL
            tried += 1
        finally:
            sleeper.kill()
            sleeper.wait()
    if not tried:
        pytest.skip("this user makes no cgroups here")


# ------------------------------------------------------------------------------------------------------------------------- processes
_STRAY = """
import signal, sys, time
sys.path[:0] = [sys.argv[1]]
from t1_env.sandbox.syscalls import set_process_name
signal.signal(signal.SIGTERM, signal.SIG_IGN)
set_process_name("t1-keeper", sys.argv[2])
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="process names are Linux's")
def test_stray_processes_are_ended_only_if_their_owner_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "_GRACE_S", 0.3)
    strays = {}
    for label in (DEAD, owner.owner_id()):
        stray = subprocess.Popen([sys.executable, "-c", _STRAY, str(ROOT), label], stdout=subprocess.PIPE, text=True)
        assert stray.stdout is not None
        assert stray.stdout.readline() == "ready\n"
        strays[label] = stray
    try:
        reaper.reap_local(dry_run=True)
        assert strays[DEAD].poll() is None
        monkeypatch.setattr(reaper, "_GRACE_S", 30.0 if strays[DEAD].poll() is not None else 0.3)
        found = {finding.name: (finding.action, finding.reason) for finding in reaper.reap_local() if finding.kind == "process"}
        assert strays[DEAD].wait(PATIENCE_S) == -signal.SIGKILL
        assert strays[owner.owner_id()].poll() is None
        assert found[f"t1-keeper (pid {strays[owner.owner_id()].pid})"] == ("kept", "its owner is running")
        assert found[f"t1-keeper (pid {strays[DEAD].pid})"][1].startswith("its owner is gone")
    finally:
        for stray in strays.values():
            stray.kill()
            stray.communicate()


# ----------------------------------------------------------------------------------------------------------------------- directories
def test_temporary_directories_of_dead_owners_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = Path(tempfile.mkdtemp(prefix=owner.directory_prefix("build")))
    dead = tmp_path / mine.name.replace(owner.file_name(owner.owner_id()), owner.file_name(DEAD))
    assert owner.owner_of_directory(dead.name) == DEAD
    (dead / "closed" / "deep").mkdir(parents=True)
    (dead / "closed" / "deep" / "file").write_text("text")
    (dead / "closed").chmod(0o500)
    other = tmp_path / "t1-anything"
    other.mkdir()
    link = tmp_path / f"{dead.name[:-1]}L"
    link.symlink_to(other)
    (other / "kept").write_text("text")
    assert reaper.reap_local(dry_run=True, everywhere=False)
    assert dead.exists()
    found = {finding.name: finding.action for finding in reaper.reap_local(everywhere=False) if finding.kind == "directory"}
    assert found == {str(dead): "removed", str(mine): "kept"}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine.name, other.name, link.name])
    assert (other / "kept").exists()


@pytest.mark.parametrize("name", ["t1-build-x-y", "t1-0.0-1-2-0", "t1-build-0-1-2-abc", "build-0.1-2-3-abc", "t1--0.1-2-3-abc"])
def test_names_that_t1_does_not_give_are_not_its_own(name: str) -> None:
    assert owner.owner_of_directory(name) is None


def test_names_hold_their_owners_label() -> None:
    label = owner.owner_id()
    assert owner.from_file_name(owner.file_name(label)) == label
    assert hierarchies.owner_of(hierarchies.cgroup_name(3)) == label
    assert hierarchies.owner_of(f"{hierarchies.cgroup_name(3)}-clone") == label
    assert owner.owner_of_directory(f"{owner.directory_prefix('build')}a_b1c2d3") == label
