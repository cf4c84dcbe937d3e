"""A throw-away OpenSSH server on this machine, so that the ssh sandbox can be measured where no host is configured."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from t1_env.bench.measure import MeasurementError
from t1_env.errors import SandboxUnavailable

_HOST: Final = "127.0.0.1"
_START_TIMEOUT_S: Final = 30.0
_PORT_TRIES: Final = 5
_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/sbin:/sbin"
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class LoopbackServer:
    """Where the server listens and what opens its door.

    Args:
        host: Address.
        port: TCP port.
        user: The present user, the only one who may log in.
        key_file: Private key to log in with.
        known_hosts_file: Holds the server's key.
        directory: All of its files lie here; gone when it is.
    """

    host: str
    port: int
    user: str
    key_file: Path
    known_hosts_file: Path
    directory: Path


@contextlib.contextmanager
def loopback_server() -> Iterator[LoopbackServer]:
    """Start an OpenSSH server with keys of its own on a free port of 127.0.0.1; it and its keys are gone afterwards.

    Raises:
        SandboxUnavailable: No OpenSSH server is installed.
        MeasurementError: It does not start.
    """
    sshd, keygen = (shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}") for name in ("sshd", "ssh-keygen"))
    if sshd is None or keygen is None:
        raise SandboxUnavailable("--ssh-loopback needs an OpenSSH server on this machine; install the package openssh-server")
    with tempfile.TemporaryDirectory(prefix="t1-bench-sshd-") as name:
        directory = Path(name)
        for key in ("host_key", "client_key"):
            _run([keygen, "-q", "-t", "ed25519", "-N", "", "-C", "t1-bench", "-f", str(directory / key)])
        shutil.copy(directory / "client_key.pub", directory / "authorized_keys")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # what a service manager makes; other servers need it too, so it stays
        process, port = _listen(sshd, directory)
        try:
            kind, key_text, *_ = (directory / "host_key.pub").read_text(encoding="ascii").split()
            known_hosts = directory / "known_hosts"
            known_hosts.write_text(f"[{_HOST}]:{port} {kind} {key_text}\n", encoding="ascii")
            yield LoopbackServer(_HOST, port, getpass.getuser(), directory / "client_key", known_hosts, directory)
        finally:
            process.kill()
            process.wait()


def _listen(sshd: str, directory: Path) -> tuple[subprocess.Popen[bytes], int]:
    for _ in range(_PORT_TRIES):  # somebody else may take a free port first
        port = _free_port()
        lines = [
            f"ListenAddress {_HOST}",
            f"Port {port}",
            f"HostKey {directory / 'host_key'}",
            f"AuthorizedKeysFile {directory / 'authorized_keys'}",
            f"AllowUsers {getpass.getuser()}",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "StrictModes no",
            "PidFile none",
            "UseDNS no",
            "MaxStartups 200",
            "MaxSessions 200",
        ]
        (directory / "sshd_config").write_text("\n".join(lines) + "\n", encoding="utf-8")
        with (directory / "log").open("ab") as log:
            process = subprocess.Popen(
                [sshd, "-D", "-e", "-f", str(directory / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )
        if _answers(process, port):
            return process, port
        process.kill()
        process.wait()
    log_end = (directory / "log").read_text(encoding="utf-8", errors="replace")[-1000:].strip()
    raise MeasurementError(f"the OpenSSH server {sshd} does not start: {log_end}")


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((_HOST, port), timeout=5) as probe:
            if probe.recv(4) == b"SSH-":
                return True
        time.sleep(0.02)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _end_with_parent() -> Callable[[], None]:
    prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec little is safe

    def call() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return call


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise MeasurementError(f"{command[0]} ended with status {done.returncode}: {done.stdout.decode('utf-8', 'replace')[-500:].strip()}")
