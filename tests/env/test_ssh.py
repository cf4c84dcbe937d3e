"""SSH sandboxes: the same sandbox as the local one on a server that may be odd, go away for a moment, or lose its programs."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from t1_env.errors import DependencyMissing, ImageBuildError, SandboxDied, SandboxError, SandboxUnavailable, TransportLost
from t1_env.protocol import ShellState
from t1_env.sandbox import owner
from t1_env.sandbox.base import ImageSource, ReportsIncidents, Sandbox, SandboxSpec
from t1_env.sandbox.local import SandboxFileError, unavailable_reason
from t1_env.sandbox.registry import make_sandbox
from t1_env.sandbox.ssh import SshConfig, SshSandbox, list_leftovers, remove_leftovers
from t1_env.shell import Session, ShellConfig

pytest.importorskip("paramiko")
pytestmark = pytest.mark.ssh
needs_namespaces = pytest.mark.skipif(unavailable_reason() is not None, reason=f"no namespaces: {unavailable_reason()}")
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def remote_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("remote") / "t1"


@pytest.fixture
def config(sshd: Any, remote_dir: Path) -> SshConfig:
    return config_for(sshd, remote_dir)


def config_for(server: Any, remote_dir: Path, **changes: Any) -> SshConfig:
    fields: dict[str, Any] = {
        "host": server.host,
        "port": server.port,
        "user": server.user,
        "key_file": str(server.key_file),
        "known_hosts_file": str(server.known_hosts_file),
        "agent": False,
        "ssh_config_file": "none",
        "connect_timeout_s": 150,
        "reconnect_s": 60,
        "remote_dir": str(remote_dir),
        "python": sys.executable,  # the login's own may be slow to find
    }
    return SshConfig(**(fields | changes))


@pytest.fixture(autouse=True)
def _nothing_left_behind(remote_dir: Path) -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    gc.collect()
    wait_until(lambda: not set(threading.enumerate()) - threads, lambda: f"threads are left: {set(threading.enumerate()) - threads}")
    wait_until(lambda: not episodes(remote_dir), lambda: f"directories are left on the server: {episodes(remote_dir)}")


def wait_until(done: Callable[[], object], trouble: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, trouble()
        time.sleep(0.02)


def episodes(remote_dir: Path) -> list[Path]:
    place = remote_dir / "episodes"
    return sorted(place.iterdir()) if place.is_dir() else []


def outpost_pid(remote_dir: Path) -> int:
    (place,) = episodes(remote_dir)
    return int((place / "outpost").read_text().split(":")[1])


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def kill_sessions(server: Any) -> None:
    """End the server's processes that serve connections, and leave the server itself and what was started over them."""
    for pid in children(server.pid):
        for below in children(pid):
            if Path(f"/proc/{below}/comm").read_text().strip().startswith("sshd"):  # the half without privileges
                os.kill(below, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def wrapped(sshd: Any, tmp_path: Path, remote_dir: Path) -> Iterator[Callable[..., SshConfig]]:
    """Makes a configuration whose login runs ``script`` first; the command is in ``$SSH_ORIGINAL_COMMAND`` there."""
    authorized = Path(sshd.key_file).with_name("authorized_keys")
    before = authorized.read_text()
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)

    def make(script: str, **changes: Any) -> SshConfig:
        path = tmp_path / "login.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        authorized.write_text(f'{before}\ncommand="{path}" {key.with_suffix(".pub").read_text()}')
        return config_for(sshd, **({"remote_dir": remote_dir, "key_file": str(key)} | changes))

    yield make
    authorized.write_text(before)


