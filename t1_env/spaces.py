"""The spaces of ``T1Terminal-v0``: text that may hold any Unicode, actions that are commands, keys or a submission."""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from gymnasium import spaces

from t1_env.protocol import SHELL_STATES, Action, Command, Keys, Submit

MAX_CODE_POINT: Final = 0x10FFFF
"""Largest Unicode code point: the upper bound of a ``screen`` cell."""
MAX_ACTION_CHARS: Final = 1 << 20
"""Longest action text in characters (1 Mi): room for a file in a heredoc, far from what could hurt the host."""
MAX_CWD_CHARS: Final = 4096
"""Linux's PATH_MAX."""
ELISION_CHARS: Final = 256
"""Room for the notice that says how many bytes of output were left out."""
MAX_TURNS: Final = 2**31 - 1
NO_EXIT_CODE: Final = -1
"""``exit_code`` when no command finished in this step."""

_SAMPLED_CHARS: Final = frozenset(string.digits + string.ascii_letters + string.punctuation + " \n\t")
_HARMLESS_COMMANDS: Final = ("true", "pwd", "ls", "ls -a", "echo hello", "cat /etc/hostname", "false")


def is_unicode(text: str) -> bool:
    """Whether ``text`` can be encoded (it holds no lone surrogate)."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def to_unicode(text: str) -> str:
    """Return ``text`` with every lone surrogate replaced, so that it can be encoded."""
    return text if is_unicode(text) else text.encode("utf-8", "replace").decode("utf-8")


class TerminalText(spaces.Text):
    """Text of a terminal: any Unicode string, empty included, up to a number of characters.

    Gymnasium's ``Text`` lists every allowed character, which leaves out spaces, box drawing and most of the world's scripts, and checks
    them one by one. Here every string that can be encoded is a member. ``charset`` only says what ``sample`` draws from.

    Args:
        max_length: Most characters.
        seed: Seed or generator for ``sample``.
    """

    def __init__(self, max_length: int, *, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(max_length, min_length=0, charset=_SAMPLED_CHARS, seed=seed)

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is a string of at most ``max_length`` characters without lone surrogates."""
        return isinstance(x, str) and len(x) <= self.max_length and is_unicode(x)

    @property
    def is_np_flattenable(self) -> bool:
        """Free text has no fixed alphabet, hence no flat array form."""
        return False

    def __repr__(self) -> str:
        return f"TerminalText({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TerminalText) and self.max_length == other.max_length

    __hash__ = None  # type: ignore[assignment]


class TerminalAction(spaces.Space[Action]):
    """What ``step`` takes: a ``str`` (a command line), ``Command``, ``Keys`` or ``Submit``.

    ``sample`` draws harmless read-only commands, so that checkers and random agents change nothing.

    Args:
        max_length: Most characters of a text.
        seed: Seed or generator for ``sample``.
    """

    def __init__(self, max_length: int = MAX_ACTION_CHARS, *, seed: int | np.random.Generator | None = None) -> None:
        self.max_length = int(max_length)
        super().__init__(shape=None, dtype=None, seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> Action:
        """Draw a harmless command.

        Args:
            mask: Not supported: the space is not finite.
            probability: Not supported, likewise.

        Returns:
            One of a few commands that read and change nothing.
        """
        if mask is not None or probability is not None:
            raise ValueError("TerminalAction.sample takes neither mask nor probability: the space of commands is not finite")
        return _HARMLESS_COMMANDS[int(self.np_random.integers(len(_HARMLESS_COMMANDS)))]

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is an action whose text can be encoded and is not too long."""
        if isinstance(x, Submit):
            return True
        text = x.text if isinstance(x, Command | Keys) else x
        return isinstance(text, str) and len(text) <= self.max_length and is_unicode(text)

    @property
    def is_np_flattenable(self) -> bool:
        """Commands have no flat array form."""
        return False

    def to_jsonable(self, sample_n: Iterable[Action]) -> list[Any]:
        """Return the actions as JSON data."""
        return [action_to_json(action) for action in sample_n]

    def from_jsonable(self, sample_n: Iterable[Any]) -> list[Action]:
        """Return the actions that ``to_jsonable`` wrote."""
        return [action_from_json(record) for record in sample_n]

    def __repr__(self) -> str:
        return f"TerminalAction({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TerminalAction) and self.max_length == other.max_length

    __hash__ = None  # type: ignore[assignment]


def action_to_json(action: Action) -> str | dict[str, Any]:
    """Write an action as JSON data: a ``str`` stays one, the full forms become an object with ``kind``.

    Args:
        action: A member of ``TerminalAction``.

    Returns:
        JSON data that ``action_from_json`` turns back into an equal action.
    """
    match action:
        case str():
            return action
        case Command(text=text, timeout_s=timeout_s):
            return {"kind": "command", "text": text, "timeout_s": timeout_s}
        case Keys(text=text, wait_s=wait_s):
            return {"kind": "keys", "text": text, "wait_s": wait_s}
        case Submit():
            return {"kind": "submit"}
    raise TypeError(f"not an action: {action!r}; expected str, Command, Keys or Submit")


def action_from_json(record: str | dict[str, Any]) -> Action:
    """Read an action that ``action_to_json`` wrote.

    Args:
        record: JSON data.

    Returns:
        The action.

    Raises:
        ValueError: If the record is not one of the four forms.
    """
    match record:
        case str():
            return record
        case {"kind": "command", "text": str(text), "timeout_s": timeout_s}:
            return Command(text, timeout_s)
        case {"kind": "keys", "text": str(text), "wait_s": wait_s}:
            return Keys(text, wait_s)
        case {"kind": "submit"}:
            return Submit()
    raise ValueError(f"not an action record: {record!r}; expected a string or an object whose kind is command, keys or submit")


def observation_space(rows: int, cols: int, max_output_bytes: int) -> spaces.Dict:
    """Return the observation space of the environment.

    Args:
        rows: Rows of the screen.
        cols: Columns of the screen.
        max_output_bytes: Bytes of output kept each step, half head and half tail.

    Returns:
        ``Dict`` of ``cwd`` (text), ``exit_code`` (int32, -1 = none), ``output`` (text), ``screen`` (uint32 [rows, cols] code points),
        ``state`` (index into ``SHELL_STATES``) and ``turn`` (int32).
    """
    return spaces.Dict(
        {
            "cwd": TerminalText(MAX_CWD_CHARS),
            "exit_code": spaces.Box(NO_EXIT_CODE, 255, shape=(), dtype=np.int32),
            "output": TerminalText(max_output_bytes + ELISION_CHARS),
            "screen": spaces.Box(0, MAX_CODE_POINT, shape=(rows, cols), dtype=np.uint32),
            "state": spaces.Discrete(len(SHELL_STATES)),
            "turn": spaces.Box(0, MAX_TURNS, shape=(), dtype=np.int32),
        }
    )


def clip_text(text: str, max_length: int) -> str:
    """Cut ``text`` in the middle so that it fits, saying how many characters were left out.

    Args:
        text: Any text.
        max_length: Most characters of the result; at least 64.

    Returns:
        ``text`` itself when it fits, else its head, a notice and its tail.
    """
    if len(text) <= max_length:
        return text
    room = max_length - 48
    head, tail = text[: room // 2], text[len(text) - (room - room // 2) :]
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters left out ...]\n{tail}"
