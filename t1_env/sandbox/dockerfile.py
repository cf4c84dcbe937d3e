"""Reading the subset of the Dockerfile language that task environments use."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from t1_env.errors import ImageBuildError

KEYWORDS: Final = ("FROM", "WORKDIR", "ENV", "ARG", "COPY", "ADD", "RUN", "USER")
"""Instructions that are understood; any other is an error, never skipped."""

_VARIABLE: Final = re.compile(r"\\(?P<escaped>\$)|\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?::(?P<operator>[-+])(?P<word>[^}]*))?\})")
_NAME: Final = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a Dockerfile.

    Args:
        line: Number of its first line, from 1.
        keyword: In upper case, one of ``KEYWORDS``.
        text: Everything after the keyword, continuation lines joined.
    """

    line: int
    keyword: str
    text: str


def parse_dockerfile(source: str, *, name: str = "Dockerfile") -> tuple[Instruction, ...]:
    """Split a Dockerfile into instructions.

    Args:
        source: Its text.
        name: What to call it in errors.

    Raises:
        ImageBuildError: An instruction outside the subset; names the line.
    """
    instructions: list[Instruction] = []
    pending: list[str] = []
    start = 0
    for number, line in enumerate(source.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("#") or not stripped:
            continue  # also inside a continued instruction, as Docker does
        if not pending:
            start = number
        if stripped.endswith("\\"):
            pending.append(stripped[:-1] if not pending else line.rstrip()[:-1])
            continue
        pending.append(stripped if not pending else line.rstrip())
        instructions.append(_instruction("".join(pending), start, name))
        pending = []
    if pending:
        raise ImageBuildError(f"{name}:{start}: the instruction ends in a backslash with nothing after it")
    _check_order(instructions, name)
    return tuple(instructions)


def substitute(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``$NAME``, ``${NAME}``, ``${NAME:-default}`` and ``${NAME:+value}``; unset names are empty."""

    def replacement(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "$"
        name = match["plain"] or match["name"]
        value = variables.get(name, "")
        if match["operator"] == "-":
            return value or substitute(match["word"], variables)
        if match["operator"] == "+":
            return substitute(match["word"], variables) if value else ""
        return value

    return _VARIABLE.sub(replacement, text)


def parse_pairs(instruction: Instruction, variables: Mapping[str, str], name: str) -> dict[str, str]:
    """The variables that an ``ENV`` instruction sets, in either form (``ENV A=1 B="x y"``, ``ENV A x y``)."""
    first, _, rest = instruction.text.partition(" ")
    if "=" not in first and rest:
        pairs = {first: rest.strip()}
    else:
        pairs = {}
        for word in split_words(instruction, name):
            key, separator, value = word.partition("=")
            if not separator:
                raise ImageBuildError(f"{name}:{instruction.line}: ENV expects NAME=value pairs, got {word!r}")
            pairs[key] = value
    for key in pairs:
        if not _NAME.fullmatch(key):
            raise ImageBuildError(f"{name}:{instruction.line}: {key!r} is not a variable name")
    return {key: substitute(value, variables) for key, value in pairs.items()}


def split_words(instruction: Instruction, name: str) -> list[str]:
    """Words of an instruction, quotes removed.

    Raises:
        ImageBuildError: A quote is not closed.
    """
    try:
        return shlex.split(instruction.text)
    except ValueError as error:
        raise ImageBuildError(f"{name}:{instruction.line}: {instruction.keyword}: {error}") from error


def parse_exec_form(text: str) -> list[str] | None:
    """The words of the JSON form (``["a", "b"]``); None if the text is not in that form."""
    if not text.lstrip().startswith("["):
        return None
    try:
        words = json.loads(text)
    except json.JSONDecodeError:
        return None
    return words if isinstance(words, list) and words and all(isinstance(word, str) for word in words) else None


def _instruction(text: str, line: int, name: str) -> Instruction:
    keyword, _, rest = text.strip().partition(" ")
    keyword = keyword.upper()
    if keyword not in KEYWORDS:
        raise ImageBuildError(f"{name}:{line}: {keyword} is not supported by the local sandbox; use only {', '.join(KEYWORDS)}")
    if not rest.strip():
        raise ImageBuildError(f"{name}:{line}: {keyword} needs an argument")
    return Instruction(line, keyword, rest.strip())


def _check_order(instructions: list[Instruction], name: str) -> None:
    stages = [instruction for instruction in instructions if instruction.keyword == "FROM"]
    if not stages:
        raise ImageBuildError(f"{name}: no FROM instruction; a Dockerfile starts with one")
    if len(stages) > 1:
        raise ImageBuildError(f"{name}:{stages[1].line}: a second FROM: builds in several stages are not supported by the local sandbox")
    before = [instruction for instruction in instructions[: instructions.index(stages[0])] if instruction.keyword != "ARG"]
    if before:
        raise ImageBuildError(f"{name}:{before[0].line}: {before[0].keyword} before FROM; only ARG may stand there")
