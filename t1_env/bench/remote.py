"""The Docker and ssh sandboxes, with what else could run a command in the same place."""

from __future__ import annotations

import contextlib
import functools
import importlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, Final

from t1_env.bench import shells
from t1_env.bench.catalogue import Benchmark, Settings
from t1_env.bench.figures import at_most
from t1_env.bench.loopback import LoopbackServer, loopback_server
from t1_env.bench.measure import MeasurementError, third_party
from t1_env.sandbox.base import ImageSource, Sandbox, SandboxSpec
from t1_env.sandbox.docker.daemon import KIND_LABEL
from t1_env.sandbox.owner import LABEL, owner_id
from t1_env.sandbox.registry import make_sandbox

_ROUNDS: Final = 30
_COMMAND_TIMEOUT_S: Final = 60.0
_SSH_PEER: Final = "ssh exec"
_DOCKER_SDK: Final = "the Docker SDK"


def docker_place(settings: Settings) -> shells.Place:
    """Return where the Docker sandbox is measured, beside two ways to run ``docker exec`` in the same container.

    Args:
        settings: Names the image.
    """
    image = None if settings.docker_image is None else ImageSource(docker_image=settings.docker_image)
    peers: dict[str, shells.Opener] = {"exec by API": _docker_api}
    if shutil.which("docker") is not None:
        peers["docker exec"] = _docker_exec
    site = shells.Site(lambda: make_sandbox("docker", SandboxSpec(image=image)), peers)
    return shells.Place("docker", lambda: contextlib.nullcontext(site), _ROUNDS, {"true-p50": at_most(0.005)}, tuple(peers))


def ssh_place(*, loopback: bool) -> shells.Place:
    """Return where the ssh sandbox is measured.

    Args:
        loopback: Whether that is a throw-away server on this machine instead of the configured host. A target is known only there.
    """
    if loopback:
        return shells.Place("ssh", _loopback_site, _ROUNDS, {"true-p50": at_most(0.010)}, (_SSH_PEER,))
    site = shells.Site(lambda: make_sandbox("ssh", SandboxSpec()))
    return shells.Place("ssh", lambda: contextlib.nullcontext(site), _ROUNDS)


def benchmarks(place: shells.Place, settings: Settings) -> list[Benchmark]:
    """Return the benchmarks of a place.

    Args:
        place: Where.
        settings: How large.
    """
    return [make(place, settings) for make in (shells.reset_benchmark, shells.true_benchmark, shells.output_benchmark)]


def probe(place: shells.Place) -> None:
    """Start a sandbox and end it, so that what is missing is said before anything is measured.

    Args:
        place: Where.

    Raises:
        T1Error: What is missing.
    """
    with place.open() as site, shells.open_shell(site.make()):
        pass


# ----------------------------------------------------------------------------------------------------------------------- docker
def _container() -> str:
    """Return the container of the only Docker sandbox that this process has open."""
    with contextlib.closing(_docker_client()) as client, third_party(_DOCKER_SDK):
        found = client.containers.list(filters={"label": [f"{LABEL}={owner_id()}", f"{KIND_LABEL}=sandbox"]})
    if len(found) != 1:
        raise MeasurementError(f"this process has {len(found)} Docker sandboxes open, expected the one that is measured")
    return str(found[0].id)


def _docker_client() -> Any:
    with third_party(_DOCKER_SDK):
        return importlib.import_module("docker").from_env(timeout=_COMMAND_TIMEOUT_S)


@contextlib.contextmanager
def _docker_api(_: Sandbox) -> Iterator[Callable[[], object]]:
    """An exec for each command, by the Docker SDK over a connection that stays open."""
    container_id = _container()
    with contextlib.closing(_docker_client()) as client:
        with third_party(_DOCKER_SDK):
            container = client.containers.get(container_id)

        def run() -> None:
            with third_party(_DOCKER_SDK):
                status = container.exec_run(["bash", "-c", "true"]).exit_code
            if status != 0:
                raise MeasurementError(f"an exec in the container ended with status {status}")

        yield run


@contextlib.contextmanager
def _docker_exec(_: Sandbox) -> Iterator[Callable[[], object]]:
    """A ``docker exec`` for each command, by the command line."""
    command = ["docker", "exec", _container(), "bash", "-c", "true"]
    yield lambda: _run(command)


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise MeasurementError(f"{' '.join(command)} ended with status {done.returncode}: {done.stdout[-300:].decode('utf-8', 'replace')}")


# -------------------------------------------------------------------------------------------------------------------------- ssh
@contextlib.contextmanager
def _loopback_site() -> Iterator[shells.Site]:
    from t1_env.sandbox.ssh import SshSandbox
    from t1_env.sandbox.ssh.config import SshConfig

    with loopback_server() as server:
        config = SshConfig(
            host=server.host,
            port=server.port,
            user=server.user,
            key_file=str(server.key_file),
            known_hosts_file=str(server.known_hosts_file),
            agent=False,
            ssh_config_file="none",
            remote_dir=str(server.directory / "far"),
        )
        yield shells.Site(lambda: SshSandbox(SandboxSpec(), config=config), {_SSH_PEER: functools.partial(_ssh_exec, server)})


@contextlib.contextmanager
def _ssh_exec(server: LoopbackServer, _: Sandbox) -> Iterator[Callable[[], object]]:
    """A channel with ``true`` for each command, over one connection that stays open: the login's shell starts each time, in no sandbox."""
    with contextlib.closing(importlib.import_module("paramiko").SSHClient()) as client:
        with third_party("paramiko"):
            client.load_host_keys(str(server.known_hosts_file))
            client.connect(
                server.host,
                port=server.port,
                username=server.user,
                key_filename=str(server.key_file),
                look_for_keys=False,
                allow_agent=False,
                timeout=_COMMAND_TIMEOUT_S,
            )

        def run() -> None:
            with third_party("paramiko"):
                _, stdout, _ = client.exec_command("true", timeout=_COMMAND_TIMEOUT_S)
                status = stdout.channel.recv_exit_status()
            if status != 0:
                raise MeasurementError(f"a command over ssh ended with status {status}")

        yield run
