"""Fixtures that every test may use: a small base image for a Docker engine, and a throw-away OpenSSH server.

Both skip with the reason where the machine cannot offer them. ``T1_REQUIRE=docker,ssh`` turns those skips into failures, for machines that
are known to have them: a continuous-integration run must not turn green because everything was skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import getpass
import hashlib
import importlib.util
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = """
    awk base64 basename bash cat chgrp chmod chown clear cmp comm cp cut date dd df diff dirname du echo env expr false find fold free
    grep gzip head hostname id install join kill ldd less ln ls md5sum mkdir mkfifo mknod mktemp mount mv nice nl nohup od paste pgrep
    pkill printenv printf ps pwd readlink realpath rm rmdir script sed seq setsid sh sha256sum shred shuf sleep sort split stat stdbuf
    stty su sync tac tail tar tee test timeout top touch tput tr true truncate tty umount uname uniq uptime vi vim wc which who whoami
    xargs yes zsh
""".split()  # noqa: SIM905
"""Looked up on this host; those that it lacks are left out, so a test that needs a rare one says so itself."""

TREES = ("/lib/terminfo", "/usr/lib/terminfo", "/etc/terminfo", "/usr/lib/locale/C.utf8")


def unavailable(what: str, reason: str) -> NoReturn:
    """Skip because the machine lacks something, or fail if the machine was said to have it."""
    if what in os.environ.get("T1_REQUIRE", "").replace(" ", "").split(","):
        pytest.fail(f"T1_REQUIRE says that this machine has {what}, but: {reason}", pytrace=False)
    pytest.skip(reason)


# --- Outposts ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def outpost(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts outposts as processes of this machine: ``outpost(mode, *arguments, kind=, spec=, before=)`` returns a started sandbox.

    The sandbox has ``stream``, whose ``pid`` is the outpost's process (or that of ``before``, a command line put in front).
    """
    from t1_env.sandbox.base import SandboxSpec
    from t1_env.sandbox.outpost.client import OutpostClient
    from t1_env.sandbox.outpost.pipe import PipeStream
    from t1_env.sandbox.outpost.remote import RemoteSandbox
    from t1_env.sandbox.outpost.runtime import make_runtime

    made = []

    class Box(RemoteSandbox):
        def __init__(self, spec: SandboxSpec, command: list[str]) -> None:
            super().__init__(spec)
            self.command = command

        def _connect(self) -> OutpostClient:
            self.stream = PipeStream(self.command)
            return OutpostClient(self.stream)

        def _sibling(self) -> Box:
            made.append(Box(self.spec, self.command))
            return made[-1]

    def start(mode: str, *arguments: str, kind: Any = "pure", spec: SandboxSpec | None = None, before: tuple[str, ...] = ()) -> Box:
        runtime = make_runtime(kind)
        command = [*before, *runtime.command(str(runtime.unpack()), mode, *arguments, python=sys.executable)]
        made.append(Box(spec or SandboxSpec(workdir="/app" if mode == "namespaces" else str(tmp_path / "work")), command))
        made[-1].start()
        return made[-1]

    yield start
    for box in made:
        box.close()


