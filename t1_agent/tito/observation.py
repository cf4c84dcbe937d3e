"""What the policy reads after a step: the exit status on the first line, then the output, cut in the middle when it is long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from t1_env.protocol import SHELL_STATES, ShellState


def render_observation(observation: Mapping[str, Any], max_chars: int = 200) -> str:
    """Render an observation of ``T1Terminal-v0`` as the text of an environment turn. Deterministic: the same observation, the same text.

    The first line is ``exit N``, or ``exit none`` while there is no exit status. When the shell does not simply wait for the next command,
    its state follows on the same line. CRLF becomes LF, and line ends at the end of the output are dropped.

    Args:
        observation: Needs ``output`` (str), ``exit_code`` (integer, negative for none) and ``state`` (index into ``SHELL_STATES``).
        max_chars: Most characters of output kept, see ``cut_middle``.

    Returns:
        Text without a line end at its end.
    """
    exit_code = int(observation["exit_code"])
    state = SHELL_STATES[int(observation["state"])]
    first = f"exit {exit_code if exit_code >= 0 else 'none'}"
    if state is not ShellState.IDLE:
        first += f" {state.value}"
    output = str(observation["output"]).replace("\r\n", "\n").rstrip("\n")
    return f"{first}\n{cut_middle(output, max_chars)}" if output else first


def cut_middle(text: str, max_chars: int) -> str:
    """Keep the two ends of a long text and say how much is gone.

    Args:
        text: Any text.
        max_chars: Most characters of ``text`` kept, >= 0; the larger half comes from the head.

    Returns:
        ``text``, or its head and tail around a line ``[N characters cut]``.

    Raises:
        ValueError: When ``max_chars`` is negative.
    """
    if max_chars < 0:
        raise ValueError(f"max_chars: got {max_chars}, expected 0 or more")
    if len(text) <= max_chars:
        return text
    tail = max_chars // 2
    head = max_chars - tail
    return f"{text[:head]}\n[{len(text) - max_chars} characters cut]\n{text[len(text) - tail :]}"