# --------------------------------------------------------------------------------------------------------------------- the good case
@needs_namespaces
def test_it_is_the_local_sandbox_over_there(config: SshConfig, remote_dir: Path, tmp_path: Path) -> None:
    descriptors = open_descriptors()
    sandbox = SshSandbox(SandboxSpec(env={"COLOUR": "green"}), config)
    assert isinstance(sandbox, Sandbox)
    assert isinstance(sandbox, ReportsIncidents)
    with sandbox:
        assert (sandbox.isolation, sandbox.mode, sandbox.incidents) == ("remote", "namespaces", ())
        assert {"clone", "storage_limit", "network_off"} <= sandbox.capabilities
        (place,) = episodes(remote_dir)
        assert place.stat().st_mode & 0o777 == 0o700
        assert owner.from_file_name(place.name.rpartition("-")[0]) == owner.owner_id()
        result = sandbox.run(["sh", "-c", "echo $COLOUR; hostname; pwd; cat; exit 3"], stdin=b"in")
        assert (result.exit_code, result.stdout) == (3, b"green\nt1\n/app\nin")
        sandbox.put(b"text", "/app/file")
        (tmp_path / "tree/below").mkdir(parents=True)
        (tmp_path / "tree/below/file").write_bytes(b"x" * 3_000_000)
        generation = sandbox.generation()
        sandbox.put(tmp_path / "tree", "/app/tree")
        assert sandbox.get("/app/tree/below/file") == b"x" * 3_000_000
        with pytest.raises(SandboxFileError) as missing:
            sandbox.get("/app/missing")
        assert (missing.value.errno, missing.value.filename) == (errno.ENOENT, "/app/missing")
        assert sandbox.generation() != generation
        with Session(sandbox, ShellConfig(cwd="/app")) as session:
            assert session.run("cat file; cd tree").output == "text"
            assert session.run("pwd").output == "/app/tree\n"
            assert session.run("sleep 100", timeout_s=0.5).timed_out
            assert session.run("read x").state is ShellState.WAITING_FOR_INPUT
            assert session.run("hello").state is ShellState.IDLE
            assert session.run("echo $x").output == "hello\n"
        clone = sandbox.run_in_clone("os.path:exists", "/app/file")
        assert clone.payload is True
        assert sandbox.run_in_clone("os.path:exists", "/tests/below/file", mounts={"/tests": tmp_path / "tree"}).payload is True
        assert sandbox.run(["test", "-e", "/tests"]).exit_code == 1
    assert not sandbox.alive
    assert not episodes(remote_dir)
    with pytest.raises(SandboxDied, match="closed"):
        sandbox.run(["true"])
    sandbox.close()
    del sandbox, session
    assert open_descriptors() <= descriptors


@needs_namespaces
def test_an_episode_is_played_and_verified_over_there(config: SshConfig) -> None:
    import gymnasium as gym

    import t1_env
    from t1_env.tasks import load_task

    env = gym.make(t1_env.ENV_ID, task="seeds/hello-file", sandbox=functools.partial(SshSandbox, config=config))
    _, info = env.reset(seed=0)
    assert (info["isolation"], info["verifiers_passed"]) == ("remote", 0)
    total = info["verifiers_total"]
    _, reward, terminated, truncated, info = env.step((load_task("seeds/hello-file").path / "solution/solve.sh").read_text())
    assert (reward, terminated, truncated) == (total, True, False)
    assert (info["end_reason"], info["verbatim"]["verdict"], info["incidents"]) == ("solved", "agrees", ())
    env.close()


@needs_namespaces
def test_a_copy_lives_on_when_the_first_is_closed(config: SshConfig, remote_dir: Path) -> None:
    first = SshSandbox(None, config)
    first.start()
    first.put(b"both", "/app/file")
    second = first.fork()
    first.put(b"mine", "/app/file")
    assert second.get("/app/file") == b"both"
    first.close()
    assert second.get("/app/file") == b"both"
    assert len(episodes(remote_dir)) == 1
    second.close()


