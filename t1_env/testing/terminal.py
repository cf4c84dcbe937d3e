"""What a case of the session contract is written with: a terminal under test, and ways to say what was expected of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn, TypeAlias

from t1_env.protocol import ShellState
from t1_env.sandbox.base import Sandbox, SandboxSpec
from t1_env.shell import Session, ShellConfig, ShellResult
from t1_env.shell.dialect import ShellName

MakeSandbox: TypeAlias = Callable[[SandboxSpec], Any]
"""Makes a sandbox that is not started, as the classes of T1's own sandboxes do."""

BASH: Final[tuple[ShellName, ...]] = ("bash",)
ALL_SHELLS: Final[tuple[ShellName, ...]] = ("bash", "sh", "zsh")

CONFIG: Final = ShellConfig(timeout_s=120.0, interrupt_grace_s=0.5, quit_grace_s=0.3, kill_grace_s=1.0, start_timeout_s=120.0)
"""Time limits that a loaded machine does not run into; cases about time limits set their own."""
LONG_S: Final = 60.0
"""How long to wait for what comes at once unless the machine is busy."""

IDLE, RUNNING, WAITING = ShellState.IDLE, ShellState.RUNNING, ShellState.WAITING_FOR_INPUT
FULLSCREEN, EXITED, DEAD = ShellState.FULLSCREEN, ShellState.SHELL_EXITED, ShellState.SANDBOX_DEAD
CONTINUATION = ShellState.CONTINUATION

_SHOWN: Final = 300
_numbers = itertools.count()


Check: TypeAlias = Callable[["Terminal"], None]
"""The function of a case."""


class CaseFailed(AssertionError):
    """The session did not do what a case expects of it."""


class CaseSkipped(Exception):
    """A case cannot be run here; the message says why."""


@dataclass(frozen=True, slots=True)
class SessionCase:
    """One promise of a session.

    Args:
        name: Unique name.
        group: What it is about.
        promise: The promise in a sentence.
        function: Checks it, with the terminal it is given.
        shells: The shells that keep it.
        own_sandbox: Specification of a sandbox of its own, which it may ruin; None to share one with other cases.
    """

    name: str
    group: str
    promise: str
    function: Check
    shells: tuple[ShellName, ...] = BASH
    own_sandbox: SandboxSpec | None = None


