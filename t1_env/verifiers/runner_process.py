"""The process that runs tests: forked by the supervisor, it reports over a pipe and never returns.

There are three ways. An *open* runner only has the task's own files before it. A *watched* one runs test after test and ends before the
first instruction of code that is not the task's, so that nothing of the agent was ever in it. What would load such code is run *apart*: one
test in a process of its own, whose word is taken for that test only, and only if nothing that judges it was tampered with.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal, NoReturn, TypeAlias

from _pytest.main import Session
from _pytest.nodes import Item

from t1_env.sandbox import within
from t1_env.sandbox.syscalls import CAP_SYS_CHROOT, keep_only_capabilities_of_programs
from t1_env.verifiers.comparing import Comparisons, TestFileLoader, TestFiles
from t1_env.verifiers.foreign import Watch
from t1_env.verifiers.guest import Guest, GuestFinder
from t1_env.verifiers.integrity import Pristine, replaced_tests
from t1_env.verifiers.programs import working_directory
from t1_env.verifiers.pytest_session import MESSAGE_LIMIT, Recorder, collect_tests, run_tests

BASE_ENV: Final[Mapping[str, str]] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
"""What tests see where the sandbox sets no variables of its own. Nothing that the agent exports reaches them."""

TOKEN_CHARS: Final = 32
_RESULT_FD: Final = 3
_CONTROL_FD: Final = 4
_MAX_REASONS: Final = 8

Wanted: TypeAlias = Sequence[str] | Literal["all"] | None
"""What a runner is to run: these ids, all that it finds, or nothing (it only collects)."""
Report: TypeAlias = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one runner is to do.

    Args:
        wanted: What to run.
        mode: How; see the module.
        ignored: Test files, relative to the tests directory, that are not even collected.
    """

    wanted: Wanted
    mode: Literal["open", "watched", "apart"] = "open"
    ignored: tuple[str, ...] = ()


def main(
    payload: Mapping[str, Any],
    tests_dir: str,
    assignment: Assignment,
    *,
    write_fd: int,
    control_fd: int,
    nonce: str,
    session: Session,
    pristine: Pristine | None,
) -> NoReturn:
    """Body of the forked runner. Leaves only through ``os._exit``, so that nothing of the parent runs twice.

    Args:
        payload: What the worker was asked.
        tests_dir: The tests.
        assignment: What to do.
        write_fd: Where records go.
        control_fd: Where an *apart* runner is asked to confirm its verdict.
        nonce: What every record carries.
        session: A session for this runner's use.
        pristine: What the interpreter was like before any test, for an *apart* runner.
    """
    code = 0
    try:
        os.setsid()
        roots = (*enter(payload, tests_dir, write_fd, control_fd), tests_dir)
        report = _reporter(nonce)
        recorder = Recorder(tests_dir)
        guard: _Guard | None = None
        if assignment.mode != "open" and payload.get("imports") == "apart":
            GuestFinder(Guest(_leave_tests, Watch(roots, (), _nothing, _nothing).is_trusted)).install()
        if assignment.mode == "watched":
            Watch(roots, (), lambda why: _leave(report, recorder, why), _nothing).start()
        elif assignment.mode == "apart" and pristine is not None:
            guard = _Guard(tests_dir, roots, session, pristine, report)
            guard.start()
        only = None
        if assignment.mode == "apart" and isinstance(assignment.wanted, Sequence):
            only = [f"{tests_dir}/{name.partition('::')[0]}" for name in assignment.wanted]
        chosen: list[tuple[str, Item]] = []
        items = collect_tests(session, recorder, report, only=only, ignored=assignment.ignored)
        if assignment.wanted is not None:
            wanted = items.keys() if assignment.wanted == "all" else set(assignment.wanted)
            chosen = [(name, same[0]) for name, same in items.items() if name in wanted]
            run_tests(session, recorder, chosen, report)
        if guard is not None and chosen:
            code = guard.confirm()
        else:
            report({"kind": "end", "token": "", "problems": []})
    finally:
        os._exit(code)  # the supervisor goes by records; only an *apart* runner's status means anything


def _reporter(nonce: str) -> Report:
    runner_pid, write, dumps, pid_of, leave = os.getpid(), os.write, json.dumps, os.getpid, os._exit

    def report(record: dict[str, Any]) -> None:
        if pid_of() != runner_pid:  # a test forked and its child came back here: only the runner itself has a vote
            leave(0)
        data = dumps({**record, "nonce": nonce}).encode() + b"\n"
        while data:
            data = data[write(_RESULT_FD, data) :]

    return report


def _leave(report: Report, recorder: Recorder, why: str) -> NoReturn:
    """End a watched runner before foreign code runs in it."""
    report({"kind": "foreign", "why": why, "file": recorder.collecting})
    os._exit(0)


