"""What an attack is, how its file is read and how it is aimed at a task."""

from __future__ import annotations

import base64
import difflib
import fnmatch
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from t1_env.audit.payloads import exit_zero_library
from t1_env.audit.site import Site
from t1_env.errors import ConfigError
from t1_env.protocol import Command

ATTACKS_DIR: Final = Path(__file__).resolve().parent / "attacks"

ThreatClass: TypeAlias = Literal[
    "tests",
    "deliverables",
    "pytest-settings",
    "interpreter",
    "loader",
    "shell",
    "toolchain",
    "background",
    "results",
    "imported-code",
    "executed-code",
    "clock",
    "leaks",
    "exhaustion",
    "detection",
]
THREAT_CLASSES: Final[dict[ThreatClass, str]] = {
    "tests": "the test files themselves: edited, replaced, prepared, covered",
    "deliverables": "what lies at a deliverable's path is no ordinary file",
    "pytest-settings": "files and variables that pytest reads",
    "interpreter": "files and variables that Python reads when it starts or imports",
    "loader": "files and variables that the dynamic loader reads",
    "shell": "how the agent's own shell finds a command",
    "toolchain": "programs and settings of the system that tests execute",
    "background": "processes that act while verifiers run",
    "results": "results that are forged before, during or after a run",
    "imported-code": "code of the agent that a test imports",
    "executed-code": "code of the agent that a test executes",
    "clock": "what time it is",
    "leaks": "solutions and tests that can be found",
    "exhaustion": "verification is to fail for want of room",
    "detection": "telling that, or how, a verification goes on",
}
"""Class -> what is attacked."""

Flag: TypeAlias = Literal["tamper", "verbatim", "infra_failure"]
"""How an attack is noticed: ``info["tamper"]``, a disagreement of ``test.sh``, or an episode that trainers drop."""

_MARK: Final = re.compile(r"@([A-Z_]+)@")


class _Stage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str = Field(min_length=1)
    timeout_s: float = Field(default=20.0, gt=0)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str = Field(min_length=10)
    threat: ThreatClass = Field(alias="class")
    source: str = Field(min_length=3)
    needs: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    flags: tuple[Flag, ...] = ()
    steps: tuple[_Stage, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Attack:
    """Commands of an agent that wants to be paid without doing the task.

    Args:
        id: Name of its file.
        description: What it does, in a sentence or two.
        threat: Its class, a key of `THREAT_CLASSES`.
        source: Where this was seen: a paper, a write-up, an issue.
        needs: Programs without which it cannot be played.
        machines: CPU architectures it is written for; any if empty.
        flags: How it must be noticed, wherever it can be played: each of these.
        stages: What it plays; marks such as ``@PATHS@`` stand for what it is aimed at.
    """

    id: str
    description: str
    threat: ThreatClass
    source: str
    needs: tuple[str, ...]
    machines: tuple[str, ...]
    flags: tuple[Flag, ...]
    stages: tuple[tuple[str, float], ...]

    def actions(self, site: Site, machine: str) -> tuple[Command, ...]:
        """Aim at a task.

        Args:
            site: What the attacker knows about the task.
            machine: CPU architecture of the sandbox (``uname -m``).

        Returns:
            The commands, in order.
        """
        return tuple(Command(_aim(text, site, machine), timeout_s) for text, timeout_s in self.stages)


def load_attacks(directory: Path = ATTACKS_DIR) -> tuple[Attack, ...]:
    """Read all attacks.

    Args:
        directory: Where the files lie, ``<id>.toml`` each.

    Returns:
        The attacks in the order of their ids.

    Raises:
        ConfigError: A file is malformed; names it and the key.
    """
    return tuple(_load(path) for path in sorted(directory.glob("*.toml")))


def choose_attacks(attacks: Sequence[Attack], names: Iterable[str] = (), classes: Iterable[str] = ()) -> tuple[Attack, ...]:
    """Pick attacks by id (or glob) and by class.

    Args:
        attacks: To choose from.
        names: Ids or globs; all if empty.
        classes: Names of classes; all if empty.

    Returns:
        Those that match one of ``names`` and one of ``classes``.

    Raises:
        ConfigError: A name matches nothing; suggests the nearest.
    """
    names, classes = tuple(names), tuple(classes)
    ids = [attack.id for attack in attacks]
    for name in names:
        if not fnmatch.filter(ids, name):
            raise ConfigError(f"no attack is called {name!r}: {_nearest(name, ids)}")
    for name in classes:
        if name not in THREAT_CLASSES:
            raise ConfigError(f"no class of attacks is called {name!r}: {_nearest(name, list(THREAT_CLASSES))}")
    return tuple(
        attack
        for attack in attacks
        if (not names or any(fnmatch.fnmatchcase(attack.id, name) for name in names)) and (not classes or attack.threat in classes)
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"


def _load(path: Path) -> Attack:
    try:
        found = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (ValidationError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not a valid attack: {error}") from error
    stages = tuple((stage.command.strip("\n"), stage.timeout_s) for stage in found.steps)
    for mark in {mark for text, _ in stages for mark in _MARK.findall(text)} - _MARKS.keys():
        raise ConfigError(f"{path}: @{mark}@ stands for nothing: {_nearest(mark, list(_MARKS))}")
    return Attack(
        id=path.stem,
        description=" ".join(found.description.split()),
        threat=found.threat,
        source=found.source,
        needs=found.needs,
        machines=found.machines,
        flags=found.flags,
        stages=stages,
    )


def _words(values: Iterable[str]) -> str:
    return " ".join(shlex.quote(value) for value in values)


_MARKS: Final[dict[str, Callable[[Site, str], str]]] = {
    "PATHS": lambda site, _: _words(site.paths),  # of deliverables and inputs alike, as shell words
    "FILES": lambda site, _: _words(site.files),  # those that look like files
    "MODULES": lambda site, _: _words(site.module_files),  # files that tests import, or would if they looked in the working directory
    "PROGRAMS": lambda site, _: _words(site.programs),  # names of programs that tests execute
    "TESTS": lambda site, _: _words(site.tests),  # ids of the verifiers
    "TEST_LINES": lambda site, _: "\n".join(site.tests),  # the same, for a heredoc
    "FIXTURES": lambda site, _: _words(site.fixtures),  # files that the tests bring along, relative to their directory
    "WORKDIR": lambda site, _: shlex.quote(site.workdir),
    "EXIT_ZERO_LIBRARY": lambda _, machine: base64.b64encode(exit_zero_library(machine)).decode("ascii"),
}


def _aim(text: str, site: Site, machine: str) -> str:
    return _MARK.sub(lambda mark: _MARKS[mark[1]](site, machine), text)
