"""Rewards: pure functions of verifier counts.

Write ``c`` for the number of verifiers that pass and ``c0`` for that number at reset, when the verifiers run once on the untouched
environment. Every built-in reward pays for ``c - c0`` only, so a task that passes untouched is never paid.

=========  ============================================================  =========================================
spec       reward of a step                                              undiscounted return
=========  ============================================================  =========================================
delta      ``c' - c``: gained minus lost in this step                    ``c_end - c0``, the absolute count
level      ``c' - c0``: the count after the step                         count summed over the steps
final      ``c' - c0`` in the step that ends the episode, else 0         ``c_end - c0``
solved     1 in the step that ends it if all pass (and did not at        1 or 0
           reset), else 0
callable   what it returns                                               -
=========  ============================================================  =========================================

With ``gamma`` the reward takes its potential-based form (Ng, Harada and Russell, "Policy invariance under reward transformations", 1999).
``delta`` becomes ``gamma * (c' - c0) - (c - c0)``, whose *discounted* return telescopes to the discounted final count
``gamma**T * (c_end - c0)``: the order in which verifiers fall no longer matters to a discounting learner. The other specs keep their own
reward and gain the shaping term ``gamma * phi' - phi`` with ``phi = c - c0`` (over the total for ``solved``) and ``phi' = 0`` where the
episode terminates, which leaves the optimal policy as it was.

A step whose verification failed as infrastructure, or that ended the episode for that reason, has reward 0.0 and the single term
``infra_failure``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from t1_env.errors import ConfigError
from t1_env.protocol import EndReason, VerifierReport

RewardTerms: TypeAlias = dict[str, float]
"""Name -> amount. The step's reward is the sum, taken by `total`."""


@dataclass(frozen=True, slots=True)
class RewardInput:
    """What a reward may depend on.

    Args:
        baseline: Report on the untouched environment, from ``reset``.
        previous: Report before the step (the baseline in the first one).
        current: Report after the step.
        end_reason: Why the episode ended with this step, or None if it goes on.
    """

    baseline: VerifierReport
    previous: VerifierReport
    current: VerifierReport
    end_reason: EndReason | None = None

    @property
    def failed(self) -> bool:
        """Whether the machinery failed, so that nothing may be paid or charged."""
        return self.end_reason is EndReason.INFRA_FAILURE or any(
            report.infra_error is not None for report in (self.baseline, self.previous, self.current)
        )


RewardFunction: TypeAlias = Callable[[RewardInput], RewardTerms]
"""One step in, named terms out."""


def total(terms: Mapping[str, float]) -> float:
    """The scalar reward: the sum of the terms."""
    return math.fsum(terms.values())


def delta(step: RewardInput) -> RewardTerms:
    """Verifiers gained and lost in this step; the two terms keep a swap of one for another visible."""
    before, after = step.previous.as_bools(), step.current.as_bools()
    gained = sum(passed and not before.get(name, False) for name, passed in after.items())
    lost = sum(passed and not after.get(name, False) for name, passed in before.items())
    return {"gained": float(gained), "lost": float(-lost)}


def level(step: RewardInput) -> RewardTerms:
    """The count after the step, above the baseline."""
    return {"level": float(_gain(step.baseline, step.current))}


def final(step: RewardInput) -> RewardTerms:
    """The count above the baseline, in the step that ends the episode."""
    return {"final": float(_gain(step.baseline, step.current)) if step.end_reason is not None else 0.0}


def solved(step: RewardInput) -> RewardTerms:
    """1 in the step that ends the episode if every verifier passes and not all did at reset."""
    return {"solved": float(step.end_reason is not None and step.current.solved and not step.baseline.solved)}


REWARDS: Final[Mapping[str, RewardFunction]] = {"delta": delta, "level": level, "final": final, "solved": solved}
"""The built-in rewards by name."""


def make_reward(spec: str | Callable[[RewardInput], Any], gamma: float | None = None) -> RewardFunction:
    """Build the reward function of an environment.

    Args:
        spec: A name in `REWARDS`, or a callable from `RewardInput` to a number or to named terms.
        gamma: The learner's discount in (0, 1] for the potential-based form, or None for the plain form.

    Returns:
        A function whose terms sum to the step's reward and that answers an infrastructure failure with 0.0, whatever ``spec`` is.

    Raises:
        ConfigError: Unknown name, not a callable, or ``gamma`` out of range. The built function raises it when a callable returns
            something that is not finite.
    """
    if gamma is not None and (isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0.0 < gamma <= 1.0):
        raise ConfigError(f"gamma={gamma!r}: expected a number in (0, 1], or None for the plain reward")
    base = _resolve(spec)

    def reward(step: RewardInput) -> RewardTerms:
        if step.failed:
            return {"infra_failure": 0.0}
        terms = base(step)
        return terms if gamma is None else {**terms, **_potential(spec, step, gamma)}

    return reward


def _resolve(spec: Any) -> RewardFunction:
    if isinstance(spec, str):
        if spec in REWARDS:
            return REWARDS[spec]
        near = difflib.get_close_matches(spec, REWARDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(REWARDS)}, or a callable"
        raise ConfigError(f"unknown reward {spec!r}: {hint}")
    if not callable(spec):
        raise ConfigError(f"reward={spec!r}: expected one of {', '.join(REWARDS)}, or a callable taking a RewardInput")
    return _checked(spec)


def _checked(function: Callable[[RewardInput], Any]) -> RewardFunction:
    """Accept a number or named numbers from a user's function, and nothing else."""

    def reward(step: RewardInput) -> RewardTerms:
        value = function(step)
        given = value if isinstance(value, Mapping) else {"custom": value}
        try:
            terms = {str(name): float(amount) for name, amount in given.items()}
        except (TypeError, ValueError):
            raise ConfigError(f"the reward callable returned {value!r}: expected a number or a mapping from name to number") from None
        if not all(math.isfinite(amount) for amount in terms.values()):
            raise ConfigError(f"the reward callable returned {value!r}: every term must be finite")
        return terms

    return reward


def _potential(spec: Any, step: RewardInput, gamma: float) -> RewardTerms:
    """The terms that turn a plain reward into its potential-based form; see the module docstring."""
    before, after = float(_gain(step.baseline, step.previous)), float(_gain(step.baseline, step.current))
    if spec == "delta":
        return {"discount": (gamma - 1.0) * after}
    if spec == "solved" and step.current.total:
        before, after = before / step.current.total, after / step.current.total
    if step.end_reason is not None and step.end_reason.terminates:
        after = 0.0
    return {"shaping": gamma * after - before}


def _gain(baseline: VerifierReport, report: VerifierReport) -> int:
    return report.passed - baseline.passed
