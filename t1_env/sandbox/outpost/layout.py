"""Where things lie in a runtime, at either side."""

from __future__ import annotations

import os
from typing import Final

BOOT: Final = "boot.py"
PACKAGES: Final = "site-packages"
LOADER: Final = "lib/ld.so"
LIBRARIES: Final = "lib"
INTERPRETER: Final = "bin/python3"
SCRIPT: Final = "bin/python"

SCRIPT_TEXT: Final = """\
#!/bin/sh
# The interpreter of this runtime as one file: started with its own loader and libraries, so that it needs nothing of the system's.
here=${0%/*}
exec "$here/../lib/ld.so" --library-path "$here/../lib" "$here/python3" "$@"
"""

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
    return [os.path.join(root, LOADER), "--library-path", os.path.join(root, LIBRARIES), os.path.join(root, INTERPRETER)]


def own_interpreter(root: str) -> tuple[list[str], str] | None:
    """At the far side: how to start the runtime's own interpreter, as a command and as one file; None if it has none."""
    if not os.path.exists(os.path.join(root, LOADER)):
        return None
    return interpreter_command(root, None), os.path.join(root, SCRIPT)
