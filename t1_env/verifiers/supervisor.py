"""The process that judges: it forks runners, reads their records and keeps time. No test and no file of the agent's ever runs in it."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import secrets
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from _pytest.main import Session

from t1_env.sandbox import within
from t1_env.verifiers import runner_process
from t1_env.verifiers.guest import hook_loader
from t1_env.verifiers.integrity import Pristine
from t1_env.verifiers.programs import confine_programs
from t1_env.verifiers.pytest_session import MESSAGE_LIMIT
from t1_env.verifiers.runner_process import TOKEN_CHARS, Assignment

PIPE_LIMIT_BYTES: Final = 1 << 22
"""More than this from one runner is not a report but a flood."""

_ENDED: Final = "the runner ended"
_FOREIGN: Final = "code of the agent was about to run"
_EXITED: Final = "the process running it exited before reporting a verdict"
_STATUSES: Final = frozenset({"passed", "failed", "error"})


class Supervisor:
    """Has tests run and takes their verdicts.

    Args:
        payload: What the worker was asked.
        ids: The frozen list to run; None to collect.
        session: Makes a session for a runner to use.
        freeze: With ``ids=None``, whether to run what was collected, if that can be frozen; sets ``ids``.
    """

    def __init__(self, payload: Mapping[str, Any], ids: list[str] | None, session: Callable[[], Session], *, freeze: bool = False) -> None:
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
        self.tainted: list[str] = []
        # Only on a list that was frozen before the agent did anything there is something to watch for.
        self._watched = ids is not None
        if self._watched and within.bare_root is not None:
            confine_programs(within.bare_root, self.tests_dir)  # here, so that runners find it as it is to be
        if self._watched and payload.get("imports") == "apart":
            hook_loader()
        self._session = session
        self._pristine: Pristine | None = None
        self._seen: set[str] = set()
        self._duplicated: set[str] = set()
        self._apart: set[str] = set()
        self._ignored: tuple[str, ...] = ()
        self._forget()

    def _forget(self) -> None:
        """What was learnt from the last runner."""
        self._collected = False
        self._current: str | None = None
        self._foreign: tuple[str, str] | None = None
        self._reasons: list[str] = []
        self._token = ""

    # ------------------------------------------------------------------------------------------------------------------- the plan
    def supervise(self) -> None:
        """Fork runners until every id has its verdict, none makes progress or time is up."""
        if self.ids is None:
            self._collect()
        while left := self._remaining():
            if time.monotonic() >= self.deadline:
                self._give_up(left, "ran out of time")
            elif left[0] in self._apart:
                self._run_apart(left[0])
            else:
                self._run_batch(list(itertools.takewhile(lambda name: name not in self._apart, left)))

    def _collect(self) -> None:
        why = self._one_runner(Assignment("all" if self.freeze else None))
        if self._current is not None:
            self._verdict(self._current, "error", 0.0, why)
        if self.ids is None and not self._collected:
            self.errors.append(f": {why}")
        if why == _ENDED and self.ids is not None:
            self._give_up(self._remaining(), why)

    def _run_batch(self, batch: list[str]) -> None:
        why = self._one_runner(Assignment(batch, "watched" if self._watched else "open", self._ignored))
        if self._foreign is not None:
            self._set_apart(batch, self._foreign[1])
            return
        if self._current is not None:
            self._verdict(self._current, "error", 0.0, why)
        left = [name for name in batch if name not in self.verdicts]
        if why == _ENDED or len(left) == len(batch):
            self._give_up(left, why)

    def _set_apart(self, batch: list[str], file: str) -> None:
        """Run apart what was about to load the agent's code: the test that did, or all of a file, or (a conftest) everything."""
        if self._current is not None:
            self._apart.add(self._current)
        elif file and file not in self._ignored:
            self._ignored = (*self._ignored, file)
            self._apart |= {name for name in batch if name.partition("::")[0] == file}
        else:
            self._apart |= set(batch)

    def _run_apart(self, name: str) -> None:
        if self._pristine is None:
            self._pristine = Pristine()
            self._pristine.add()
        why = self._one_runner(Assignment([name], "apart"))
        if name not in self.verdicts:
            if self._current is not None or why != _ENDED:
                self._verdict(name, "error", 0.0, why)
            else:
                self._give_up([name], why)
            return
        status, seconds, _ = self.verdicts[name]
        if status != "passed" or self._foreign is None:
            return
        if why != _ENDED:
            self._reasons.append("its verdict was not confirmed")
        if self._reasons:
            self.verdicts[name] = ("error", seconds, f"passed beside code of the agent's, but {'; '.join(self._reasons)}"[:MESSAGE_LIMIT])
        else:
            self.tainted.append(name)

    # ----------------------------------------------------------------------------------------------------------------- the answer
    def outcomes(self) -> dict[str, list[Any]]:
        """Frozen id -> [status, seconds, message]."""
        verdicts: dict[str, list[Any]] = {}
        for name in self.ids or ():
            status, seconds, message = self.verdicts.get(name, ("missing", 0.0, "not collected"))
            if name in self._duplicated:
                status, message = "error", "two tests have this id"
            verdicts[name] = [status, seconds, message]
        return verdicts

    def unknown(self) -> list[str]:
        """Ids that the tests directory holds but the frozen list does not."""
        return sorted(self._seen - {*(self.ids or ()), *self.payload.get("known", ())})

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

    # ----------------------------------------------------------------------------------------------------------------- one runner
    def _one_runner(self, assignment: Assignment) -> str:
        """Fork a runner and read it out. Returns why it ended, in words."""
        self.runners += 1
        self.found, self.errors = [], []
        self._forget()
        nonce = secrets.token_hex(16)
        read_fd, write_fd = os.pipe()
        control_read, control_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            os.close(control_write)
            runner_process.main(
                self.payload,
                self.tests_dir,
                assignment,
                write_fd=write_fd,
                control_fd=control_read,
                nonce=nonce,
                session=self._session(),
                pristine=self._pristine,
            )
        os.close(write_fd)
        os.close(control_read)
        status = 0
        try:
            why = self._read_out(pid, read_fd, nonce, assignment, control_write)
            if why == _ENDED and assignment.mode == "apart":
                why = self._await_exit(pid)
        finally:
            os.close(read_fd)
            os.close(control_write)
            _kill_group(pid)
            status = os.waitpid(pid, 0)[1]
        if why == _ENDED and self._token and os.waitstatus_to_exitcode(status) != self._token_code:
            return _EXITED
        return why

    @property
    def _token_code(self) -> int:
        """The exit status that an *apart* runner is asked for: a byte that is not zero."""
        return int(self._token[:2], 16) | 1

    def _await_exit(self, pid: int) -> str:
        pidfd = os.pidfd_open(pid)
        try:
            wait_s = max(0.0, min(self.deadline - time.monotonic(), self.test_timeout_s))
            return _ENDED if select.select([pidfd], [], [], wait_s)[0] else "did not end after its verdict"
        finally:
            os.close(pidfd)

    def _read_out(self, pid: int, read_fd: int, nonce: str, assignment: Assignment, control_fd: int) -> str:
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
                    kind = self._record(line, nonce, assignment)
                    if kind == "end":
                        return _ENDED
                    if kind == "foreign" and assignment.mode == "watched":
                        return _FOREIGN  # nothing that comes after it counts
                    if kind == "collected" and self.freeze and not self._freeze():
                        return _ENDED
                    if kind == "verdict" and assignment.mode == "apart" and not self._token:
                        self._token = secrets.token_hex(TOKEN_CHARS // 2)
                        with contextlib.suppress(BrokenPipeError):  # it is gone, and its verdict will not be confirmed
                            os.write(control_fd, self._token.encode() + bytes([self._token_code]))
                    if kind is not None and (assignment.mode != "apart" or kind in ("collected", "start")):
                        limit = min(self.deadline, time.monotonic() + self.test_timeout_s)
                if pidfd in ready and not chunk:
                    return _EXITED
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

    def _record(self, line: bytes, nonce: str, assignment: Assignment) -> str | None:
        """Take in one record. Anything that does not carry the nonce, or is no record, is dropped, whoever wrote it."""
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not secrets.compare_digest(str(record.get("nonce", "")), nonce):
                return None
            return self._take(record, assignment)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def _take(self, record: Mapping[str, Any], assignment: Assignment) -> str | None:
        kind = str(record["kind"])
        apart = assignment.mode == "apart"
        if kind == "collected":
            found, errors = [str(name) for name in record["ids"]], [str(error) for error in record["errors"]]
            if apart:  # it may say what it likes of other tests
                found = [name for name in found if [name] == assignment.wanted]
            self.found, self.errors, self._collected = found, errors, True
            self._seen |= set(found)
            self._duplicated |= {name for name, count in Counter(found).items() if count > 1}
        elif kind == "foreign":
            if self._foreign is None:
                self._foreign = (str(record["why"]), str(record["file"]))
        elif kind == "suspect":
            self._reasons.append(str(record["why"]))
        elif kind == "start":
            self._current = str(record["id"])
        elif kind == "verdict":
            return self._take_verdict(record, assignment)
        elif kind == "end" and apart and self._foreign is not None:
            if not self._token or not secrets.compare_digest(str(record["token"]), self._token):
                self._reasons.append("its verdict was not confirmed")
            self._reasons += [str(problem) for problem in record["problems"]]
        return kind

    def _take_verdict(self, record: Mapping[str, Any], assignment: Assignment) -> str | None:
        name, status, seconds = str(record["id"]), str(record["status"]), float(record["seconds"])
        if status not in _STATUSES or (assignment.mode == "apart" and [name] != assignment.wanted):
            return None
        self._current = None
        self._verdict(name, status, seconds if math.isfinite(seconds) else 0.0, str(record["message"]))
        return "verdict"


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
