"""What the agent can see of a verification: nothing. Processes, files and their times, sockets, mounts, shared memory, process numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from t1_env import TerminalEnv
from t1_env.sandbox.local import unavailable_reason
from t1_env.tasks import Task, load_task

needs_namespaces = [pytest.mark.namespaces, pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))]

# One line for each thing that can be looked at; not when /dev was last read, which this very look moves.
SNAPSHOT = r"""
snapshot() {
  find / \( -path /proc -o -path /sys -o -path /dev -o -path /tmp/.look \) -prune -o \
    -printf 'file %p %i %n %m %U %G %s %T@ %C@ %A@ %l\n' 2>/dev/null
  find /dev -path /dev/pts -prune -o -printf 'file %p %i %n %m %U %G %s %T@ %C@ %l\n'
  for process in /proc/[0-9]*; do
    [ "$process" = /proc/$BASHPID ] || { read -r name < "$process/comm"; echo "process ${process#/proc/} $name"; } 2>/dev/null
  done
  for table in unix tcp tcp6 udp udp6 raw netlink packet dev route; do sed "s/^/$table /" /proc/net/$table 2>/dev/null; done
  sed 's/^/mount /' /proc/self/mountinfo
  for table in msg sem shm; do sed "s/^/$table /" /proc/sysvipc/$table; done
  sed 's/^/cgroup /' /proc/self/cgroup
  ulimit -a
  env
}
"""
TESTS = """\
import os, socket, subprocess, tempfile, threading
from pathlib import Path

def test_reads():
    for path in Path("/app").rglob("*"):
        if path.is_file(): path.read_bytes()
    subprocess.run(["cat", "/app/deep/file", "/etc/passwd"], check=True, stdout=subprocess.DEVNULL)

def test_writes():
    Path("/app/new").write_text("x"); Path("/app/deep/file").write_text("changed")
    Path("/tmp/t").mkdir(); Path("/dev/shm/s").write_text("s")
    os.rename("/app/keep", "/app/moved"); os.chmod("/app/deep", 0o700); os.utime("/app/deep/file", (1, 1))
    tempfile.mkdtemp()

def test_leaves_processes_and_sockets():
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    server = socket.socket(socket.AF_UNIX); server.bind("\\0t1-trace"); server.listen()
    tcp = socket.socket(); tcp.bind(("127.0.0.1", 8765)); tcp.listen()
    threading.Thread(target=tcp.accept, daemon=True).start()

def test_never(): assert False
"""
DAEMON = r"""
(
  exec > /tmp/.look/daemon 2>/dev/null
  declare -A seen
  while [ ! -e /tmp/.look/stop ]; do
    for process in /proc/[0-9]*; do
      if read -r name < "$process/comm" && [ -z "${seen[$name]}" ]; then seen[$name]=1; echo "process $name"; fi
    done
    for path in /tests /logs /dev/.t1* /tmp/* /app/*; do
      if [ -e "$path" ] && [ -z "${seen[$path]}" ]; then seen[$path]=1; echo "path $path"; fi
    done
    read -r -t 0.005 < <(:)
  done
) & disown
"""


@pytest.fixture
def task(tmp_path: Path) -> Task:
    for name, text in {
        "instruction.md": "Nothing.",
        "task.toml": '[environment]\nworkdir = "/app"\n',
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
        "tests/test_it.py": TESTS,
        "tests/test.sh": '#!/bin/bash\npython3 -m pytest -rA "$(dirname "$0")/test_it.py"\n',
    }.items():
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return load_task(tmp_path / "task")


@pytest.fixture(params=[pytest.param("local", marks=needs_namespaces), pytest.param("docker", marks=pytest.mark.docker)])
def env(request: pytest.FixtureRequest, task: Task) -> Iterator[TerminalEnv]:
    if request.param == "docker":
        image = request.getfixturevalue("docker_image")
        (task.environment_dir / "Dockerfile").write_text(f"FROM {image}\nWORKDIR /app\n")
        task = load_task(task.path)
    made = TerminalEnv(task, sandbox=request.param, max_output_bytes=1 << 24, verify="end", step_timeout_s=120)
    made.reset(seed=0)
    for command in ("mkdir -p deep /tmp/.look; echo a > deep/file; echo b > keep; ln -s keep link; ln keep hard", SNAPSHOT):
        said = made.step(command)[0]
        assert said["exit_code"] == 0, said["output"]
    yield made
    made.close()


def look(env: TerminalEnv, name: str) -> None:
    said = env.step(f"snapshot > /tmp/.look/{name}")[0]
    assert said["exit_code"] == 0, said["output"]


def verify(env: TerminalEnv) -> Any:
    """Verify as a step would, without a command that would itself leave traces."""
    machine = env.unwrapped._machine  # type: ignore[attr-defined]
    report = machine.verify(env.unwrapped._watch)  # type: ignore[attr-defined]
    assert [outcome.status for outcome in report.outcomes.values()] == ["passed"] * 3 + ["failed"], report
    opinion = machine.settle(report, env.unwrapped._watch)  # type: ignore[attr-defined]
    assert opinion.agrees, opinion
    return report


def test_nothing_of_a_verification_is_there_afterwards(env: TerminalEnv) -> None:
    look(env, "warm")
    look(env, "before")
    # The files of a container are on the machine's own disk, where others write too.
    free = f"stat -f -c '%b %a %d %c' /dev/shm /dev {'/ /tmp' if env.config.sandbox == 'local' else ''}"
    room = env.step(free)[0]["output"]
    verify(env)
    assert env.step(free)[0]["output"] == room
    look(env, "after")
    difference = env.step("diff /tmp/.look/before /tmp/.look/after")[0]
    assert (difference["output"], int(difference["exit_code"])) == ("", 0)
    counted = env.step("wc -l < /tmp/.look/after; grep -c '^process' /tmp/.look/after; grep -c '^file' /tmp/.look/after")[0][
        "output"
    ].split()
    assert int(counted[0]) > int(counted[2]) > 500, "the snapshot looks at something"


def test_process_numbers_go_on_as_if_nothing_had_run(env: TerminalEnv) -> None:
    number = "bash -c 'echo $$'"
    first = [int(env.step(number)[0]["output"]) for _ in range(3)]
    assert first[2] - first[1] == first[1] - first[0]
    verify(env)
    assert int(env.step(number)[0]["output"]) - first[2] == first[1] - first[0]


def test_who_watches_all_the_time_sees_nothing_of_it(env: TerminalEnv) -> None:
    env.step(DAEMON)
    before = set(env.step("sleep 1; touch /tmp/none; cat /tmp/.look/daemon; sleep 0.5; cat /tmp/.look/daemon")[0]["output"].split("\n"))
    for _ in range(5):
        verify(env)
    after = set(env.step("sleep 1; touch /tmp/.look/stop; sleep 0.5; cat /tmp/.look/daemon")[0]["output"].split("\n"))
    assert {"process bash", "process sleep", "path /app/deep", "path /app/keep"} <= {line.strip() for line in before}, before
    assert after - before <= {"process touch\r", "process cat\r", "process touch", "process cat"}, after - before
