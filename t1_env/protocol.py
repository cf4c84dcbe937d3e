"""The seam between the environment and everything that drives it.

This module holds the vocabulary that crosses package borders: actions, shell states, why an episode ended, verifier reports and the
keys of ``info``. It imports nothing beyond the standard library, so that a trainer, a log reader or a remote client can depend on it
without pulling in Gymnasium or a sandbox.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias

SCHEMA_VERSION: Final = "1"
"""Version of the records below; written into every transcript and checked when one is read."""


# --------------------------------------------------------------------------------------------------------------------- actions
@dataclass(frozen=True, slots=True)
class Command:
    """Run a command line in the shell and wait for it to finish.

    Args:
        text: The command line, as bash would read it; may span lines and hold heredocs.
        timeout_s: Wall-clock limit in seconds; ``None`` takes the environment's default.
    """

    text: str
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ValueError(f"Command.timeout_s must be a positive number of seconds, got {self.timeout_s!r}")


@dataclass(frozen=True, slots=True)
class Keys:
    """Send keystrokes to whatever is in the foreground.

    Args:
        text: Literal text, or one key name in tmux notation (``"C-c"``, ``"C-d"``, ``"Enter"``, ``"Escape"``, ``"Up"``).
        wait_s: How long to wait, in seconds, for the program to answer and fall quiet again.
    """

    text: str
    wait_s: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.wait_s) and self.wait_s >= 0):
            raise ValueError(f"Keys.wait_s must be a number of seconds >= 0, got {self.wait_s!r}")


@dataclass(frozen=True, slots=True)
class Submit:
    """Declare the task done: the episode terminates and is scored as it stands."""


Action: TypeAlias = str | Command | Keys | Submit
"""What ``env.step`` takes. A plain ``str`` means ``Command(text)``."""


# ---------------------------------------------------------------------------------------------------------------- shell states
class ShellState(StrEnum):
    """What the terminal is doing when a step returns. The order is the index used in the observation's ``state``."""

    IDLE = "idle"
    """The shell waits for the next command."""
    RUNNING = "running"
    """A command is still running (only after ``Keys`` with too short a wait)."""
    WAITING_FOR_INPUT = "waiting_for_input"
    """The foreground program is blocked reading the terminal: send ``Keys``."""
    CONTINUATION = "continuation"
    """The shell wants the rest of an incomplete command."""
    FULLSCREEN = "fullscreen"
    """A program took over the alternate screen: read ``screen``, send ``Keys``."""
    SHELL_EXITED = "shell_exited"
    """The shell ended (``exit``, ``exec``, ``kill``); a new one with the same cwd and exports stands ready."""
    SANDBOX_DEAD = "sandbox_dead"
    """The sandbox itself is gone; the episode ends as an infra failure."""


SHELL_STATES: Final[tuple[ShellState, ...]] = tuple(ShellState)


class EndReason(StrEnum):
    """Why an episode ended. The first two terminate it, the others truncate it."""

    SUBMITTED = "submitted"
    SOLVED = "solved"
    TURN_LIMIT = "turn_limit"
    TIME_LIMIT = "time_limit"
    BYTE_LIMIT = "byte_limit"
    CONTEXT_LIMIT = "context_limit"
    INFRA_FAILURE = "infra_failure"
    """The machinery failed, not the agent: the step's reward is 0.0 and the episode must not be trained on."""

    @property
    def terminates(self) -> bool:
        """Whether this is a real end of the task (no bootstrapping) rather than a cut."""
        return self in (EndReason.SUBMITTED, EndReason.SOLVED)


