"""A task that is ready to be played: a Harbor directory on disk and what was read from it."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from t1_env.errors import TaskError
from t1_env.tasks.schema import T1Metadata, TaskConfig

_STEP: Final = re.compile(r"^# step:[ \t]*(?P<title>.*)$", re.MULTILINE)
_SETUP_LINE: Final = re.compile(r"^\s*(#.*|set\s.*)?$")
_IGNORED_NAMES: Final = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".DS_Store"})


@dataclass(frozen=True, slots=True)
class Slip:
    """A plausible wrong command in place of one oracle step; it costs at least one verifier.

    Args:
        step: Index into ``Task.oracle_steps()``.
        command: The wrong command.
        kind: What went wrong, for example ``"copy-for-move"``.
    """

    step: int
    command: str
    kind: str


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Args:
        id: ``seeds/hello-file``, ``families/tidy-files?level=1&seed=7``, or the directory's name for a task given by its path.
        path: The Harbor task directory.
        instruction: What the agent is asked to do (a leading canary comment is taken off).
        config: ``task.toml``.
        metadata: ``[metadata.t1]`` of ``task.toml``.
        digest: SHA-256 (hex) of every file of the directory: names, executable bits and contents.
        workdir: Absolute directory the agent starts in.
    """

    id: str
    path: Path
    instruction: str
    config: TaskConfig
    metadata: T1Metadata
    digest: str
    workdir: str

    @property
    def tests_dir(self) -> Path:
        """The verifiers; never visible to the agent."""
        return self.path / "tests"

    @property
    def environment_dir(self) -> Path:
        """What the agent's machine is built from."""
        return self.path / "environment"

    @property
    def solution_path(self) -> Path | None:
        """``solution/solve.sh``, or None if the task ships no oracle."""
        path = self.path / "solution" / "solve.sh"
        return path if path.is_file() else None

    def oracle_steps(self) -> tuple[str, ...]:
        """Commands of the oracle, in order; run one after the other they pass every verifier.

        Returns:
            One command (possibly of several lines) for each ``# step: <title>`` line of ``solution/solve.sh``; the whole script as one
            command, in a subshell of its own, if it has no such line; empty without an oracle.

        Raises:
            TaskError: A step holds no command.
        """
        path = self.solution_path
        return () if path is None else tuple(command for _, command in parse_oracle(read_text(path), file=path))

    def slips(self) -> tuple[Slip, ...]:
        """Plausible wrong commands from ``solution/slips.json``; empty if the task has none.

        Raises:
            TaskError: The file is malformed or names a step that does not exist.
        """
        path = self.path / "solution" / "slips.json"
        return parse_slips(read_text(path), n_steps=len(self.oracle_steps()), file=path) if path.is_file() else ()


def read_text(path: Path) -> str:
    """Read a UTF-8 file of a task; raises ``TaskError`` naming it when that is impossible."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not valid UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from None


def parse_oracle(script: str, *, file: str | Path) -> tuple[tuple[str, str], ...]:
    """Split a ``solve.sh`` into (title, command) pairs.

    Comments, blank lines and ``set`` before the first step are left out: they shape a script, but would end an interactive shell at its
    first failing command. Any other code before the first step becomes a step of its own.

    Raises:
        TaskError: A step holds no command.
    """
    marks = list(_STEP.finditer(script))
    if not marks:
        body = "\n".join(line for number, line in enumerate(script.splitlines()) if number or not line.startswith("#!"))
        return (("solve", f"(\n{body.strip()}\n)"),) if body.strip() else ()
    steps = []
    setup = [line for line in script[: marks[0].start()].splitlines() if not _SETUP_LINE.match(line)]
    if setup:
        steps.append(("set up", "\n".join(setup)))
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        command = script[mark.end() : following.start() if following else len(script)].strip()
        title = mark["title"].strip()
        if not command:
            raise TaskError(f"{file}: the step {title!r} holds no command")
        steps.append((title, command))
    return tuple(steps)


def parse_slips(text: str, *, n_steps: int, file: str | Path) -> tuple[Slip, ...]:
    """Read the text of a ``slips.json``; raises ``TaskError`` on anything but a list of valid ``step``/``command``/``kind`` records."""
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise TaskError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(records, list):
        raise TaskError(f"{file}: expected a list of slips, got {type(records).__name__}")
    slips = []
    for index, record in enumerate(records):
        if not isinstance(record, dict) or set(record) != {"step", "command", "kind"}:
            raise TaskError(f"{file}: slip {index}: expected an object with the keys step, command and kind, got {record!r}")
        step, command, kind = record["step"], record["command"], record["kind"]
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < n_steps:
            raise TaskError(f"{file}: slip {index}: step = {step!r}: expected an index from 0 to {n_steps - 1}")
        if not (isinstance(command, str) and command.strip() and isinstance(kind, str) and kind):
            raise TaskError(f"{file}: slip {index}: command and kind must be non-empty strings, got {command!r} and {kind!r}")
        slips.append(Slip(step, command, kind))
    return tuple(slips)


def strip_canary(text: str) -> str:
    """Take leading comment lines that hold a canary off an instruction, as Harbor does."""
    lines = text.splitlines(keepends=True)
    start = 0
    for number, line in enumerate(lines):
        stripped = line.strip()
        if stripped.startswith(("#", "<!--")) and "canary" in stripped.lower():
            start = number + 1
        elif stripped:
            break
    return "".join(lines[start:]).strip()


def dockerfile_workdir(text: str) -> str:
    """The directory a Dockerfile leaves its container in: its ``WORKDIR`` lines applied in order, ``/`` without any."""
    workdir = "/"
    for line in text.splitlines():
        word, _, argument = line.strip().partition(" ")
        if word.upper() == "WORKDIR" and argument.strip():
            try:
                target = shlex.split(argument)[0]
            except ValueError:
                target = argument.strip()
            workdir = target if target.startswith("/") else f"{workdir.rstrip('/')}/{target}"
    return workdir


def content_digest(entries: Iterable[tuple[str, bytes, bool]]) -> str:
    """SHA-256 (hex) over (relative path, contents, is executable), independent of their order."""
    digest = hashlib.sha256()
    for name, content, executable in sorted(entries):
        digest.update(f"{name}\0{int(executable)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def directory_digest(root: Path) -> str:
    """``content_digest`` of a task directory on disk; caches left by tools are not part of it.

    Raises:
        TaskError: A symlink points outside the task, or a file cannot be read.
    """
    return content_digest(_entries(root.resolve(), root))


def _entries(root: Path, directory: Path) -> Iterable[tuple[str, bytes, bool]]:
    try:
        for path in directory.iterdir():
            if path.name in _IGNORED_NAMES:
                continue
            name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.resolve().relative_to(root).as_posix()
            if path.is_symlink():
                if not path.resolve().is_relative_to(root):
                    raise TaskError(f"{path}: the symlink points outside the task directory, to {path.readlink()}")
                yield name, b"-> " + str(path.readlink()).encode(), False
            elif path.is_dir():
                yield from _entries(root, path)
            elif path.is_file():
                yield name, path.read_bytes(), bool(path.stat().st_mode & 0o100)
            else:
                raise TaskError(f"{path}: expected a file, a directory or a symlink")
    except OSError as error:
        raise TaskError(f"{error.filename}: cannot be read: {error.strerror}") from None
