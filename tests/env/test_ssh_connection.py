"""SSH connections: who is let in, who is refused, and that nothing waits for ever, shows a password or is left behind."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from t1_env.errors import ConfigError, SandboxUnavailable, TransportLost
from t1_env.sandbox.ssh.config import SshConfig
from t1_env.sandbox.ssh.connection import Connection, connect
from t1_env.sandbox.ssh.secret import Secret

paramiko = pytest.importorskip("paramiko")
pytestmark = pytest.mark.ssh

PASSWORD = "correct horse battery"


@pytest.fixture
def config(sshd: Any) -> SshConfig:
    return SshConfig(
        host=sshd.host,
        port=sshd.port,
        user=sshd.user,
        key_file=str(sshd.key_file),
        known_hosts_file=str(sshd.known_hosts_file),
        agent=False,
        ssh_config_file="none",
        connect_timeout_s=150,
    )


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 10
    while left := set(threading.enumerate()) - threads:
        assert time.monotonic() < deadline, f"threads are left: {left}"
        time.sleep(0.01)


def read_to_end(stream: Any) -> bytes:
    data = b""
    while piece := stream.receive():
        data += piece
    return data


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# ---------------------------------------------------------------------------------------------------------------------- the good case
def test_programs_talk_and_end(config: SshConfig) -> None:
    before = open_descriptors()
    for _ in range(3):
        connection = connect(config)
        stream = connection.execute("exec sh -c 'echo ready; echo oops >&2; cat; exit 3'")
        data = stream.receive()
        sender = threading.Thread(target=stream.send, args=(b"x" * 5_000_000,))
        sender.start()
        while len(data) < 5_000_006:
            data += stream.receive()
        sender.join()
        assert data == b"ready\n" + b"x" * 5_000_000
        stream._channel.shutdown_write()
        assert stream.receive() == b""
        assert stream.exit_status(30) == 3
        assert stream.errors() == "oops\n"
        stream.close()
        stream.close()
        assert stream.receive() == b""
        with pytest.raises(TransportLost, match="closed"):
            stream.send(b"x")
        del connection, stream
    assert open_descriptors() <= before


def test_a_program_that_is_killed_has_ended_and_the_connection_has_not(config: SshConfig) -> None:
    connection = connect(config)
    stream = connection.execute("exec sh -c 'echo $$; exec sleep 1000'")
    os.kill(int(stream.receive()), signal.SIGKILL)
    assert stream.receive() == b""
    assert stream.exit_status(10) is None
    assert read_to_end(connection.execute("echo still here")) == b"still here\n"
    connection.close()


def test_much_on_standard_error_stalls_nothing_and_its_end_is_kept(config: SshConfig) -> None:
    connection = connect(config)
    padding = "x" * 990
    stream = connection.execute(f"exec sh -c 'i=0; while [ $i -lt 4000 ]; do echo {padding} >&2; i=$((i+1)); echo; done; echo last >&2'")
    assert read_to_end(stream) == b"\n" * 4000
    assert len(stream.errors()) == 4096
    assert stream.errors().endswith("last\n")
    connection.close()


# --------------------------------------------------------------------------------------------------------------------------- host keys
def public_key(sshd: Any) -> str:
    return " ".join(Path(sshd.known_hosts_file).read_text().split()[1:3])


def other_key(tmp_path: Path) -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    return " ".join((tmp_path / "other.pub").read_text().split()[:2])


def refusal(config: SshConfig) -> str:
    with pytest.raises(SandboxUnavailable) as caught:
        connect(config)
    return str(caught.value)


def test_an_unknown_host_is_refused_and_never_added(config: SshConfig, sshd: Any, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text("")
    message = refusal(replace(config, known_hosts_file=str(known)))
    assert "HOST KEY UNKNOWN" in message
    assert sshd.host_fingerprint in message
    assert str(known) in message
    assert "host_fingerprint=" in message
    assert known.read_text() == ""
    assert "HOST KEY UNKNOWN" in refusal(replace(config, known_hosts_file=str(tmp_path / "missing")))
    assert not (tmp_path / "missing").exists()


def test_a_fingerprint_alone_decides(config: SshConfig, sshd: Any, tmp_path: Path) -> None:
    connect(replace(config, known_hosts_file=str(tmp_path / "missing"), host_fingerprint=sshd.host_fingerprint)).close()
    wrong = "SHA256:" + "A" * 43
    message = refusal(replace(config, host_fingerprint=wrong))  # although known_hosts knows it
    assert "HOST KEY REFUSED" in message
    assert wrong in message
    assert sshd.host_fingerprint in message


def test_a_changed_key_is_refused_loudly(config: SshConfig, sshd: Any, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"# mine\n[127.0.0.1]:{sshd.port} {other_key(tmp_path)}\n")
    message = refusal(replace(config, known_hosts_file=str(known)))
    assert "HOST KEY CHANGED" in message
    assert f"{known}:2" in message
    assert sshd.host_fingerprint in message


def test_a_revoked_key_is_refused(config: SshConfig, sshd: Any, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{sshd.port} {public_key(sshd)}\n@revoked * {public_key(sshd)}\n")
    assert "revoked" in refusal(replace(config, known_hosts_file=str(known)))


def test_a_key_known_for_the_host_is_good_on_another_port_and_another_one_proves_nothing(
    config: SshConfig, sshd: Any, tmp_path: Path
) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"127.0.0.1 {public_key(sshd)}\n")
    connect(replace(config, known_hosts_file=str(known))).close()
    known.write_text(f"127.0.0.1 {other_key(tmp_path)}\n")
    assert "HOST KEY UNKNOWN" in refusal(replace(config, known_hosts_file=str(known)))


def test_the_key_kind_that_is_known_is_asked_for(tmp_path: Path) -> None:
    with fake_server(keys=("rsa", "ecdsa")) as server:
        for kind in ("rsa", "ecdsa"):
            known = tmp_path / kind
            key = server.keys[kind]
            known.write_text(f"[127.0.0.1]:{server.port} {key.get_name()} {key.get_base64()}\n")
            connect(server.config(known_hosts_file=str(known), host_fingerprint=None, password=PASSWORD)).close()


# ------------------------------------------------------------------------------------------------------------------------------ logins
def test_a_key_that_is_not_authorized_is_refused_with_what_was_tried(config: SshConfig, tmp_path: Path) -> None:
    other_key(tmp_path)
    message = refusal(replace(config, key_file=str(tmp_path / "other")))
    assert f"key {tmp_path / 'other'} (refused)" in message
    assert "authorized_keys" in message


def test_a_key_file_that_is_missing_or_no_key_is_said_so(config: SshConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        connect(replace(config, key_file=str(tmp_path / "missing")))
    (tmp_path / "text").write_text("no key\n")
    with pytest.raises(ConfigError, match="no private key"):
        connect(replace(config, key_file=str(tmp_path / "text")))


@pytest.mark.parametrize("form", [(), ("-m", "PEM", "-t", "rsa", "-b", "2048")], ids=["openssh", "pem"])
def test_encrypted_keys_need_the_right_passphrase(config: SshConfig, sshd: Any, tmp_path: Path, form: tuple[str, ...]) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", *(form or ("-t", "ed25519")), "-N", PASSWORD, "-f", str(key)], check=True)
    with pytest.raises(ConfigError, match="encrypted"):
        connect(replace(config, key_file=str(key)))
    with pytest.raises(ConfigError, match="passphrase is wrong"):
        connect(replace(config, key_file=str(key), passphrase=Secret("wrong")))
    message = refusal(replace(config, key_file=str(key), passphrase=Secret(PASSWORD)))  # readable, and then not authorized
    assert "(refused)" in message
    connect(replace(config, passphrase=Secret(PASSWORD))).close()  # a key that is not encrypted needs none


def test_keys_of_an_agent_are_used(config: SshConfig, sshd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sock = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(sock)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not sock.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
        monkeypatch.setenv("HOME", str(tmp_path))  # no usual keys
        Path(sshd.key_file).chmod(0o600)
        assert "nothing, as there is neither a key nor a password" in refusal(replace(config, key_file=None))
        assert "nothing" in refusal(replace(config, key_file=None, agent=True))
        subprocess.run(["ssh-add", "-q", str(sshd.key_file)], check=True)
        connect(replace(config, key_file=None, agent=True)).close()
    finally:
        agent.kill()
        agent.wait()


def test_an_agent_that_is_gone_is_no_obstacle(config: SshConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "none"))
    connect(replace(config, agent=True)).close()


@pytest.mark.parametrize("way", ["password", "keyboard-interactive"])
def test_passwords_open_the_door_and_are_shown_nowhere(
    way: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = []
    with caplog.at_level(logging.DEBUG), fake_server(way=way) as server:
        connect(server.config(password=PASSWORD)).close()
        for wrong in ("wrong " + PASSWORD, PASSWORD + " wrong"):
            with pytest.raises(SandboxUnavailable, match=r"password \(") as caught:
                connect(server.config(password=wrong))
            trace = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
            trace.stack = traceback.StackSummary.from_list([frame for frame in trace.stack if frame.filename != __file__])
            shown.append("".join(trace.format()))
            assert caught.value.__context__ is None
    assert any("t1_env.ssh" in record.name for record in caplog.records)  # paramiko did write there
    shown += [caplog.text, *(str(record.__dict__) for record in caplog.records), *capfd.readouterr()]
    assert not [text for text in shown if PASSWORD in text]


def test_an_error_of_a_login_shows_no_passphrase(config: SshConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "right one", "-f", str(key)], check=True)
    with caplog.at_level(logging.DEBUG), pytest.raises(ConfigError) as caught:
        connect(replace(config, key_file=str(key), passphrase=Secret(PASSWORD)))
    trace = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert PASSWORD not in trace + caplog.text


# ------------------------------------------------------------------------------------------------------------- what cannot be reached
def test_a_refused_connection_is_one_try(config: SshConfig) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert "refused" in refusal(replace(config, port=sock.getsockname()[1]))


def test_a_name_nobody_knows_is_said_so(config: SshConfig) -> None:
    assert "cannot be resolved" in refusal(replace(config, host="no-such-host.invalid"))


@contextlib.contextmanager
def listener(answer: Callable[[socket.socket], None]) -> Iterator[tuple[int, list[float]]]:
    """A TCP server that does ``answer`` with each connection."""
    visits: list[float] = []
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        done = threading.Event()

        def serve() -> None:
            while not done.is_set():
                with contextlib.suppress(TimeoutError):
                    link, _ = server.accept()
                    visits.append(time.monotonic())
                    held.append(link)
                    with contextlib.suppress(OSError):
                        answer(link)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1], visits
        finally:
            done.set()
            thread.join()
            for link in held:
                link.close()


def test_a_server_that_says_nothing_is_given_up(config: SshConfig) -> None:
    with listener(lambda link: None) as (port, visits):
        message = refusal(replace(config, port=port, connect_timeout_s=1))
        assert "handshake" in message
        assert len(visits) == 1


def test_a_server_that_hangs_up_at_once_is_tried_a_few_times_and_no_more(config: SshConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("t1_env.sandbox.ssh.connection._DROPPED_PAUSE_S", 0.1)
    with listener(lambda link: link.close()) as (port, visits):
        assert "MaxStartups" in refusal(replace(config, port=port))
        assert len(visits) == 6
        assert min(after - before for before, after in itertools.pairwise(visits)) > 0.02


def test_something_that_is_no_ssh_server_is_said_so(config: SshConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("t1_env.sandbox.ssh.connection._DROPPED_PAUSE_S", 0.1)
    with listener(lambda link: link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 200)) as (port, _):
        assert "Is an SSH server on this port" in refusal(replace(config, port=port, connect_timeout_s=5))


def test_a_server_that_does_not_answer_the_login_is_given_up() -> None:
    with fake_server(hang_at="login") as server:
        assert "within 2 s" in refusal(server.config(password=PASSWORD, connect_timeout_s=2))


def test_a_server_that_does_not_start_programs_is_given_up() -> None:
    with fake_server(hang_at="exec") as server:
        connection = connect(server.config(password=PASSWORD, connect_timeout_s=2))
        with pytest.raises(TransportLost, match="within 2 s"):
            connection.execute("true")
        connection.close()


def test_a_server_that_allows_no_session_is_said_so() -> None:
    with fake_server(hang_at="session") as server:
        connection = connect(server.config(password=PASSWORD))
        with pytest.raises(SandboxUnavailable, match="MaxSessions"):
            connection.execute("true")
        connection.close()


# --------------------------------------------------------------------------------------------------------------------- loss on the way
def session_pid(connection: Connection) -> int:
    """The process of the server that serves this connection; below it runs the program."""
    stream = connection.execute("exec sh -c 'echo $PPID; exec cat'")
    return int(stream.receive())


def test_a_killed_session_is_a_lost_connection_for_whoever_waits(config: SshConfig) -> None:
    connection = connect(config)
    stream = connection.execute("exec sh -c 'echo ready; exec cat'")
    assert stream.receive() == b"ready\n"
    pid = session_pid(connection)
    killer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(TransportLost, match="hung up"):
        stream.receive()
    killer.join()
    with pytest.raises(TransportLost):
        stream.send(b"x")
    with pytest.raises(TransportLost):
        connection.execute("true")
    stream.close()


def test_closing_wakes_up_whoever_waits(config: SshConfig) -> None:
    stream = connect(config).execute("exec sh -c 'echo ready; exec cat'")
    assert stream.receive() == b"ready\n"
    closer = threading.Timer(0.2, stream.close)
    closer.start()
    assert stream.receive() == b""
    closer.join()


# ------------------------------------------------------------------------------------------------------------------------ roundabout
def test_jump_hosts_are_gone_through(config: SshConfig, sshd: Any, tmp_path: Path) -> None:
    openssh = tmp_path / "config"
    openssh.write_text(
        f"Host inner\n  HostName 127.0.0.1\n  ProxyJump outer\nHost outer\n  HostName 127.0.0.1\n  IdentityFile {sshd.key_file}\n"
        f"Host *\n  Port {sshd.port}\n  User {sshd.user}\n  UserKnownHostsFile {sshd.known_hosts_file}\n"
    )
    before = open_descriptors()
    connection = connect(
        SshConfig(host="inner", agent=False, key_file=str(sshd.key_file), ssh_config_file=str(openssh), connect_timeout_s=150)
    )
    assert read_to_end(connection.execute("echo through")) == b"through\n"
    connection.close()
    assert open_descriptors() <= before


def test_proxy_commands_are_run_and_ended(config: SshConfig, sshd: Any, tmp_path: Path) -> None:
    relay = tmp_path / "relay.py"
    relay.write_text(
        "import os, select, socket, sys\n"
        "link = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "while True:\n"
        "    ready, _, _ = select.select([0, link], [], [])\n"
        "    data = os.read(0, 65536) if 0 in ready else link.recv(65536)\n"
        "    if not data: break\n"
        "    link.sendall(data) if 0 in ready else os.write(1, data)\n"
    )
    openssh = tmp_path / "config"
    openssh.write_text(f"Host box\n  HostName 127.0.0.1\n  ProxyCommand {sys.executable} {relay} %h %p\n")
    connection = connect(replace(config, host="box", ssh_config_file=str(openssh)))
    assert read_to_end(connection.execute("echo through")) == b"through\n"
    pid = int((tmp_path / "pid").read_text())
    connection.close()
    assert not Path(f"/proc/{pid}").exists()


def test_many_logins_at_once_wait_for_their_turn() -> None:
    with fake_server() as server:
        failures: list[BaseException] = []

        def visit() -> None:
            try:
                connect(server.config(password=PASSWORD, max_logins=2, connect_timeout_s=120)).close()
            except Exception as error:  # noqa: BLE001
                failures.append(error)

        threads = [threading.Thread(target=visit) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert server.most_under_way <= 2


# -------------------------------------------------------------------------------------------------------------------- a server of ours
class FakeServer:
    """An SSH server in this process that misbehaves on demand."""

    def __init__(self, port: int, keys: dict[str, Any]) -> None:
        self.port, self.keys = port, keys
        self.under_way = self.most_under_way = 0

    def config(self, **changes: Any) -> SshConfig:
        from t1_env.sandbox.ssh.hostkeys import fingerprint

        fields: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": self.port,
            "user": "someone",
            "agent": False,
            "ssh_config_file": "none",
            "host_fingerprint": fingerprint(next(iter(self.keys.values())).asbytes()),
            "connect_timeout_s": 150,
        }
        return SshConfig(**(fields | changes))


@contextlib.contextmanager
def fake_server(*, way: str = "password", hang_at: str = "", keys: tuple[str, ...] = ("ecdsa",)) -> Iterator[FakeServer]:
    made = {kind: paramiko.RSAKey.generate(2048) if kind == "rsa" else paramiko.ECDSAKey.generate() for kind in keys}
    released = threading.Event()
    transports: list[Any] = []

    class Interface(paramiko.ServerInterface):  # type: ignore[name-defined, misc]
        def get_allowed_auths(self, username: str) -> str:
            return way

        def check_auth_password(self, username: str, password: str) -> int:
            if hang_at == "login":
                released.wait(60)
            return paramiko.AUTH_SUCCESSFUL if way == "password" and password == PASSWORD else paramiko.AUTH_FAILED

        def check_auth_interactive(self, username: str, submethods: str) -> Any:
            return paramiko.InteractiveQuery("", "", ("Password: ", False)) if way == "keyboard-interactive" else paramiko.AUTH_FAILED

        def check_auth_interactive_response(self, responses: list[str]) -> int:
            return paramiko.AUTH_SUCCESSFUL if responses == [PASSWORD] else paramiko.AUTH_FAILED

        def check_channel_request(self, kind: str, chanid: int) -> int:
            return paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED if hang_at == "session" else paramiko.OPEN_SUCCEEDED

        def check_channel_exec_request(self, channel: Any, command: bytes) -> bool:
            released.wait(60)
            return False

    def answer(link: socket.socket) -> None:
        server.under_way = sum(1 for transport in transports if transport.is_active() and not transport.is_authenticated()) + 1
        server.most_under_way = max(server.most_under_way, server.under_way)
        transport = paramiko.Transport(link)
        transport.daemon = True
        for key in made.values():
            transport.add_server_key(key)
        transports.append(transport)
        transport.start_server(event=threading.Event(), server=Interface())

    with listener(answer) as (port, _):
        server = FakeServer(port, made)
        try:
            yield server
        finally:
            released.set()
            for transport in transports:
                transport.close()
                transport.join(10)
