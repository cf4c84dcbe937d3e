"""Observations as one string, and a window over the last turns."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from t1_env.errors import ConfigError
from t1_env.protocol import SHELL_STATES, Action, Command, Keys
from t1_env.spaces import MAX_CWD_CHARS, NO_EXIT_CODE, TerminalText, clip_text

_STATUS_CHARS = MAX_CWD_CHARS + 64
_ACTION_CHARS = 4096


def action_text(action: Action) -> str:
    """Return an action as one would read it in a transcript: ``$ command``, ``keys: C-c`` or ``submit``."""
    if isinstance(action, str):
        return f"$ {action}"
    if isinstance(action, Command):
        return f"$ {action.text}"
    if isinstance(action, Keys):
        return f"keys: {action.text}"
    return "submit"


class TextObservation(
    gym.ObservationWrapper[str, Action, dict[str, Any]],
    gym.utils.RecordConstructorArgs,
):
    """Turns the observation into one string: a status line, then the output.

    Args:
        env: An environment with T1Terminal's observation space.
        status: Whether to write the status line, ``[turn 3 | exit 0 | idle | /app]``.
    """

    def __init__(self, env: gym.Env[dict[str, Any], Action], *, status: bool = True) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, status=status)
        super().__init__(env)
        self.status = status
        self.observation_space = TerminalText(require_terminal_space(env, "TextObservation").output_chars + _STATUS_CHARS)

    def observation(self, observation: dict[str, Any]) -> str:
        """Return the string form of an observation."""
        if not self.status:
            return str(observation["output"])
        exit_code = int(observation["exit_code"])
        parts = [f"turn {int(observation['turn'])}", SHELL_STATES[int(observation["state"])].value, observation["cwd"]]
        if exit_code != NO_EXIT_CODE:
            parts.insert(1, f"exit {exit_code}")
        return f"[{' | '.join(parts)}]\n{observation['output']}"


class HistoryWindow(gym.Wrapper[str, Action, str, Action], gym.utils.RecordConstructorArgs):
    """Shows the first observation (the instruction) and the last turns instead of the last observation alone.

    Args:
        env: An environment with text observations, such as ``TextObservation``.
        turns: How many turns to keep, each an action and its observation.
    """

    def __init__(self, env: gym.Env[str, Action], turns: int = 8) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, turns=turns)
        super().__init__(env)
        if not isinstance(env.observation_space, TerminalText):
            raise ConfigError(f"HistoryWindow needs text observations, got {env.observation_space}; apply TextObservation first")
        if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
            raise ConfigError(f"turns={turns!r}: expected an integer of at least 1")
        self.turns = turns
        turn_chars = env.observation_space.max_length + 2
        self.observation_space = TerminalText(turn_chars + turns * (turn_chars + _ACTION_CHARS))
        self._first = ""
        self._window: deque[str] = deque(maxlen=turns)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Reset and start an empty window."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._first = observation
        self._window.clear()
        return self._first, info

    def step(self, action: Action) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        """Step and add the turn to the window."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._window.append(f"{clip_text(action_text(action), _ACTION_CHARS)}\n{observation}")
        return "\n".join([self._first, *self._window]), reward, terminated, truncated, info


@dataclass(frozen=True, slots=True)
class TerminalShape:
    """Sizes that wrappers need of T1Terminal's observations.

    Args:
        rows: Rows of the screen.
        cols: Columns of the screen.
        output_chars: Most characters of ``output``.
    """

    rows: int
    cols: int
    output_chars: int


def require_terminal_space(env: gym.Env[Any, Any], wrapper: str) -> TerminalShape:
    """Return the sizes of the environment's observations, or raise ``ConfigError`` when they are not T1Terminal's."""
    space = env.observation_space
    if isinstance(space, gym.spaces.Dict) and {"cwd", "exit_code", "output", "screen", "state", "turn"} <= set(space.spaces):
        output, screen = space["output"], space["screen"]
        if isinstance(output, TerminalText) and isinstance(screen, gym.spaces.Box):
            rows, cols = screen.shape
            return TerminalShape(rows, cols, output.max_length)
    raise ConfigError(f"{wrapper} needs T1Terminal's own observations, got {space}; apply it before other observation wrappers")
