"""The conversation with an outpost: greeting, pulse, lease, loss, one reconnect, and children that a host process forks."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from t1_env.errors import SandboxDied, SandboxError, SandboxUnavailable, TransportLost
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.outpost import client as clients
from t1_env.sandbox.outpost import frames
from t1_env.sandbox.outpost.client import OutpostClient
from t1_env.sandbox.outpost.pipe import PipeStream
from t1_env.sandbox.outpost.remote import RemoteSandbox
from t1_env.sandbox.outpost.runtime import make_runtime
from t1_env.shell import Session, ShellConfig

PATIENCE_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def command(*arguments: str) -> list[str]:
    runtime = make_runtime("pure")
    return runtime.command(str(runtime.unpack()), *arguments, python=sys.executable)


# ------------------------------------------------------------------------------------------------------------------------ greeting
def test_the_greeting_says_who_answers() -> None:
    client = OutpostClient(PipeStream(command("auto", "--lease-s", "77")))
    greeting = client.greeting
    assert (greeting["protocol"], greeting["mode"], greeting["lease_s"]) == (frames.PROTOCOL, "auto", 77)
    assert greeting["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert client.pulse_s == 15
    client.close()
    client.close()
    assert not client.alive
    with pytest.raises(SandboxDied, match="closed"):
        client.request("generation", sandbox=1)


def test_something_else_that_answers_is_shown() -> None:
    with pytest.raises(TransportLost, match="python3: command not found"):
        OutpostClient(PipeStream(["sh", "-c", "echo 'Welcome!'; echo 'python3: command not found'"]))
    with pytest.raises(TransportLost, match="no outpost answered"):
        OutpostClient(PipeStream(["true"]))
    with pytest.raises(TransportLost, match="something else"):
        OutpostClient(PipeStream(["yes"]))
    with pytest.raises(SandboxUnavailable, match="cannot start"):
        PipeStream(["/no/such/program"])


def test_what_a_login_script_prints_is_no_harm() -> None:
    client = OutpostClient(PipeStream(["sh", "-c", 'echo Welcome; exec "$@"', "sh", *command("native")]))
    assert client.alive
    client.close()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PROTOCOL", 0)
    with pytest.raises(SandboxUnavailable, match="same version"):
        OutpostClient(PipeStream(command("native")))


def test_nonsense_ends_the_conversation_and_the_outpost() -> None:
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10_000, frames.MAGIC + b"\xff" * 64, frames.MAGIC + frames.pack({"op": "run", "id": 1})):
        stream = PipeStream(command("native"))
        with contextlib.suppress(TransportLost):
            stream.send(data)
        if not data:
            stream._stdin.close()
        seen = b""
        while part := stream.receive():
            seen += part
        assert b'"hello"' not in seen
        stream.close()


def test_an_unknown_request_is_an_answer() -> None:
    client = OutpostClient(PipeStream(command("native")))
    for operation in ("no-such", "shell.no-such", "process.no-such"):
        with pytest.raises(SandboxError):
            client.request(operation, sandbox=1, shell=1, process=1)
    assert client.alive
    with pytest.raises(SandboxError, match="KeyError"):
        client.request("start")
    client.close()


def test_an_answer_that_does_not_come_in_time(outpost: Callable[..., Any]) -> None:
    box = outpost("native")
    with pytest.raises(SandboxError, match="did not answer"):
        box._client.request("run", answer_timeout_s=0.2, sandbox=1, **_run(["sleep", "5"]))
    assert box.run(["echo", "on"]).stdout == b"on\n"


def _run(argv: list[str]) -> dict[str, Any]:
    return {"argv": argv, "env": {}, "cwd": None, "timeout_s": 1000.0, "max_output_bytes": 1000}


# --------------------------------------------------------------------------------------------------------------------- lease, pulse
def test_without_a_pulse_the_lease_runs_out(tmp_path: Path) -> None:
    client = OutpostClient(PipeStream(command("native", "--lease-s", "2")))
    clients.PULSES.remove(client)
    reply, _ = client.request("start", spec={"workdir": str(tmp_path)})
    pid = tmp_path / "pid"
    client.request("run", sandbox=reply["sandbox"], **_run(["sh", "-c", f"(setsid sleep 1000 & echo $! > {pid})"]))
    until(lambda: not client.alive)
    with pytest.raises(SandboxDied, match="nothing was heard for 2 s"):
        client.request("generation", sandbox=1)
    until(lambda: not runs(int(pid.read_text())))
    client.close()


def test_the_pulse_keeps_it(outpost: Callable[..., Any]) -> None:
    box = outpost("native", "--lease-s", "4")
    assert box._client.pulse_s == 1
    time.sleep(7)
    assert box.run(["echo", "on"]).stdout == b"on\n"


def test_an_outpost_that_stood_still_past_its_lease_goes_on(outpost: Callable[..., Any]) -> None:
    box = outpost("native", "--lease-s", "3")
    os.kill(box.stream.pid, 19)
    with box._client.unwatched():
        time.sleep(5)
        os.kill(box.stream.pid, 18)
    assert box.run(["echo", "on"]).stdout == b"on\n"


def test_an_outpost_that_never_answers_again_is_given_up(outpost: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_SILENCE_S", 1.0)
    box = outpost("native", "--lease-s", "2")
    os.kill(box.stream.pid, 19)
    with pytest.raises(TransportLost):
        box.run(["true"])
    assert not box.alive


def test_no_threads_or_descriptors_are_left(outpost: Callable[..., Any]) -> None:
    def held() -> tuple[int, set[str]]:
        names = {thread.name for thread in threading.enumerate() if thread.name.startswith("t1-")}
        return len(list(Path("/proc/self/fd").iterdir())), names

    box = outpost("native")
    box.close()
    before = held()
    for _ in range(3):
        box = outpost("native")
        with Session(box) as session:
            session.run("true")
        process = box.spawn(["cat"], pty_size=(24, 80))
        os.close(process.pty_fd)
        process.wait(PATIENCE_S)
        del process
        box.close()
    until(lambda: held() == before)


# ---------------------------------------------------------------------------------------------------------------------------- fork
def test_a_forked_child_cannot_use_it_and_does_no_harm(outpost: Callable[..., Any]) -> None:
    box = outpost("native")
    process = box.spawn(["sleep", "1000"])
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with contextlib.suppress(SandboxDied):
                box.run(["true"])
                os._exit(2)
            if box.alive or process.poll() is None:
                os._exit(3)
            box.close()
            os.write(write_fd, b"1")
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(read_fd)
    os.close(write_fd)
    assert process.poll() is None
    assert box.run(["echo", "on"]).stdout == b"on\n"


# ----------------------------------------------------------------------------------------------------------------------- reconnect
class Reconnecting(RemoteSandbox):
    """An outpost behind a socket; each stream is a process that leads to it."""

    def __init__(self, path: str, workdir: str, *arguments: str) -> None:
        super().__init__(SandboxSpec(workdir=workdir))
        self.path = path
        self.arguments = arguments
        self.streams: list[PipeStream] = []
        self.delay_s = 0.0

    def _connect(self) -> OutpostClient:
        self.streams.append(PipeStream(command("native", "--grace-s", "5", "--listen", self.path, *self.arguments)))
        return OutpostClient(self.streams[0], reconnect=self.again)

    def again(self) -> PipeStream:
        time.sleep(self.delay_s)
        self.streams.append(PipeStream(command("--attach", self.path)))
        return self.streams[-1]

    def cut(self) -> None:
        os.kill(self.streams[-1].pid, 9)

    @property
    def pid(self) -> int:
        assert self._client is not None
        return int(self._client.greeting["pid"])


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Callable[..., Reconnecting]]:
    made = []

    def start(*arguments: str) -> Reconnecting:
        box = Reconnecting(str(tmp_path / "socket"), str(tmp_path / "work"), *arguments)
        made.append(box)
        box.start()
        return box

    yield start
    for box in made:
        box.close()
        until(lambda box=box: not runs(box.pid))  # type: ignore[misc]


def test_a_lost_connection_is_replaced_and_nothing_is_done_twice(listening: Callable[..., Reconnecting], tmp_path: Path) -> None:
    box = listening()
    assert oct((tmp_path / "socket").stat().st_mode & 0o777) == "0o600"
    done = tmp_path / "done"
    with Session(box, ShellConfig(timeout_s=100)) as session:
        session.run("x=kept")
        threading.Timer(0.7, box.cut).start()
        result = session.run(f"sleep 2; echo once >> {done}; echo $x")  # the answer comes after the connection is back
        assert (result.output, result.exit_code) == ("kept\n", 0)
        assert done.read_text() == "once\n"
        assert len(box.incidents) == 1
        assert box.incidents[0].startswith("reconnected after ")
        assert session.run("echo $x").output == "kept\n"
        assert box.alive
        box.cut()  # once is enough
        with pytest.raises(TransportLost):
            session.run("echo $x")
    assert not box.alive
    assert len(box.streams) == 2


def test_an_answer_given_while_nobody_was_there_is_kept(listening: Callable[..., Reconnecting], tmp_path: Path) -> None:
    box = listening()
    box.delay_s = 3.0
    done = tmp_path / "done"
    threading.Timer(0.5, box.cut).start()
    result = box.run(["sh", "-c", f"sleep 1.5; echo once >> {done}; echo answer; exit 7"])
    assert (result.exit_code, result.stdout) == (7, b"answer\n")
    assert done.read_text() == "once\n"
    assert len(box.incidents) == 1


def test_answers_that_arrived_are_not_kept(listening: Callable[..., Reconnecting]) -> None:
    box = listening()
    process = box.spawn(["sleep", "1000"])  # a request that stays open all the time

    def resident_kb() -> int:
        status = Path(f"/proc/{box.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0])

    def turn() -> None:
        assert len(box.run(["head", "-c", "3000000", "/dev/zero"], max_output_bytes=1 << 22).stdout) == 3_000_000

    for _ in range(5):
        turn()
    before = resident_kb()
    for _ in range(40):
        turn()
    assert resident_kb() < before + 60_000
    assert process.poll() is None


def test_requests_made_while_the_connection_is_down_wait_for_it(listening: Callable[..., Reconnecting]) -> None:
    box = listening()
    box.delay_s = 1.0
    box.cut()
    time.sleep(0.3)
    outputs = []
    threads = [threading.Thread(target=lambda n=n: outputs.append(box.run(["echo", str(n)]).stdout)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(outputs) == [b"%d\n" % number for number in range(5)]


def test_a_connection_that_cannot_be_replaced_is_lost(listening: Callable[..., Reconnecting], monkeypatch: pytest.MonkeyPatch) -> None:
    box = listening()

    def refuse() -> PipeStream:
        raise TransportLost("the network is down")

    assert box._client is not None
    monkeypatch.setattr(box._client, "_reconnect", refuse)
    box.cut()
    with pytest.raises(TransportLost):
        box.run(["sleep", "100"])
    assert "the network is down" in box.incidents[0]


def test_nobody_else_can_take_the_connection_over(listening: Callable[..., Reconnecting], tmp_path: Path) -> None:
    box = listening()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(tmp_path / "socket"))
        stranger.settimeout(PATIENCE_S)
        stranger.sendall(frames.MAGIC + frames.pack({"op": "attach", "session": "guessed"}))
        assert stranger.recv(100) == b""
    assert box.run(["echo", "on"]).stdout == b"on\n"
    assert box.incidents == ()


def test_without_a_connection_it_ends_after_its_grace_time(listening: Callable[..., Reconnecting], tmp_path: Path) -> None:
    box = listening("--grace-s", "1")
    pid = tmp_path / "pid"
    box.run(["sh", "-c", f"(setsid sleep 1000 & echo $! > {pid})"])
    box.delay_s = 5.0
    outpost = box.pid
    assert runs(outpost)
    box.cut()
    until(lambda: not runs(outpost))
    until(lambda: not runs(int(pid.read_text())))
    assert not (tmp_path / "socket").exists()
    with pytest.raises(TransportLost):
        box.run(["true"])
