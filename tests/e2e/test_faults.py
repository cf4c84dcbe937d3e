"""Episodes in which something is killed at a random moment: each ends with a typed reason, none hangs, and nothing is left afterwards.

``T1_FAULT_EPISODES`` sets how many are played over all backends (a seeded 150 by default; `tox run -e faults` plays 1,000) and
``T1_FAULT_SEED`` another seed. What happened is printed as a table (``pytest -s``), and written as JSON to the path in ``T1_FAULT_REPORT``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from t1_env import Command, EndReason, Keys, Submit
from t1_env.errors import T1Error
from t1_env.sandbox import hierarchies, owner
from t1_env.sandbox.launcher import LAUNCHER
from t1_env.sandbox.local import unavailable_reason
from t1_env.timing import Stopwatch

EPISODES = int(os.environ.get("T1_FAULT_EPISODES", "150"))
SEED = int(os.environ.get("T1_FAULT_SEED", "20260901"))
SHARES = {"local": 0.8, "docker": 0.08, "ssh": 0.12}  # an episode takes about 0.1 s, 8 s and 2 s there
WATCHDOG_S = 240.0  # an episode takes well under a second; this many is a hang even on a machine that does ten other things
SETTLE_S = 60.0
MAX_TURNS = 7
OF_OTHERS = ("/var/lib/docker", "/run/docker", "/run/containerd", "/run/netns")  # the machine's own engine works for everybody
PHASES = ("sandbox", "verify", "shell", "fingerprint", "command", "verbatim")

pytestmark = pytest.mark.timeout(3600)


# --- what is played ----------------------------------------------------------------------------------------------------------------------


def make_task(root: Path, image: str | None = None) -> Path:
    """A task whose verifiers take long enough to be hit; its environment needs no network."""
    (root / "tests").mkdir(parents=True)
    (root / "environment").mkdir()
    named = "" if image is None else f'docker_image = "{image}"\n'
    (root / "task.toml").write_text(
        'schema_version = "1.4"\n[task]\nname = "t1/faults"\n'
        f'[environment]\nnetwork_mode = "no-network"\nmemory_mb = 512\nworkdir = "/app"\n{named}'
    )
    (root / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\nWORKDIR /app\n")
    (root / "instruction.md").write_text("Write a file.\n")
    (root / "tests" / "test_outputs.py").write_text(
        "import time\nfrom pathlib import Path\n\n\n"
        "def test_a() -> None:\n    time.sleep(0.02)\n    assert Path('/app/a').is_file()\n\n\n"
        "def test_b() -> None:\n    assert Path('/app/b').is_file()\n"
    )
    (root / "tests" / "test.sh").write_text("mkdir -p /logs/verifier; test -f /app/a; echo $((! $?)) > /logs/verifier/reward.txt\n")
    return root


def actions(rng: random.Random) -> Iterator[Any]:
    """What an agent does in one episode; some of it is a mess of its own making."""
    some: list[Any] = [
        "echo hi > a",
        "echo hi > b",
        "cd /tmp && ls -l / | head -5",
        "seq 1 20000",
        Command("sleep 5", timeout_s=0.05),
        Command("trap '' INT TERM; sleep 5", timeout_s=0.05),
        "sleep 0.05",
        "sleep 100 &",
        "kill -9 $$",
        "exit 3",
        "cat > c",
        Keys("C-c", wait_s=0.1),
        Keys("C-d", wait_s=0.1),
        "head -c 3000000 /dev/zero > d",
    ]
    for _ in range(rng.randint(1, MAX_TURNS - 1)):
        yield rng.choice(some)
    if rng.random() < 0.7:
        yield Submit()
    while True:
        yield "true"


# --- what is killed ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """When to strike: this long after the n-th beginning of a phase of the episode; and at what."""

    phase: str
    occurrence: int
    delay_s: float
    victim: str


class PhaseWatch(Stopwatch):
    """A stopwatch that tells when a phase begins, so that a kill can be aimed at a reset, a command, a verification ..."""

    def __init__(self) -> None:
        super().__init__(True)
        self.on_phase: Callable[[str], None] = lambda phase: None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.on_phase(name)
        with super().phase(name):
            yield


@dataclass(frozen=True)
class Process:
    """A process below this one, with the names of those above it, the nearest first."""

    pid: int
    parent: int
    name: str
    state: str
    above: tuple[str, ...]


class Backend:
    """Where the episodes run, what can be killed there, and what would be left behind."""

    name = ""
    victims: Sequence[str] = ()
    workers = 1

    def __init__(self, task: Path, factory: Any) -> None:
        self.task = task
        self._factory = factory
        self._striking = threading.Lock()

    def env(self) -> gym.Env[Any, Any]:
        """An environment on this backend."""
        return gym.make(
            "T1Terminal-v0", task=str(self.task), sandbox=self._factory, max_turns=MAX_TURNS, step_timeout_s=20, disable_env_checker=True
        )

    def wait_for_service(self) -> None:
        """Wait until the daemon or server that was killed is there again."""
        with self._striking:
            pass

    def strike(self, victim: str, rng: random.Random) -> bool:
        """Kill one; False if there is none right now."""
        found = [process for process in descendants() if self.is_victim(process, victim)]
        if not found:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(found).pid, signal.SIGKILL)
            return True
        return False

    def is_victim(self, process: Process, victim: str) -> bool:
        """Whether a process below this one counts as such a victim."""
        raise NotImplementedError

    def leftovers(self) -> Counter[str]:
        """What exists outside this process's own descendants, by kind."""
        return Counter()

    def services(self) -> list[int]:
        """Process ids of what the test itself started and waits for."""
        return []

    def is_ours(self, process: Process) -> bool:
        """Whether a process below this one is T1's to clean up."""
        return True


