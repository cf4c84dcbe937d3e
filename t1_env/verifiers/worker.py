"""The trusted test runner that executes inside a verification clone.

It is loaded into a warm interpreter outside the sandbox (call `warm` once there), and every verification forks from it. Two processes
take part in a run: a supervisor, which never touches a test, and a runner forked from it, which collects and runs the tests with
pytest's own machinery and reports each verdict over an inherited pipe, signed with a nonce of this run. A test that hangs, crashes or
leaves through ``os._exit`` costs its own verdict only: the supervisor forks a new runner for the tests that are left.

Only the standard library and pytest are imported here, so that the warm interpreter stays small.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeAlias

from _pytest.main import Session

from t1_env.verifiers.pytest_session import MESSAGE_LIMIT, collect_tests, new_session, run_tests

PIPE_LIMIT_BYTES: Final = 1 << 22
"""More than this from one runner is not a report but a flood."""

BASE_ENV: Final[Mapping[str, str]] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
"""What tests see where the sandbox sets no variables of its own. Nothing that the agent exports reaches them."""

# What tests commonly import: paid once in the warm interpreter instead of in every run.
_PRELOADED: Final = (
    *("collections", "configparser", "csv", "datetime", "difflib", "filecmp", "glob", "grp", "gzip", "hashlib", "itertools", "math", "pwd"),
    *("re", "shlex", "shutil", "socket", "sqlite3", "stat", "string", "subprocess", "tarfile", "textwrap", "tomllib", "unittest.mock"),
    *("xml.etree.ElementTree", "zipfile"),
)

_WARM_UP_TESTS: Final = """
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_parametrised(number): assert number == 1

def test_tmp_path(tmp_path): (tmp_path / "file").write_text("text")

@pytest.mark.skip
def test_skipped(): pass

@pytest.mark.xfail
def test_xfailed(): raise ValueError

class TestClass:
    def test_method(self): pass
