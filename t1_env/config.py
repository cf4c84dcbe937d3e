"""The arguments of ``TerminalEnv`` as one checked record."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from typing import Any, Final

from t1_env.errors import ConfigError

VERIFY_MODES: Final = ("change", "step", "end")
RENDER_MODES: Final = ("ansi", "human")
MIN_OUTPUT_BYTES: Final = 256
MAX_OUTPUT_BYTES: Final = 1 << 24
MAX_ROWS, MAX_COLS = 500, 1000


@dataclass(frozen=True, slots=True)
class EnvConfig:
    """Everything that shapes an episode apart from the task. ``TerminalEnv``'s docstring explains each field.

    Args:
        sandbox: Backend name (``"local"``) or a callable taking a ``SandboxSpec`` and returning a ``Sandbox`` that is not started.
        reward: ``"delta"``, ``"level"``, ``"final"``, ``"solved"`` or a callable.
        gamma: Discount of the potential-based form of the reward, in (0, 1], or None for the plain form.
        end_on_solved: Whether passing every verifier terminates the episode.
        max_turns: Steps until the episode is truncated.
        time_limit_s: Wall-clock seconds until the episode is truncated, or None.
        byte_limit: Bytes of terminal output until the episode is truncated, or None.
        step_timeout_s: Seconds a command may take when it sets no limit of its own.
        max_output_bytes: Bytes of output kept each step.
        rows: Rows of the terminal.
        cols: Columns of the terminal.
        verify: When verifiers run: after a step that changed the filesystem (``"change"``), after every step (``"step"``), once at the
            end of the episode (``"end"``), or after every n-th step and at the end (a number).
        verify_async: Whether a step returns while its verifiers still run; the next step waits for them and carries the reward.
        confirm: Whether a verifier that newly passes must pass a second time to count.
        verbatim: Whether the task's own ``test.sh`` is run at the end of the episode and must agree with the verifiers.
        render_mode: None, ``"ansi"`` or ``"human"``.
        timing: Whether ``info["_timing"]`` is filled.
        retries: How often a failed reset or verification is tried again before it counts as an infrastructure failure.

    Raises:
        ConfigError: If a value cannot be used.
    """

    sandbox: Any = "local"
    reward: Any = "delta"
    gamma: float | None = None
    end_on_solved: bool = True
    max_turns: int = 300
    time_limit_s: float | None = None
    byte_limit: int | None = None
    step_timeout_s: float = 30.0
    max_output_bytes: int = 16384
    rows: int = 24
    cols: int = 80
    verify: str | int = "change"
    verify_async: bool = False
    confirm: bool = False
    verbatim: bool = True
    render_mode: str | None = None
    timing: bool = True
    retries: int = 1

    def __post_init__(self) -> None:
        _require_int("max_turns", self.max_turns, 1, 2**31 - 1)
        _require_int("max_output_bytes", self.max_output_bytes, MIN_OUTPUT_BYTES, MAX_OUTPUT_BYTES)
        _require_int("rows", self.rows, 2, MAX_ROWS)
        _require_int("cols", self.cols, 20, MAX_COLS)
        _require_int("retries", self.retries, 0, 10)
        _require_seconds("step_timeout_s", self.step_timeout_s)
        if self.time_limit_s is not None:
            _require_seconds("time_limit_s", self.time_limit_s)
        if self.byte_limit is not None:
            _require_int("byte_limit", self.byte_limit, 1, 2**63 - 1)
        if self.gamma is not None and not (_is_number(self.gamma) and 0.0 < self.gamma <= 1.0):
            raise ConfigError(f"gamma={self.gamma!r}: expected a number in (0, 1], or None for the plain reward")
        if isinstance(self.verify, int):
            _require_int("verify", self.verify, 1, 2**31 - 1)
        else:
            _require_choice("verify", self.verify, VERIFY_MODES, "a number of steps")
        for name in ("verify_async", "confirm", "verbatim"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected True or False")
        if self.render_mode is not None:
            _require_choice("render_mode", self.render_mode, RENDER_MODES)
        if not (isinstance(self.sandbox, str) or callable(self.sandbox)):
            raise ConfigError(f"sandbox={self.sandbox!r}: expected a backend name such as 'local', or a callable SandboxSpec -> Sandbox")

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Names of the arguments, in order."""
        return tuple(field.name for field in fields(cls))


def reject_unknown(given: dict[str, Any], known: tuple[str, ...], what: str) -> None:
    """Raise ``ConfigError`` when ``given`` holds a name that is not in ``known``, suggesting the nearest.

    Args:
        given: Keyword arguments or options.
        known: Names that are understood.
        what: How to call one of them in the message (``"argument"``, ``"option"``).
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
            raise ConfigError(f"unknown {what} {name!r}: {hint}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r}: expected an integer from {low} to {high}")


def _require_seconds(name: str, value: Any) -> None:
    if not (_is_number(value) and value > 0):
        raise ConfigError(f"{name}={value!r}: expected a positive number of seconds")


def _require_choice(name: str, value: Any, choices: tuple[str, ...], *others: str) -> None:
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join((*choices, *others))}{hint}")
