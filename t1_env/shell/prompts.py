"""Interpreters that ask for the rest of an incomplete command.

The session's own shell never does: it takes commands whole. A shell or a Python that the agent started interactively does, by a prompt
that is always the same unless it was changed. This is the one place where printed text counts, and it decides between two names for the
same thing: a program that is known, by other means, to wait for input.
"""

from __future__ import annotations

import re
from typing import Final

_PROMPTS: Final = (
    (re.compile(r"(?:ba|da|a|k|mk)?sh"), re.compile(r"> ")),
    (re.compile(r"zsh"), re.compile(r"(?:[a-z]+ )*[a-z]+> ")),
    (re.compile(r"(?:python|pypy)[0-9.]*"), re.compile(r"\.\.\. ")),
)


def is_continuation(program: str, line: str) -> bool:
    """Whether a program that waits for input wants the rest of a command.

    Args:
        program: Its name.
        line: The last line it printed, up to the cursor.
    """
    return any(name.fullmatch(program) and prompt.fullmatch(line) for name, prompt in _PROMPTS)
