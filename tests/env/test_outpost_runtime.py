"""Runtimes: the same contents, the same bundle; built once; complete ones need nothing of where they run."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from t1_env.errors import ConfigError, SandboxUnavailable
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.outpost import elf, interpreter, layout, runtime
from t1_env.sandbox.outpost.client import OutpostClient
from t1_env.sandbox.outpost.pipe import PipeStream
from t1_env.sandbox.outpost.remote import RemoteSandbox
from t1_env.sandbox.outpost.runtime import Runtime, make_runtime


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Each name has a cache of its own."""

    def use(name: str) -> None:
        monkeypatch.setenv("T1_CACHE_DIR", str(tmp_path / name))
        monkeypatch.setattr(runtime, "_made", {})

    return use


def names(archive: Path) -> list[str]:
    with tarfile.open(archive) as tar:
        return tar.getnames()


def test_a_pure_runtime_is_the_same_wherever_it_is_built(fresh: Callable[[str], None]) -> None:
    fresh("one")
    one = make_runtime("pure")
    fresh("two")
    two = make_runtime("pure")
    assert (one.digest, one.size_bytes) == (two.digest, two.size_bytes)
    assert one.archive != two.archive
    assert hashlib.sha256(one.tar().read_bytes()).hexdigest().startswith(one.digest)
    assert one.size_bytes == one.tar().stat().st_size
    assert one.machine == os.uname().machine
    found = names(one.tar())
    assert {"boot.py", "site-packages/t1_env/sandbox/outpost/server.py", "site-packages/pyte/__init__.py"} <= set(found)
    assert not [name for name in found if "__pycache__" in name or name.endswith(".so")]
    assert not [name for name in found if name.startswith(("site-packages/t1_env/cli", "site-packages/t1_env/tasks"))]
    assert one.command("/r", "native", python="/usr/bin/python3.12") == [
        *("/usr/bin/python3.12", "-I", "-S", "-X", "utf8", "/r/boot.py", "native")
    ]


def test_it_is_built_once_and_again_if_damaged(fresh: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fresh("one")
    built = []
    build = runtime._build
    monkeypatch.setattr(runtime, "_build", lambda *arguments: (built.append(1), build(*arguments))[1])
    first = make_runtime("pure")
    monkeypatch.setattr(runtime, "_made", {})
    assert make_runtime("pure") == first
    assert len(built) == 1
    first.archive.write_bytes(b"cut off")
    monkeypatch.setattr(runtime, "_made", {})
    again = make_runtime("pure")
    assert again == first
    assert len(built) == 2
    assert again.unpack() == again.unpack()
    assert (again.unpack() / "boot.py").is_file()


def test_what_nobody_used_in_a_long_time_is_removed(fresh: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fresh("one")
    old = make_runtime("pure")
    unpacked = old.unpack()
    directory = old.archive.parent
    abandoned = directory / ".new-abandoned"
    abandoned.mkdir()
    for path in (*directory.glob("*.json"), old.archive, unpacked, abandoned):
        os.utime(path, (1, 1))
    monkeypatch.setattr(runtime, "_FORMAT", "another version")
    monkeypatch.setattr(runtime, "_made", {})
    original = runtime._digest_of
    monkeypatch.setattr(runtime, "_digest_of", lambda path: "f" + original(path)[1:])
    new = make_runtime("pure")
    assert sorted(path.name for path in directory.iterdir() if path.suffix != ".json") == [".lock", new.archive.name]
    assert len(list(directory.glob("*.json"))) == 1


def test_processes_that_build_at_once_build_one(tmp_path: Path) -> None:
    script = "from t1_env.sandbox.outpost.runtime import make_runtime as m; r = m('pure'); print(r.digest, r.unpack())"
    environment = {**os.environ, "T1_CACHE_DIR": str(tmp_path / "cache")}
    processes = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) for _ in range(4)]
    outputs = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert len(outputs) == 1
    left = sorted(path.name.partition("-")[0] for path in (tmp_path / "cache/runtimes").iterdir())
    assert left == [".lock", "pure", "pure", "pure"]  # the archive, its index and its directory


def test_a_cache_that_cannot_be_written_is_named(fresh: Callable[[str], None], tmp_path: Path) -> None:
    (tmp_path / "one").write_text("a file")
    fresh("one")
    with pytest.raises(ConfigError, match="set T1_CACHE_DIR"):
        make_runtime("pure")


