"""The Docker sandbox: what is in it, what it may use, what is left of it, and what it says when something goes wrong."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium
import pytest

import t1_env  # noqa: F401  (registers the environment)
from t1_env.errors import ConfigError, SandboxDied, SandboxError, SandboxUnavailable, TransportLost
from t1_env.protocol import ShellState
from t1_env.sandbox import owner
from t1_env.sandbox.base import ImageSource, Sandbox, SandboxSpec
from t1_env.sandbox.docker import DockerConfig, DockerSandbox
from t1_env.sandbox.docker import container as docker_container
from t1_env.sandbox.docker.config import BASE_IMAGE_VARIABLE
from t1_env.sandbox.docker.container import remove_image
from t1_env.sandbox.docker.daemon import daemon_for
from t1_env.sandbox.docker.leftovers import list_leftovers, remove_leftovers
from t1_env.sandbox.registry import make_sandbox, sandbox_names
from t1_env.shell import Session, ShellConfig
from t1_env.tasks import load_task

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def config(docker_image):
    return DockerConfig(default_image=docker_image, base_image=docker_image, build_network="none")


@pytest.fixture(scope="module")
def daemon(config):
    yield daemon_for(config)
    # What a killed process of a test left, and the outpost's volume, unless another worker uses it.
    remove_leftovers(config)
    for volume in daemon_for(config).api.volumes(filters={"label": "t1.kind=runtime"})["Volumes"] or ():
        try:
            daemon_for(config).api.remove_volume(volume["Name"])
        except daemon_for(config).sdk.errors.APIError:
            continue


@pytest.fixture(scope="module")
def shared(config, daemon):
    """One sandbox for tests that leave it as they found it."""
    with DockerSandbox(SandboxSpec(memory_mb=256, max_processes=64, cpus=0.5, env={"SPEC": "yes"}), config) as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(config, daemon):
    with DockerSandbox(SandboxSpec(memory_mb=256, max_processes=64), config) as made:
        yield made


def sh(sandbox: DockerSandbox, command: str, **options) -> str:
    result = sandbox.run(["bash", "-c", command], **options)
    assert result.exit_code == 0, result
    return result.stdout.decode()


def look(sandbox: DockerSandbox, *paths: str, mounts: dict[str, Path] | None = None) -> list[str | None]:
    """Texts of files in a clone; None for one that is not there."""
    script = 'for path; do if [ -e "$path" ]; then cat "$path"; else echo; fi; printf "\\1"; done'
    result = sandbox.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["bash", "-c", script, "look", *paths]}, mounts=mounts)
    assert result.error is None
    return [None if text == "\n" else text for text in result.payload["stdout"].split("\1")[:-1]]


def own_containers(daemon) -> list[str]:
    return [entry["Id"] for entry in daemon.api.containers(all=True, filters={"label": f"{owner.LABEL}={owner.owner_id()}"})]


def own_images(daemon) -> list[str]:
    return [entry["Id"] for entry in daemon.api.images(all=True, filters={"label": f"{owner.LABEL}={owner.owner_id()}"})]


def eventually(condition, timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# ---------------------------------------------------------------------------------------------------------------------- what it is
def test_it_is_a_sandbox_by_name():
    assert "docker" in sandbox_names()
    made = make_sandbox("docker", SandboxSpec(workdir="/w"))
    assert isinstance(made, DockerSandbox)
    assert isinstance(made, Sandbox)
    assert not made.alive
    with pytest.raises(SandboxDied, match="start"):
        made.run(["true"])
    with pytest.raises(ConfigError, match="relative"):
        make_sandbox("docker", SandboxSpec(workdir="relative"))


def test_a_daemon_that_does_not_answer(config):
    with pytest.raises(SandboxUnavailable, match="DOCKER_HOST"):
        DockerSandbox(None, DockerConfig(base_url="unix:///no/such.sock")).start()


def test_what_a_process_finds(shared):
    assert shared.isolation == "container"
    assert shared.alive
    assert sh(shared, "pwd; hostname; id -u; echo $SPEC").split() == ["/app", "t1", "0", "yes"]
    environment = sh(shared, "env")
    for name in ("LD_PRELOAD", "T1_", "PYTHON", "DOCKER"):
        assert name not in environment
    assert sh(shared, "ls -A /app") == ""
    assert {"clone", "fork", "memory_limit", "process_limit", "cpu_limit", "network_off"} <= shared.capabilities


def test_an_image_with_variables_a_directory_and_a_user(config, daemon, tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM x\nENV A=image LD_LIBRARY_PATH=/no/such\nWORKDIR /srv/shop\nRUN echo 3 >stock\nUSER user\n")
    spec = SandboxSpec(workdir="/srv/shop", image=ImageSource(environment_dir=tmp_path), env={"B": "spec"})
    with DockerSandbox(spec, config) as sandbox:
        assert sandbox.built.workdir == "/srv/shop"
        assert sandbox.built.env["A"] == "image"
        said = sandbox.run(["bash", "-c", "whoami; cat stock; echo $A $B $LD_LIBRARY_PATH; : >/srv/shop/new || echo refused"])
        assert said.stdout.decode().split() == ["user", "3", "image", "spec", "/no/such", "refused"]
        sandbox.put(b"from outside", "/etc/put")
        assert sh(sandbox, "stat -c %U /etc/put; cat /etc/put") == "root\nfrom outside"
        with Session(sandbox, ShellConfig()) as session:
            assert session.run("whoami").output == "user\n"
        result = sandbox.run_in_clone("t1_env.sandbox.probe:echo", 1)
        assert result.error is None
        image = sandbox._image.id
    daemon.api.remove_image(image, force=True)


def test_files_in_and_out(shared, tmp_path):
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "run.sh").write_text("echo ran")
    (tmp_path / "tree" / "sub" / "run.sh").chmod(0o755)
    shared.put(tmp_path / "tree", "/var/tmp/in")
    shared.put(b"\0\xff", "/var/tmp/in/bytes")
    assert sh(shared, "/var/tmp/in/sub/run.sh") == "ran\n"
    assert shared.get("/var/tmp/in/bytes") == b"\0\xff"
    with pytest.raises(SandboxError):
        shared.get("/no/such")
    sh(shared, "rm -r /var/tmp/in")


def test_a_session_works_and_recovers(sandbox):
    with Session(sandbox, ShellConfig()) as session:
        assert session.run("cd /tmp; X=1; echo hi").output == "hi\n"
        assert session.run("echo $X $PWD").output == "1 /tmp\n"
        result = session.run("echo partial; sleep 1000", timeout_s=1.0)
        assert result.timed_out
        assert result.output.startswith("partial\n")
        assert session.run("kill -9 $$").state is ShellState.SHELL_EXITED
        assert session.run("pwd").output == "/tmp\n"


def test_threads_start_and_use_many(config):
    def one(number: int) -> str:
        with DockerSandbox(SandboxSpec(), config) as sandbox, Session(sandbox, ShellConfig()) as session:
            return session.run(f"echo {number}").output

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(6))) == [f"{number}\n" for number in range(6)]


def test_starts_are_paced_and_few_at_a_time(docker_image):
    quick = daemon_for(DockerConfig(default_image=docker_image, max_concurrent_starts=2, start_interval_s=0.05))
    inside, most, begun, lock = [0], [0], [], threading.Lock()

    def start() -> None:
        with quick.start_slot():
            with lock:
                begun.append(time.monotonic())
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            time.sleep(0.06)
            with lock:
                inside[0] -= 1

    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(start)
    assert most[0] <= 2
    assert min(later - earlier for earlier, later in zip(sorted(begun), sorted(begun)[1:], strict=False)) > 0.03


# ------------------------------------------------------------------------------------------------------------------------- confined
def test_it_is_confined_and_labelled(shared, daemon):
    found = daemon.api.inspect_container(shared._container.id)
    host = found["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert host["CapDrop"] == ["ALL"]
    assert "no-new-privileges" in host["SecurityOpt"][0]
    assert host["Memory"] == host["MemorySwap"] == (256 + docker_container.MEMORY_HEADROOM_MB) << 20
    assert host["PidsLimit"] == 64 + docker_container.PROCESS_HEADROOM
    assert host["LogConfig"]["Type"] == "none"
    assert host["AutoRemove"]
    assert not host["Privileged"]
    assert found["Config"]["Labels"][owner.LABEL] == owner.owner_id()
    assert found["Config"]["Labels"]["t1.kind"] == "sandbox"
    assert len(daemon.api.networks(filters={"label": owner.LABEL})) == 0


@pytest.mark.parametrize(
    "attempt",
    [
        "echo >/dev/tcp/198.51.100.1/80",  # an address that belongs to nobody
        "mknod /tmp/disk b 8 0",
        "mount -t tmpfs none /mnt",
        "echo x >/proc/sys/kernel/hostname",
        "echo x >/.t1/boot.py",
        "rm /.t1/boot.py",
        "cat /proc/1/environ",
        "readlink /proc/1/fd/0",
        "hostname other",
    ],
)
def test_what_root_inside_cannot_do(shared, attempt):
    assert shared.run(["bash", "-c", attempt]).exit_code != 0


def test_the_first_process_cannot_be_ended_from_inside(shared):
    shared.run(["bash", "-c", "for s in TERM INT HUP QUIT USR1 USR2 PIPE ALRM STOP TSTP KILL; do kill -$s 1; done"])
    assert sh(shared, "echo still here") == "still here\n"


def test_the_network_is_there_only_for_a_task_that_asks(config, daemon):
    if "bridge" not in {network["Name"] for network in daemon.api.networks()} or (
        daemon.is_local and not Path("/sys/class/net/docker0").exists()
    ):
        pytest.skip("this engine has no bridge")
    with DockerSandbox(SandboxSpec(network=True), config) as sandbox:
        assert "network_off" not in sandbox.capabilities
        assert int(sh(sandbox, "ls /sys/class/net | wc -l")) > 1


def test_out_of_memory_kills_the_command_not_the_sandbox(sandbox):
    with Session(sandbox, ShellConfig()) as session:
        result = session.run("head -c 2000000000 /dev/zero | tail -c 2000000000 >/dev/null; echo ${PIPESTATUS[1]}", timeout_s=120)
        assert result.output.split()[-1] == "137"
        assert session.run("echo on").output == "on\n"


def test_a_fork_bomb_is_the_agents_own_mess(sandbox):
    with Session(sandbox, ShellConfig()) as session:
        session.run("bomb() { bomb | bomb & }; bomb", timeout_s=5.0)
        for _ in range(20):
            result = session.run("kill -9 -1; echo on", timeout_s=20.0)
            assert result.state is not ShellState.SANDBOX_DEAD
            if result.state is ShellState.IDLE and result.exit_code == 0 and "on" in result.output.split():
                break
        assert result.exit_code == 0
    assert sandbox.alive
    assert eventually(lambda: sandbox.run(["true"]).exit_code == 0)


def test_one_file_cannot_be_larger_than_the_storage(config):
    with DockerSandbox(SandboxSpec(storage_mb=8), config) as sandbox:
        assert sandbox.run(["bash", "-c", "head -c 20000000 /dev/zero >/tmp/large"]).exit_code != 0
        assert int(sh(sandbox, "stat -c %s /tmp/large")) == 8 << 20
        assert ("storage_limit" in sandbox.capabilities) is sandbox._container.storage_limited


# ------------------------------------------------------------------------------------------------------------------- what changed
@pytest.mark.parametrize("near", [True, False])
def test_generation_and_system_changes(sandbox, near):
    if not near:
        sandbox._layers = None  # as with a daemon on another machine
    elif sandbox._layers is None:
        pytest.skip("the layers of this engine cannot be read from here")
    first = sandbox.generation()
    assert sandbox.generation() == first
    assert sandbox.system_changes() == {}
    sh(sandbox, "cat /etc/passwd; ls -R / >/dev/null 2>&1; echo x >/dev/null")
    assert sandbox.generation() == first
    seen = {first}
    for command in (
        "echo new >/app/new",
        "echo x >>/app/new",
        "chmod 600 /app/new",
        "mv /app/new /app/newer",
        "rm /app/newer",
        "mkdir -p /usr/local/deep/er; echo x >/usr/local/deep/er/file",
        "echo x >>/etc/passwd",
        "rm /usr/bin/tac",
    ):
        sh(sandbox, command)
        seen.add(sandbox.generation())
    assert len(seen) == 9
    assert set(sandbox.system_changes()) == {"/etc/passwd", "/usr/bin/tac"}


# -------------------------------------------------------------------------------------------------------------------------- clones
@pytest.fixture(params=["layers", "commit"])
def clone_mode(request, shared):
    """Every way to make a clone that this machine has."""
    if request.param == "layers" and shared.clone_mode != "layers":
        pytest.skip("the layers of this engine cannot be cloned from here")
    return request.param


def set_clone_mode(sandbox: DockerSandbox, mode: str, monkeypatch) -> None:
    monkeypatch.setattr(sandbox, "clone_mode", mode)


def test_a_clone_sees_the_files_and_changes_nothing(shared, daemon, tmp_path, clone_mode, monkeypatch):
    set_clone_mode(shared, clone_mode, monkeypatch)
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    sh(shared, "echo agent >/app/file; mkdir -p /tests; echo planted >/tests/conftest.py; ln -s /etc /tests/etc")
    try:
        before = shared.generation()
        found = look(shared, "/app/file", "/tests/test_it.py", "/tests/conftest.py", mounts={"/tests": tmp_path})
        assert found == ["agent\n", "def test_it(): pass\n", None]
        assert shared.generation() == before
        assert sh(shared, "cat /app/file; ls /tests") == "agent\nconftest.py\netc\n"
    finally:
        sh(shared, "rm -rf /tests /app/file")
    assert own_images(daemon) == []
    assert own_containers(daemon) == [shared._container.id]


@pytest.mark.parametrize(
    "trick",
    [
        "ln -s /usr /tests",
        "ln -s /proc /tests; ln -s /no/such /x",
        "ln -s /.t1 /tests",
        "echo file >/tests; rm -r /app; echo file >/app",
        "mkdir /x; ln -s /x /tests; rm -r /tmp /root; ln -s /proc /tmp; ln -s / /root",
        "mkdir -m 0 /tests; chmod 0 /app; mv /etc /x; ln -s /x /etc",
    ],
)
def test_what_stands_at_a_mounts_place_does_not_lead_it_astray(sandbox, tmp_path, trick, clone_mode, monkeypatch):
    set_clone_mode(sandbox, clone_mode, monkeypatch)
    (tmp_path / "answer").write_text("42")
    sh(sandbox, trick)
    assert look(sandbox, "/tests/answer", "/usr/answer", "/x/answer", mounts={"/tests": tmp_path}) == ["42", None, None]


def test_a_volume_of_the_image_is_part_of_clones_forks_and_generations(config, daemon, tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM x\nRUN mkdir /data && echo old >/data/old && echo kept >/data/kept\nVOLUME /data\n")
    with DockerSandbox(SandboxSpec(image=ImageSource(environment_dir=tmp_path)), config) as sandbox:
        first = sandbox.generation()
        sh(sandbox, "rm /data/old; echo new >/data/new")
        assert sandbox.generation() != first
        assert look(sandbox, "/data/old", "/data/kept", "/data/new") == [None, "kept\n", "new\n"]
        copy = sandbox.fork()
        try:
            assert sh(copy, "cat /data/*") == "kept\nnew\n"
        finally:
            copy.close()
        image = sandbox._image.id
    daemon.api.remove_image(image, force=True)


def test_what_a_clone_can_fail_of(shared, daemon, tmp_path, clone_mode, monkeypatch):
    set_clone_mode(shared, clone_mode, monkeypatch)
    wrong = [
        ("t1_env.sandbox.probe:execute", {}, "raised TypeError"),
        ("t1_env.sandbox.probe:nothing_of_this_name", {}, "no function"),
        ("no.such.module:function", {}, "ModuleNotFoundError"),
        ("os:_exit", {}, "without a result"),
        ("time:sleep", {"timeout_s": 2.0}, "ran out of time ("),
    ]
    for entry, options, reason in wrong:
        result = shared.run_in_clone(entry, 1000, **options)
        assert result.payload is None
        assert reason in (result.error or "")
    for mounts in ({"/x": Path("/no/such/path")}, {"/proc/x": tmp_path}, {"/.t1": tmp_path}, {"relative": tmp_path}):
        with pytest.raises(ConfigError):
            shared.run_in_clone("t1_env.sandbox.probe:echo", 1, mounts=mounts)
    assert own_images(daemon) == []
    assert own_containers(daemon) == [shared._container.id]


def test_the_agents_processes_go_on_after_a_clone_and_are_not_in_it(sandbox, clone_mode, monkeypatch):
    set_clone_mode(sandbox, clone_mode, monkeypatch)
    with Session(sandbox, ShellConfig()) as session:
        session.run("while :; do echo tick >>/tmp/ticks; sleep 0.05; done & disown")
        seen = sandbox.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["ps", "-e", "-o", "comm="]})
        assert seen.error is None
        assert {"bash", "sleep"}.isdisjoint(seen.payload["stdout"].split())
        count = int(session.run("wc -l </tmp/ticks").output)
        assert eventually(lambda: int(session.run("wc -l </tmp/ticks").output) > count)


# --------------------------------------------------------------------------------------------------------------------------- forks
def test_forks_share_nothing_and_leave_nothing(config, daemon):
    before = own_images(daemon)
    first = DockerSandbox(SandboxSpec(env={"E": "1"}), config)
    first.start()
    try:
        sh(first, "echo one >/app/file")
        second = first.fork()
        sh(second, "echo two >/app/file")
        third = second.fork()
        assert [sh(box, "cat /app/file; echo $E") for box in (first, second, third)] == ["one\n1\n", "two\n1\n", "two\n1\n"]
        assert look(third, "/app/file") == ["two\n"]
        second.close()  # the image that it is made of is needed by the third
        assert sh(third, "cat /app/file") == "two\n"
        third.close()
    finally:
        first.close()
    assert own_images(daemon) == before


# ------------------------------------------------------------------------------------------------------------------------- the end
def test_close_leaves_nothing_and_can_be_repeated(config, daemon):
    before = (own_containers(daemon), threading.active_count(), len(list(Path("/proc/self/fd").iterdir())))
    for _ in range(2):
        sandbox = DockerSandbox(SandboxSpec(), config)
        sandbox.start()
        sandbox.start()
        session = Session(sandbox, ShellConfig())
        session.start()
        session.run("sleep 1000 &")
        sandbox.close()
        sandbox.close()
        assert not sandbox.alive
        for call in (functools.partial(sandbox.run, ["true"]), sandbox.start, sandbox.generation, sandbox.fork):
            with pytest.raises(SandboxDied):
                call()
        assert session.run("true").state is ShellState.SANDBOX_DEAD
        session.close()
    del sandbox, session, call
    gc.collect()
    assert eventually(lambda: (own_containers(daemon), threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))) == before)


def test_a_sandbox_that_nobody_closed_goes_with_its_object(config, daemon):
    before = own_containers(daemon)
    sandbox = DockerSandbox(SandboxSpec(), config)
    sandbox.start()
    assert len(own_containers(daemon)) == len(before) + 1
    del sandbox
    gc.collect()
    assert eventually(lambda: own_containers(daemon) == before)


def test_a_container_killed_from_outside_is_a_dead_sandbox(config, daemon):
    with DockerSandbox(SandboxSpec(), config) as sandbox, Session(sandbox, ShellConfig()) as session:
        timer = threading.Timer(1.0, lambda: daemon.api.kill(sandbox._container.id))
        timer.start()
        assert session.run("sleep 1000", timeout_s=500).state is ShellState.SANDBOX_DEAD
        timer.join()
        assert not sandbox.alive
        for call in (
            lambda: sandbox.run(["true"]),
            sandbox.generation,
            lambda: sandbox.run_in_clone("t1_env.sandbox.probe:echo", 1),
            sandbox.fork,
        ):
            with pytest.raises(SandboxDied):
                call()


class Proxy:
    """A Unix socket that leads to a Docker daemon until it is cut."""

    def __init__(self, path: Path, daemon_socket: str) -> None:
        self.path, self._target = path, daemon_socket
        self._open: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._target)
            self._open += [near, far]
            for source, target in ((near, far), (far, near)):
                thread = threading.Thread(target=self._copy, args=(source, target))
                self._threads.append(thread)
                thread.start()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def cut(self) -> None:
        self.path.unlink(missing_ok=True)
        for sock in [self._listener, *self._open]:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads:
            thread.join()
        for sock in [self._listener, *self._open]:
            sock.close()


def test_a_daemon_that_is_gone_is_a_lost_transport_and_nothing_hangs(config, daemon, tmp_path):
    if not daemon.is_local:
        pytest.skip("the daemon is not behind a Unix socket")
    proxy = Proxy(tmp_path / "d.sock", daemon.api.get_adapter(daemon.api.base_url).socket_path)
    before = own_containers(daemon)
    cut = threading.Timer(1.0, proxy.cut)
    try:
        sandbox = DockerSandbox(SandboxSpec(), dataclasses.replace(config, base_url=f"unix://{proxy.path}"))
        sandbox.start()
        session = Session(sandbox, ShellConfig())
        session.start()
        cut.start()
        with pytest.raises(TransportLost):
            session.run("sleep 1000", timeout_s=500)
        cut.join()
        for call in (
            lambda: sandbox.run(["true"]),
            sandbox.generation,
            sandbox.fork,
            lambda: sandbox.run_in_clone("t1_env.sandbox.probe:echo", 1),
        ):
            with pytest.raises(TransportLost):
                call()
        assert not sandbox.alive
        session.close()
        sandbox.close()
        with pytest.raises(SandboxUnavailable):
            DockerSandbox(SandboxSpec(), sandbox.config).start()
    finally:
        cut.cancel()
        proxy.cut()
    assert eventually(lambda: own_containers(daemon) == before), "the container ends with its connection"


KILLED = """
import sys, time
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.docker import DockerConfig, DockerSandbox
from t1_env.sandbox import owner
sandbox = DockerSandbox(SandboxSpec(), DockerConfig(default_image=sys.argv[1]))
sandbox.start()
copy = sandbox.fork()
print(owner.owner_id(), flush=True)
time.sleep(1000)
"""


def test_nothing_stays_of_a_process_that_was_killed(config, daemon, docker_image):
    with subprocess.Popen([sys.executable, "-c", KILLED, docker_image], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        label = process.stdout.readline().strip()
        assert owner.is_alive(label) is True
        mine = {"label": f"{owner.LABEL}={label}"}
        assert len(daemon.api.containers(all=True, filters=mine)) == 2
        assert all(found.action == "kept" for found in remove_leftovers(config) if found.reason == "its owner is running")
        assert len(daemon.api.containers(all=True, filters=mine)) == 2, "what a living process has must stay"
        os.kill(process.pid, signal.SIGKILL)
    # Containers go by themselves; the image of the fork is the reaper's work.
    assert eventually(lambda: daemon.api.containers(all=True, filters=mine) == [])
    left = daemon.api.images(all=True, filters=mine)
    assert [image["Labels"]["t1.kind"] for image in left] == ["commit"]
    name = left[0]["Id"].removeprefix("sha256:")[:12]
    assert [found.action for found in list_leftovers(config) if name in found.name] == ["would be removed"]
    assert [found.action for found in remove_leftovers(config) if name in found.name] == ["removed"]
    assert daemon.api.images(all=True, filters=mine) == []


PAUSED = """
import sys, time
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.docker import DockerConfig, DockerSandbox
sandbox = DockerSandbox(SandboxSpec(), DockerConfig(default_image=sys.argv[1]))
sandbox.start()
with sandbox._container.paused():
    print(sandbox._container.id, flush=True)
    time.sleep(1000)
