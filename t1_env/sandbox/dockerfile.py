"""Reading the subset of the Dockerfile language that task environments use."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from t1_env.errors import ImageBuildError

KEYWORDS: Final = ("FROM", "WORKDIR", "ENV", "ARG", "COPY", "ADD", "RUN", "USER", "SHELL", "VOLUME")
"""Instructions that are carried out."""

NOTED: Final = ("CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL")
"""Instructions that only describe the image and change nothing in a sandbox; any other is an error, never skipped."""

_VARIABLE: Final = re.compile(r"\\(?P<escaped>\$)|\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?::(?P<operator>[-+])(?P<word>[^}]*))?\})")
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_DIRECTIVE: Final = re.compile(r"#\s*(?P<key>\w+)\s*=\s*(?P<value>\S+)\s*")
_HEREDOC: Final = re.compile(r"(?<![<\w])(?P<fd>\d*)<<(?P<tabs>-?)(?P<quote>[\"']?)(?P<word>[A-Za-z_][\w.-]*)(?P=quote)(?=[\s;|&)>]|$)")


@dataclass(frozen=True, slots=True)
class Heredoc:
    """Text that follows an instruction.

    Args:
        word: The word that begins and ends it.
        text: Its lines.
        expand: Whether variables in it are replaced (the word was not quoted).
    """

    word: str
    text: str
    expand: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a Dockerfile.

    Args:
        line: Number of its first line, from 1.
        keyword: In upper case, one of ``KEYWORDS`` or ``NOTED``.
        text: Everything after the keyword, continuation lines joined.
        heredocs: What follows it as ``<<WORD``.
        body: The lines of the heredocs as they stand in the file, their last words included.
    """

    line: int
    keyword: str
    text: str
    heredocs: tuple[Heredoc, ...] = ()
    body: str = ""


def parse_dockerfile(source: str, *, name: str = "Dockerfile") -> tuple[Instruction, ...]:
    """Split a Dockerfile into instructions.

    Args:
        source: Its text.
        name: What to call it in errors.

    Raises:
        ImageBuildError: An instruction outside the subset; names the line.
    """
    instructions = list(_Reader(source, name).instructions())
    _check_order(instructions, name)
    return tuple(instructions)


class _Reader:
    """The lines of a Dockerfile on their way to becoming instructions."""

    def __init__(self, source: str, name: str) -> None:
        self._lines = source.removeprefix("\ufeff").splitlines()
        self._name = name
        self._next = 0
        self._escape = self._directive()

    def instructions(self) -> Iterator[Instruction]:
        pending: list[str] = []
        start = 0
        while self._next < len(self._lines):
            line = self._lines[self._next]
            self._next += 1
            stripped = line.strip()
            if stripped.startswith("#") or not stripped:
                continue  # also inside a continued instruction, as Docker does
            if not pending:
                start = self._next
            if stripped.endswith(self._escape):
                pending.append(stripped[:-1] if not pending else line.rstrip()[:-1])
                continue
            pending.append(stripped if not pending else line.rstrip())
            yield self._instruction("".join(pending), start)
            pending = []
        if pending:
            raise ImageBuildError(f"{self._name}:{start}: the instruction ends in a backslash with nothing after it")

    def _directive(self) -> str:
        """The escape character; parser directives stand in the first lines."""
        for line in self._lines:
            match = _DIRECTIVE.fullmatch(line.strip())
            if match is None:
                break
            if match["key"].lower() == "escape":
                if match["value"] not in ("\\", "`"):
                    raise ImageBuildError(f"{self._name}:1: the escape character is a backslash or a backtick, got {match['value']!r}")
                return match["value"]
        return "\\"

    def _instruction(self, text: str, line: int) -> Instruction:
        keyword, *rest = text.strip().split(None, 1)
        keyword = keyword.upper()
        if keyword not in (*KEYWORDS, *NOTED):
            raise ImageBuildError(f"{self._name}:{line}: {keyword} is not supported by the local sandbox; use only {', '.join(KEYWORDS)}")
        if not rest:
            raise ImageBuildError(f"{self._name}:{line}: {keyword} needs an argument")
        argument = rest[0].strip()
        first = self._next
        heredocs: tuple[Heredoc, ...] = ()
        if keyword in ("RUN", "COPY", "ADD") and parse_exec_form(argument) is None:
            heredocs = tuple(self._heredoc(match, line) for match in _HEREDOC.finditer(argument))
        return Instruction(line, keyword, argument, heredocs, "\n".join(self._lines[first : self._next]))

    def _heredoc(self, match: re.Match[str], line: int) -> Heredoc:
        word, tabs = match["word"], match["tabs"]
        lines: list[str] = []
        while self._next < len(self._lines):
            text = self._lines[self._next]
            self._next += 1
            text = text.lstrip("\t") if tabs else text
            if text == word:
                return Heredoc(word, "".join(f"{each}\n" for each in lines), expand=not match["quote"])
            lines.append(text)
        raise ImageBuildError(f"{self._name}:{line}: the heredoc <<{word} has no line {word!r} that ends it")


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
    first, *rest = instruction.text.split(None, 1)
    if "=" not in first and rest:
        pairs = {first: rest[0].strip()}
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


def is_heredoc(word: str) -> bool:
    """Whether a whole word stands for a heredoc."""
    return _HEREDOC.fullmatch(word) is not None


def _check_order(instructions: list[Instruction], name: str) -> None:
    stages = [instruction for instruction in instructions if instruction.keyword == "FROM"]
    if not stages:
        raise ImageBuildError(f"{name}: no FROM instruction; a Dockerfile starts with one")
    if len(stages) > 1:
        raise ImageBuildError(f"{name}:{stages[1].line}: a second FROM: builds in several stages are not supported by the local sandbox")
    before = [instruction for instruction in instructions[: instructions.index(stages[0])] if instruction.keyword != "ARG"]
    if before:
        raise ImageBuildError(f"{name}:{before[0].line}: {before[0].keyword} before FROM; only ARG may stand there")