# --- Plain processes ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def process_spawner() -> type[Any]:
    """The class of a stand-in for a sandbox: a session's processes are plain processes of this machine (tests/env/process_spawner.py)."""
    spec = importlib.util.spec_from_file_location("process_spawner", Path(__file__).with_name("env") / "process_spawner.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ProcessSpawner  # type: ignore[no-any-return]


# --- Docker ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def docker_image_archive() -> bytes:
    """What ``docker_image`` is made of, for engines other than the machine's own."""
    return _host_image(python=False)()


@pytest.fixture(scope="session")
def docker_image() -> Iterator[str]:
    """Name of a small local image: this host's own bash, coreutils, grep, sed, procps, vim, less ... and no Python."""
    with _shared_image("base", _host_image(python=False)) as name:
        yield name


@pytest.fixture(scope="session")
def docker_python_image() -> Iterator[str]:
    """Name of an image like ``docker_image`` that has ``python3`` as well (this interpreter and its standard library)."""
    with _shared_image("python", _host_image(python=True)) as name:
        yield name


@contextlib.contextmanager
def _shared_image(kind: str, make: Callable[[], bytes]) -> Iterator[str]:
    """Import an image under a tag that names its content, for as long as any test process of this user needs it.

    Workers and concurrent runs share it: each holds a shared lock on one file, and the last to end gets the exclusive lock and removes it.
    """
    client = _docker_client()
    try:
        archive = make()
        name = f"t1-test/{kind}:{hashlib.sha256(archive).hexdigest()[:16]}"
        path = Path(tempfile.gettempdir()) / f"t1-test-image-{os.getuid()}-{name.replace('/', '-').replace(':', '-')}.lock"
        with path.open("w") as lock:
            while True:
                fcntl.flock(lock, fcntl.LOCK_SH)
                if client.images.list(name=name):
                    break
                fcntl.flock(lock, fcntl.LOCK_UN)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # by the time we would get it, whoever has it has imported the image and keeps it in use
                    time.sleep(0.05)
                    continue
                if not client.images.list(name=name):
                    changes = ['CMD ["bash"]', f"ENV PATH={SYSTEM_PATH}", "LABEL t1.test=image"]
                    client.api.import_image_from_data(
                        archive, repository=name.partition(":")[0], tag=name.partition(":")[2], changes=changes
                    )
                fcntl.flock(lock, fcntl.LOCK_UN)
            try:
                yield name
            finally:
                with contextlib.suppress(BlockingIOError):  # another test process uses it
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _forget_image(client, name)
    finally:
        client.close()


def _docker_client() -> Any:
    try:
        import docker
    except ImportError:
        unavailable("docker", "the docker SDK is not installed: python -m pip install 't1-terminal[docker]'")
    reason = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the SDK forgets to close a socket that could not be connected
        try:
            client = docker.from_env(timeout=120)
            client.ping()
        except (docker.errors.DockerException, OSError) as error:
            reason = str(error)
        gc.collect()
    if reason:
        unavailable("docker", f"no Docker engine answers: {reason}")
    return client


def _forget_image(client: Any, name: str) -> None:
    import docker

    # A container of a test that failed may still use it; the label tells whoever cleans up what it is.
    with contextlib.suppress(docker.errors.DockerException, OSError):
        client.images.remove(name)


def _host_image(*, python: bool) -> Callable[[], bytes]:
    def make() -> bytes:
        files: dict[str, Path] = {}
        for program in PROGRAMS:
            if found := shutil.which(program, path=SYSTEM_PATH):
                _with_libraries(files, Path(found), f"/usr/bin/{program}")
        for tree in [Path(tree) for tree in TREES] + sorted(Path("/usr/lib").glob("*/zsh")):
            _tree(files, tree)
        if python:
            executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
            _with_libraries(files, executable, str(executable))
            _tree(
                files,
                Path(sysconfig.get_path("stdlib")),
                leave_out=("site-packages", "dist-packages", "test", "__pycache__", "idlelib", "ensurepip"),
            )
        return _tar(files, links={"/usr/bin/python3": str(executable)} if python else {})

    return make


def _with_libraries(files: dict[str, Path], source: Path, target: str) -> None:
    files[target] = source
    listing = subprocess.run(["ldd", str(source)], capture_output=True, text=True, check=False).stdout  # a script has no libraries
    for line in listing.splitlines():
        for word in line.split():
            if word.startswith("/"):
                library = Path(word)
                files[str(library.parent.resolve() / library.name)] = library


def _tree(files: dict[str, Path], top: Path, leave_out: tuple[str, ...] = ()) -> None:
    for directory, folders, names in os.walk(top):
        folders[:] = sorted(name for name in folders if name not in leave_out and not name.startswith("config-"))
        for name in sorted(names):
            path = Path(directory) / name
            if path.is_file():
                if name.endswith(".so"):
                    _with_libraries(files, path, str(path.parent.resolve() / name))
                else:
                    files[str(path.parent.resolve() / name)] = path


def _tar(files: dict[str, Path], links: dict[str, str]) -> bytes:
    """An archive that depends on contents alone: no times, owners or order of this host."""
    links = {**links, **{top: str(Path(top).resolve()) for top in ("/bin", "/sbin", "/lib", "/lib64", "/lib32") if Path(top).is_symlink()}}
    users = "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\nnobody:x:65534:65534::/:/bin/sh\n"
    texts = {
        "/etc/passwd": users,
        "/etc/group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
        "/etc/os-release": "NAME=t1-test\nID=t1-test\n",
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:

        def add(path: str, kind: bytes, mode: int, data: bytes = b"", link: str = "", owner: int = 0) -> None:
            info = tarfile.TarInfo(path.lstrip("/"))
            info.type, info.mode, info.size, info.linkname, info.uid, info.gid = kind, mode, len(data), link, owner, owner
            archive.addfile(info, io.BytesIO(data))

        for path, mode, owner in (
            ("/root", 0o700, 0),
            ("/home/user", 0o755, 1000),
            ("/tmp", 0o1777, 0),
            ("/var/tmp", 0o1777, 0),
            ("/usr/sbin", 0o755, 0),
        ):
            add(path, tarfile.DIRTYPE, mode, owner=owner)
        for path, target in sorted(links.items()):
            add(path, tarfile.SYMTYPE, 0o777, link=target)
        for path, text in sorted(texts.items()):
            add(path, tarfile.REGTYPE, 0o644, text.encode())
        for path, source in sorted(files.items()):
            # Modes of this host would let its umask and its setuid programs into the image's name.
            add(path, tarfile.REGTYPE, 0o755 if os.access(source, os.X_OK) else 0o644, source.read_bytes())
    return buffer.getvalue()


# --- SSH ---------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SshServer:
    """Where a throw-away OpenSSH server listens and what opens its door."""

    host: str
    port: int
    user: str
    key_file: Path
    known_hosts_file: Path
    host_fingerprint: str
    pid: int


@dataclass
class SshServerProcess:
    """An OpenSSH server on a loopback port with keys of its own, for the current user only. It can be killed and started again."""

    directory: Path
    address: SshServer | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, *, port: int | None = None) -> SshServer:
        """Start it, on the port it had before if it had one.

        Raises:
            RuntimeError: It does not listen; the message has the end of its log.
        """
        port = port or (self.address.port if self.address else None)
        self._make_keys()
        # Somebody else may take a free port first; a fixed one may still be held by the last processes of the server that was killed.
        for _ in range(50 if port else 5):
            chosen = port or _free_port()
            if self._listen(chosen):
                break
            time.sleep(0.1)
        else:
            raise RuntimeError(f"sshd does not start: {self.log()[-1000:]}")
        assert self.process is not None
        public = (self.directory / "host_key.pub").read_text().split()
        known_hosts = self.directory / "known_hosts"
        known_hosts.write_text(f"[127.0.0.1]:{chosen} {public[0]} {public[1]}\n")
        fingerprint = _ok("ssh-keygen", "-l", "-E", "sha256", "-f", str(self.directory / "host_key.pub")).split()[1]
        self.address = SshServer(
            "127.0.0.1", chosen, getpass.getuser(), self.directory / "client_key", known_hosts, fingerprint, self.process.pid
        )
        return self.address

    def check_login(self) -> str:
        """Log in once with the ordinary client; return why it failed, or nothing."""
        assert self.address is not None
        options = [
            f"UserKnownHostsFile={self.address.known_hosts_file}",
            "StrictHostKeyChecking=yes",
            "BatchMode=yes",
            "IdentitiesOnly=yes",
        ]
        argv = ["ssh", "-F", "none", "-T", "-i", str(self.address.key_file), "-p", str(self.address.port)]
        argv += [word for option in options for word in ("-o", option)] + [f"{self.address.user}@{self.address.host}", "true"]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
        return "" if done.returncode == 0 else f"login failed with {done.returncode}: {done.stderr[-500:]}\n{self.log()[-500:]}"

    def log(self) -> str:
        """What it wrote."""
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self, *, sessions: bool = True) -> None:
        """End the server at once, with every session of it or leaving those alone. Idempotent."""
        if self.process is None:
            return
        tree = _descendants(self.process.pid) if sessions else []
        self.process.kill()
        self.process.wait()
        self.process = None
        for pid, started in tree:
            if _start_time(pid) == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _make_keys(self) -> None:
        for name in ("host_key", "client_key"):
            if not (self.directory / name).exists():
                _ok("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "t1-test", "-f", str(self.directory / name))
        authorized = self.directory / "authorized_keys"
        authorized.write_bytes((self.directory / "client_key.pub").read_bytes())
        authorized.chmod(0o600)

    def _listen(self, port: int) -> bool:
        assert self.process is None
        sshd = find_sshd()
        assert sshd is not None
        config = self.directory / "sshd_config"
        lines = [
            "ListenAddress 127.0.0.1",
            f"Port {port}",
            f"HostKey {self.directory / 'host_key'}",
            f"AuthorizedKeysFile {self.directory / 'authorized_keys'}",
            f"AllowUsers {getpass.getuser()}",
            *("PidFile none", "UsePAM no", "StrictModes no", "PermitRootLogin prohibit-password", "PasswordAuthentication no"),
            *("KbdInteractiveAuthentication no", "UseDNS no", "PrintMotd no", "MaxSessions 500", "MaxStartups 500:30:1000"),
            *("LoginGraceTime 300", "LogLevel VERBOSE", "Subsystem sftp internal-sftp"),
            # Not the first level, so bash reads no start-up files: what is in this user's is none of a test's business, and a test that
            # kills things at random must not interrupt it.
            "SetEnv SHLVL=1",
        ]
        config.write_text("\n".join(lines) + "\n")
        # Newer servers punish addresses whose logins fail, as tests of failing logins make them do; older ones do not know the word.
        extra = ["-o", "PerSourcePenalties=no"]
        if subprocess.run([sshd, "-t", *extra, "-f", str(config)], capture_output=True, check=False).returncode != 0:
            extra = []
        with (self.directory / "log").open("ab") as log:
            argv = [sshd, "-D", "-e", *extra, "-f", str(config)]
            # The kernel's parent of a process is a thread: one that a test starts to restart the server must not take it along.
            guard = _die_with_parent if threading.current_thread() is threading.main_thread() else None
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=guard
            )
        deadline = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as probe:
                if probe.recv(4) == b"SSH-":
                    return True
            time.sleep(0.02)
        self.kill()
        return False


