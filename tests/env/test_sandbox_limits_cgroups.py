"""Cgroups of both versions: where directories are made, what is written, who may; on a tree of files that behaves like version 2."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from t1_env.sandbox import hierarchies, limits
from t1_env.sandbox.hierarchies import Hierarchies
from t1_env.sandbox.limits import CPU, MEMORY, PROCESSES, Limits

LIMITS = Limits(memory_mb=64, storage_mb=16, max_processes=40, cpus=0.5)
FILES = {
    "memory": {"memory.max": "max", "memory.swap.max": "max", "memory.oom.group": "0"},
    "pids": {"pids.max": "max"},
    "cpu": {"cpu.max": "max 100000"},
}


class Tree:
    """Version 2 as the kernel presents it: control files appear with a directory, controllers come from the one above."""

    def __init__(self, mount: Path, controllers: str) -> None:
        self.mount = mount
        self.closed: set[Path] = set()
        mount.mkdir()
        self._fill(mount, controllers.split())

    def add(self, path: str, *, passes_on: str = "", processes: str = "", closed: bool = False) -> Path:
        directory = self.mount
        for name in path.split("/"):
            directory = directory / name
            if not directory.exists():
                assert self.make_directory(str(directory))
        for controller in passes_on.split():
            self.write_file(str(directory / "cgroup.subtree_control"), f"+{controller}")
        (directory / "cgroup.procs").write_text(processes)
        if closed:
            self.closed.add(directory)
        return directory

    def make_directory(self, path: str) -> bool:
        directory = Path(path)
        if directory.parent in self.closed or directory.exists():
            return False
        directory.mkdir()
        self._fill(directory, (directory.parent / "cgroup.subtree_control").read_text().split())
        return True

    def _fill(self, directory: Path, controllers: list[str]) -> None:
        core = {"cgroup.procs": "", "cgroup.subtree_control": "", "cgroup.events": "populated 0\nfrozen 0\n", "cgroup.freeze": "0"}
        core |= {"cgroup.controllers": " ".join(controllers), "cgroup.kill": ""}
        for name, text in core.items():
            (directory / name).write_text(text)
        for controller in controllers:
            for name, text in FILES.get(controller, {}).items():
                if directory != self.mount:
                    (directory / name).write_text(text)

    def write_file(self, path: str, text: str) -> None:
        file = Path(path)
        if not file.exists():
            raise FileNotFoundError(errno.ENOENT, "no such control file", path)
        if file.parent in self.closed:
            raise PermissionError(errno.EACCES, "another user's", path)
        if file.name == "cgroup.subtree_control":
            if (file.parent / "cgroup.procs").read_text() and file.parent != self.mount:
                raise OSError(errno.EBUSY, "it holds processes", path)
            known = file.read_text().split()
            file.write_text(" ".join([*known, text.removeprefix("+")]))
            return
        if file.name == "cgroup.freeze":
            (file.parent / "cgroup.events").write_text(f"populated 1\nfrozen {text}\n")
        file.write_text(text)

    def remove_directory(self, path: str) -> bool:
        shutil.rmtree(path)
        return True

    def hierarchies(self, own: str) -> Hierarchies:
        mountinfo = f"41 31 0:38 / {self.mount} rw,relatime - cgroup2 cgroup2 rw\n"
        return hierarchies.find_hierarchies(f"0::/{own}\n", mountinfo)


@pytest.fixture
def make_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(controllers: str = "cpuset cpu io memory pids") -> Tree:
        tree = Tree(tmp_path / "cgroup", controllers)
        for module in (hierarchies, limits):
            for name in ("make_directory", "remove_directory", "write_file"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, getattr(tree, name))
        return tree

    return make


def files_of(directory: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in Path(directory).iterdir() if path.is_file()}


# ------------------------------------------------------------------------------------------------------------------------- version 2
def test_a_service_of_roots_gets_every_limit(make_tree) -> None:
    """systemd: the slice passes memory and pids on; cpu is switched on because it is asked for."""
    tree = make_tree()
    tree.write_file(f"{tree.mount}/cgroup.subtree_control", "+memory")
    tree.write_file(f"{tree.mount}/cgroup.subtree_control", "+pids")
    tree.write_file(f"{tree.mount}/cgroup.subtree_control", "+cpu")
    tree.add("system.slice", passes_on="memory pids")
    tree.add("system.slice/trainer.service", processes="12\n")
    cgroup = limits.create_cgroup("t1-x", LIMITS, hierarchies=tree.hierarchies("system.slice/trainer.service"))
    assert cgroup.directories == [f"{tree.mount}/system.slice/t1-x"]
    assert cgroup.capabilities == {MEMORY, PROCESSES, CPU}
    written = files_of(cgroup.directories[0])
    assert written["memory.max"] == str((64 + 16) << 20)
    assert written["memory.swap.max"] == "0"
    assert written["memory.oom.group"] == "0"  # the culprit alone is killed
    assert written["pids.max"] == "40"
    assert written["cpu.max"] == "50000 100000"
    assert cgroup.homes == [f"{tree.mount}/system.slice/trainer.service/cgroup.procs"]
    assert cgroup.freezer == f"{tree.mount}/system.slice/t1-x/cgroup.freeze"
    cgroup.freeze()
    assert files_of(cgroup.directories[0])["cgroup.freeze"] == "1"
    cgroup.thaw()
    assert files_of(cgroup.directories[0])["cgroup.freeze"] == "0"
    cgroup.remove()
    assert not (tree.mount / "system.slice" / "t1-x").exists()


def test_a_delegated_scope_of_an_ordinary_users_gets_its_limits_beside_itself(make_tree) -> None:
    tree = make_tree()
    for controller in ("memory", "pids"):
        tree.write_file(f"{tree.mount}/cgroup.subtree_control", f"+{controller}")
    tree.add("user.slice", passes_on="memory pids")
    tree.add("user.slice/user@1000.service", passes_on="memory pids")
    tree.add("user.slice/user@1000.service/app.slice", passes_on="memory pids")
    tree.add("user.slice/user@1000.service/app.slice/run-u1.scope", processes="12\n")
    tree.closed |= {tree.mount, tree.mount / "user.slice"}
    where = tree.hierarchies("user.slice/user@1000.service/app.slice/run-u1.scope")
    cgroup = limits.create_cgroup("t1-x", LIMITS, hierarchies=where)
    assert cgroup.directories == [f"{tree.mount}/user.slice/user@1000.service/app.slice/t1-x"]
    assert cgroup.capabilities == {MEMORY, PROCESSES}
    cgroup.remove()


def test_a_login_session_of_an_ordinary_users_gets_none_and_leaves_nothing(make_tree) -> None:
    tree = make_tree()
    for controller in ("memory", "pids"):
        tree.write_file(f"{tree.mount}/cgroup.subtree_control", f"+{controller}")
    tree.add("user.slice", passes_on="memory pids")
    scope = tree.add("user.slice/session-3.scope", processes="12\n")
    tree.closed |= {tree.mount, tree.mount / "user.slice", scope}
    before = sorted(tree.mount.rglob("*"))
    cgroup = limits.create_cgroup("t1-x", LIMITS, hierarchies=tree.hierarchies("user.slice/session-3.scope"))
    assert (cgroup.directories, cgroup.capabilities, cgroup.freezer, cgroup.procs_fds) == ([], set(), None, [])
    assert sorted(tree.mount.rglob("*")) == before


def test_the_root_of_a_machine_without_systemd_is_made_to_pass_controllers_on(make_tree) -> None:
    tree = make_tree("memory pids cpu hugetlb")
    (tree.mount / "cgroup.procs").write_text("1\n12\n")
    cgroup = limits.create_cgroup("t1-x", LIMITS, hierarchies=tree.hierarchies(""))
    assert cgroup.directories == [f"{tree.mount}/t1-x"]
    assert cgroup.capabilities == {MEMORY, PROCESSES, CPU}
    assert sorted((tree.mount / "cgroup.subtree_control").read_text().split()) == ["cpu", "memory", "pids"]
    cgroup.remove()


def test_a_container_whose_cgroup_holds_processes_can_at_least_freeze(make_tree) -> None:
    """Its directory may not pass controllers on as long as it holds processes itself."""
    tree = make_tree("hugetlb")
    tree.write_file(f"{tree.mount}/cgroup.subtree_control", "+memory")
    own = tree.add("container", processes="1\n")
    cgroup = limits.create_cgroup("t1-x", LIMITS, hierarchies=tree.hierarchies("container"))
    assert cgroup.directories == [f"{own}/t1-x"]
    assert cgroup.capabilities == set()
    assert cgroup.freezer is not None
    cgroup.remove()


def test_a_tree_that_adds_nothing_is_not_used(make_tree) -> None:
    tree = make_tree("hugetlb")
    cgroup = limits.create_cgroup("t1-x", LIMITS, freezer=False, hierarchies=tree.hierarchies(""))
    assert cgroup.directories == []
    assert not (tree.mount / "t1-x").exists()


def test_a_directory_that_may_be_made_but_not_joined_is_not_used(make_tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree()
    monkeypatch.setattr(limits, "_can_join", lambda procs_fd: False)
    before = sorted(Path("/proc/self/fd").iterdir())
    cgroup = limits.create_cgroup("t1-x", LIMITS, hierarchies=tree.hierarchies(""))
    assert cgroup.directories == []
    assert not (tree.mount / "t1-x").exists()
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_nothing_is_asked_of_controllers_that_are_not_wanted(make_tree) -> None:
    tree = make_tree("memory pids cpu")
    unlimited = Limits(memory_mb=None, storage_mb=16, max_processes=40, cpus=None)
    cgroup = limits.create_cgroup("t1-x", unlimited, hierarchies=tree.hierarchies(""))
    assert cgroup.capabilities == {PROCESSES}
    written = files_of(cgroup.directories[0])
    assert (written["memory.max"], written["cpu.max"]) == ("max", "max 100000")
    cgroup.remove()


def test_emptying_uses_the_kill_file(make_tree) -> None:
    tree = make_tree("memory pids")
    directory = tree.add("t1-x", processes=f"{os.getpid()}\n")
    assert hierarchies.empty_and_remove([str(directory)]) == []  # had it signalled the listed processes, this one would be gone
    assert not directory.exists()


def test_a_real_version_2_tree_freezes_and_kills() -> None:
    where = hierarchies.find_hierarchies()
    only_v2 = Hierarchies({}, where.v2, where.roots)
    cgroup = limits.create_cgroup(hierarchies.cgroup_name(888_888), LIMITS, hierarchies=only_v2)
    if cgroup.freezer is None:
        pytest.skip("no version 2 tree here that this user may freeze in")
    sleeper = subprocess.Popen(["bash", "-c", "while :; do sleep 0.01; done"])
    try:
        hierarchies.write_file(f"{cgroup.directories[0]}/cgroup.procs", str(sleeper.pid))
        cgroup.freeze()
        assert "frozen 1" in hierarchies.read_file(f"{cgroup.directories[0]}/cgroup.events")
        cgroup.thaw()
        assert "frozen 0" in hierarchies.read_file(f"{cgroup.directories[0]}/cgroup.events")
        cgroup.freeze()
        assert hierarchies.empty_and_remove(cgroup.directories, timeout_s=60) == []
        assert sleeper.wait(60) == -9
    finally:
        sleeper.kill()
        sleeper.wait()
        cgroup.remove()


# ------------------------------------------------------------------------------------------------------------------------- version 1
CGROUP_V1 = "9:name=systemd:/\n8:pids:/\n6:freezer:/\n4:memory:/job/7\n1:cpu,cpuacct:/\n0::/\n"
MOUNTS_V1 = """\
22 27 0:21 / /proc rw - proc proc rw
32 31 0:29 / /c/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /c/memory rw,relatime shared:9 - cgroup cgroup rw,memory
37 31 0:34 / /c/freezer rw,relatime - cgroup cgroup rw,freezer
39 31 0:36 / /c/pids rw,relatime - cgroup cgroup rw,pids
40 31 0:37 / /c/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /c/unified rw,relatime - cgroup2 cgroup2 rw
"""


def test_version_1_trees_are_found_where_this_process_is() -> None:
    where = hierarchies.find_hierarchies(CGROUP_V1, MOUNTS_V1)
    assert where.v1 == {"cpu": "/c/cpu,cpuacct", "memory": "/c/memory/job/7", "freezer": "/c/freezer", "pids": "/c/pids"}
    assert where.v2 == ("/c/unified",)
    assert set(where.roots) == {"/c/cpu,cpuacct", "/c/memory", "/c/freezer", "/c/pids", "/c/unified"}


def test_a_container_sees_only_its_own_part_of_a_tree() -> None:
    mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory\n"
    where = hierarchies.find_hierarchies("4:memory:/docker/abc\n", mounts)
    assert where.v1 == {"memory": "/sys/fs/cgroup/memory"}


def test_a_machine_without_cgroups_has_none() -> None:
    where = hierarchies.find_hierarchies("", "22 27 0:21 / /proc rw - proc proc rw\n")
    assert where == Hierarchies({}, (), ())
    cgroup = limits.create_cgroup("t1-x", LIMITS, hierarchies=where)
    assert (cgroup.directories, cgroup.capabilities, cgroup.freezer) == ([], set(), None)
    cgroup.freeze()
    cgroup.thaw()
    cgroup.remove()


def test_controllers_that_are_mounted_together_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_directory(path: str) -> bool:
        directory = Path(path)
        if directory.exists():
            return False
        directory.mkdir()
        names = (
            "cgroup.procs",
            "memory.limit_in_bytes",
            "memory.memsw.limit_in_bytes",
            "pids.max",
            "cpu.cfs_quota_us",
            "cpu.cfs_period_us",
        )
        for name in (*names, "freezer.state"):
            (directory / name).write_text("")
        return True

    monkeypatch.setattr(limits, "make_directory", make_directory)
    where = Hierarchies(dict.fromkeys(("memory", "pids", "cpu", "freezer"), str(tmp_path)), (), ())
    cgroup = limits.create_cgroup("t1-x", LIMITS, hierarchies=where)
    assert cgroup.directories == [str(tmp_path / "t1-x")]
    assert len(cgroup.procs_fds) == 1
    assert cgroup.capabilities == {MEMORY, PROCESSES, CPU}
    assert cgroup.freezer == str(tmp_path / "t1-x" / "freezer.state")
    written = files_of(str(tmp_path / "t1-x"))
    assert written["memory.limit_in_bytes"] == written["memory.memsw.limit_in_bytes"] == str((64 + 16) << 20)
    assert (written["pids.max"], written["cpu.cfs_quota_us"], written["cpu.cfs_period_us"]) == ("40", "50000", "100000")
    shutil.rmtree(tmp_path / "t1-x")
    cgroup.remove()


def test_the_pid_namespaces_bound_is_not_written_on_kernels_where_it_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(limits, "try_write", lambda path, text: written.append((path, text)) or True)
    for release, expected in (("6.13.9-arch1", False), ("5.12.0", False), ("unknown", False), ("6.14.0-15-generic", True), ("7.0.1", True)):
        written.clear()
        monkeypatch.setattr(os, "uname", lambda release=release: os.uname_result(("Linux", "host", release, "", "x86_64")))
        assert limits.bound_pid_namespace(40) is expected
        assert written == ([("/proc/sys/kernel/pid_max", "344")] if expected else [])


def test_a_freezer_that_does_not_freeze_is_reported_and_thawed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_FREEZE_TIMEOUT_S", 0.05)
    (tmp_path / "freezer.state").write_text("THAWED")
    cgroup = limits.Cgroup(freezer=str(tmp_path / "freezer.state"))
    states = []

    def write(path: str, text: str) -> None:
        states.append(text)
        Path(path).write_text("FREEZING" if text == "FROZEN" else text)

    monkeypatch.setattr(limits, "write_file", write)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="did not freeze"):
        cgroup.freeze()
    assert time.monotonic() - started < 30
    assert states == ["FROZEN", "THAWED"]
