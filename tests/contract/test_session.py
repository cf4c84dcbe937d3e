"""What a shell session promises, on every backend that this machine can run: the public cases of ``t1_env.testing``, one test each."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from t1_env.sandbox.base import ImageSource, SandboxSpec
from t1_env.sandbox.local import LocalSandbox, unavailable_reason
from t1_env.shell.dialect import ShellName
from t1_env.testing import SESSION_CASES, SessionCase
from t1_env.testing.session import CaseRunner
from t1_env.testing.terminal import CaseSkipped


class Backend(NamedTuple):
    name: str
    shell: ShellName


MARKS = {"local": pytest.mark.namespaces, "docker": pytest.mark.docker, "ssh": pytest.mark.ssh}
BACKENDS = [
    Backend("process", "bash"), Backend("local", "bash"), Backend("docker", "bash"), Backend("ssh", "bash"),
    Backend("local", "sh"), Backend("local", "zsh"),
]  # fmt: skip


def _process(request: pytest.FixtureRequest) -> Callable[[SandboxSpec], Any]:
    """Plain processes of this machine: what a session does by itself, without a sandbox."""
    spawner = request.getfixturevalue("process_spawner")
    workdir = request.getfixturevalue("tmp_path_factory").mktemp("work")
    return lambda _: spawner(workdir)


def _local(request: pytest.FixtureRequest) -> Callable[[SandboxSpec], Any]:
    if reason := unavailable_reason():
        pytest.skip(f"no local sandbox on this machine: {reason}")
    return LocalSandbox


def _docker(request: pytest.FixtureRequest) -> Callable[[SandboxSpec], Any]:
    image = request.getfixturevalue("docker_python_image")
    from t1_env.sandbox.docker import DockerSandbox

    return lambda spec: DockerSandbox(replace(spec, image=ImageSource(docker_image=image)))


def _ssh(request: pytest.FixtureRequest) -> Callable[[SandboxSpec], Any]:
    server = request.getfixturevalue("sshd")
    from t1_env.sandbox.ssh import SshConfig, SshSandbox

    config = SshConfig(
        host=server.host,
        port=server.port,
        user=server.user,
        key_file=str(server.key_file),
        known_hosts_file=str(server.known_hosts_file),
        agent=False,
        ssh_config_file="none",
        connect_timeout_s=60,
        remote_dir=str(request.getfixturevalue("tmp_path_factory").mktemp("remote") / "t1"),
        python=sys.executable,
    )
    return functools.partial(SshSandbox, config=config)


FACTORIES = {"process": _process, "local": _local, "docker": _docker, "ssh": _ssh}


@pytest.fixture(scope="module")
def runners() -> Iterator[dict[Backend, CaseRunner]]:
    """One for each backend, by need. (A parametrised fixture would be torn down between any two cases.)"""
    made: dict[Backend, CaseRunner] = {}
    yield made
    for runner in made.values():
        runner.close()


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(backend, case, marks=MARKS.get(backend.name, ()), id=f"{'-'.join(backend)}-{case.group}-{case.name}")
        for backend in BACKENDS
        for case in SESSION_CASES
        if backend.shell in case.shells
    ],
)
def test_session(runners: dict[Backend, CaseRunner], backend: Backend, case: SessionCase, request: pytest.FixtureRequest) -> None:
    if backend not in runners:
        runners[backend] = CaseRunner(FACTORIES[backend.name](request), backend.shell)
    try:
        runners[backend].run(case)
    except CaseSkipped as skip:
        pytest.skip(str(skip))