"""


def test_a_container_that_its_process_left_standing_still_is_reaped(config, daemon, docker_image):
    with subprocess.Popen([sys.executable, "-c", PAUSED, docker_image], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        container = process.stdout.readline().strip()
        os.kill(process.pid, signal.SIGKILL)
    assert daemon.api.inspect_container(container)["State"]["Paused"]
    assert [found.action for found in remove_leftovers(config) if container[:12] in found.name] == ["removed"]
    assert container not in {entry["Id"] for entry in daemon.api.containers(all=True)}


def test_the_reaper_takes_what_a_dead_owner_left_and_nothing_else(config, daemon, docker_image):
    dead, foreign = owner.owner_id().rsplit(":", 1)[0] + ":1", "another-machine.1:2:3"
    made = {
        label: daemon.api.create_container(
            docker_image, ["true"], labels={} if label is None else {owner.LABEL: label, "t1.kind": "sandbox"}
        )["Id"]
        for label in (dead, foreign, owner.owner_id(), None)
    }
    try:
        actions = {found.name.split()[0]: found.action for found in list_leftovers(config)}
        assert actions[made[dead][:12]] == "would be removed"
        actions = {found.name.split()[0]: found.action for found in remove_leftovers(config)}
        assert (actions[made[dead][:12]], actions[made[foreign][:12]], actions[made[owner.owner_id()][:12]]) == ("removed", "kept", "kept")
        assert made[None][:12] not in actions
        there = {entry["Id"] for entry in daemon.api.containers(all=True)}
        assert {made[foreign], made[owner.owner_id()], made[None]} <= there
        assert made[dead] not in there
    finally:
        for label in (foreign, owner.owner_id(), None):
            daemon.api.remove_container(made[label], force=True)


def test_the_next_start_removes_what_an_absent_daemon_kept(config, daemon, sandbox, monkeypatch):
    """A daemon that is killed takes no orders, and may have carried out the request that it was killed over."""

    def away(*_: object, **__: object) -> None:
        raise OSError("connection refused")

    used = sandbox._container
    with monkeypatch.context() as patch:
        unheard = used.commit("clone-commit")
        patch.setattr(daemon.api, "remove_image", away)
        remove_image(daemon, unheard)
        real = daemon.api.commit

        def carried_out_unheard(*arguments: object, **options: object) -> None:
            real(*arguments, **options)
            away()

        patch.setattr(daemon.api, "commit", carried_out_unheard)
        with pytest.raises(TransportLost):
            used.commit("commit")
    in_use = used.commit("commit")
    assert len(own_images(daemon)) == 3
    with DockerSandbox(SandboxSpec(memory_mb=256), config):
        assert own_images(daemon) == [in_use]
        assert used.id in own_containers(daemon)
    assert sandbox.run(["true"]).exit_code == 0
    remove_image(daemon, in_use)
    assert own_images(daemon) == []


def test_an_outpost_volume_that_somebody_removed_is_filled_again(docker_image, config, daemon, monkeypatch):
    from t1_env.sandbox.outpost.runtime import Runtime, make_runtime

    real = make_runtime("complete")
    # A volume of this test's own: other tests' sandboxes use the real one.
    other = Runtime(real.kind, f"0test{os.getpid():019d}", real.machine, real.size_bytes, real.archive)
    monkeypatch.setattr("t1_env.sandbox.docker.sandbox.make_runtime", lambda kind: other)
    name = f"t1-runtime-{other.digest[:24]}"
    try:
        for _ in range(2):
            with DockerSandbox(SandboxSpec(), config) as sandbox:
                assert sh(sandbox, "echo on") == "on\n"
            daemon.api.remove_volume(name)
    finally:
        if any(volume["Name"] == name for volume in daemon.api.volumes()["Volumes"] or ()):
            daemon.api.remove_volume(name)


@pytest.mark.parametrize("clones", ["auto", "commit"])
def test_an_episode_is_solved_and_paid(docker_image, daemon, monkeypatch, clones):
    monkeypatch.setenv(BASE_IMAGE_VARIABLE, docker_image)
    sandbox = "docker" if clones == "auto" else functools.partial(DockerSandbox, config=DockerConfig(clones="commit"))
    env = gymnasium.make("T1Terminal-v0", task="seeds/hello-file", sandbox=sandbox)
    try:
        _, info = env.reset(seed=0)
        assert (info["verifiers_passed"], info["isolation"]) == (0, "container")
        total = 0.0
        for command in load_task("seeds/hello-file").oracle_steps():
            _, reward, terminated, truncated, info = env.step(command)
            total += float(reward)
        assert (terminated, truncated, info["end_reason"]) == (True, False, "solved")
        assert total == info["verifiers_passed"] == info["verifiers_total"] > 0
        assert info["verbatim"]["verdict"] == "agrees"
        assert info["tamper"] == ()
    finally:
        env.close()
    for image in daemon.api.images(filters={"label": "t1.kind=task-image"}):
        if any(parent["Id"] == daemon.api.inspect_image(docker_image)["Id"] for parent in daemon.api.history(image["Id"])):
            daemon.api.remove_image(image["Id"], force=True)


def test_a_factory_with_a_configuration(docker_image):
    factory = functools.partial(DockerSandbox, config=DockerConfig(base_url="unix:///no/such.sock", base_image=docker_image))
    env = gymnasium.make("T1Terminal-v0", task="seeds/hello-file", sandbox=factory)
    with pytest.raises(SandboxUnavailable, match="no/such"):
        env.reset(seed=0)
    env.close()