def _nothing(_: str) -> None:
    """For whoever does not want to know."""


def _leave_tests() -> None:
    """Be, with the agent's modules, where the tests are not, without a way back."""
    if within.bare_root is not None:
        directory = working_directory()
        os.chroot(within.bare_root)
        os.chdir("/")
        with contextlib.suppress(OSError):
            os.chdir(directory)
        keep_only_capabilities_of_programs((CAP_SYS_CHROOT,))


class _Guard:
    """What is known about a process in which foreign code runs."""

    def __init__(self, tests_dir: str, roots: Sequence[str], session: Session, pristine: Pristine, report: Report) -> None:
        self._session = session
        self._pristine = pristine
        self._report = report
        self._tests_dir = tests_dir
        self._foreign = False
        self._reasons = 0
        self._files = TestFiles(tests_dir, Comparisons(self._is_known, self._suspect))
        self._watch = Watch(roots, (TestFileLoader,), self._notice, self._suspect)

    def start(self) -> None:
        sys.meta_path.insert(0, self._files)
        self._watch.start()

    def confirm(self) -> int:
        """Say what was found and repeat what only the supervisor knew until now. Returns the exit status it asked for."""
        problems = self._problems() if self._foreign else []
        challenge = os.read(_CONTROL_FD, TOKEN_CHARS + 1)
        self._report({"kind": "end", "token": challenge[:TOKEN_CHARS].decode("ascii", "replace"), "problems": problems})
        return challenge[TOKEN_CHARS] if len(challenge) > TOKEN_CHARS else 0

    def _notice(self, why: str) -> None:
        self._pristine.add(self._session, only=self._is_library)
        self._foreign = True
        self._report({"kind": "foreign", "why": why[:MESSAGE_LIMIT], "file": ""})

    def _suspect(self, why: str) -> None:
        if self._foreign and self._reasons < _MAX_REASONS:
            self._reasons += 1
            self._report({"kind": "suspect", "why": why[:MESSAGE_LIMIT]})

    def _problems(self) -> list[str]:
        found: list[str] = []
        for module, code, own in self._files.imported:
            found += replaced_tests(module, code, own)
            found += [
                f"{name} of {module.__name__} was replaced"
                for name, value in self._files.helpers.items()
                if vars(module).get(name) is not value
            ]
        for change in self._pristine.changes(self._session):
            found.append(change)
            if len(found) >= _MAX_REASONS:
                break
        return [reason[:MESSAGE_LIMIT] for reason in found[:_MAX_REASONS]]

    def _is_library(self, module: ModuleType) -> bool:
        """Whether a module that was imported on the way is the library's; those of the tests are looked at by themselves."""
        file = getattr(module, "__file__", None)
        return file is None or (self._watch.is_trusted(file) and not file.startswith(f"{self._tests_dir}/"))

    def _is_known(self, kind: type) -> bool:
        """Whether a class is the library's or the tests' own rather than the agent's."""
        if not self._foreign or self._pristine.knows(kind):
            return True
        module = sys.modules.get(kind.__module__)
        if type(module) is not ModuleType:
            return False
        trusted = any(module is tests for tests, _, _ in self._files.imported) or self._watch.is_trusted(getattr(module, "__file__", None))
        return trusted and vars(module).get(kind.__qualname__.partition(".")[0]) is not None


def test_environment(payload: Mapping[str, Any]) -> dict[str, str]:
    """The environment that tests see: the machine's as the task defines it (or `BASE_ENV`), and the task's ``[verifier] env``.

    Args:
        payload: ``inherit_env`` says that this process already carries the sandbox's environment and nothing else, as in a clone.
    """
    base = {**BASE_ENV, **os.environ} if payload.get("inherit_env") else dict(BASE_ENV)
    return {name: value for name, value in {**base, **(payload.get("env") or {})}.items() if not name.startswith("PYTEST_")}


def enter(payload: Mapping[str, Any], tests_dir: str, write_fd: int, control_fd: int) -> tuple[str, ...]:
    """Give the runner its fixed surroundings: environment, working directory, descriptors, limits, import path.

    Returns:
        Where trusted modules are imported from.
    """
    env = test_environment(payload)
    os.environ.clear()
    os.environ.update(env)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    # Every other descriptor of the warm interpreter ends here, above all the one on which the clone's answer leaves.
    control = os.dup(control_fd) if control_fd <= _RESULT_FD else control_fd  # not under what comes next
    os.dup2(write_fd, _RESULT_FD, inheritable=False)
    os.dup2(control, _CONTROL_FD, inheritable=False)
    os.closerange(_CONTROL_FD + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
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
    library = [entry for entry in sys.path if entry not in ("", ".")]
    sys.path[:] = [*library, tests_dir]
    # Not /tmp/pytest-of-<user>, which the agent could have prepared.
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="t1-")
    return tuple(library)
