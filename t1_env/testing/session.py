"""The contract of a shell session, to be checked against any sandbox: ours and yours."""

from __future__ import annotations

import contextlib
import difflib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from t1_env.errors import ConfigError, T1Error
from t1_env.sandbox.base import SandboxSpec
from t1_env.shell.dialect import ShellName
from t1_env.testing.cases import SESSION_CASES
from t1_env.testing.terminal import CaseFailed, CaseSkipped, MakeSandbox, SessionCase, Terminal

__all__ = ["SESSION_CASES", "CaseResult", "CaseRunner", "SessionCase", "SessionReport", "check_session"]

_SHARED: Final = SandboxSpec(workdir="/app")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What became of one case.

    Args:
        name: Name of the case.
        group: What it is about.
        outcome: ``"passed"``, ``"failed"`` or ``"skipped"``.
        reason: Why it failed or was skipped; empty if it passed.
        seconds: Wall time.
    """

    name: str
    group: str
    outcome: Literal["passed", "failed", "skipped"]
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SessionReport:
    """What became of all of them. Prints as a table.

    Args:
        results: In the order in which they ran.
    """

    results: tuple[CaseResult, ...]

    @property
    def passed(self) -> tuple[CaseResult, ...]:
        """Cases that passed."""
        return tuple(result for result in self.results if result.outcome == "passed")

    @property
    def failed(self) -> tuple[CaseResult, ...]:
        """Cases that failed."""
        return tuple(result for result in self.results if result.outcome == "failed")

    @property
    def skipped(self) -> tuple[CaseResult, ...]:
        """Cases that could not be run, with the reason."""
        return tuple(result for result in self.results if result.outcome == "skipped")

    @property
    def ok(self) -> bool:
        """Whether something passed and nothing failed."""
        return bool(self.passed) and not self.failed

    def raise_on_failure(self) -> None:
        """Do nothing if all is well.

        Raises:
            AssertionError: Some case failed, or none passed; the message lists them with the reasons.
        """
        if not self.ok:
            reasons = [f"{result.group}/{result.name}: {result.reason}" for result in self.failed] or ["no case passed"]
            raise AssertionError(f"{len(self.failed)} of {len(self.results)} cases failed:\n" + "\n".join(reasons))

    def __str__(self) -> str:
        width = max((len(result.name) for result in self.results), default=0)
        lines = []
        for result in self.results:
            why = result.reason.partition("\n")[0]
            lines.append(f"{result.outcome:<8}{result.name:<{width}} {result.seconds:6.2f} s  {why}".rstrip())
        return "\n".join([*lines, f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"])


class CaseRunner:
    """Runs cases one after the other: each in a shell of its own, in a shared sandbox where the case allows it.

    Args:
        make_sandbox: Makes a sandbox from a specification.
        shell: The shell under test.
    """

    def __init__(self, make_sandbox: MakeSandbox, shell: ShellName = "bash") -> None:
        self._make_sandbox = make_sandbox
        self._shell = shell
        self._shared: Any = None

    def run(self, case: SessionCase) -> None:
        """Run one case.

        Raises:
            CaseFailed: It failed.
            CaseSkipped: It cannot be run here.
            T1Error: Something went wrong that the case does not expect: it failed too.
        """
        if self._shell not in case.shells:
            raise CaseSkipped(f"not promised with {self._shell}")
        if case.own_sandbox is None:
            self._run_in(self.shared_sandbox(), case)
            return
        sandbox = self._started(case.own_sandbox)
        try:
            self._run_in(sandbox, case)
        finally:
            sandbox.close()

    def shared_sandbox(self) -> Any:
        """The sandbox that cases share; a new one if it is gone."""
        if self._shared is None or not self._shared.alive:
            self.close()
            self._shared = self._started(_SHARED)
        return self._shared

    def close(self) -> None:
        """Close the shared sandbox. Idempotent."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _started(self, spec: SandboxSpec) -> Any:
        sandbox = self._make_sandbox(spec)
        try:
            sandbox.start()
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    def _run_in(self, sandbox: Any, case: SessionCase) -> None:
        terminal = Terminal(sandbox, self._shell, self._make_sandbox)
        with terminal.session:
            case.function(terminal)


def check_session(
    make_sandbox: MakeSandbox,
    *,
    cases: Iterable[str | SessionCase] | None = None,
    on_case: Callable[[CaseResult], None] | None = None,
    shell: ShellName = "bash",
) -> SessionReport:
    """Check that a session in your sandbox keeps every promise that T1's own keep.

    Args:
        make_sandbox: Makes a sandbox that is not started, from a ``SandboxSpec`` (a sandbox class does).
        cases: Names of cases or groups, or the cases; None for all of ``SESSION_CASES``.
        on_case: Called after each case, e.g. to show progress.
        shell: The shell to check, as of ``ShellConfig.shell``.

    Returns:
        What became of each case; ``report.raise_on_failure()`` for use in a test, ``print(report)`` for people.

    Raises:
        ConfigError: A name is none of a case or group.
        SandboxError: The first sandbox could not be started.

    Example:
        >>> from t1_env.sandbox.local import LocalSandbox
        >>> print(check_session(LocalSandbox, cases=["trailing_comment"]))  # doctest: +SKIP
        passed  trailing_comment   0.01 s
        1 passed, 0 failed, 0 skipped
    """
    chosen = _choose(cases)
    results = []
    with contextlib.closing(CaseRunner(make_sandbox, shell)) as runner:
        runner.shared_sandbox()
        for case in chosen:
            result = _result_of(runner, case)
            results.append(result)
            if on_case is not None:
                on_case(result)
    return SessionReport(tuple(results))


def _result_of(runner: CaseRunner, case: SessionCase) -> CaseResult:
    started = time.monotonic()
    outcome: Literal["passed", "failed", "skipped"] = "passed"
    reason = ""
    try:
        runner.run(case)
    except CaseSkipped as skip:
        outcome, reason = "skipped", str(skip)
    except CaseFailed as failure:
        outcome, reason = "failed", str(failure)
    except T1Error as error:
        outcome, reason = "failed", f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - somebody else's sandbox: whatever it raises is what is wrong with it, and is reported
        outcome, reason = "failed", f"{type(error).__name__}: {error}"
    return CaseResult(case.name, case.group, outcome, reason, time.monotonic() - started)


def _choose(cases: Iterable[str | SessionCase] | None) -> list[SessionCase]:
    if cases is None:
        return list(SESSION_CASES)
    known = {case.name for case in SESSION_CASES} | {case.group for case in SESSION_CASES}
    chosen: list[SessionCase] = []
    for wanted in cases:
        if isinstance(wanted, SessionCase):
            chosen.append(wanted)
            continue
        found = [case for case in SESSION_CASES if wanted in (case.name, case.group)]
        if not found:
            close = difflib.get_close_matches(wanted, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"no case or group of cases is called {wanted!r}{hint}")
        chosen += found
    return chosen