def sandbox_cgroups() -> Counter[str]:
    """Cgroups of this process's sandboxes, of those below it, and of processes that are gone."""
    pids = {str(process.pid) for process in descendants()}
    found: Counter[str] = Counter()
    for directory, label in hierarchies.sandbox_directories(hierarchies.everywhere(hierarchies.find_hierarchies().roots)):
        if label == owner.owner_id() or label.split(":")[1] in pids or owner.is_alive(label) is False:
            found["cgroup of a clone" if directory.endswith("-clone") else "cgroup"] += 1
    return found


class Local(Backend):
    """Namespaces of this machine."""

    name = "local"
    victims = ("shell", "t1-init", "t1-keeper", "t1-verifier", "t1-zygote", "anything")
    workers = 3

    def is_victim(self, process: Process, victim: str) -> bool:
        ours = process.name.startswith("t1-")
        return {"shell": process.name == "bash", "anything": process.name != "t1-zygote"}.get(victim, ours and process.name == victim)

    def leftovers(self) -> Counter[str]:
        return sandbox_cgroups()


class Docker(Backend):
    """Containers of a daemon of the tests' own."""

    name = "docker"
    victims = ("shell", "shell", "outpost", "outpost", "container", "container", "dockerd", "anything")  # a restart takes ten seconds
    workers = 3

    def __init__(self, task: Path, factory: Any, daemon: Any) -> None:
        super().__init__(task, factory)
        self._daemon = daemon

    def strike(self, victim: str, rng: random.Random) -> bool:
        if victim not in ("container", "dockerd"):
            return super().strike(victim, rng)
        with self._striking:
            if victim == "dockerd":
                self._daemon.kill()
                time.sleep(rng.uniform(0, 1))
                self._daemon.start()
                return True
            with contextlib.closing(self._daemon.client()) as client:
                names = [container["Id"] for container in client.api.containers()]
                if not names:
                    return False
                with contextlib.suppress(Exception):  # it may be gone by itself in this moment
                    client.api.remove_container(rng.choice(names), force=True)
            return True

    def is_victim(self, process: Process, victim: str) -> bool:
        if not any(name.startswith("containerd-shim") for name in process.above):
            return False
        return {"shell": process.name == "bash", "outpost": process.above[0].startswith("containerd-shim")}.get(
            victim, victim == "anything"
        )

    def leftovers(self) -> Counter[str]:
        found = Counter({"process in a cgroup": sum(len((path / "cgroup.procs").read_text().split()) for path in self._daemon.cgroups())})
        with contextlib.closing(self._daemon.client()) as client:
            for container in client.api.containers(all=True):
                found[f"container {container['Labels'].get('t1.kind')}, {container['State']}"] += 1
            for image in client.api.images(all=True):
                found[f"image {(image['Labels'] or {}).get('t1.kind')}"] += 1
            for volume in client.api.volumes()["Volumes"] or []:
                found[f"volume {(volume['Labels'] or {}).get('t1.kind')}"] += 1
        return found

    def services(self) -> list[int]:
        return [process.pid for process in (self._daemon.process, self._daemon.containerd) if process is not None]

    def is_ours(self, process: Process) -> bool:
        # A daemon that is killed while it makes a container forgets it, with its shim and an empty cgroup; no client can see those.
        return not process.name.startswith(("containerd", "runc"))