@contextlib.contextmanager
def _running_sshd() -> Iterator[SshServerProcess]:
    if find_sshd() is None or shutil.which("ssh-keygen") is None or shutil.which("ssh") is None:
        unavailable("ssh", "no OpenSSH server is installed: apt-get install openssh-server")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # the service manager's work; other servers may use it, so it stays
    # A short path of our own, and not pytest's: it stays readable to the login's own user whatever becomes of the test run's directory.
    directory = Path(tempfile.mkdtemp(prefix="t1-test-sshd-"))
    server = SshServerProcess(directory)
    try:
        try:
            server.start()
        except RuntimeError as error:
            unavailable("ssh", str(error))
        if trouble := server.check_login():
            unavailable("ssh", f"the OpenSSH server of the tests lets nobody in: {trouble}")
        yield server
    finally:
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def sshd_process() -> Iterator[SshServerProcess]:
    """This worker's OpenSSH server as something that a test may kill; it must start it again before it ends."""
    with _running_sshd() as server:
        yield server


@pytest.fixture
def own_sshd() -> Iterator[SshServerProcess]:
    """An OpenSSH server that only this test uses, for tests that kill it at random."""
    with _running_sshd() as server:
        yield server


@pytest.fixture(scope="session")
def sshd(sshd_process: SshServerProcess) -> SshServer:
    """A running throw-away OpenSSH server."""
    assert sshd_process.address is not None
    return sshd_process.address


def find_sshd() -> str | None:
    """Absolute path of the server, which it insists on being started by."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ok(*argv: str) -> str:
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout


def _die_with_parent() -> None:
    """Runs in the child: a test process that is killed outright leaves no server behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _start_time(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _descendants(root: int) -> list[tuple[int, str]]:
    """Every process below one, as (pid, start time), which names a process for good."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        for pid in parents.get(queue.pop(), []):
            queue.append(pid)
            if (started := _start_time(pid)) is not None:
                found.append((pid, started))
    return found