@needs_namespaces
def test_layers_of_images_are_kept_for_the_next_sandbox(config: SshConfig, remote_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nENV A=b\nWORKDIR /made\nCOPY file .\nRUN cat file /proc/uptime > other\n")
    (tmp_path / "file").write_text("hi ")
    spec = SandboxSpec(image=ImageSource(environment_dir=tmp_path))
    seen = set()
    for _ in range(2):
        with SshSandbox(spec, config) as sandbox:
            assert (sandbox.built.env, sandbox.built.workdir) == ({"A": "b"}, "/made")
            seen.add(sandbox.get("/made/other"))
    assert len(seen) == 1
    assert seen.pop().startswith(b"hi ")


def test_its_name_and_variables_are_enough(config: SshConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("host", "port", "user", "key_file", "known_hosts_file", "agent", "ssh_config_file", "remote_dir", "python"):
        monkeypatch.setenv(f"T1_SSH_{name.upper()}", str(getattr(config, name)))
    sandbox = make_sandbox("ssh", SandboxSpec())
    assert isinstance(sandbox, SshSandbox)
    with sandbox:
        assert sandbox.run(["echo", "hi"]).stdout == b"hi\n"


def test_without_paramiko_the_command_to_install_it_is_named(config: SshConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(DependencyMissing, match=r"pip install 't1-terminal\[ssh\]'"):
        SshSandbox(None, config)


def test_a_factory_can_be_sent_to_a_worker(config: SshConfig) -> None:
    factory = pickle.loads(pickle.dumps(functools.partial(SshSandbox, config=config)))
    assert factory(SandboxSpec()).config == config


# ------------------------------------------------------------------------------------------------------------------------ odd logins
def test_what_a_login_prints_is_not_taken_for_an_answer(wrapped: Callable[..., SshConfig]) -> None:
    noise = 'printf "Welcome\\n\\000\\377T1-\\n"; seq 30000; echo oops >&2; T1=1; cd /; umask 0; exec bash -c "$SSH_ORIGINAL_COMMAND"'
    with SshSandbox(None, wrapped(noise)) as sandbox, Session(sandbox) as session:
        assert session.run("echo quiet").output == "quiet\n"


@pytest.mark.parametrize("shell", ["dash", "zsh", "fish", "tcsh", "ksh", "busybox sh"])
def test_the_login_may_have_any_shell(wrapped: Callable[..., SshConfig], shell: str) -> None:
    if shutil.which(shell.split()[0]) is None:
        pytest.skip(f"{shell} is not installed")
    with SshSandbox(None, wrapped(f'exec {shell} -c "$SSH_ORIGINAL_COMMAND"')) as sandbox:
        assert sandbox.run(["echo", "hi"]).stdout == b"hi\n"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo "This account is not available."; exit 1', "status 1.*This account is not available"),
        ("echo to stderr >&2; exit 7", "status 7.*to stderr"),
        ("exec yes", "prints without end"),
        ("exit 0", "said: nothing"),
    ],
)
def test_a_login_without_a_shell_is_shown_as_it_is(wrapped: Callable[..., SshConfig], script: str, message: str) -> None:
    with pytest.raises(SandboxUnavailable, match=f"(?s){message}"):
        SshSandbox(None, wrapped(script)).start()


def test_a_login_that_hangs_is_given_up(wrapped: Callable[..., SshConfig]) -> None:
    with pytest.raises(TransportLost, match="within 2 s"):
        SshSandbox(None, wrapped("exec sleep 1000", connect_timeout_s=2)).start()


# -------------------------------------------------------------------------------------------------------------------------- runtimes
def test_a_server_without_python_gets_one(wrapped: Callable[..., SshConfig], remote_dir: Path) -> None:
    config = wrapped('exec env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$SSH_ORIGINAL_COMMAND"', python=None, runtime="complete")
    with SshSandbox(None, config) as sandbox, Session(sandbox) as session:
        assert session.run("echo hi").output == "hi\n"
        if sandbox.mode == "namespaces":
            assert sandbox.run_in_clone("os.path:exists", "/app").payload is True
    (runtime,) = (remote_dir / "runtimes").glob("complete-*")
    before = runtime.stat().st_ino
    with SshSandbox(None, config) as sandbox:
        assert sandbox.run(["echo", "hi"]).stdout == b"hi\n"
    assert [path.stat().st_ino for path in (remote_dir / "runtimes").glob("complete-*")] == [before]


@pytest.mark.parametrize(
    "changes", [{"python": "/no/such/python"}, {"python": "/bin/true"}, {"python": "/no/such/python", "runtime": "pure"}]
)
def test_a_python_that_was_named_and_is_none_is_said_so(config: SshConfig, changes: dict[str, Any]) -> None:
    with pytest.raises(SandboxUnavailable, match="no usable '/"):
        SshSandbox(None, replace(config, **changes)).start()


def test_what_an_outpost_says_that_does_not_start_is_shown(config: SshConfig, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *" -c "*) echo "$0";; *) echo boom >&2; exit 3;; esac\n')
    python.chmod(0o755)
    with pytest.raises(SandboxUnavailable, match="boom"):
        SshSandbox(None, replace(config, python=str(python))).start()
    remove_leftovers(config)