class CaseTable:
    """The cases of one group, in the order in which they are written down."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.cases: list[SessionCase] = []

    def case(self, *, shells: tuple[ShellName, ...] = BASH, own_sandbox: SandboxSpec | None = None) -> Callable[[Check], Check]:
        """Decorator that adds a function; its docstring is the promise."""

        def add(function: Check) -> Check:
            promise = " ".join((function.__doc__ or "").split())
            self.cases.append(SessionCase(function.__name__, self.group, promise, function, shells, own_sandbox))
            return function

        return add

    def add(self, name: str, promise: str, function: Check, shells: tuple[ShellName, ...] = BASH) -> None:
        """Add a case that is one row of a table."""
        self.cases.append(SessionCase(name, self.group, promise, function, shells))


class Terminal:
    """A started session in a sandbox, and a record of what it did.

    Args:
        sandbox: The started sandbox.
        shell: The shell under test.
        make_sandbox: Makes further sandboxes.
    """

    def __init__(self, sandbox: Any, shell: ShellName, make_sandbox: MakeSandbox) -> None:
        self.sandbox = sandbox
        self.shell = shell
        self.make_sandbox = make_sandbox
        self._history: deque[str] = deque(maxlen=6)
        self.session = Session(sandbox, replace(CONFIG, shell=shell))

    # -------------------------------------------------------------------------------------------------------------------------- acts
    def run(self, text: str, timeout_s: float | None = None) -> ShellResult:
        """Run a command in the session."""
        return self._noted(f"run {_short(text)}", self.session.run(text, timeout_s))

    def keys(self, text: str, wait_s: float = LONG_S) -> ShellResult:
        """Type keys into it."""
        return self._noted(f"keys {_short(text)}", self.session.keys(text, wait_s))

    @contextlib.contextmanager
    def another(self, **changes: Any) -> Iterator[Terminal]:
        """Another terminal in the same sandbox, configured differently."""
        other = Terminal(self.sandbox, self.shell, self.make_sandbox)
        other.session = Session(self.sandbox, replace(CONFIG, shell=self.shell, **changes))
        with other.session:
            yield other

    def path(self, name: str) -> str:
        """A path in the sandbox that no other case uses."""
        return f"/tmp/t1-case-{os.getpid()}-{next(_numbers)}-{name}"

    def count_running(self, marker: str) -> int:
        """How many processes in the sandbox have the marker in their command line."""
        found = self.run(f"echo count=$(grep -asl '{marker[:-1]}[{marker[-1]}]' /proc/[0-9]*/cmdline | wc -l)")
        match = re.search(r"count=(\d+)$", found.output, re.MULTILINE)  # a shell may have news of its jobs, too
        if match is None:
            self.fail("processes could not be counted")
        return int(match[1])

    def await_running(self, marker: str, count: int) -> None:
        """Check that so many processes with the marker in their command line run, once a busy machine has started them."""
        for _ in range(100):
            found = self.count_running(marker)
            if found == count:
                return
            self.run("sleep 0.1")
        self.fail(f"{found} processes with {marker!r} are running, expected {count}")

    # ------------------------------------------------------------------------------------------------------------------ expectations
    def answers(self, text: str, output: str | None = None, *, code: int = 0) -> ShellResult:
        """Run a command that must end by itself, with this output (None: any) and exit code, at the prompt again."""
        return self.expect(self.run(text), output, code=code)

    def expect(
        self, result: ShellResult, output: str | None = None, *, code: int | None = 0, state: ShellState = IDLE, timed_out: bool = False
    ) -> ShellResult:
        """Check a result in full."""
        self.equal("state", result.state, state)
        self.equal("exit code", result.exit_code, code)
        self.equal("timed_out", result.timed_out, timed_out)
        if output is not None:
            self.equal("output", result.output, output)
        return result

    def expires(self, result: ShellResult, *, state: ShellState = IDLE) -> ShellResult:
        """Check that a command ran out of time."""
        return self.expect(result, code=124, state=state, timed_out=True)

    def waits(self, result: ShellResult, output: str | None = None) -> ShellResult:
        """Check that a program waits for input."""
        return self.expect(result, output, code=None, state=WAITING)

    def equal(self, what: str, seen: object, expected: object) -> None:
        """Check for equality."""
        if seen != expected:
            self.fail(f"{what} is {_short(seen)}, expected {_short(expected)}")

    def check(self, condition: bool, message: str) -> None:
        """Check a condition; the message says what was seen and what was expected."""
        if not condition:
            self.fail(message)

    def usable(self) -> None:
        """Check that the session is at its prompt and runs commands."""
        self.answers("echo usable", "usable\n")

    def fail(self, message: str) -> NoReturn:
        """The case fails."""
        history = "\n".join(f"  {line}" for line in self._history)
        raise CaseFailed(f"{message}; the last steps were:\n{history}")

    # ------------------------------------------------------------------------------------------------------------------------- skips
    def need(self, *programs: str) -> None:
        """Skip unless the sandbox has these programs."""
        for program in programs:
            if self.session.run(f"command -v {program} >/dev/null").exit_code != 0:
                raise CaseSkipped(f"{program} is not installed in this sandbox")

    def need_capability(self, name: str) -> None:
        """Skip unless the sandbox says that it can do this."""
        if name not in getattr(self.sandbox, "capabilities", ()):
            raise CaseSkipped(f"this sandbox does not offer {name!r}")

    def need_sandbox(self) -> Sandbox:
        """Skip unless this is a whole sandbox, and not only something that starts processes."""
        if not isinstance(self.sandbox, Sandbox):
            raise CaseSkipped("needs a sandbox with all its methods")
        return self.sandbox

    def skip(self, reason: str) -> NoReturn:
        """Skip the case."""
        raise CaseSkipped(reason)

    def _noted(self, action: str, result: ShellResult) -> ShellResult:
        self._history.append(
            f"{action} -> {result.state.value}, exit code {result.exit_code}, {result.output_bytes} bytes {_short(result.output)}"
        )
        return result


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
