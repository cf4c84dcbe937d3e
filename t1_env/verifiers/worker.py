"""The trusted test runner that executes inside a verification clone.

It is loaded into a warm interpreter outside the sandbox (call `warm` once there), and every verification forks from it. Two processes
take part in a run: a supervisor, which never touches a test (supervisor.py), and a runner forked from it, which collects and runs the
tests with pytest's own machinery and reports each verdict over an inherited pipe, signed with a nonce of this run (runner_process.py). A
test that hangs, crashes or leaves through ``os._exit`` costs its own verdict only: the supervisor forks a new runner for the tests that
are left. Code of the agent that a test would load never runs in a process that judges another test.

Only the standard library and pytest are imported here, so that the warm interpreter stays small.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from _pytest.main import Session

from t1_env.verifiers.pytest_session import Recorder, collect_tests, new_session, run_tests
from t1_env.verifiers.runner_process import test_environment
from t1_env.verifiers.supervisor import Supervisor

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
        recorder = Recorder(directory)
        items = collect_tests(session, recorder, _discard)
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
    supervisor = Supervisor(payload, None, _session)
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
        _end_session(script.pid)
        script.wait()
    return collect(payload)


def run(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Run a frozen list of verifiers.

    Args:
        payload: ``tests_dir`` (absolute path of the test files), ``workdir`` (the tests' working directory), ``ids`` (node ids relative
            to ``tests_dir``), ``timeout_s`` (for the whole run), ``test_timeout_s`` (for one test), and optionally ``env`` and
            ``inherit_env`` (see `test_environment`), ``memory_mb`` (limit on each process's private memory), ``known`` (the whole
            frozen list, if ``ids`` are not all of it) and ``imports`` (``"apart"``: see guest.py).

    Returns:
        ``{"outcomes": {id: [status, seconds, message]}, "unknown": [...], "errors": [...], "runners": n, "tainted": [...]}``. Every given
        id is in ``outcomes``; ``unknown`` are ids that were collected but not asked for; ``runners`` says how many processes it took;
        ``tainted`` passed in a process that had loaded code of the agent.
    """
    supervisor = Supervisor(payload, list(payload["ids"]), _session)
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
    supervisor = Supervisor(payload, None, _session, freeze=True)
    supervisor.supervise()
    if supervisor.ids is None:
        return {"ids": supervisor.found, "errors": supervisor.errors, "outcomes": None}
    return {"ids": supervisor.ids, **_run_report(supervisor)}


def _run_report(supervisor: Supervisor) -> dict[str, Any]:
    return {
        "outcomes": supervisor.outcomes(),
        "unknown": supervisor.unknown(),
        "errors": supervisor.errors,
        "runners": supervisor.runners,
        "tainted": supervisor.tainted,
    }


def _session() -> Session:
    """A session that nobody has used yet; in a forked runner the warm one is."""
    return _warm_session or new_session()


def _end_session(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _discard(record: dict[str, Any]) -> None:
    """Where the warm-up's records go."""
