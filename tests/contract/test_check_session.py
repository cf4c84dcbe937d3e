"""The contract suite as the author of a sandbox runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from t1_env.errors import ConfigError, SandboxUnavailable
from t1_env.sandbox.base import SandboxSpec
from t1_env.testing import SESSION_CASES, CaseResult, SessionCase, SessionReport, check_session


def test_every_case_has_a_name_and_a_promise() -> None:
    names = [case.name for case in SESSION_CASES]
    assert len(set(names)) == len(names)
    assert not {case.name for case in SESSION_CASES} & {case.group for case in SESSION_CASES}
    for case in SESSION_CASES:
        assert case.promise.endswith("."), case.name


def test_a_sandbox_that_keeps_its_promises(process_spawner: type[Any], tmp_path: Path) -> None:
    seen: list[CaseResult] = []
    report = check_session(
        lambda _: process_spawner(tmp_path),
        cases=["trailing_comment", "exit_with_a_status", "dead_sandbox", "full_disk"],
        on_case=seen.append,
    )
    assert report.results == tuple(seen)
    assert [(result.name, result.outcome) for result in seen] == [
        ("trailing_comment", "passed"),
        ("exit_with_a_status", "passed"),
        ("dead_sandbox", "passed"),
        ("full_disk", "skipped"),
    ]
    assert report.ok
    report.raise_on_failure()
    (skipped,) = report.skipped
    assert skipped.reason == "this sandbox does not offer 'storage_limit'"
    lines = str(report).splitlines()
    assert lines[0].split()[:2] == ["passed", "trailing_comment"]
    assert lines[-1] == "3 passed, 0 failed, 1 skipped"


def test_groups_and_shells(process_spawner: type[Any], tmp_path: Path) -> None:
    names = [case.name for case in SESSION_CASES if case.group == "commands"]
    report = check_session(lambda _: process_spawner(tmp_path), cases=["commands"], shell="sh")
    assert [result.name for result in report.results] == names
    assert not report.failed, str(report)
    assert {result.reason for result in report.skipped} == {"not promised with sh"}


class Liar:
    """A sandbox that starts another program than it was asked for."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.alive = True

    def start(self) -> None:
        """Nothing to do."""

    def spawn(self, argv: list[str], **options: Any) -> Any:
        return self._inner.spawn(["bash", "-c", "echo no shell; exit 3"], **options)

    def close(self) -> None:
        self._inner.close()


def test_failures_are_reported_not_raised(process_spawner: type[Any], tmp_path: Path) -> None:
    report = check_session(lambda _: Liar(process_spawner(tmp_path)), cases=["trailing_comment", "life_cycle"])
    assert [result.outcome for result in report.results] == ["failed", "failed"]
    assert not report.ok
    assert "ShellError: bash ended with status 3 while starting; it printed 'no shell'" in report.failed[0].reason
    with pytest.raises(AssertionError, match="2 of 2 cases failed:\ncommands/trailing_comment: ShellError"):
        report.raise_on_failure()


def test_a_failed_expectation_shows_the_last_steps(process_spawner: type[Any], tmp_path: Path) -> None:
    def promise(t: Any) -> None:
        t.answers("echo one", "one\n")
        t.answers("echo two; (exit 2)", "two\n")

    def broken(t: Any) -> None:
        raise RuntimeError("a case of your own that is wrong")

    cases = [SessionCase("mine", "own", "It ends well.", promise), SessionCase("other", "own", "It ends.", broken)]
    first, second = check_session(lambda _: process_spawner(tmp_path), cases=cases).results
    assert first.reason == (
        "exit code is 2, expected 0; the last steps were:\n"
        "  run 'echo one' -> idle, exit code 0, 4 bytes 'one\\n'\n"
        "  run 'echo two; (exit 2)' -> idle, exit code 2, 4 bytes 'two\\n'"
    )
    assert second.reason == "RuntimeError: a case of your own that is wrong"


def test_a_sandbox_that_dies_is_replaced_for_the_next_case(process_spawner: type[Any], tmp_path: Path) -> None:
    made = []

    def make(spec: SandboxSpec) -> Any:
        made.append(process_spawner(tmp_path))
        return made[-1]

    def ruin(t: Any) -> None:
        t.sandbox.close()

    report = check_session(make, cases=[SessionCase("ruin", "own", "It ruins it.", ruin), "trailing_comment"])
    assert not report.failed, str(report)
    assert len(made) == 2
    assert not any(sandbox.alive for sandbox in made)


def test_mistakes(process_spawner: type[Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no case or group of cases is called 'trailing_coment'; did you mean 'trailing_comment'"):
        check_session(lambda _: process_spawner(tmp_path), cases=["trailing_coment"])

    class Unavailable:
        alive = False

        def start(self) -> None:
            raise SandboxUnavailable("not on this machine")

        def close(self) -> None:
            """Nothing to do."""

    with pytest.raises(SandboxUnavailable):
        check_session(lambda _: Unavailable())
    with pytest.raises(AssertionError, match="no case passed"):
        SessionReport(()).raise_on_failure()
    assert str(SessionReport(())) == "0 passed, 0 failed, 0 skipped"