class Ssh(Backend):
    """Namespaces of a machine that is reached by SSH: this one."""

    name = "ssh"
    victims = ("shell", "connection", "sshd", "relay", "server", "t1-zygote", "t1-keeper", "t1-init", "anything")
    workers = 3

    def __init__(self, task: Path, factory: Any, server: Any, remote_dir: Path) -> None:
        super().__init__(task, factory)
        self._server = server
        self._remote_dir = remote_dir

    def strike(self, victim: str, rng: random.Random) -> bool:
        if victim != "sshd":
            return super().strike(victim, rng)
        with self._striking:
            self._server.kill()
            time.sleep(rng.uniform(0, 2))
            self._server.start()
            return True

    def is_victim(self, process: Process, victim: str) -> bool:
        python = process.name.startswith("python")
        if not (python or process.name == "sshd" or any(name.startswith("python") for name in process.above)):
            return False  # the login's own start-up files may run things that are none of ours
        by_name = {
            "shell": process.name == "bash" and "t1-init" in process.above,
            "connection": process.name == "sshd" and process.above[0] == "sshd",
            "relay": python and process.above[0] == "sshd",
            "server": python and process.above[0] != "sshd",
            "anything": python or "t1-zygote" in process.above,
        }
        return by_name.get(victim, process.name == victim)

    def leftovers(self) -> Counter[str]:
        return sandbox_cgroups() + Counter(f"remote {path.parent.name}" for path in self._remote_dir.glob("*/*"))

    def services(self) -> list[int]:
        return [] if self._server.process is None else [self._server.process.pid]


