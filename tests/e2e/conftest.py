"""A Docker daemon of the tests' own, which they may kill: the machine's is everybody's."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class DockerDaemon:
    """A daemon with its own socket, store and containerd, no network of its own, and one image."""

    directory: Path
    archive: bytes = field(repr=False)
    image: str = "t1-test/base:own"
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    containerd: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def base_url(self) -> str:
        """Where it listens."""
        return f"unix://{self.directory / 'docker.sock'}"

    @property
    def cgroup_parent(self) -> str:
        """Below which its containers have their cgroups."""
        return f"/{self.directory.name}"

    def start(self) -> None:
        """Start it, after a kill too, and wait until it answers.

        Raises:
            RuntimeError: It does not; the message has the end of its log.
        """
        assert self.process is None
        home = self.directory
        if self.containerd is None:  # apart from the daemon, as service managers run it: it outlives a daemon that is killed
            config = home / "containerd.toml"
            config.write_text(
                f'version = 2\nroot = "{home}/containerd"\nstate = "{home}/state"\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
                f'[grpc]\naddress = "{home}/containerd.sock"\n'
            )
            self.containerd = self._launch(["containerd", "--log-level", "warn", "--config", str(config)])
        (home / "pid").unlink(missing_ok=True)  # what a killed one leaves; a new process of that number would keep the next from starting
        # In a network namespace of its own: a daemon without a bridge removes docker0, and with it the network of the machine's own daemon.
        argv = ["unshare", "--net", "dockerd", "--log-level", "warn", "-H", self.base_url]
        argv += ["--data-root", str(home / "data"), "--exec-root", str(home / "exec")]
        argv += ["--pidfile", str(home / "pid"), "--bridge=none", "--iptables=false", "--cgroup-parent", self.cgroup_parent]
        self.process = self._launch([*argv, "--containerd", f"{home}/containerd.sock"])
        deadline = time.monotonic() + 120
        while self.process.poll() is None and time.monotonic() < deadline:
            if self._answers():
                with contextlib.closing(self.client()) as client:
                    if not client.images.list(name=self.image):
                        repository, _, tag = self.image.partition(":")
                        client.api.import_image_from_data(self.archive, repository=repository, tag=tag, changes=['CMD ["bash"]'])
                return
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"dockerd does not start: {(home / 'log').read_text(errors='replace')[-1500:]}")

    def _launch(self, argv: list[str]) -> subprocess.Popen[bytes]:
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as engine:
            engine.settimeout(10)
            engine.connect(self.base_url.removeprefix("unix://"))
            engine.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in engine.recv(64)
        return False

    def client(self) -> Any:
        """A client of it, to be closed by the caller."""
        import docker

        return docker.DockerClient(base_url=self.base_url, timeout=120)

    def kill(self) -> None:
        """End the daemon at once; what it had started is left to itself, as in a crash. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """End it in good order, and remove every trace: containers, mounts, cgroups, files."""
        for process in (self.process, self.containerd):
            if process is not None:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self.process = self.containerd = None
        deadline = time.monotonic() + 30
        while strays := self._strays():
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            if (target := line.split()[4]).startswith(f"{self.directory}/"):
                subprocess.run(["umount", "-l", target], check=False)
        while (left := self.cgroups()) and time.monotonic() < deadline:
            for directory in reversed(left):
                with contextlib.suppress(OSError):
                    directory.rmdir()
        shutil.rmtree(self.directory, ignore_errors=True)

    def cgroups(self) -> list[Path]:
        """Cgroup directories of its containers, parents first."""
        root = Path("/sys/fs/cgroup")
        tops = [path for place in (root, *root.glob("*/")) if (path := place / self.directory.name).is_dir()]
        return [directory for top in tops for directory in [top, *sorted(path for path in top.rglob("*") if path.is_dir())]]

    def _strays(self) -> list[int]:
        """Shims that outlived their daemon (their command lines name our directory), and what ran in its containers."""
        found = []
        for directory in self.cgroups():
            found += [int(line) for line in (directory / "cgroup.procs").read_text().split()]
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if f"{self.directory}/".encode() in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
        return found


@pytest.fixture
def docker_daemon(docker_image_archive: bytes) -> Iterator[DockerDaemon]:
    """A Docker daemon that only this test uses."""
    pytest.importorskip("docker", reason="the docker SDK is not installed: python -m pip install 't1-terminal[docker]'")
    if shutil.which("dockerd") is None or os.getuid() != 0:
        pytest.skip("a daemon of the tests' own needs root and dockerd: apt-get install docker.io")
    daemon = DockerDaemon(Path(tempfile.mkdtemp(prefix="t1-test-docker-", dir="/var/tmp")), docker_image_archive)
    try:
        try:
            daemon.start()
        except RuntimeError as error:
            pytest.skip(str(error))
        yield daemon
    finally:
        daemon.stop()
