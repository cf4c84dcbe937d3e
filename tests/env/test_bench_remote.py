"""``t1-env bench`` over Docker and SSH: the throw-away server, the peers in the same place, and tiny runs where the machine allows them."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t1_env.bench import loopback, remote
from t1_env.bench.catalogue import Settings
from t1_env.bench.figures import at_most, evaluate
from t1_env.bench.loopback import loopback_server
from t1_env.bench.measure import MeasurementError, Role
from t1_env.bench.shells import Place
from t1_env.cli.main import main
from t1_env.errors import SandboxUnavailable

TINY = Settings(fraction=0.001, output_bytes=100_000)


def needs_sshd(test: Callable[..., None]) -> Callable[..., None]:
    found = all(shutil.which(name, path="/usr/sbin:/usr/local/sbin:/sbin:/usr/bin:/bin") for name in ("sshd", "ssh", "ssh-keygen"))
    return pytest.mark.ssh(pytest.mark.skipif(not found, reason="no OpenSSH server and client are installed")(test))


def check_place(place: Place) -> dict[str, Any]:
    """Run each benchmark of a place once; returns its series by benchmark."""
    series = {}
    for benchmark in remote.benchmarks(place, TINY):
        told: list[float] = []
        measured = benchmark.run(told.append)
        assert told[-1] == 1.0
        for spec in benchmark.figures:
            figure = evaluate(spec, benchmark.name, measured)
            assert np.isfinite(figure.value)
            assert figure.value > 0
        series[benchmark.name] = measured
    return series


# ------------------------------------------------------------------------------------------------------------- throw-away server
@needs_sshd
def test_the_server_lets_its_own_key_in_and_leaves_nothing() -> None:
    with loopback_server() as server:
        directory = server.key_file.parent
        options = ["BatchMode=yes", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes", f"UserKnownHostsFile={server.known_hosts_file}"]
        command = ["ssh", "-F", "none", "-T", "-p", str(server.port), "-i", str(server.key_file)]
        command += [word for option in options for word in ("-o", option)] + [f"{server.user}@{server.host}", "echo", "in"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)
        assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, [b"in"]), done.stderr
        assert directory.stat().st_mode & 0o077 == 0
    assert not directory.exists()
    with socket.socket() as probe:
        assert probe.connect_ex((server.host, server.port)) != 0


def test_without_a_server_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SandboxUnavailable, match="openssh-server"), loopback_server():
        pass


@needs_sshd
def test_a_server_that_does_not_start_is_told_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which
    monkeypatch.setattr(
        loopback.shutil, "which", lambda name, **kwargs: real("false" if name == "sshd" else name, **kwargs) or real("false")
    )
    with pytest.raises(MeasurementError, match="does not start"), loopback_server():
        pass


# ---------------------------------------------------------------------------------------------------------------------- definitions
def test_the_targets_of_docker_and_ssh_are_those_of_the_manual() -> None:
    assert remote.docker_place(TINY).targets == {"true-p50": at_most(0.005)}
    assert remote.ssh_place(loopback=True).targets == {"true-p50": at_most(0.010)}
    assert remote.ssh_place(loopback=False).targets == {}, "how far a configured host is, nobody knows"


def test_a_container_that_cannot_be_told_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        containers = property(lambda self: self)

        def list(self, **_: Any) -> list[Any]:
            return []

        def close(self) -> None:
            pass

    monkeypatch.setattr(remote, "_docker_client", Client)
    with pytest.raises(MeasurementError, match="has 0 Docker sandboxes open"):
        remote._container()


# ---------------------------------------------------------------------------------------------------------------------- the real thing
@pytest.mark.docker
def test_docker_is_measured_beside_exec_in_the_same_container(docker_image: str) -> None:
    place = remote.docker_place(Settings(docker_image=docker_image))
    remote.probe(place)
    measured = check_place(place)["docker-true"]
    assert {name for name, series in measured.items() if series.role is Role.PEER} == set(place.peers) >= {"exec by API"}


@needs_sshd
def test_ssh_is_measured_beside_an_exec_each_on_a_server_of_its_own() -> None:
    place = remote.ssh_place(loopback=True)
    measured = check_place(place)["ssh-true"]
    assert {name for name, series in measured.items() if series.role is Role.PEER} == {"ssh exec"}


@needs_sshd
def test_the_runtime_goes_where_the_throw_away_server_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    @contextlib.contextmanager
    def remember() -> Iterator[loopback.LoopbackServer]:
        with loopback_server() as server:
            yield server
            seen.append(server.directory)
            assert any((server.directory / "far").iterdir()), "sandboxes keep their files there, not in the login's home"

    monkeypatch.setattr(remote, "loopback_server", remember)
    remote.probe(remote.ssh_place(loopback=True))
    assert len(seen) == 1
    assert not seen[0].exists()


def test_a_host_that_is_not_configured_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    pytest.importorskip("paramiko")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HOST", "CONFIG"):
        monkeypatch.delenv(f"T1_SSH_{name}", raising=False)
    assert main(["bench", "--sandbox", "ssh"]) == 2
    error = capsys.readouterr().err
    assert "T1_SSH_HOST" in error
    assert error.count("\n") == 1
