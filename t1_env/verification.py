"""When the verifiers of an episode run, and what becomes of those that run while the caller thinks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from t1_env.protocol import VerifierReport

LATE_TERM: Final = "late"
"""The reward term of a step that holds what the step before it earned."""
PENDING_TERM: Final = "pending"
"""The reward term, always 0.0, of a step whose verifiers still run."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """After which steps the verifiers run.

    Args:
        mode: ``EnvConfig.verify``: ``"change"``, ``"step"``, ``"end"`` or a number of steps.
    """

    mode: str | int

    def is_due(self, turn: int, *, last: bool) -> bool:
        """Whether verifiers may run after this step.

        Args:
            turn: Number of the step, from 1.
            last: Whether it ends the episode, or may.
        """
        if last:
            return True
        return turn % self.mode == 0 if isinstance(self.mode, int) else self.mode != "end"

    @property
    def unchanged_too(self) -> bool:
        """Whether they run even if nothing changed since they last ran."""
        return self.mode == "step"


class PendingVerification:
    """Verifiers that run in a thread of their own; the agent's processes stand still until they are done.

    Args:
        verify: Runs them and returns the report.
    """

    def __init__(self, verify: Callable[[], VerifierReport]) -> None:
        self.seconds = 0.0
        self._verify = verify
        self._report: VerifierReport | None = None
        self._error: BaseException | None = None
        # A daemon, so that an interpreter that ends does not wait for it: its sandbox ends with the process.
        self._thread = threading.Thread(target=self._run, name="t1-verify", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        start_s = time.perf_counter()
        try:
            self._report = self._verify()
        except BaseException as error:  # noqa: BLE001  (whatever it is, it is raised again where the report is waited for)
            self._error = error
        self.seconds = time.perf_counter() - start_s

    @property
    def running(self) -> bool:
        """Whether the report is still to come."""
        return self._thread.is_alive()

    def wait(self) -> VerifierReport:
        """Wait for the report.

        Returns:
            What the verifiers said.

        Raises:
            Exception: Whatever running them raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._report is not None, "the thread left a report or an error"
        return self._report


@dataclass(frozen=True, slots=True)
class LateReward:
    """What an earlier step earned, known now.

    Args:
        turn: Number of that step, from 1; 0 when nothing was waited for.
        reward: Its reward.
        terms: Parts of it.
        verifiers_passed: Verifiers that pass after it.
        infra_error: What broke while they ran, or None.
    """

    turn: int = 0
    reward: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict)
    verifiers_passed: int = 0
    infra_error: str | None = None

    def added_to(self, terms: Mapping[str, float]) -> dict[str, float]:
        """The terms of a step with this reward among them, so that they still sum to what the step returns."""
        return {**terms, LATE_TERM: self.reward} if self.turn else dict(terms)

    def as_info(self) -> dict[str, Any]:
        """The value of ``info["late_reward"]``; the same keys on every step."""
        return {"turn": self.turn, "reward": self.reward, "terms": dict(self.terms), "verifiers_passed": self.verifiers_passed}


NOTHING_LATE: Final = LateReward()
"""What a step carries that nothing waited for."""
