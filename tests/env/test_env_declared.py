"""Sandboxes without verification clones: only declared paths are verified, in a fresh sandbox, when the episode is over."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t1_env import Submit, TerminalEnv
from t1_env.declared import DeclaredPath, declared_paths, harmless_archive
from t1_env.errors import SandboxError, SandboxUnavailable
from t1_env.sandbox.local import LocalSandbox, unavailable_reason
from t1_env.tasks import Task, load_task
from t1_env.testing import rollout

needs_namespaces = [pytest.mark.namespaces, pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))]

TESTS = """\
import os, stat
from pathlib import Path

def test_out(): assert Path("out.txt").read_text() == "done\\n"
def test_script(): assert os.access("bin/run", os.X_OK) and Path("bin/latest").readlink() == Path("run")
def test_shipped(): assert not Path("data/draft").exists()
def test_elsewhere(): assert not Path("/app/notes").exists() and not Path("/etc/agent").exists()
"""


class WithoutClones(LocalSandbox):
    """A backend that runs commands and moves files, and nothing else."""

    isolation = "none"

    def start(self) -> None:
        super().start()
        self.capabilities = frozenset()

    def run_in_clone(self, *args: Any, **kwargs: Any) -> Any:
        raise SandboxError("this sandbox has no clones")

    def generation(self) -> str:
        raise SandboxError("this sandbox cannot tell what changed")


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[[str], Task]:
    def make(toml: str) -> Task:
        for name, text in {
            "instruction.md": "Write out.txt.",
            "task.toml": toml,
            "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY draft data/draft\n",
            "environment/draft": "draft\n",
            "tests/test_it.py": TESTS,
            "tests/test.sh": '#!/bin/bash\npython3 -m pytest -rA "$(dirname "$0")/test_it.py"\n',
        }.items():
            path = tmp_path / "task" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return load_task(tmp_path / "task")

    return make


# --------------------------------------------------------------------------------------------------------------- what is declared
def test_declared_paths_of_both_tables(make_task: Callable[[str], Task]) -> None:
    task = make_task(
        'artifacts = ["/var/log/a", "bin/sub", { source = "data", exclude = ["*.tmp"] }, { source = "/x", service = "db" }]\n'
        '[metadata.t1]\nartifacts = ["out.txt", "./bin/", "out.txt"]\n'
    )
    assert declared_paths(task, "/app") == (
        DeclaredPath("/app/out.txt"),
        DeclaredPath("/app/bin"),
        DeclaredPath("/var/log/a"),
        DeclaredPath("/app/data", ("*.tmp",)),
    )


@pytest.mark.parametrize(("toml", "declares"), [("", "none"), ('[metadata.t1]\nartifacts = ["/", "a"]\n', "all of /")])
def test_a_task_that_declares_nothing_is_refused_with_what_to_do(make_task: Callable[[str], Task], toml: str, declares: str) -> None:
    with pytest.raises(SandboxUnavailable, match=rf"declares {declares}.*artifacts = \["):
        declared_paths(make_task(toml), "/app")


# ------------------------------------------------------------------------------------------------------------------- archives
def archive_of(*members: tuple[str, bytes, str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, kind, linkname, data in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size, member.uid, member.mode = kind, linkname, len(data), 1000, 0o750
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def test_of_a_hostile_archive_only_what_stays_inside_is_kept() -> None:
    kept = harmless_archive(
        archive_of(
            ("./a", tarfile.REGTYPE, "", b"a"),
            ("../b", tarfile.REGTYPE, "", b"b"),
            ("/c", tarfile.REGTYPE, "", b"c"),
            ("d/../../e", tarfile.REGTYPE, "", b"e"),
            ("usr", tarfile.SYMTYPE, "/usr", b""),
            ("usr/bin/bash", tarfile.REGTYPE, "", b"evil"),
            ("./usr/./bin/sh", tarfile.REGTYPE, "", b"evil"),
            ("again", tarfile.LNKTYPE, "a", b""),
            ("nothing", tarfile.LNKTYPE, "missing", b""),
            ("itself", tarfile.LNKTYPE, "itself", b""),
            ("device", tarfile.CHRTYPE, "", b""),
            ("pipe", tarfile.FIFOTYPE, "", b""),
            ("dir", tarfile.DIRTYPE, "", b""),
            ("dir/f", tarfile.REGTYPE, "", b"f"),
        )
    )
    with tarfile.open(fileobj=io.BytesIO(kept)) as archive:
        members = archive.getmembers()
        assert [(member.name, member.type) for member in members] == [
            ("a", tarfile.REGTYPE),
            ("usr", tarfile.SYMTYPE),
            ("again", tarfile.REGTYPE),
            ("dir", tarfile.DIRTYPE),
            ("dir/f", tarfile.REGTYPE),
        ]
        assert {(member.uid, member.mode) for member in members} == {(0, 0o750)}
        again = archive.extractfile("again")
        assert again is not None
        assert again.read() == b"a"


@pytest.mark.parametrize("data", [b"", b"no archive", os.urandom(2048)], ids=["empty", "text", "noise"])
def test_what_is_no_archive_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(tarfile.TarError):
        harmless_archive(data)


def test_an_archive_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("t1_env.declared.MAX_BYTES", 1000)
    with pytest.raises(tarfile.TarError, match="more than 1000 bytes"):
        harmless_archive(archive_of(("a", tarfile.REGTYPE, "", b"x" * 600), ("b", tarfile.LNKTYPE, "a", b"")))


# ------------------------------------------------------------------------------------------------------------------- episodes
DECLARES = '[metadata.t1]\nartifacts = ["out.txt", "bin", "data"]\n'
SOLVE = [
    "echo done > out.txt; echo n > notes; echo n > /etc/agent",
    "mkdir bin; echo '#!/bin/sh' > bin/run; chmod +x bin/run; ln -s run bin/latest; ln -s /usr bin/usr",
    "rm data/draft",
]


@pytest.mark.parametrize("verify", [pytest.param(verify, marks=needs_namespaces) for verify in ("change", "step", 2)])
def test_declared_paths_are_verified_in_a_fresh_sandbox_at_the_end(make_task: Callable[[str], Task], verify: Any) -> None:
    env = TerminalEnv(make_task(DECLARES), sandbox=WithoutClones, verify=verify, verify_async=verify == 2)
    try:
        episode = rollout(env, [*SOLVE, Submit()], seed=0)
    finally:
        env.close()
    assert episode.infos[0]["verifiers_passed"] == 1
    assert [info["verifier_source"] for info in episode.infos] == ["declared"] * 5
    assert [info["isolation"] for info in episode.infos] == ["none"] * 5
    assert episode.rewards == [0.0, 0.0, 0.0, 3.0]
    last = episode.infos[-1]
    assert all(last["verifiers"].values()), "what is not declared stays behind"
    assert (last["verbatim"]["verdict"], last["end_reason"], last["incidents"]) == ("agrees", "submitted", ())


@pytest.mark.parametrize(
    ("commands", "passed", "problem"),
    [
        pytest.param(commands, passed, problem, marks=needs_namespaces)
        for commands, passed, problem in (
            ([], 1, None),
            (["mkfifo out.txt"], 1, "Not a regular file"),
            (["ln -s /dev/zero out.txt"], 1, None),
            (["ln -s out.txt out.txt"], 1, None),
            (["rm -r data; echo d > data"], 2, None),
            (["mkdir bin; rm /usr/bin/tar"], 1, "tar ended with status 127"),
            (["mkdir bin; printf '#!/bin/sh\\necho junk > $4' > /usr/bin/tar"], 1, "could not be fetched"),
        )
    ],
)
def test_what_an_agent_leaves_at_a_declared_path_is_its_own_doing(
    make_task: Callable[[str], Task], commands: list[str], passed: int, problem: str | None
) -> None:
    env = TerminalEnv(make_task(DECLARES), sandbox=WithoutClones)
    try:
        info = rollout(env, [*commands, Submit()], seed=0).infos[-1]
    finally:
        env.close()
    assert (info["end_reason"], info["infra_error"], info["verifiers_passed"]) == ("submitted", None, passed)
    assert bool(info["incidents"]) == bool(problem)
    for incident in info["incidents"]:
        assert str(problem) in incident


@pytest.mark.parametrize("toml", [pytest.param("", marks=needs_namespaces)])
def test_a_reset_says_what_is_missing(make_task: Callable[[str], Task], toml: str) -> None:
    env = TerminalEnv(make_task(toml), sandbox=WithoutClones)
    with pytest.raises(SandboxUnavailable, match="Choose another sandbox"):
        env.reset(seed=0)
    env.close()


@pytest.mark.ssh
@pytest.mark.parametrize("marked", [pytest.param(True, marks=needs_namespaces)])
def test_an_ssh_server_without_namespaces(make_task: Callable[[str], Task], sshd: Any, tmp_path: Path, marked: bool) -> None:
    from t1_env.sandbox.ssh import SshConfig, SshSandbox

    place = tmp_path / "far"
    toml = f'[environment]\nworkdir = "{place}/app"\n[metadata.t1]\nartifacts = ["out.txt", "bin", "data"]\n'
    task = make_task(toml)
    config = SshConfig(
        host=sshd.host,
        port=sshd.port,
        user=sshd.user,
        key_file=str(sshd.key_file),
        known_hosts_file=str(sshd.known_hosts_file),
        isolation="none",
    )
    (task.environment_dir / "Dockerfile").write_text(f"FROM debian:bookworm-slim\nWORKDIR {place}/app\nCOPY draft data/draft\n")
    env = TerminalEnv(load_task(task.path), sandbox=lambda spec: SshSandbox(spec, config))
    try:
        episode = rollout(env, ["echo done > out.txt", *SOLVE[1:], Submit()], seed=0)
    finally:
        env.close()
    last = episode.infos[-1]
    assert (last["isolation"], last["verifier_source"], last["verifiers_passed"], last["incidents"]) == ("none", "declared", 4, ())
    assert episode.rewards == [0.0, 0.0, 0.0, 3.0]