# ------------------------------------------------------------------------------------------------------------------------ complete
@pytest.fixture(scope="module")
def complete() -> Runtime:
    try:
        return make_runtime("complete")
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def test_what_cannot_be_made_complete_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\n" + "#" * 100)
    with pytest.raises(SandboxUnavailable, match="64-bit ELF"):
        elf.loader_of(script)
    with pytest.raises(SandboxUnavailable, match="neither glibc's nor musl's"):
        elf.isolated_loader(b"\x7fELF\x02 something", "/lib/ld.so")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="Linux only"):
        interpreter.interpreter_members(tmp_path)


class EmptyPlace(RemoteSandbox):
    """An outpost in a root that holds nothing but the runtime, and what an agent might plant there."""

    def __init__(self, root: Path, command: list[str]) -> None:
        super().__init__(SandboxSpec(workdir="/work"))
        self.command = command
        self.log = root / "stderr"

    def _connect(self) -> OutpostClient:
        return OutpostClient(PipeStream(["sh", "-c", f'exec "$@" 2>{self.log}', "sh", *self.command]))


@pytest.fixture
def empty_root(complete: Runtime, tmp_path: Path) -> tuple[Path, list[str]]:
    root = tmp_path / "root"
    (root / "proc").mkdir(parents=True)
    (root / "dev").mkdir()
    with tarfile.open(complete.tar()) as archive:
        archive.extractall(root / "runtime", filter="tar")
    setup = 'mount -t proc proc "$0/proc" && touch "$0/dev/null" && mount --bind /dev/null "$0/dev/null" && exec chroot "$0" "$@"'
    before = ["unshare", "--fork", "--pid", "--mount", "--kill-child"]
    if os.geteuid() != 0:
        before += ["--user", "--map-root-user"]
    before += ["--", "sh", "-c", setup, str(root)]
    interpreter_command = layout.interpreter_command("/runtime", None)
    probe = subprocess.run([*before, *interpreter_command, "-c", "print(1)"], capture_output=True, text=True, check=False)
    if "unshare" in probe.stderr or "mount" in probe.stderr or "chroot" in probe.stderr:
        pytest.skip(f"this machine does not let us make an empty root: {probe.stderr.strip()}")
    assert probe.stdout == "1\n", probe.stderr
    return root, before


@pytest.mark.namespaces
def test_a_complete_runtime_needs_nothing_of_the_place(complete: Runtime, empty_root: tuple[Path, list[str]]) -> None:
    root, before = empty_root
    with EmptyPlace(root, [*before, *complete.command("/runtime", "native")]) as box:
        assert box.run(["sh"]).exit_code == 127
        box.put(b"text", "/a/b")
        assert (root / "a/b").read_bytes() == b"text"
        assert box.get("/a/b") == b"text"
        generation = box.generation()
        assert box.generation() == generation
        box.put(b"more", "/a/b")
        assert box.generation() != generation
        modules = "import ssl, sqlite3, ctypes, hashlib, lzma, bz2, zlib, pytest, pyte, sys; print(sys.prefix)"
        code = f"import sys; sys.path.insert(0, '/runtime/site-packages'); {modules}"
        assert box.run([*layout.interpreter_command("/runtime", None), "-I", "-S", "-c", code]).stdout == b"/runtime\n"
    assert (root / "stderr").read_text() == ""


@pytest.mark.namespaces
def test_nothing_that_an_agent_plants_is_loaded(complete: Runtime, empty_root: tuple[Path, list[str]]) -> None:
    root, before = empty_root
    planted = Path(interpreter._libraries_of(elf.loader_of(Path(sys.executable).resolve()), [Path(sys.executable).resolve()])["libc.so.6"])
    evil = planted.read_bytes()
    directories = ["lib", "usr/lib", "lib64", str(planted.parent).lstrip("/"), sys.base_prefix.lstrip("/") + "/lib"]
    for directory in directories:
        (root / directory).mkdir(parents=True, exist_ok=True)
        for name in ("libnss_evil.so.2", "libpython3.so", "libevil.so"):
            (root / directory / name).write_bytes(evil)
    (root / "etc").mkdir()
    (root / "etc/ld.so.preload").write_text("/lib/libevil.so\n")
    (root / "etc/nsswitch.conf").write_text("passwd: evil files\nhosts: evil files\n")
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    code = """
import ctypes, pwd, socket
pwd.getpwuid(0)
try: pwd.getpwnam("nobody-here")
except KeyError: pass
try: socket.getaddrinfo("nowhere", 80)
except OSError: pass
for name in ("libevil.so", "libnss_evil.so.2"):
    try: ctypes.CDLL(name)
    except OSError: pass
files = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(sorted(name for name in files if not name.startswith("/runtime/")))
"""
    command = [*before, *layout.interpreter_command("/runtime", None), "-I", "-S", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("[]\n", "")
