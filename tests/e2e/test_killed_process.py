"""A process that runs sandboxes of every kind is killed outright; a new one cleans up, and nothing is left of the first."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from t1_env.sandbox import hierarchies
from t1_env.sandbox.local import unavailable_reason

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason())),
    pytest.mark.timeout(900),
]

VICTIM = """
import json, sys, threading
from functools import partial
import gymnasium as gym
import t1_env
from t1_env.sandbox.owner import owner_id

order = json.loads(sys.argv[1])

def backend(name):
    if name == "docker":
        from t1_env.sandbox.docker import DockerConfig, DockerSandbox
        return partial(DockerSandbox, config=DockerConfig(base_image=order["image"], build_network="none", pull="never"))
    if name == "ssh":
        from t1_env.sandbox.ssh import SshConfig, SshSandbox
        return partial(SshSandbox, config=SshConfig(**order["ssh"]))
    return name

def play(name):
    env = gym.make("T1Terminal-v0", task="seeds/hello-file", sandbox=backend(name), end_on_solved=False, max_turns=30, step_timeout_s=60)
    while True:
        env.reset(seed=0)
        print(name, "is up", flush=True)
        done = False
        while not done:
            for command in ("sleep 1000 &", "echo hi > hello.txt", "rm -f hello.txt", "sleep 0.2"):
                _, _, terminated, truncated, info = env.step(command)
                assert info["infra_error"] is None, info["infra_error"]
                if terminated or truncated:
                    done = True
                    break

print(owner_id(), flush=True)
for name in order["backends"]:
    threading.Thread(target=play, args=[name], daemon=True).start()
threading.Event().wait()
"""


@pytest.mark.docker
@pytest.mark.ssh
@pytest.mark.parametrize("round_", range(2))
def test_nothing_is_left_of_a_killed_process(round_: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    rng = random.Random(round_)
    order: dict[str, Any] = {"backends": ["local", "local", "local"]}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("T1_SSH_")}
    server = _fixture(request, "sshd") if _has("paramiko") else None
    if server is not None:
        fields = {"host": server.host, "port": server.port, "key_file": str(server.key_file), "host_fingerprint": server.host_fingerprint}
        fields |= {"ssh_config_file": "none", "agent": False, "remote_dir": str(tmp_path / "remote"), "isolation": "namespaces"}
        order |= {"backends": [*order["backends"], "ssh", "ssh"], "ssh": fields}
        environ |= {f"T1_SSH_{name.upper()}": str(value) for name, value in fields.items()}
    image = _fixture(request, "docker_image") if _has("docker") else None
    if image is not None:
        order |= {"backends": [*order["backends"], "docker", "docker"], "image": image}

    process = subprocess.Popen([sys.executable, "-c", VICTIM, json.dumps(order)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        label = process.stdout.readline().strip()
        up = [process.stdout.readline().split()[0] for _ in order["backends"]]
        assert set(up) <= set(order["backends"])
        time.sleep(rng.uniform(0, 3))
        below = _below(process.pid)
        assert process.poll() is None, "it ended by itself"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()

    # Local sandboxes end by themselves with their process. The rest is the reaper's; a start of a sandbox does the same.
    reap = subprocess.run(
        [sys.executable, "-m", "t1_env", "reap", *(["--ssh"] if server is not None else [])],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert reap.returncode == 0, reap.stdout + reap.stderr
    _eventually(lambda: [process for process in below if _start_time(process[0]) == process[1]], "processes")
    _eventually(lambda: _cgroups(label), "cgroups")
    if server is not None:
        _eventually(lambda: list((tmp_path / "remote" / "episodes").iterdir()), "remote directories")
    if image is not None:
        _eventually(lambda: _on_docker(label), "containers and images")


def _fixture(request: pytest.FixtureRequest, name: str) -> Any:
    """A fixture's value; None where the machine cannot offer it, so that the rest is tested all the same."""
    try:
        return request.getfixturevalue(name)
    except pytest.skip.Exception:
        return None


def _has(module: str) -> bool:
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def _eventually(left: Callable[[], list[Any]], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while found := left():
        assert time.monotonic() < deadline, f"{what} are left: {found}"
        time.sleep(0.1)


def _below(root: int) -> list[tuple[int, str]]:
    """(pid, start time) of every process below one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                children.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []).append(int(entry.name))
            except OSError:
                continue
    found, queue = [], [root]
    while queue:
        queue += (below := children.get(queue.pop(), []))
        found += [(pid, started) for pid in below if (started := _start_time(pid)) is not None]
    return found


def _start_time(pid: int) -> str | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _cgroups(label: str) -> list[str]:
    places = hierarchies.everywhere(hierarchies.find_hierarchies().roots)
    return [directory for directory, owner in hierarchies.sandbox_directories(places) if owner == label]


def _on_docker(label: str) -> list[str]:
    import docker

    client = docker.from_env()
    try:
        mine = {"label": f"t1.owner={label}"}
        images = [image["Id"] for image in client.api.images(all=True, filters=mine) if image["Labels"].get("t1.kind") != "task-image"]
        return [container["Id"] for container in client.api.containers(all=True, filters=mine)] + images
    finally:
        client.close()
