"""Observations as plain arrays and actions as a menu, for libraries that know neither text nor commands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from t1_env.errors import ConfigError
from t1_env.protocol import SHELL_STATES, Action, Command, Keys, Submit
from t1_env.spaces import NO_EXIT_CODE
from t1_env.wrappers.text import action_text, require_terminal_space

SCREEN_CLASSES: Final = 96
"""Classes of a screen cell: 0 blank, 1 to 94 the visible ASCII characters in order, 95 everything else."""
STATUS_SIZE: Final = 5 + len(SHELL_STATES)


def screen_classes(screen: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """Map code points to classes.

    Args:
        screen: uint32 [rows, cols], code points; 0 and 32 are blank.

    Returns:
        uint8 [rows * cols], values below ``SCREEN_CLASSES``.
    """
    flat = screen.reshape(-1)
    classes = np.full(flat.shape, SCREEN_CLASSES - 1, dtype=np.uint8)
    visible = (flat > 32) & (flat < 127)
    classes[visible] = (flat[visible] - 32).astype(np.uint8)
    classes[(flat == 0) | (flat == 32)] = 0
    return classes


class ArrayObservation(
    gym.ObservationWrapper[dict[str, npt.NDArray[Any]], Any, dict[str, Any]],
    gym.utils.RecordConstructorArgs,
):
    """Turns the observation into a flat ``Dict`` of ``Box``: ``screen`` uint8 [rows * cols] and ``status`` float32 [12].

    ``status`` holds, all in [0, 1]: the share of turns used, whether a command ended with 0, with something else, or not at all, the
    (logarithmic) share of the output limit used, and the shell state one-hot.

    Args:
        env: An environment with T1Terminal's observation space.
        scaled: Give ``screen`` as float32 in [0, 1] instead of classes, for networks that take it as it is. Running normalisation
            (SB3's ``VecNormalize``) is no substitute: a cell that is nearly always blank becomes a huge input when it is not.
        max_turns: Turns that count as all of them; default the environment's own limit.
    """

    def __init__(self, env: gym.Env[dict[str, Any], Any], *, scaled: bool = False, max_turns: int | None = None) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, scaled=scaled, max_turns=max_turns)
        super().__init__(env)
        shape = require_terminal_space(env, "ArrayObservation")
        self._max_turns = max_turns or int(env.get_wrapper_attr("config").max_turns)
        self._max_output = math.log1p(shape.output_chars)
        self._scaled = scaled
        cells = (shape.rows * shape.cols,)
        screen = gym.spaces.Box(0.0, 1.0, cells, np.float32) if scaled else gym.spaces.Box(0, SCREEN_CLASSES - 1, cells, np.uint8)
        space: Any = gym.spaces.Dict(
            {
                "screen": screen,
                "status": gym.spaces.Box(0.0, 1.0, shape=(STATUS_SIZE,), dtype=np.float32),
            }
        )
        self.observation_space = space

    def observation(self, observation: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of an observation."""
        exit_code = int(observation["exit_code"])
        status = np.zeros(STATUS_SIZE, dtype=np.float32)
        status[0] = min(1.0, int(observation["turn"]) / self._max_turns)
        status[1] = exit_code == 0
        status[2] = exit_code > 0
        status[3] = exit_code == NO_EXIT_CODE
        status[4] = math.log1p(len(observation["output"])) / self._max_output
        status[5 + int(observation["state"])] = 1.0
        screen: npt.NDArray[Any] = screen_classes(observation["screen"])
        if self._scaled:
            screen = screen.astype(np.float32) / (SCREEN_CLASSES - 1)
        return {"screen": screen, "status": status}


class MenuAction(gym.ActionWrapper[Any, Any, Action], gym.utils.RecordConstructorArgs):
    """Turns the action into a number: an entry of a fixed menu, the last one being the submission.

    Args:
        env: An environment with T1Terminal's action space.
        menu: Commands (``str`` or ``Command``) or ``Keys``, in order.
        submit: Whether to add ``Submit()`` as the last entry.
    """

    def __init__(self, env: gym.Env[Any, Action], menu: Sequence[Action], *, submit: bool = True) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, menu=menu, submit=submit)
        super().__init__(env)
        if isinstance(menu, str) or not menu:
            raise ConfigError(f"menu={menu!r}: expected a non-empty list of actions")
        entries = (*menu, Submit()) if submit else tuple(menu)
        for entry in entries:
            if not isinstance(entry, str | Command | Keys | Submit):
                raise ConfigError(f"menu entry {entry!r}: expected a str, Command, Keys or Submit")
        self.menu: tuple[Action, ...] = entries
        self.action_space = gym.spaces.Discrete(len(entries))

    def action(self, action: Any) -> Action:
        """Return the menu entry with this number."""
        if not self.action_space.contains(action):
            raise gym.error.InvalidAction(f"menu entry {action!r} does not exist; expected an integer from 0 to {len(self.menu) - 1}")
        return self.menu[int(action)]

    def labels(self) -> list[str]:
        """Return a short label of each entry, for plots and logs."""
        return [action_text(entry).removeprefix("$ ") for entry in self.menu]


def make_sb3_env(task: Any, menu: Sequence[Action], *, submit: bool = True, **kwargs: Any) -> gym.Env[Any, Any]:
    """Make an environment that Stable-Baselines3 can use: array observations and a discrete menu of commands.

    Args:
        task: As for ``TerminalEnv``.
        menu: Commands to choose from, see ``MenuAction``.
        submit: Whether the menu ends with ``Submit()``.
        **kwargs: Arguments of ``TerminalEnv``.

    Returns:
        The wrapped environment. Use it in a ``DummyVecEnv`` with ``MultiInputPolicy``.
    """
    env: gym.Env[Any, Any] = gym.make("T1Terminal-v0", task=task, **kwargs)
    try:
        return MenuAction(ArrayObservation(env, scaled=True), menu, submit=submit)
    except BaseException:
        env.close()
        raise
