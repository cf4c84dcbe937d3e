"""Owner labels tell a dead owner from a live one, and say so when they cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from t1_env.sandbox.owner import is_alive, owner_id

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="labels are precise on Linux only")
_PRINT_AND_WAIT = "import sys; from t1_env.sandbox.owner import owner_id; print(owner_id(), flush=True); sys.stdin.read()"


def _other_process(*prefix: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([*prefix, sys.executable, "-c", _PRINT_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_this_process_is_alive_and_has_one_label() -> None:
    assert owner_id() == owner_id()
    assert is_alive(owner_id()) is True


def test_another_process_is_alive_until_it_ends() -> None:
    process, label = _other_process()
    assert label != owner_id()
    assert is_alive(label) is True
    process.communicate()
    assert is_alive(label) is False


def test_a_killed_process_that_nobody_waited_for_is_dead() -> None:
    process, label = _other_process()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(label) is False
    process.communicate()


def test_a_forked_child_is_an_owner_of_its_own() -> None:
    parent = owner_id()
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_fd, f"{owner_id()} {is_alive(owner_id())} {is_alive(parent)}".encode())
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as stream:
        label, child_alive, parent_alive = stream.read().split()
    os.waitpid(pid, 0)
    assert label != parent
    assert (child_alive, parent_alive) == ("True", "True")
    assert is_alive(label) is False


def test_a_reused_pid_is_not_the_owner() -> None:
    machine, pid, start = owner_id().split(":")
    assert is_alive(f"{machine}:{pid}:{int(start) - 1}") is False


@pytest.mark.parametrize("label", ["", "x", "a:b:c", "1:2", "0-0.1:2:3", "0-0.4026531836:1:1"])
def test_other_machines_and_other_forms_cannot_be_told(label: str) -> None:
    assert is_alive(label) is None


def test_the_same_pid_in_another_pid_namespace_is_not_the_owner() -> None:
    machine, pid, start = owner_id().split(":")
    boot, namespace = machine.split(".")
    assert is_alive(f"{boot}.{int(namespace) + 1}:{pid}:{start}") is not True


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare(1) on this machine")
def test_a_process_of_a_container_is_seen_from_outside_but_not_the_other_way_round() -> None:
    prefix = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not make pid namespaces")
    code = f"from t1_env.sandbox.owner import is_alive; print(is_alive({owner_id()!r}))"
    seen = subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert seen.strip() == "None"
    process, label = _other_process(*prefix)
    assert is_alive(label) is True
    process.communicate()
    assert is_alive(label) is not True
