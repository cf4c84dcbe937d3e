"""What a family's ``generate`` returns, and the builder most families make it with.

A family composes an instance from clauses. Each clause adds a line to the instruction, files to the environment, steps to the oracle,
slips (plausible wrong commands) and tests. Everything random comes from named streams of the instance, so that an instance is a pure
function of (family, level, seed) and one part can change without disturbing the others.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from t1_env.errors import TaskError
from t1_env.tasks.task import Slip
from t1_env.tasks.words import NAMES, PLACES

LEVEL_1_WORDS = {"name": 24, "place": 12}
"""How many words of each kind level 1 draws from: few enough that a very small model learns to copy each of them."""


@dataclass(frozen=True, slots=True)
class Step:
    """One oracle step: a title and the command."""

    title: str
    command: str


@dataclass(frozen=True, slots=True)
class EnvironmentFile:
    """A file of the environment: contents and permission bits."""

    content: bytes
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Instance:
    """One generated task, before it is written out as a Harbor directory.

    Args:
        instruction: Text of ``instruction.md``.
        files: Path relative to ``/app`` -> file.
        steps: The oracle.
        tests: Python source of ``tests/test_outputs.py``.
        slips: Plausible wrong commands, each costing at least one verifier.
        directories: Directories (relative to ``/app``) to create beyond those the files need.
        requires: Programs the oracle needs beyond coreutils.
    """

    instruction: str
    files: Mapping[str, EnvironmentFile]
    steps: tuple[Step, ...]
    tests: str
    slips: tuple[Slip, ...]
    directories: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()


_TEST_HEAD = '''"""Verifiers: one test for each requirement of the instruction."""

from pathlib import Path

APP = Path("/app")


def lines(name):
    """Lines of a regular file under /app."""
    path = APP / name
    assert path.is_file() and not path.is_symlink(), f"{name} is not a file"
    return path.read_text().splitlines()


def mode(name):
    """Permission bits of a path under /app."""
    return (APP / name).stat().st_mode & 0o777
'''


MAX_VERIFIERS = 10
"""Most verifiers of one instance; a longer instruction has several requirements in one verifier."""


@dataclass(frozen=True, slots=True)
class _Check:
    """One test before it is written out."""

    name: str
    requirement: str
    asserts: tuple[str, ...]


@dataclass(slots=True)
class Builder:
    """Collects the parts of one instance.

    Args:
        name: Family.
        level: Level.
        seed: Seed.
    """

    name: str
    level: int
    seed: int
    _said: list[str] = field(default_factory=list)
    _files: dict[str, EnvironmentFile] = field(default_factory=dict)
    _directories: list[str] = field(default_factory=list)
    _steps: list[Step] = field(default_factory=list)
    _slips: list[Slip] = field(default_factory=list)
    _checks: list[_Check] = field(default_factory=list)
    _requires: list[str] = field(default_factory=list)
    _pools: dict[str, list[str]] = field(default_factory=dict)

    def stream(self, part: str) -> random.Random:
        """A random stream of its own for one part of the instance."""
        return random.Random(f"{self.name}/{self.level}/{self.seed}/{part}")

    def draw(self, kind: str = "name") -> str:
        """Draw a word that this instance has not used yet; ``kind`` is ``name`` or ``place``. Level 1 uses fewer words."""
        if kind not in self._pools:
            words = list({"name": NAMES, "place": PLACES}[kind])
            if self.level == 1:
                words = words[: LEVEL_1_WORDS[kind]]
            self.stream(f"draw-{kind}").shuffle(words)
            self._pools[kind] = words
        if not self._pools[kind]:
            raise TaskError(f"family {self.name!r}, level {self.level}: all words of kind {kind!r} are used; draw fewer")
        return self._pools[kind].pop()

    def say(self, line: str) -> None:
        """Add a line to the instruction."""
        self._said.append(line)

    def file(self, path: str, lines: Sequence[str], *, mode: int = 0o644) -> None:
        """Add a text file to the environment."""
        self._files[path] = EnvironmentFile("".join(f"{line}\n" for line in lines).encode(), mode)

    def directory(self, path: str) -> None:
        """Add an empty directory to the environment."""
        self._directories.append(path)

    def step(self, title: str, command: str, *, slips: Mapping[str, str] | None = None) -> None:
        """Add an oracle step.

        Args:
            title: What it does.
            command: The command.
            slips: Kind -> a wrong command in its place.
        """
        self._slips.extend(Slip(len(self._steps), wrong, kind) for kind, wrong in (slips or {}).items())
        self._steps.append(Step(title, command))

    def test(self, name: str, requirement: str, *asserts: str) -> None:
        """Add a verifier.

        Args:
            name: What must hold, in snake case; a name that is taken gets a number.
            requirement: The line of the instruction it checks.
            asserts: Python statements, run in order.
        """
        taken = {check.name for check in self._checks}
        numbered = (f"{name}_nr_{number}" for number in itertools.count(2))
        free = name if name not in taken else next(each for each in numbered if each not in taken)
        self._checks.append(_Check(free, requirement, asserts))

    def needs(self, *programs: str) -> None:
        """Declare programs the oracle uses beyond coreutils."""
        self._requires.extend(program for program in programs if program not in self._requires)

    def build(self) -> Instance:
        """The finished instance. Level 1 goes without a preamble: its paths are relative to where the shell starts."""
        preamble = [] if self.level == 1 else ["In /app:"]
        return Instance(
            instruction="\n".join([*preamble, *self._said]) + "\n",
            files=dict(sorted(self._files.items())),
            steps=tuple(self._steps),
            tests="\n\n".join([_TEST_HEAD, *map(_test_source, _merged(self._checks))]),
            slips=tuple(self._slips),
            directories=tuple(sorted(self._directories)),
            requires=("bash", *sorted(self._requires)),
        )


def _merged(checks: Sequence[_Check]) -> list[_Check]:
    """At most ``MAX_VERIFIERS`` checks: first one for each line of the instruction, then neighbouring lines together."""
    if len(checks) <= MAX_VERIFIERS:
        return list(checks)
    by_line: dict[str, list[_Check]] = {}
    for check in checks:
        by_line.setdefault(check.requirement, []).append(check)
    groups = list(by_line.values())
    count = min(len(groups), MAX_VERIFIERS)
    merged = []
    for index in range(count):
        chunk = [check for group in groups[index * len(groups) // count : (index + 1) * len(groups) // count] for check in group]
        requirement = "; ".join(dict.fromkeys(check.requirement for check in chunk))
        asserts = tuple(dict.fromkeys(statement for check in chunk for statement in check.asserts))
        merged.append(_Check(chunk[0].name if len(chunk) == 1 else f"part_{index + 1}", requirement, asserts))
    return merged


def _test_source(check: _Check) -> str:
    body = "\n".join(f"    {statement}" for statement in check.asserts)
    return f'def test_{check.name}():\n    """{check.requirement}"""\n{body}\n'
