"""What an agent that watches from inside can see of a verification: that time stood still, and nothing else.

`test_env_verify_trace.py` compares what is there before and after. Here a process of the agent records what happens to it meanwhile: events
on its files (inotify), broken leases, signals, calls that are interrupted, its own processor time, process numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from t1_env import TerminalEnv
from t1_env.sandbox.local import unavailable_reason
from t1_env.tasks import load_task

namespaces = [pytest.mark.namespaces, pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))]

# Everything that a verifier does to files: lists directories, reads, writes, renames, removes, locks, executes.
TESTS = """\
import fcntl, os, subprocess
from pathlib import Path

def test_uses_everything():
    for directory, _, names in os.walk("/app"):
        for name in names: Path(directory, name).read_bytes()
    subprocess.run(["ls", "-laR", "/app", "/tmp"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["sh", "/app/program.sh"], check=True)
    with open("/app/leased", "r+") as stream: fcntl.flock(stream, fcntl.LOCK_EX); stream.write("x")
    Path("/app/deep/file").write_text("y"); os.rename("/app/kept", "/app/renamed"); os.utime("/app", (1, 1)); Path("/tmp/new").mkdir()
    assert False
"""
RECORDER = r"""
import ctypes, errno, fcntl, os, signal, struct, sys, time

libc = ctypes.CDLL(None, use_errno=True)
log = open("/dev/shm/log", "w", buffering=1)
NO_HANDLER = (signal.SIGKILL, signal.SIGSTOP)


def say(*words):
    log.write(" ".join(map(str, words)) + "\n")


def seen(number, frame):
    say("signal", number)
    if number == signal.SIGIO:
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_UNLCK)


for number in range(1, 65):
    try:
        if number not in NO_HANDLER:
            signal.signal(number, seen)
    except (OSError, ValueError):
        pass

leased = os.open("/app/leased", os.O_RDWR | os.O_CREAT, 0o600)
try:
    fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
except OSError as error:
    say("no lease:", error)

notify, names = libc.inotify_init1(os.O_NONBLOCK), {}


def watch(path):
    descriptor = libc.inotify_add_watch(notify, path.encode(), 0xFFF)
    if descriptor >= 0:
        names[descriptor] = path


def events():
    try:
        data = os.read(notify, 1 << 16)
    except BlockingIOError:
        return
    while data:
        descriptor, mask, _, length = struct.unpack_from("iIII", data)
        yield names.get(descriptor), hex(mask), data[16 : 16 + length].rstrip(b"\0").decode()
        data = data[16 + length :]


for top in ("/app", "/tmp", "/root"):
    watch(top)
    for directory, below, files in os.walk(top):
        for name in [*below, *files]:
            watch(os.path.join(directory, name))
list(events())
poller, room = libc.epoll_create1(0), (ctypes.c_char * 64)()
known, stopped = set(os.listdir("/proc")), set()
children = os.times()
say("ready", len(names))
clock, cpu = time.monotonic(), time.process_time()
while not os.path.exists("/dev/shm/stop"):
    if libc.epoll_wait(poller, room, 1, 1) < 0:
        say("interrupted", errno.errorcode[ctypes.get_errno()])
    now, used = time.monotonic(), time.process_time()
    if used - cpu > 0.1:
        say("processor", used - cpu)
    if now - clock > 0.001:
        stopped.add(round(now - clock, 3))
    clock, cpu = now, used
    for event in events():
        say("event", *event)
    appeared = {name for name in os.listdir("/proc") if name.isdigit()} - known
    for number in sorted(appeared):
        say("process", number)
    known |= appeared
    if os.times()[2:4] != children[2:4]:
        say("children", os.times())
        children = os.times()
say("longest", max(stopped))
"""


@pytest.fixture(params=["layered", "plain", "docker"])
def env(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TerminalEnv]:
    base, sandbox = "debian:bookworm-slim", "local"
    if request.param == "docker":
        base, sandbox = request.getfixturevalue("docker_python_image"), "docker"
    elif unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    for name, text in {
        "instruction.md": "Nothing.",
        "task.toml": '[environment]\nworkdir = "/app"\n',
        # Without a layer the root of a local sandbox is put together in another way.
        "environment/Dockerfile": f"FROM {base}\n" + ("WORKDIR /app\n" if request.param != "plain" else ""),
        "tests/test_it.py": TESTS,
        "tests/test.sh": 'python3 -m pytest -rA "$(dirname "$0")/test_it.py"\n',
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    made = TerminalEnv(load_task(tmp_path), sandbox=sandbox, verify="end", max_output_bytes=1 << 22, step_timeout_s=120)
    made.reset(seed=0)
    say(made, "mkdir -p deep && echo a > deep/file && echo b > kept && echo exit 0 > program.sh")
    if "python3" not in say(made, "command -v python3; true"):
        made.close()
        pytest.skip("the sandbox has no Python to watch with")
    say(made, f"cat > /dev/shm/recorder.py <<'EOF'{RECORDER}EOF")
    say(made, "setsid python3 /dev/shm/recorder.py > /dev/null 2> /dev/shm/errors < /dev/null & disown")
    for _ in range(300):
        if "ready" in say(made, "sleep 0.1; cat /dev/shm/log 2>/dev/null"):
            break
    yield made
    made.close()


def say(env: TerminalEnv, command: str) -> str:
    observation, _, _, _, info = env.step(command)
    assert info["infra_error"] is None
    return str(observation["output"])


def verify(env: TerminalEnv) -> None:
    """Verify as a step would, without a command that would itself be seen."""
    machine: Any = env._machine
    report = machine.verify(env._watch)
    (outcome,) = report.outcomes.values()
    assert outcome.status == "failed", outcome
    assert outcome.message.startswith("test_it.py:11"), outcome  # the test went all the way
    assert machine.settle(report, env._watch).agrees


def test_a_watcher_sees_that_time_stood_still_and_nothing_else(env: TerminalEnv):
    say(env, "echo go > /dev/shm/unwatched")
    before = say(env, "cat /dev/shm/log").split("\n")
    assert int(next(line for line in before if line.startswith("ready")).split()[1]) > 5
    for _ in range(3):
        verify(env)
        time.sleep(0.05)
    log = [line.strip() for line in say(env, "cat /dev/shm/log; cat /dev/shm/errors").split("\n")[len(before) - 1 :] if line.strip()]
    # Waiting calls that are never restarted say that they were interrupted: the stop of time by another clock.
    assert [line for line in log if line != "interrupted EINTR" and not is_of_this_look(line)] == []


def is_of_this_look(line: str) -> bool:
    """The command that reads the log is a process too, and what it prints is kept beside the shell, in a file without a name."""
    return line.startswith("process ") or (line.startswith("event /tmp 0x2 #") and line.rpartition("#")[2].isdigit())


def test_the_watcher_would_see_a_verifier_that_shared_the_agents_view(env: TerminalEnv):
    say(env, "cat deep/file kept > /dev/null; ls /tmp > /dev/null; cat /app/leased & wait")
    log = say(env, "cat /dev/shm/log")
    assert "event /app/deep/file" in log or "event /app/deep 0x20 file" in log
    assert "event /app/kept" in log or "event /app 0x20 kept" in log
    assert "process " in log
    if "no lease" not in log:
        assert "signal 29" in log
