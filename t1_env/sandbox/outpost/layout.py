"""Where things lie in a runtime, at either side."""

from __future__ import annotations

import os
import sys
from typing import Final

BOOT: Final = "boot.py"
PACKAGES: Final = "site-packages"
LOADER: Final = "lib/ld.so"
LIBRARIES: Final = "lib"
INTERPRETER: Final = "bin/python3"

# No user site, no environment, no site customisation; UTF-8 whatever the locale.
FLAGS: Final = ("-I", "-S", "-X", "utf8")


def interpreter_command(root: str, python: str | None) -> list[str]:
    """The start of a command line that runs Python at the far side.

    Args:
        root: Where the runtime lies there.
        python: An interpreter of the far side; None for the runtime's own, which brings its loader and libraries.
    """
    if python is not None:
        return [python]
    loader = [os.path.join(root, LOADER), "--inhibit-cache", "--library-path", os.path.join(root, LIBRARIES)]
    return [*loader, os.path.join(root, INTERPRETER)]


def far_interpreter(root: str) -> list[str]:
    """At the far side: the start of a command line that runs this very interpreter."""
    own = os.path.exists(os.path.join(root, LOADER))
    return interpreter_command(root, None if own else sys.executable)


def far_command(root: str) -> list[str]:
    """At the far side: the command line that starts this very program, to which arguments are appended."""
    return [*far_interpreter(root), *FLAGS, os.path.join(root, BOOT)]