def descendants() -> list[Process]:
    """Every process below this one, however deep; orphans are adopted (see ``_adopting``)."""
    everything: dict[int, list[tuple[int, str, str]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                head, _, tail = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue
            state, parent = tail.split()[:2]
            everything.setdefault(int(parent), []).append((int(entry.name), head.partition("(")[2], state))
    found: list[Process] = []
    queue: list[tuple[int, tuple[str, ...]]] = [(os.getpid(), ("",))]
    while queue:
        parent, above = queue.pop()
        for pid, name, state in everything.get(parent, []):
            found.append(Process(pid, parent, name, state, above))
            queue.append((pid, (name, *above)))
    return found


@pytest.fixture(scope="module", autouse=True)
def _adopting() -> Iterator[None]:
    """Processes whose parent is killed become children of this one instead of the machine's first: nothing escapes the count."""
    libc = ctypes.CDLL(None, use_errno=True)
    set_child_subreaper = 36
    assert libc.prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    yield
    assert libc.prctl(set_child_subreaper, 0, 0, 0, 0) == 0


def reap_adopted(own: Collection[int]) -> None:
    """Wait for orphans that ended, as the machine's first process would; ``own`` are children that somebody else waits for."""
    launcher = LAUNCHER._zygote
    spared = {*own, launcher.process.pid if launcher is not None else 0}
    for process in descendants():
        if process.state == "Z" and process.parent == os.getpid() and process.pid not in spared:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


# --- what is there before and after ------------------------------------------------------------------------------------------------------


def inventory(backend: Backend) -> dict[str, Counter[str]]:
    """Everything that episodes could leave behind, by kind, so that two of these can be compared."""
    gc.collect()
    reap_adopted(backend.services())
    descriptors: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the directory
            descriptors[re.sub(r"[0-9]+", "N", str(entry.readlink()))] += 1
    return {
        "processes": Counter(
            f"{process.name}{' (zombie)' * (process.state == 'Z')}" for process in descendants() if backend.is_ours(process)
        ),
        "threads": Counter(re.sub(r"[0-9]+", "N", thread.name) for thread in threading.enumerate()),
        "descriptors": descriptors,
        "mounts": Counter(re.sub(r"[0-9a-f]{8,}", "N", target) for target in mount_points() if not target.startswith(OF_OTHERS)),
        "elsewhere": +backend.leftovers(),
    }


def mount_points() -> list[str]:
    """Where something is mounted, as this process sees it."""
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


def settled(backend: Backend, before: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    """Wait until no more is there than was before; return what is too many, by kind."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = inventory(backend)
        left = {kind: now[kind] - before[kind] for kind in before if now[kind] - before[kind]}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


# --- the campaign ------------------------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How an episode ended."""

    reason: str
    struck: bool
    victim: str
    phase: str
    message: str = ""
    trouble: str = ""


@dataclass
class Campaign:
    """Plays episodes with one kill in each."""

    backend: Backend
    outcomes: list[Outcome] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _broken: list[Exception] = field(default_factory=list)

    def play(self, numbers: Sequence[int]) -> None:
        """Play these episodes, in several threads; returns when all have ended, or fails because one hangs."""
        queue = list(reversed(numbers))
        beats = {index: time.monotonic() for index in range(self.backend.workers)}

        def work(index: int) -> None:
            env = self.backend.env()
            watch = PhaseWatch()
            env.unwrapped._watch = watch  # type: ignore[attr-defined]
            try:
                while True:
                    with self._lock:
                        if not queue:
                            break
                        number = queue.pop()
                        beats[index] = time.monotonic()
                    outcome = self.episode(env, watch, number)
                    with self._lock:
                        self.outcomes.append(outcome)
            except Exception as error:  # noqa: BLE001  (of the test itself; raised again in its own thread)
                self._broken.append(error)
            finally:
                env.close()
                beats.pop(index)

        threads = [threading.Thread(target=work, args=[index], name=f"faults-{index}", daemon=True) for index in list(beats)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.05)
            oldest = min(list(beats.values()), default=time.monotonic())
            if time.monotonic() - oldest > WATCHDOG_S:
                faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
                pytest.fail(f"{self.backend.name}: an episode has been going on for {WATCHDOG_S:.0f} s; the stacks are above")
        if self._broken:
            raise self._broken[0]

    def episode(self, env: gym.Env[Any, Any], watch: PhaseWatch, number: int) -> Outcome:
        """Play one; whatever comes of it is an outcome."""
        rng = random.Random(f"{SEED}:{self.backend.name}:{number}")
        phase = rng.choice(PHASES)
        often = 1 if phase in ("sandbox", "shell", "verbatim") else rng.randint(1, 3)
        victim = self.backend.victims[number % len(self.backend.victims)]  # each in its turn, also in a short run
        plan = Plan(phase, often, rng.choice([0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.1)]), victim)
        saboteur = Saboteur(self.backend, plan, rng)
        watch.on_phase = saboteur.notice
        message = trouble = ""
        try:
            reason, message = self._drive(env, rng, number)
        except T1Error as error:
            reason, message = f"reset: {type(error).__name__}", str(error)
            self.backend.wait_for_service()  # each outage costs each thread one episode, not as many as fit into it
        except BaseException as error:  # noqa: BLE001  (any other exception is what this test looks for)
            reason, trouble = f"UNTYPED {type(error).__name__}", f"{plan}: {error!r}"
            faulthandler.dump_traceback(sys.__stderr__)
        finally:
            watch.on_phase = lambda phase: None
            saboteur.stop()
        return Outcome(reason, saboteur.struck, plan.victim, plan.phase, message, trouble)

    def _drive(self, env: gym.Env[Any, Any], rng: random.Random, number: int) -> tuple[str, str]:
        env.reset(seed=number)
        for action in actions(rng):
            _, reward, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                reason = EndReason(info["end_reason"])
                if reason is EndReason.INFRA_FAILURE:
                    assert reward == 0.0, "an episode that the machinery ended pays nothing"
                    kind, _, message = info["infra_error"].partition(": ")
                    return f"{reason.value}: {kind}", message
                return reason.value, ""
        raise AssertionError("unreachable: the environment's own budget ends an episode")


class Saboteur:
    """Carries out one plan from a thread of its own."""

    def __init__(self, backend: Backend, plan: Plan, rng: random.Random) -> None:
        self.struck = False
        self._backend, self._plan, self._rng = backend, plan, random.Random(rng.random())
        self._seen = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def notice(self, phase: str) -> None:
        """Called by the episode when a phase begins."""
        if phase == self._plan.phase:
            self._seen += 1
            if self._seen == self._plan.occurrence and self._thread is None:
                self._thread = threading.Thread(target=self._act, name="saboteur", daemon=True)
                self._thread.start()

    def _act(self) -> None:
        self._over.wait(self._plan.delay_s)
        deadline = time.monotonic() + 0.5
        try:
            while not self.struck and time.monotonic() < deadline and not self._over.is_set():
                self.struck = self._backend.strike(self._plan.victim, self._rng)  # a verifier, say, lives for some milliseconds only
        except Exception as error:  # noqa: BLE001  (raised again where the test sees it)
            self._failure = error

    def stop(self) -> None:
        """The episode is over."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure


def report(backend: str, outcomes: Sequence[Outcome], seconds: float) -> None:
    """Print how the episodes ended, and add it to the report file."""
    by_reason = Counter(outcome.reason for outcome in outcomes)
    hits = Counter(outcome.victim for outcome in outcomes if outcome.struck)
    print(f"\n{backend}: {len(outcomes)} episodes, {sum(hits.values())} kills {dict(hits)}, {seconds:.1f} s")
    for reason, count in sorted(by_reason.items()):
        print(f"  {count:5d}  {reason}")
        for message, times in Counter(outcome.message for outcome in outcomes if outcome.reason == reason and outcome.message).most_common(
            5
        ):
            print(f"           {times:5d} x {message[:300]}")
    if path := os.environ.get("T1_FAULT_REPORT"):
        file = Path(path)
        known = json.loads(file.read_text()) if file.exists() else {}
        known[backend] = {"episodes": len(outcomes), "kills": dict(hits), "reasons": dict(by_reason), "seconds": round(seconds, 1)}
        file.write_text(json.dumps(known, indent=2) + "\n")


def warm_up(backend: Backend) -> None:
    """An episode in each thread, so that what is made once and kept (launchers, caches, idle connections) is there before the count."""

    def play() -> None:
        env = backend.env()
        env.reset(seed=0)
        env.step(Submit())
        env.close()

    with ThreadPoolExecutor(backend.workers) as pool:
        for done in [pool.submit(play) for _ in range(backend.workers)]:
            done.result()


def run_campaign(backend: Backend) -> None:
    """Play this backend's share and check what the module's docstring says."""
    warm_up(backend)
    before = inventory(backend)
    campaign = Campaign(backend)
    started = time.monotonic()
    campaign.play(range(max(1, round(EPISODES * SHARES[backend.name]))))
    report(backend.name, campaign.outcomes, time.monotonic() - started)
    assert [outcome.trouble for outcome in campaign.outcomes if outcome.trouble] == []
    struck = sum(outcome.struck for outcome in campaign.outcomes)
    assert struck > len(campaign.outcomes) / 3, "the kills mostly missed: this run says nothing"
    # The next episode is as good as any, and removes what could not be removed while a daemon or a server was away.
    fresh = backend.env()
    fresh.reset(seed=1)
    said = [fresh.step(command) for command in ("touch a", "touch b")]
    assert said[-1][4]["end_reason"] == "solved", json.dumps([step[4] for step in said], default=repr)
    fresh.close()
    left = settled(backend, before)
    assert not left, f"more than at the start: {left}"


@pytest.mark.namespaces
@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_local_episodes_survive_random_kills(tmp_path: Path) -> None:
    run_campaign(Local(make_task(tmp_path / "task"), "local"))


@pytest.mark.docker
def test_docker_episodes_survive_random_kills(tmp_path: Path, docker_daemon: Any) -> None:
    from t1_env.sandbox.docker import DockerSandbox
    from t1_env.sandbox.docker.config import DockerConfig

    config = DockerConfig(base_url=docker_daemon.base_url, pull="never")
    run_campaign(Docker(make_task(tmp_path / "task", docker_daemon.image), partial(DockerSandbox, config=config), docker_daemon))


@pytest.mark.ssh
@pytest.mark.namespaces
@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_ssh_episodes_survive_random_kills(tmp_path: Path, own_sshd: Any) -> None:
    pytest.importorskip("paramiko", reason="paramiko is not installed: python -m pip install 't1-terminal[ssh]'")
    from t1_env.sandbox.ssh import SshConfig, SshSandbox

    config = SshConfig(
        host=own_sshd.address.host,
        port=own_sshd.address.port,
        key_file=str(own_sshd.address.key_file),
        host_fingerprint=own_sshd.address.host_fingerprint,
        ssh_config_file="none",
        agent=False,
        remote_dir=str(tmp_path / "remote"),
        isolation="namespaces",
    )
    run_campaign(Ssh(make_task(tmp_path / "task"), partial(SshSandbox, config=config), own_sshd, tmp_path / "remote"))
