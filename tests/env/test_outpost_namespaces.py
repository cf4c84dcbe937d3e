"""An outpost that hosts the local sandbox: isolation, clones, forks and images at the far end of a connection."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t1_env.errors import ConfigError, ImageBuildError, SandboxError
from t1_env.sandbox.base import ImageSource, SandboxSpec
from t1_env.sandbox.local import SandboxFileError, unavailable_reason
from t1_env.shell import Session

pytestmark = pytest.mark.namespaces


@pytest.fixture(autouse=True)
def _possible() -> None:
    reason = unavailable_reason()
    if reason:
        pytest.skip(f"no local sandbox on this machine: {reason}")


@pytest.fixture(params=["pure", "complete"])
def box(request: pytest.FixtureRequest, outpost: Callable[..., Any]) -> Any:
    return outpost("namespaces", kind=request.param)


def execute(box: Any, *argv: str, **options: Any) -> Any:
    result = box.run_in_clone("t1_env.sandbox.probe:execute", {"argv": list(argv)}, **options)
    assert result.error is None
    return result.payload


def test_it_is_the_local_sandbox(box: Any, tmp_path: Path) -> None:
    assert (box.mode, box.isolation, box.mode_reason) == ("namespaces", "remote", None)
    assert {"clone", "storage_limit", "network_off"} <= box.capabilities
    assert box.run(["cat", "/proc/1/comm"]).stdout == b"t1-init\n"
    assert box.run(["test", "-e", str(tmp_path)]).exit_code == 1
    with Session(box) as session:
        assert session.run("echo hello; pwd").output == "hello\n/app\n"
        assert session.run("kill -9 -1; kill -9 $$").exit_code == 137
        assert session.run("echo on").output == "on\n"


def test_files(box: Any, tmp_path: Path) -> None:
    source = tmp_path / "tree"
    (source / "d").mkdir(parents=True)
    (source / "d/big").write_bytes(os.urandom(2_500_000))
    (source / "d/big").chmod(0o600)
    (source / "link").symlink_to("d/big")
    os.utime(source / "d/big", ns=(10**18, 10**18))
    box.put(source, "/srv/there")
    assert box.get("/srv/there/link") == (source / "d/big").read_bytes()
    assert box.run(["stat", "-c", "%a %Y %u", "/srv/there/d/big"]).stdout == b"600 1000000000 0\n"
    box.put(b"text", "/srv/bytes", mode=0o755)
    assert box.run(["stat", "-c", "%a", "/srv/bytes"]).stdout == b"755\n"
    box.run(["ln", "-s", f"{tmp_path}/tree/d/big", "/srv/outside"])
    with pytest.raises(SandboxFileError):
        box.get("/srv/outside")
    (tmp_path / "empty").mkdir()
    box.put(tmp_path / "empty", "/srv/empty")
    assert box.run(["ls", "-A", "/srv/empty"]).stdout == b""


def test_generation_and_system_changes(box: Any) -> None:
    first = box.generation()
    assert box.generation() == first
    box.run(["sh", "-c", "echo x > /app/x; rm /usr/bin/env"])
    assert box.generation() != first
    assert list(box.system_changes()) == ["/usr/bin/env"]


def test_clone_with_mounts(box: Any, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "secret").write_text("one")
    box.run(["sh", "-c", "echo agent > /app/file"])
    shown = execute(box, "sh", "-c", "cat /app/file /tests/secret; echo changed > /app/file", mounts={"/tests": tests})
    assert shown["stdout"] == "agent\none"
    assert box.get("/app/file") == b"agent\n"
    assert box.run(["sh", "-c", "grep -rs one /tests /tmp /var /root; ls /tests"]).stdout == b""
    (tests / "secret").write_text("two")
    assert execute(box, "cat", "/tests/secret", mounts={"/tests": tests})["stdout"] == "two"
    single = execute(box, "cat", "/one/file", mounts={"/one/file": tests / "secret"})
    assert single["stdout"] == "two"
    with pytest.raises(ConfigError, match="does not exist"):
        execute(box, "true", mounts={"/tests": tmp_path / "none"})


def test_mounts_are_sent_once_for_each_content(box: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/a").write_text("1")
    asked: list[str] = []
    submit = box._client.submit
    monkeypatch.setattr(box._client, "submit", lambda operation, *a, **k: (asked.append(operation), submit(operation, *a, **k))[1])
    for _ in range(3):
        execute(box, "true", mounts={"/tests": tmp_path / "tests"})
    assert asked == ["has_mount", "put_mount", "clone", "clone", "clone"]


def test_failures_of_a_clone(box: Any) -> None:
    assert "no function" in box.run_in_clone("t1_env.sandbox.probe:nothing", None).error
    assert "ran out of time" in box.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["sleep", "100"]}, timeout_s=0.5).error
    assert box.run_in_clone("t1_env.sandbox.probe:echo", {"a": [1, None, "ü"]}).payload == {"a": [1, None, "ü"]}


def test_the_interpreter_that_was_brought_along_can_be_started_in_a_clone(outpost: Callable[..., Any]) -> None:
    box = outpost("namespaces", kind="complete")
    # In one clone: it lies somewhere else in each.
    start = "[__import__('sys').executable, '-I', '-c', 'import ssl, sqlite3; print(6 * 7)']"
    result = box.run_in_clone("builtins:eval", f"__import__('subprocess').check_output({start}, text=True)")
    assert (result.payload, result.error) == ("42\n", None)


def test_fork(box: Any) -> None:
    if "fork" not in box.capabilities:
        pytest.skip("this machine's local sandbox cannot be forked")
    box.run(["sh", "-c", "echo before > /app/file"])
    copy = box.fork()
    assert copy.capabilities == box.capabilities
    box.run(["sh", "-c", "echo after > /app/file"])
    assert copy.get("/app/file") == b"before\n"
    box.close()
    assert not box.alive
    assert copy.alive
    assert copy.run(["echo", "on"]).stdout == b"on\n"
    copy.close()
    assert not copy.alive


def test_an_image_is_built_over_there(outpost: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM base\nCOPY file /built/\nRUN cat /built/file > /built/copy\nENV A=1\nWORKDIR /srv/w\n")
    (tmp_path / "file").write_text("text")
    box = outpost("namespaces", spec=SandboxSpec(image=ImageSource(tmp_path)))
    assert (dict(box.built.env), box.built.workdir) == ({"A": "1"}, "/srv/w")
    assert box.get("/built/copy") == b"text"
    (tmp_path / "Dockerfile").write_text("FROM base\nRUN exit 3\n")
    with pytest.raises(ImageBuildError, match=f"{tmp_path}/Dockerfile:2"):
        outpost("namespaces", spec=SandboxSpec(image=ImageSource(tmp_path)))


def test_auto_takes_namespaces_where_there_are_any(outpost: Callable[..., Any]) -> None:
    assert outpost("auto", spec=SandboxSpec()).mode == "namespaces"


def test_a_specification_that_is_none_is_refused_over_there(outpost: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="max_processes"):
        outpost("namespaces", spec=SandboxSpec(max_processes=1))
    with pytest.raises(SandboxError):
        outpost("native", spec=SandboxSpec(workdir="/proc/version/x"))
