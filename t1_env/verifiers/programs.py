"""Programs that tests start do not see the tests.

A deliverable that a test executes could read the expected answers, or the test itself, out of the tests directory. In a clone that has a
second root without it (``t1_env.sandbox.within``), everything that the tests' process executes is moved there first. A program that the
test itself points at the tests directory (a helper script, a file to compare with) is left where it can find it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_BEFORE_PREEXEC: Final = 5  # arguments of Popen, beside the program, that come before preexec_fn
_NAMES: Final = ("TEST_DIR", "TESTS_DIR")


def confine_programs(bare_root: str, tests_dir: str) -> None:
    """From here on, have this process and its forks start programs in the other root.

    Args:
        bare_root: Directory of that root.
        tests_dir: The directory that it does not have.
    """
    mark = re.compile(rf"(?<![\w./-]){re.escape(tests_dir)}(?![\w.-])|{'|'.join(_NAMES)}")
    has_left = False  # in a fork, which looks for its program in one directory after the other

    def needs_tests(*parts: Any) -> bool:
        """Whether a command line mentions the tests."""
        flat = [item for part in parts for item in (part if isinstance(part, list | tuple) else (part,))]
        words = [os.fsdecode(item) for item in flat if isinstance(item, str | bytes | os.PathLike)]
        return any(mark.search(word) for word in words)

    def leave() -> None:
        nonlocal has_left
        if has_left:
            return
        directory = working_directory()
        try:
            os.chroot(bare_root)
        except PermissionError:
            return  # it has become another user that root's own files are closed to
        has_left = True
        try:
            os.chdir(directory)
        except OSError:
            os.chdir("/")

    _confine_popen(needs_tests, leave)
    _confine_exec(needs_tests, leave)


def _confine_popen(needs_tests: Callable[..., bool], leave: Callable[[], None]) -> None:
    start: Any = subprocess.Popen.__init__

    def init(self: Any, args: Any, *rest: Any, **named: Any) -> None:
        directory = named.get("cwd") or working_directory()
        if len(rest) > _BEFORE_PREEXEC or needs_tests(args, named.get("executable"), directory):
            start(self, args, *rest, **named)
            return
        given = named.get("preexec_fn")

        def before() -> None:
            leave()
            if given is not None:
                given()

        start(self, args, *rest, **{**named, "preexec_fn": before})

    def system(command: Any) -> int:
        code = subprocess.Popen(command, shell=True).wait()
        return code << 8 if code >= 0 else -code

    subprocess.Popen.__init__ = init  # type: ignore[method-assign]
    os.system = system


def _confine_exec(needs_tests: Callable[..., bool], leave: Callable[[], None]) -> None:
    """For what forks and executes by itself, as a terminal does."""
    execv: Any = os.execv
    execve: Any = os.execve

    def new_execv(path: Any, argv: Any) -> Any:
        if not needs_tests(path, list(argv), working_directory()):
            leave()
        return execv(path, argv)

    def new_execve(path: Any, argv: Any, env: Any) -> Any:
        if not needs_tests(path, list(argv), working_directory()):
            leave()
        return execve(path, argv, env)

    os.execv, os.execve = new_execv, new_execve


def working_directory() -> str:
    """The working directory, or the root if it was removed."""
    try:
        return str(Path.cwd())
    except OSError:
        return "/"