"""

_Wanted: TypeAlias = Sequence[str] | Literal["all"] | None
"""What a runner is to run: these ids, all that it finds, or nothing (it only collects)."""

_RESULT_FD: Final = 3
_ENDED: Final = "the runner ended"
_warm_session: Session | None = None


# ------------------------------------------------------------------------------------------------------------------ entry points
def warm() -> None:
    """Prepare everything that does not depend on a task, in the interpreter that is to be forked. Takes about 0.1 s; idempotent.

    Imports what tests commonly import, runs one throw-away session so that pytest's lazy imports and caches are filled, and keeps a
    configured session: each forked runner uses its own copy of it, once.
    """
    global _warm_session
    if _warm_session is not None:
        return
    for name in _PRELOADED:
        __import__(name)
    writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "test_t1_warm_up.py").write_text(_WARM_UP_TESTS, encoding="utf-8")
        session = new_session()
        recorder, items = collect_tests(session, directory, _discard)
        run_tests(session, recorder, [(name, item) for name, (item,) in items.items()], _discard)
    sys.dont_write_bytecode = writes_bytecode
    for name in [name for name in sys.modules if name.endswith("test_t1_warm_up")]:
        del sys.modules[name]
    _warm_session = new_session()
    gc.collect()
    gc.freeze()  # the collector must not touch, and so copy, the pages that all forks share


def collect(payload: Mapping[str, Any]) -> dict[str, Any]:
    """List the verifiers of a task.

    Args:
        payload: ``tests_dir``, ``workdir``, ``timeout_s`` and optionally ``env``, ``inherit_env`` and ``memory_mb``; see `run`.

    Returns:
        ``{"ids": [...], "errors": [...]}``: node ids relative to ``tests_dir`` in pytest's order, duplicates included, and what could
        not be collected.
    """
    supervisor = _Supervisor(payload, ids=None)
    supervisor.supervise()
    return {"ids": supervisor.found, "errors": supervisor.errors}


def collect_solved(payload: Mapping[str, Any]) -> dict[str, Any]:
    """`collect`, once the task's oracle has done its work in this clone: for tests that import what the agent is to write.

    Args:
        payload: As for `collect`, ``solution`` (path of the oracle's script) and ``solution_env`` (variables it needs).

    Returns:
        As `collect`.
    """
    env = {**test_environment(payload), **payload["solution_env"]}
    cwd = payload["workdir"] if Path(payload["workdir"]).is_dir() else "/"
    try:
        script = subprocess.Popen(
            ["/bin/bash", payload["solution"]],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        return {"ids": [], "errors": [f": the oracle cannot be run: {error}"]}
    try:
        script.wait(float(payload["timeout_s"]))
    except subprocess.TimeoutExpired:
        return {"ids": [], "errors": [f": the oracle did not end within {payload['timeout_s']} s"]}
    finally:
        _kill_group(script.pid)
        script.wait()
    return collect(payload)


def run(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Run a frozen list of verifiers.

    Args:
        payload: ``tests_dir`` (absolute path of the test files), ``workdir`` (the tests' working directory), ``ids`` (node ids relative
            to ``tests_dir``), ``timeout_s`` (for the whole run), ``test_timeout_s`` (for one test), and optionally ``env`` and
            ``inherit_env`` (see `test_environment`), ``memory_mb`` (limit on each process's private memory) and ``known`` (the whole
            frozen list, if ``ids`` are not all of it).

    Returns:
        ``{"outcomes": {id: [status, seconds, message]}, "unknown": [...], "errors": [...], "runners": n}``. Every given id is in
        ``outcomes``; ``unknown`` are ids that were collected but not asked for; ``runners`` says how many processes it took.
    """
    supervisor = _Supervisor(payload, ids=list(payload["ids"]))
    supervisor.supervise()
    return _run_report(supervisor)


def collect_and_run(payload: Mapping[str, Any]) -> dict[str, Any]:
    """List the verifiers of a task and run them, in one go: what `collect` and then `run` with its ids would say.

    Args:
        payload: As for `run`, without ``ids``. ``timeout_s`` holds for collecting and for running, each.

    Returns:
        What `collect` and `run` return, as one. ``outcomes`` is None where nothing was run: the list cannot be frozen (an error, no test,
        an id that two tests have), or collecting took longer than `run` gives it.
    """
    supervisor = _Supervisor(payload, ids=None, freeze=True)
    supervisor.supervise()
    if supervisor.ids is None:
        return {"ids": supervisor.found, "errors": supervisor.errors, "outcomes": None}
    return {"ids": supervisor.ids, **_run_report(supervisor)}


def _run_report(supervisor: _Supervisor) -> dict[str, Any]:
    return {
        "outcomes": supervisor.outcomes(),
        "unknown": supervisor.unknown(),
        "errors": supervisor.errors,
        "runners": supervisor.runners,
    }


# -------------------------------------------------------------------------------------------------------------------- supervisor
class _Supervisor:
    """Forks runners, reads their records, keeps time. Executes no test code and holds no file of the agent open.

    With ``ids=None`` it collects; with ``freeze`` as well it runs what was collected, if that can be frozen, and sets ``ids``.
    """

    def __init__(self, payload: Mapping[str, Any], ids: list[str] | None, *, freeze: bool = False) -> None:
        self.payload = payload
        self.tests_dir = os.fspath(payload["tests_dir"])
        if not Path(self.tests_dir).is_dir():
            raise RuntimeError(f"the test directory {self.tests_dir!r} is not there: it must be mounted before the verifiers run")
        self.ids = ids
        self.freeze = freeze
        self.timeout_s = float(payload["timeout_s"])
        self.started_at = time.monotonic()
        self.deadline = self.started_at + self.timeout_s
        self.test_timeout_s = float(payload.get("test_timeout_s", payload["timeout_s"]))
        self.found: list[str] = []
        self.errors: list[str] = []
        self.runners = 0
        self.verdicts: dict[str, tuple[str, float, str]] = {}
        self._collected = False
        self._current: str | None = None

    def supervise(self) -> None:
        """Fork runners until every id has its verdict, none makes progress or time is up."""
        remaining = self._remaining()
        while True:
            why = self._one_runner(remaining)
            remaining = remaining or list(self.ids or ())  # frozen by the runner that has just ended
            if self._current is not None:
                self._verdict(self._current, "error", 0.0, why)
            left = self._remaining()
            if self.ids is None:
                if not self._collected:
                    self.errors.append(f": {why}")
                break
            if why == _ENDED or len(left) == len(remaining) or time.monotonic() >= self.deadline:
                self._give_up(left, why)
                break
            remaining = left

    def outcomes(self) -> dict[str, list[Any]]:
        """Frozen id -> [status, seconds, message]."""
        duplicates = {name for name, count in Counter(self.found).items() if count > 1}
        verdicts: dict[str, list[Any]] = {}
        for name in self.ids or ():
            status, seconds, message = self.verdicts.get(name, ("missing", 0.0, "not collected"))
            if name in duplicates:
                status, message = "error", "two tests have this id"
            verdicts[name] = [status, seconds, message]
        return verdicts

    def unknown(self) -> list[str]:
        """Ids that the tests directory holds but the frozen list does not."""
        known = {*(self.ids or ()), *self.payload.get("known", ())}
        return sorted({name for name in self.found if name not in known})

    def _remaining(self) -> list[str]:
        return [name for name in self.ids or () if name not in self.verdicts]

    def _verdict(self, name: str, status: str, seconds: float, message: str) -> None:
        if name in self.verdicts:  # a runner reports each test once: a second report means forked or forging code inside the test
            status, message = "error", "reported more than once"
        self.verdicts[name] = (status, seconds, message[:MESSAGE_LIMIT])

    def _give_up(self, left: Sequence[str], why: str) -> None:
        """Judge what never started: ids of files that failed to collect, ids that are gone, or tests for which no time was left."""
        found = set(self.found)
        failed = {error.partition(": ")[0]: error.partition(": ")[2] for error in self.errors}
        for name in left:
            file = name.partition("::")[0]
            if file in failed:
                self._verdict(name, "error", 0.0, f"could not be collected: {failed[file]}")
            elif self._collected and name not in found:
                if failed.keys() - {file}:  # a broken conftest or directory takes its files with it
                    self._verdict(name, "error", 0.0, f"could not be collected: {next(iter(failed.values()))}")
                else:
                    self._verdict(name, "missing", 0.0, "no test with this id")
            else:
                self._verdict(name, "error", 0.0, why)

    def _one_runner(self, remaining: Sequence[str]) -> str:
        """Fork a runner for ``remaining`` and read it out. Returns why it ended, in words."""
        self.runners += 1
        self._current = None
        self.found, self.errors, self._collected = [], [], False
        wanted: _Wanted = remaining if self.ids is not None else "all" if self.freeze else None
        nonce = secrets.token_hex(16)
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            _runner_main(self.payload, self.tests_dir, wanted, write_fd, nonce)
        os.close(write_fd)
        try:
            return self._read_out(pid, read_fd, nonce)
        finally:
            os.close(read_fd)
            _kill_group(pid)
            os.waitpid(pid, 0)

    def _read_out(self, pid: int, read_fd: int, nonce: str) -> str:
        pidfd = os.pidfd_open(pid)
        poller = select.poll()
        poller.register(read_fd, select.POLLIN)
        poller.register(pidfd, select.POLLIN)
        os.set_blocking(read_fd, False)
        buffer, total = b"", 0
        limit = self.deadline if self.ids is None else min(self.deadline, time.monotonic() + self.test_timeout_s)
        try:
            while True:
                wait_s = limit - time.monotonic()
                if wait_s <= 0:
                    return "ran out of time"
                ready = {fd for fd, _ in poller.poll(max(1, int(wait_s * 1000)))}
                if not ready:
                    continue
                chunk = _read_available(read_fd) if read_fd in ready else b""
                total += len(chunk)
                if total > PIPE_LIMIT_BYTES:
                    return "flooded the result pipe"
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    kind = self._record(line, nonce)
                    if kind == "end":
                        return _ENDED
                    if kind == "collected" and self.freeze and not self._freeze():
                        return _ENDED
                    if kind is not None:
                        limit = min(self.deadline, time.monotonic() + self.test_timeout_s)
                if pidfd in ready and not chunk:
                    return "the process running it exited before reporting a verdict"
        finally:
            os.close(pidfd)

    def _freeze(self) -> bool:
        """Take what was collected as the list to run, with a run's own time; False if it must not be run."""
        if self.ids is None:
            now = time.monotonic()
            if self.errors or not self.found or len(set(self.found)) < len(self.found) or now - self.started_at > self.test_timeout_s:
                return False
            self.ids, self.deadline = list(self.found), now + self.timeout_s
        return True

    def _record(self, line: bytes, nonce: str) -> str | None:
        """Take in one record. Anything that does not carry the nonce is dropped, whoever wrote it."""
        try:
            record = json.loads(line)
        except ValueError:
            return None
        if not isinstance(record, dict) or not secrets.compare_digest(str(record.get("nonce", "")), nonce):
            return None
        kind = str(record["kind"])
        if kind == "collected":
            self.found, self.errors, self._collected = list(record["ids"]), list(record["errors"]), True
        elif kind == "start":
            self._current = str(record["id"])
        elif kind == "verdict":
            self._current = None
            self._verdict(str(record["id"]), str(record["status"]), float(record["seconds"]), str(record["message"]))
        return kind


def _read_available(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 20)
    except BlockingIOError:
        return b""


def _kill_group(pid: int) -> None:
    """Kill the runner and what it started; a process that left the group dies with the clone's pid namespace."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # the group never formed or has ended
            continue


# ------------------------------------------------------------------------------------------------------------------------ runner
def _runner_main(payload: Mapping[str, Any], tests_dir: str, wanted: _Wanted, write_fd: int, nonce: str) -> NoReturn:
    """Body of the forked runner. Leaves only through ``os._exit``, so that nothing of the parent runs twice."""
    try:
        os.setsid()
        _enter(payload, tests_dir, write_fd)
        runner_pid = os.getpid()

        def report(record: dict[str, Any]) -> None:
            if os.getpid() != runner_pid:  # a test forked and its child came back here: only the runner itself has a vote
                os._exit(0)
            data = json.dumps({**record, "nonce": nonce}).encode() + b"\n"
            while data:
                data = data[os.write(_RESULT_FD, data) :]

        session = _warm_session or new_session()
        recorder, items = collect_tests(session, tests_dir, report)
        if wanted is not None:
            chosen = items.keys() if wanted == "all" else set(wanted)
            run_tests(session, recorder, [(name, same[0]) for name, same in items.items() if name in chosen], report)
        report({"kind": "end"})
    finally:
        os._exit(0)  # the supervisor goes by records, never by exit status


def test_environment(payload: Mapping[str, Any]) -> dict[str, str]:
    """The environment that tests see: the machine's as the task defines it (or `BASE_ENV`), and the task's ``[verifier] env``.

    Args:
        payload: ``inherit_env`` says that this process already carries the sandbox's environment and nothing else, as in a clone.
    """
    base = {**BASE_ENV, **os.environ} if payload.get("inherit_env") else dict(BASE_ENV)
    return {name: value for name, value in {**base, **(payload.get("env") or {})}.items() if not name.startswith("PYTEST_")}


def _discard(record: dict[str, Any]) -> None:
    """Where the warm-up's records go."""


def _enter(payload: Mapping[str, Any], tests_dir: str, write_fd: int) -> None:
    """Give the runner its fixed surroundings: environment, working directory, descriptors, limits, import path."""
    env = test_environment(payload)
    os.environ.clear()
    os.environ.update(env)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    # Every other descriptor of the warm interpreter ends here, above all the one on which the clone's answer leaves.
    os.dup2(write_fd, _RESULT_FD, inheritable=False)
    os.closerange(_RESULT_FD + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.umask(0o022)
    try:
        os.chdir(payload["workdir"])
    except OSError:  # the agent removed its own working directory: tests that need it fail by themselves
        os.chdir("/")
    # Private writable memory, not address space: a runaway read of /dev/zero ends, programs that reserve much but use little still run.
    limit = int(payload.get("memory_mb") or 2048) << 20
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or hard > limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.dont_write_bytecode = True
    # Last, so that nothing in the tests directory shadows the standard library; the agent's directories are not on the path at all.
    sys.path[:] = [entry for entry in sys.path if entry not in ("", ".")] + [tests_dir]
    # Not /tmp/pytest-of-<user>, which the agent could have prepared.
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="t1-")
