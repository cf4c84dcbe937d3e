"""Budgets of an episode, and why it ended.

When several reasons apply to the same step, the first of this list is given:

1. ``infra_failure``: what the step did cannot be known, so nothing else may be concluded from it;
2. ``submitted``: the agent said it was done, whether or not the verifiers agree;
3. ``solved``: every verifier passes and ``end_on_solved`` is set;
4. ``turn_limit``, 5. ``time_limit``, 6. ``byte_limit``.

An episode that is solved or submitted on its last allowed turn is therefore terminated, not truncated: bootstrapping from the state after
it would be wrong. ``context_limit`` is the agent's own budget and is reported by whoever drives the environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from t1_env.errors import ConfigError
from t1_env.protocol import EndReason


@dataclass(frozen=True, slots=True)
class Budget:
    """What an episode may use. None means no limit.

    Args:
        max_turns: Steps.
        time_limit_s: Wall-clock seconds since the start, verification included.
        byte_limit: Bytes of terminal output, counted before anything is elided.
        end_on_solved: Whether passing every verifier ends the episode.

    Raises:
        ConfigError: A limit is not positive.
    """

    max_turns: int | None = 300
    time_limit_s: float | None = None
    byte_limit: int | None = None
    end_on_solved: bool = True

    def __post_init__(self) -> None:
        for name in ("max_turns", "time_limit_s", "byte_limit"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value!r}: expected a positive number, or None for no limit")


class Episode:
    """Counts what an episode uses and decides when it ends.

    Args:
        budget: Its limits.
        clock: Monotonic seconds; replaced in tests.
    """

    def __init__(self, budget: Budget, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self.turns = 0
        self.output_bytes = 0
        self.end_reason: EndReason | None = None
        self._clock = clock
        self._started_at = clock()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the start."""
        return self._clock() - self._started_at

    @property
    def remaining_s(self) -> float | None:
        """Seconds left (0.0 once they are used up), or None without a time limit."""
        limit = self.budget.time_limit_s
        return None if limit is None else max(0.0, limit - self.seconds)

    @property
    def terminated(self) -> bool:
        """Whether the episode reached a real end of the task."""
        return self.end_reason is not None and self.end_reason.terminates

    @property
    def truncated(self) -> bool:
        """Whether the episode was cut."""
        return self.end_reason is not None and not self.end_reason.terminates

    def will_reach_a_limit(self, output_bytes: int = 0) -> bool:
        """Whether the step in progress uses up a budget, so that its verifiers must run even with ``verify="end"``.

        Args:
            output_bytes: Bytes of output of that step, before `finish_turn` has counted it.
        """
        return self._limit(self.turns + 1, self.output_bytes + output_bytes) is not None

    def finish_turn(
        self, *, output_bytes: int = 0, submitted: bool = False, solved: bool = False, infra_failure: bool = False
    ) -> EndReason | None:
        """Count one step and decide whether it was the last.

        Args:
            output_bytes: Bytes the terminal printed during it.
            submitted: Whether the action was ``Submit``.
            solved: Whether every verifier passes after it.
            infra_failure: Whether the machinery failed during it.

        Returns:
            The reason the episode ended, or None if it goes on. Also kept in ``end_reason``.

        Raises:
            RuntimeError: The episode has ended already.
            ValueError: ``output_bytes`` is negative.
        """
        if self.end_reason is not None:
            raise RuntimeError(f"the episode ended already ({self.end_reason.value}): call reset() before the next step")
        if output_bytes < 0:
            raise ValueError(f"output_bytes={output_bytes}: expected a number of bytes >= 0")
        self.turns += 1
        self.output_bytes += output_bytes
        if infra_failure:
            self.end_reason = EndReason.INFRA_FAILURE
        elif submitted:
            self.end_reason = EndReason.SUBMITTED
        elif solved and self.budget.end_on_solved:
            self.end_reason = EndReason.SOLVED
        else:
            self.end_reason = self._limit(self.turns, self.output_bytes)
        return self.end_reason

    def finish_late(self, *, solved: bool, infra_failure: bool) -> EndReason | None:
        """Decide again, now that it is known what the verifiers say of the last step that was counted.

        Args:
            solved: Whether every verifier passes after it.
            infra_failure: Whether the machinery failed while they ran.

        Returns:
            The reason the episode ended with that step, or None if it goes on. Also kept in ``end_reason``.
        """
        if infra_failure:
            self.end_reason = EndReason.INFRA_FAILURE
        elif solved and self.budget.end_on_solved and self.end_reason is not EndReason.SUBMITTED:
            self.end_reason = EndReason.SOLVED
        return self.end_reason

    def _limit(self, turns: int, output_bytes: int) -> EndReason | None:
        budget = self.budget
        if budget.max_turns is not None and turns >= budget.max_turns:
            return EndReason.TURN_LIMIT
        if budget.time_limit_s is not None and self.seconds >= budget.time_limit_s:
            return EndReason.TIME_LIMIT
        if budget.byte_limit is not None and output_bytes >= budget.byte_limit:
            return EndReason.BYTE_LIMIT
        return None
