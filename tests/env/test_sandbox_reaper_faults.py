"""A process of the sandbox is killed in the middle of something: an error of the right kind, no hang, nothing left."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from t1_env.errors import SandboxDied, SandboxError, SandboxUnavailable
from t1_env.sandbox import hierarchies, launcher, owner
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.local import LocalSandbox, unavailable_reason

pytestmark = [pytest.mark.namespaces, pytest.mark.timeout(900)]

PATIENCE_S = 120.0
ROUNDS = 3
VICTIMS = ("t1-keeper", "t1-init", "t1-zygote", "t1-verifier")


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    if reason := unavailable_reason():
        pytest.skip(reason)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for index in range(200):
        (tmp_path / "tree" / str(index)).mkdir(parents=True)
        (tmp_path / "tree" / str(index) / "file").write_bytes(bytes(20_000))
    return tmp_path / "tree"


def sandbox_processes() -> dict[int, str]:
    """Pid -> name of every process of this process's sandboxes, with a new name by its user namespace or by its owner's label."""
    label = owner.owner_id()
    mine: set[int] = set()
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        head, _, tail = hierarchies.read_or_empty(f"{entry}/stat").rpartition(")")
        if not tail or tail.split()[0] in "ZX":
            continue
        pid = int(entry.name)
        parents[pid], names[pid] = int(tail.split()[1]), head.partition("(")[2]
        if label in hierarchies.read_or_empty(f"{entry}/cmdline"):
            mine.add(pid)
    found = {}
    for pid, name in names.items():
        current, steps = pid, 0
        while current in parents and current not in mine and steps < 50:
            current, steps = parents[current], steps + 1
        if current in mine:
            found[pid] = name
    return found


def kill(victim: str) -> bool:
    hit = False
    for pid, name in sandbox_processes().items():
        if name == victim:
            try:
                os.kill(pid, signal.SIGKILL)
                hit = True
            except ProcessLookupError:
                pass
    return hit


def inventory() -> dict[str, object]:
    gc.collect()
    places = hierarchies.everywhere(hierarchies.find_hierarchies().roots)
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "cgroups": [path for path, label in hierarchies.sandbox_directories(places) if label == owner.owner_id()],
        "processes": [name for name in sandbox_processes().values() if name != "t1-zygote"],
        "mounts": [line for line in hierarchies.read_file("/proc/self/mountinfo").splitlines() if " - tmpfs t1 " in line],
    }


@pytest.fixture
def nothing_left() -> Iterator[None]:
    with LocalSandbox():  # so that there is a launcher before and after
        pass
    before = inventory()
    yield
    deadline = time.monotonic() + PATIENCE_S
    while (after := inventory()) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    # The launcher's own socket is there or not, depending on whether it was the last to die.
    assert abs(int(str(after.pop("descriptors"))) - int(str(before.pop("descriptors")))) <= 1
    assert after == before
    with LocalSandbox() as box:  # and the next one is as good as any
        assert box.run(["echo", "fine"]).stdout == b"fine\n"


def operations(tree: Path) -> dict[str, Callable[[LocalSandbox], object]]:
    return {
        "clone": lambda box: box.run_in_clone("t1_env.sandbox.probe:execute", {"argv": ["sleep", "0.02"]}),
        "put": lambda box: box.put(tree, "/app/tree"),
        "get": lambda box: box.get("/etc/passwd"),
        "run": lambda box: box.run(["bash", "-c", "sleep 0.01 | cat"], timeout_s=PATIENCE_S),
        "fingerprint": lambda box: box.generation(),
        "start": lambda box: LocalSandbox(SandboxSpec(storage_mb=16)).__enter__().close(),
        "fork": lambda box: box.fork().close(),
        "kill all": lambda box: box.kill_all(),
    }


def repeat(action: Callable[[LocalSandbox], object], box: LocalSandbox, stop: threading.Event, errors: list[BaseException]) -> None:
    while not stop.is_set():
        try:
            action(box)
        except BaseException as error:  # noqa: BLE001  (what is raised is what this test looks at)
            errors.append(error)
            if not box.alive:
                return


@pytest.mark.parametrize("operation", ["clone", "put", "get", "run", "fingerprint", "start", "fork", "kill all"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_in_the_middle(nothing_left: None, tree: Path, operation: str, victim: str) -> None:
    rng = random.Random(f"{operation} {victim}")
    action = operations(tree)[operation]
    for _ in range(ROUNDS):
        errors: list[BaseException] = []
        stop = threading.Event()
        box = LocalSandbox(SandboxSpec(storage_mb=64, cpus=2.0))
        box.start()
        agent = box.spawn(["bash", "-c", "trap '' TERM; setsid sleep 1000 & while :; do echo x >> /app/x; sleep 0.005; done"])

        thread = threading.Thread(target=repeat, args=(action, box, stop, errors))
        thread.start()
        time.sleep(rng.uniform(0.0, 0.06))
        deadline = time.monotonic() + 0.5
        while not kill(victim) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        stop.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"{operation} hangs after {victim} was killed"
        for error in errors:
            assert isinstance(error, SandboxError), repr(error)
            assert not isinstance(error, SandboxUnavailable), error  # the machine can; something was killed
        if victim in ("t1-keeper", "t1-init"):
            deadline = time.monotonic() + PATIENCE_S
            while box.alive and time.monotonic() < deadline:
                time.sleep(0.01)
            with pytest.raises(SandboxDied):
                box.run(["true"])
            assert agent.wait(PATIENCE_S) is not None
        box.close()
        del agent


def test_everything_at_once(nothing_left: None) -> None:
    boxes = [LocalSandbox(SandboxSpec(storage_mb=16)) for _ in range(4)]
    for box in boxes:
        box.start()
    for victim in VICTIMS:
        kill(victim)
    for box in boxes:
        with pytest.raises(SandboxDied):
            box.run(["true"])
        box.close()


def test_a_launcher_that_is_killed_again_and_again(nothing_left: None) -> None:
    for _ in range(5):
        kill("t1-zygote")
        with LocalSandbox(SandboxSpec(storage_mb=16)) as box:
            assert box.run(["true"]).exit_code == 0
    launcher.LAUNCHER.stop()
    with LocalSandbox(SandboxSpec(storage_mb=16)) as box:
        assert box.run(["true"]).exit_code == 0