# ------------------------------------------------------------------------------------------------------------------- verifiers
class VerifierStatus(StrEnum):
    """Outcome of one verifier. Only ``PASSED`` counts."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    """The test could not be collected or set up, was skipped, xfailed, duplicated or ran out of time."""
    MISSING = "missing"
    """The frozen list has it, the run did not report it."""


@dataclass(frozen=True, slots=True)
class VerifierOutcome:
    """What one verifier said.

    Args:
        status: Passed, failed, error or missing.
        seconds: How long it took.
        message: Short reason when it did not pass; never shown to the agent.
    """

    status: VerifierStatus
    seconds: float = 0.0
    message: str = ""


@dataclass(frozen=True, slots=True)
class VerifierReport:
    """One run of a task's verifiers over the frozen list of ids.

    Args:
        outcomes: Verifier id -> outcome, in the frozen order. Every frozen id is present.
        source: Where the verdicts came from (``"runner"``, ``"ctrf"``, ``"junit"``, ``"pytest"``, ``"reward.json"``, ``"reward.txt"``), or
            ``"declared"``: from the runner, on the paths that the task declares alone, because the sandbox has no verification clones.
        seconds: Wall time of the whole run, clone included.
        unknown: Ids that were reported but are not in the frozen list; ignored in the count, kept as a flag.
        tainted: Ids that passed in a process that had loaded code of the agent: they count, and are worth a look.
        masked: Files of the base system that the agent changed or shadowed, and that a second run of the verifiers saw as they were; what
            did not pass there as well does not count.
        flaky: Ids that passed once and not again when they were confirmed; they do not count.
        infra_error: Set when the machinery failed. Such a report carries no verdict and must not be turned into a reward.
    """

    outcomes: Mapping[str, VerifierOutcome] = field(default_factory=lambda: MappingProxyType({}))
    source: str = "runner"
    seconds: float = 0.0
    unknown: tuple[str, ...] = ()
    tainted: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()
    infra_error: str | None = None

    @property
    def passed(self) -> int:
        """Number of verifiers that pass: the paper's absolute count."""
        return sum(outcome.status is VerifierStatus.PASSED for outcome in self.outcomes.values())

    @property
    def total(self) -> int:
        """Number of frozen verifiers."""
        return len(self.outcomes)

    @property
    def solved(self) -> bool:
        """Whether every verifier passes (an empty list is never solved)."""
        return self.total > 0 and self.passed == self.total

    def as_bools(self) -> dict[str, bool]:
        """Verifier id -> whether it passed."""
        return {name: outcome.status is VerifierStatus.PASSED for name, outcome in self.outcomes.items()}


class VerbatimVerdict(StrEnum):
    """What the task's own ``test.sh``, run word for word at the end of an episode, says about the verifiers' report."""

    NOT_RUN = "not_run"
    """The episode goes on, ended as an infra failure, or the script is switched off."""
    AGREES = "agrees"
    DISAGREES = "disagrees"
    """The lower count is paid."""
    NO_VERDICT = "no_verdict"
    """The script is missing, cannot be run, ran out of time or left nothing that can be read: the verifiers' report stands."""
    INFRA_FAILURE = "infra_failure"
    """The machinery failed while it ran: the verifiers' report stands."""


# ------------------------------------------------------------------------------------------------------------------- info keys
INFO_KEYS: Final[tuple[str, ...]] = (
    "schema_version",  # str: SCHEMA_VERSION
    "task_id",  # str: id of the task being played, e.g. "seeds/hello-file" or "families/tidy?level=1&seed=7"
    "instruction",  # str: the task's instruction.md
    "isolation",  # str: "namespaces" | "container" | "remote" | "none"
    "state",  # str: ShellState of the terminal
    "verifiers_passed",  # int
    "verifiers_total",  # int
    "verifiers",  # dict[str, bool] in frozen order
    "verifier_source",  # str: VerifierReport.source
    "verbatim",  # dict[str, str]: "verdict" (VerbatimVerdict), "source" (as VerifierReport.source, of the script) and "note"
    "unknown",  # tuple[str, ...]: ids that the verifiers reported although the frozen list has them not; they never count
    "tainted",  # tuple[str, ...]: ids that passed in a process that had loaded code of the agent; they count, and are worth a look
    "flaky",  # tuple[str, ...]: ids that passed once and not again when they were confirmed; they do not count
    "reward_terms",  # dict[str, float]: sums to the step's reward
    "reward_pending",  # bool: the step's verifiers still run; the next step carries its reward
    "late_reward",  # dict: "turn" (0: nothing was late), "reward", "terms", "verifiers_passed" of the step before
    "action_executed",  # bool: False after a reset, and where the step before turned out to have ended the episode
    "end_reason",  # str | None: EndReason once the episode ended
    "infra_error",  # str | None: what broke, when end_reason is "infra_failure"
    "incidents",  # tuple[str, ...]: what befell the connection to the sandbox, e.g. that it was made anew
    "tamper",  # tuple[str, ...]: base-image files the agent changed or shadowed under the system directories
    "_timing",  # dict[str, float]: seconds by phase; not deterministic, `timing=False` leaves it empty
)
"""Keys present in the ``info`` of every ``reset`` and ``step``."""