def test_sandboxes_that_bring_the_same_runtime_do_not_disturb_each_other(config: SshConfig, remote_dir: Path) -> None:
    fresh = replace(config, remote_dir=f"{remote_dir}-race")
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def play() -> None:
        try:
            barrier.wait()
            with SshSandbox(None, fresh) as sandbox:
                assert sandbox.run(["echo", "hi"]).stdout == b"hi\n"
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=play) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    (runtime,) = Path(f"{remote_dir}-race", "runtimes").iterdir()
    assert sorted(path.name for path in runtime.iterdir()) == ["boot.py", "site-packages"]


def test_a_runtime_that_arrives_damaged_is_refused_and_removed(
    config: SshConfig, remote_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from t1_env.sandbox.ssh import place as ssh_place

    real = ssh_place._compressed

    def damaged(runtime: Any) -> Iterator[bytes]:
        data = bytearray(b"".join(real(runtime)))
        data[len(data) // 2] ^= 0xFF
        yield bytes(data)

    monkeypatch.setattr(ssh_place, "_compressed", damaged)
    fresh = replace(config, remote_dir=f"{remote_dir}-damaged")
    with pytest.raises(SandboxUnavailable, match="could not take T1's runtime"):
        SshSandbox(None, fresh).start()
    assert not list(Path(f"{remote_dir}-damaged", "runtimes").iterdir())


def test_a_directory_that_cannot_be_used_is_said_so(config: SshConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxUnavailable, match=r"remote_dir=.*cannot be used"):
        SshSandbox(None, replace(config, remote_dir=str(tmp_path / "file"))).start()


def test_a_directory_that_sandboxes_see_is_refused(config: SshConfig) -> None:
    place = Path("/opt", f"t1-test-{os.getpid()}")
    if not os.access("/opt", os.W_OK):
        pytest.skip("needs a writable /opt")
    try:
        with pytest.raises(SandboxUnavailable, match="system directory"):
            SshSandbox(None, replace(config, remote_dir=str(place))).start()
    finally:
        shutil.rmtree(place, ignore_errors=True)


# ----------------------------------------------------------------------------------------------------------------------------- losses
def test_a_broken_connection_is_replaced_in_the_middle_of_a_step_and_only_once(config: SshConfig, sshd: Any) -> None:
    with SshSandbox(None, config) as sandbox, Session(sandbox) as session:
        session.run("count=0")
        breaker = threading.Timer(0.5, kill_sessions, [sshd])
        breaker.start()
        result = session.run("count=$((count + 1)); sleep 2; echo done")
        breaker.join()
        assert (result.output, result.exit_code, result.state) == ("done\n", 0, ShellState.IDLE)
        assert session.run("echo $count").output == "1\n"  # it was not run twice
        (incident,) = sandbox.incidents
        assert "reconnected" in incident
        breaker = threading.Timer(0.5, kill_sessions, [sshd])
        breaker.start()
        with pytest.raises(TransportLost):
            session.run("sleep 2")
        breaker.join()
        assert not sandbox.alive
        with pytest.raises(TransportLost):
            sandbox.run(["true"])
        wait_until(lambda: not sandbox.alive, lambda: "still alive")
    remove_leftovers(config)  # this process lives, but it has closed the sandbox
    assert [finding for finding in remove_leftovers(config) if finding.action != "kept"] == []
    assert list(Path(config.remote_dir).glob("episodes/*")) == []
    end_outposts(Path(config.remote_dir))


def end_outposts(remote_dir: Path) -> None:
    """What a lost outpost does by itself when its time is up, now."""
    for place in episodes(remote_dir):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(int((place / "outpost").read_text().split(":")[1]), signal.SIGKILL)
        shutil.rmtree(place, ignore_errors=True)


@needs_namespaces
def test_an_episode_says_that_its_connection_broke(config: SshConfig, sshd: Any) -> None:
    import gymnasium as gym

    import t1_env

    env = gym.make(t1_env.ENV_ID, task="seeds/hello-file", sandbox=functools.partial(SshSandbox, config=config))
    env.reset(seed=0)
    kill_sessions(sshd)
    _, _, terminated, truncated, info = env.step("echo hi")
    assert not terminated
    assert not truncated
    assert "reconnected" in info["incidents"][0]
    kill_sessions(sshd)
    _, reward, terminated, truncated, info = env.step("echo hi")
    assert (reward, terminated, truncated, info["end_reason"]) == (0.0, False, True, "infra_failure")
    env.close()
    end_outposts(Path(config.remote_dir))


def test_a_server_that_comes_back_in_time_is_found_again(own_sshd: Any, remote_dir: Path) -> None:
    config = config_for(own_sshd.address, remote_dir)
    with SshSandbox(None, config) as sandbox, Session(sandbox) as session:
        session.run("x=1")
        kill_all(own_sshd)
        outputs: list[str] = []
        player = threading.Thread(target=lambda: outputs.append(session.run("echo $x").output))
        player.start()
        time.sleep(1)
        own_sshd.start()  # by this thread: it dies with the one that starts it
        player.join()
        assert outputs == ["1\n"]
        assert "reconnected" in sandbox.incidents[0]


def kill_all(server: Any) -> None:
    """End a server with its sessions, but not what was started over them."""
    server.kill(sessions=False)
    for pid in sessions_of(server.address.port):
        os.kill(pid, signal.SIGKILL)


def sessions_of(port: int) -> list[int]:
    """Processes that serve connections of the server on a port, found by its configuration's directory in their open files."""
    wanted = f"{port:04X}"
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{wanted}") and fields[3] == "01":
            inodes.add(f"socket:[{fields[9]}]")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if any(str(fd.readlink()) in inodes for fd in (entry / "fd").iterdir()):
                    found.append(int(entry.name))
    return found


def test_a_server_that_stays_away_is_given_up(own_sshd: Any, remote_dir: Path) -> None:
    config = config_for(own_sshd.address, remote_dir, reconnect_s=1)
    with SshSandbox(None, config) as sandbox, Session(sandbox) as session:
        kill_all(own_sshd)
        with pytest.raises(TransportLost):
            session.run("true")
        assert "not restored" in sandbox.incidents[0]
    end_outposts(remote_dir)


def test_the_host_key_is_looked_at_again(config: SshConfig, sshd: Any, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_bytes(Path(sshd.known_hosts_file).read_bytes())
    with SshSandbox(None, replace(config, known_hosts_file=str(known))) as sandbox:
        known.write_text("")
        kill_sessions(sshd)
        with pytest.raises(TransportLost):
            sandbox.run(["true"])
        assert "HOST KEY UNKNOWN" in sandbox.incidents[0]
    end_outposts(Path(config.remote_dir))


def test_an_outpost_that_is_killed_is_a_dead_sandbox(config: SshConfig, remote_dir: Path) -> None:
    with SshSandbox(None, config) as sandbox, Session(sandbox) as session:
        killer = threading.Timer(0.5, lambda: os.kill(outpost_pid(remote_dir), signal.SIGKILL))
        killer.start()
        result = session.run("sleep 1000", timeout_s=900)
        killer.join()
        assert result.state is ShellState.SANDBOX_DEAD
        assert not sandbox.alive
        with pytest.raises(SandboxDied, match="is gone"):
            sandbox.run(["true"])
        assert not episodes(remote_dir)


def test_closing_while_the_connection_is_broken_does_not_hang(config: SshConfig, sshd: Any, remote_dir: Path) -> None:
    with SshSandbox(None, config) as sandbox:
        kill_sessions(sshd)
    assert not sandbox.alive
    wait_until(lambda: not episodes(remote_dir), lambda: "the outpost was not told")


def test_a_start_that_fails_leaves_nothing(config: SshConfig, remote_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nRUN exit 3\n")
    descriptors = open_descriptors()
    with pytest.raises(ImageBuildError):
        SshSandbox(SandboxSpec(image=ImageSource(environment_dir=tmp_path)), config).start()
    gc.collect()
    assert not episodes(remote_dir)
    assert open_descriptors() <= descriptors


def test_a_forgotten_sandbox_ends(config: SshConfig, remote_dir: Path) -> None:
    sandbox = SshSandbox(None, config)
    sandbox.start()
    del sandbox
    gc.collect()
    wait_until(lambda: not episodes(remote_dir), lambda: "it lives on")


def test_a_child_that_was_forked_leaves_the_sandbox_to_its_parent(config: SshConfig) -> None:
    with SshSandbox(None, config) as sandbox:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of forks with threads, which is what is tried
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                sandbox.run(["true"])
            except SandboxError:
                code = 0
            sandbox.close()
            del sandbox
            gc.collect()
            os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        for _ in range(3):
            assert sandbox.run(["echo", "hi"]).stdout == b"hi\n"
        assert sandbox.incidents == ()


# -------------------------------------------------------------------------------------------------------------------------- isolation
def ordinary_user() -> str:
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to become an ordinary user")
    return (
        'exec setpriv --reuid=65534 --regid=65534 --clear-groups env -i PATH=/usr/bin:/bin HOME=/ USER=nobody sh -c "$SSH_ORIGINAL_COMMAND"'
    )


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory of the ordinary user that he can reach, unlike pytest's."""
    path = Path("/tmp", f"t1-test-ssh-{os.getpid()}")
    path.mkdir()
    os.chown(path, 65534, 65534)
    yield path
    shutil.rmtree(path)


@needs_namespaces
def test_an_ordinary_user_of_the_server_has_namespaces_too(wrapped: Callable[..., SshConfig], open_dir: Path) -> None:
    config = wrapped(ordinary_user(), remote_dir=str(open_dir / "t1"), python=None)
    sandbox = SshSandbox(None, config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sandbox.start() if namespaces_of_nobody() else pytest.skip("ordinary users have no namespaces here")
    with sandbox, Session(sandbox) as session:
        assert session.run("id -u; pwd").output == "0\n/app\n"
        assert sandbox.isolation == "remote"


def namespaces_of_nobody() -> bool:
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "unshare", "-Urm", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def refuses_namespaces() -> str:
    script = "echo 0 > /proc/sys/user/max_user_namespaces && exec sh -c"
    if subprocess.run(["unshare", "-Ur", "sh", "-c", f"{script} true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs unshare and user namespaces to make a server that has none")
    return f"exec unshare -Ur sh -c '{script} \"$SSH_ORIGINAL_COMMAND\"'"


def test_a_server_without_namespaces_is_used_with_a_warning(wrapped: Callable[..., SshConfig], tmp_path: Path, remote_dir: Path) -> None:
    workdir = tmp_path / "made/app"
    sandbox = SshSandbox(SandboxSpec(workdir=str(workdir)), wrapped(refuses_namespaces()))
    with pytest.warns(UserWarning, match="NO ISOLATION.*refuses namespaces"):
        sandbox.start()
    with sandbox, Session(sandbox) as session:
        assert (sandbox.isolation, sandbox.capabilities) == ("none", frozenset())
        assert session.run("pwd; echo $HOME").output == f"{workdir}\n{episodes(remote_dir)[0]}/home\n"
        generation = sandbox.generation()
        session.run("touch file; nohup sleep 1000 > /dev/null 2>&1 & echo $!")
        assert sandbox.generation() != generation
        pid = int(session.run("pgrep -n -x sleep").output)
        with pytest.raises(SandboxError, match="cannot"):
            sandbox.run_in_clone("os.path:exists", "/")
    assert not workdir.parent.exists()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), lambda: "a background job lives on")


def test_a_server_without_namespaces_is_refused_where_they_are_demanded(wrapped: Callable[..., SshConfig], remote_dir: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="namespaces"):
        SshSandbox(None, wrapped(refuses_namespaces(), isolation="namespaces")).start()
    assert not episodes(remote_dir)


def test_isolation_that_was_waived_needs_no_warning_and_a_directory_that_is_there_stays(config: SshConfig, tmp_path: Path) -> None:
    with SshSandbox(SandboxSpec(workdir=str(tmp_path)), replace(config, isolation="none")) as sandbox:
        assert sandbox.isolation == "none"
        assert sandbox.run(["sh", "-c", "echo hi > file"]).exit_code == 0
    assert (tmp_path / "file").read_text() == "hi\n"


def test_a_working_directory_that_cannot_be_written_is_said_so(wrapped: Callable[..., SshConfig], open_dir: Path) -> None:
    config = wrapped(ordinary_user(), remote_dir=str(open_dir / "t1"), python=None, isolation="none")
    for workdir in ("/app-of-nobody/below", "/usr"):
        with pytest.raises(SandboxUnavailable, match=workdir):
            SshSandbox(SandboxSpec(workdir=workdir), config).start()


# --------------------------------------------------------------------------------------------------------------------------- leftovers
PLAYER = """
import pickle, sys, time
from t1_env.sandbox.ssh import SshSandbox
config = pickle.loads(bytes.fromhex(sys.argv[1]))
sandbox = SshSandbox(None, config)
sandbox.start()
print("started", flush=True)
time.sleep(1000)
"""


def start_player(config: SshConfig) -> subprocess.Popen[str]:
    player = subprocess.Popen([sys.executable, "-c", PLAYER, pickle.dumps(config).hex()], stdout=subprocess.PIPE, text=True)
    assert player.stdout is not None
    assert player.stdout.readline() == "started\n"
    player.stdout.close()
    return player


def test_what_a_killed_process_left_is_removed_and_nothing_else(config: SshConfig, remote_dir: Path) -> None:
    with SshSandbox(None, config) as mine:
        player = start_player(config)
        try:
            (theirs,) = set(episodes(remote_dir)) - {own_place(remote_dir)}
            assert {finding.action for finding in list_leftovers(config)} == {"kept"}
            pid = int((theirs / "outpost").read_text().split(":")[1])
        finally:
            player.kill()
            player.wait()
        assert {Path(finding.name): finding.action for finding in list_leftovers(config)}[theirs] == "would be removed"
        assert theirs.exists()
        found = {Path(finding.name): finding.action for finding in remove_leftovers(config)}
        assert found == {theirs: "removed", own_place(remote_dir): "kept"}
        assert not theirs.exists()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), lambda: "the outpost lives on")
        assert mine.run(["echo", "hi"]).stdout == b"hi\n"


def own_place(remote_dir: Path) -> Path:
    (place,) = (path for path in episodes(remote_dir) if path.name.startswith(owner.file_name(owner.owner_id())))
    return place


def test_every_start_removes_what_killed_processes_left(config: SshConfig, remote_dir: Path) -> None:
    player = start_player(config)
    (place,) = episodes(remote_dir)
    player.kill()
    player.wait()
    with SshSandbox(None, config):
        assert not place.exists()


def test_what_is_not_known_to_be_left_stays(config: SshConfig, remote_dir: Path) -> None:
    with SshSandbox(None, config):
        pass  # the directories are there now
    elsewhere = owner.file_name("00000000-0000-0000-0000-000000000000.4026531836:17:42")
    place = remote_dir / "episodes"
    names = {
        "not-ours": "kept",
        f"{elsewhere}-aaaaaaaaaaaa": "kept",
        f"{elsewhere}-bbbbbbbbbbbb": "removed",
        f"{elsewhere}-cccccccccccc": "kept",
    }
    for name in names:
        (place / name / "below").mkdir(parents=True)
    for name in names:
        if name.endswith("c"):
            (place / name / "outpost").write_text(f"{owner.owner_id()}\n")  # it runs
        if not name.endswith("a"):
            os.utime(place / name, (time.time() - 7200, time.time() - 7200))
    found = {Path(finding.name).name: finding.action for finding in remove_leftovers(config)}
    assert found == names
    for name, action in names.items():
        assert (place / name).exists() == (action == "kept")
        shutil.rmtree(place / name, ignore_errors=True)


def test_an_outpost_ends_when_its_host_process_is_killed(config: SshConfig, remote_dir: Path) -> None:
    player = start_player(replace(config, lease_s=5, reconnect_s=1))
    pid = outpost_pid(remote_dir)
    player.kill()
    player.wait()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), lambda: "it lives on")
    wait_until(lambda: not episodes(remote_dir), lambda: "its directory is left")
