"""Agents that do no work and mean no harm: what a task pays them says how much its verifiers ask for."""

from __future__ import annotations

import random
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from t1_env.audit.site import Site, survey
from t1_env.env import TerminalEnv
from t1_env.protocol import Action, Submit
from t1_env.tasks import Task

RANDOM_COMMANDS: Final = 12
"""Commands of a random episode."""

_VOCABULARY: Final = (
    *("ls -la {a}", "cat {a}", "touch {a}", "mkdir -p {a}", "echo {word} > {a}", "echo {word} >> {a}", "rm -f {a}", "rm -rf {a}"),
    *("cp -r {a} {b}", "mv {a} {b}", "ln -s {a} {b}", "chmod 644 {a}", "chmod 755 {a}", "chmod 600 {a}", "gzip -k {a}"),
    *("sort {a} > {b}", "sort -u -o {a} {a}", "head -n 1 {a} > {b}", "tail -n 2 {a} > {b}", "wc -l < {a} > {b}"),
    *("grep {word} {a} > {b}", "grep -c {word} {a} > {b}", "sed -i s/{word}/{other}/ {a}", "cut -d , -f 1 {a} > {b}"),
    *("find {dir} -name '*.{suffix}' -delete", "find {dir} -type f > {b}", "tar -cf {b} -C {dir} .", "tar -xzf {a} -C {dir}"),
    *("awk '{{print $1}}' {a} > {b}", "tr a-z A-Z < {a} > {b}", "sha256sum {a} > {b}"),
)
_WORDS: Final = ("hi", "error", "ERROR", "ALARM", "0", "1", "2", "3", "name", "total", "true", "done", "x")
_SUFFIXES: Final = ("tmp", "txt", "log", "bak", "csv")


@dataclass(frozen=True, slots=True)
class IdleRewards:
    """What agents that do no work are paid by a task.

    Args:
        task: Id of the task.
        verifiers: Number of its verifiers.
        named_paths: Return of an agent that makes an empty file at every path the instruction names and that does not exist.
        random: Return of each random episode.
        random_best: The most verifiers that passed at the same time in any of them, less those that pass untouched.
        weak: Verifiers that pass after something inert was done to the paths of the task.
    """

    task: str
    verifiers: int
    named_paths: float
    random: tuple[float, ...]
    random_best: int
    weak: tuple[str, ...]

    @property
    def random_mean(self) -> float:
        """Mean return of the random episodes; 0 without any."""
        return sum(self.random) / len(self.random) if self.random else 0.0


def weak_verifiers(task: Task, *, sandbox: Any = "local") -> frozenset[str]:
    """Verifiers that need no work: they pass when paths of the task are touched, filled with junk, removed, or made into something else.

    Args:
        task: The task.
        sandbox: Backend name or factory.

    Returns:
        Ids of those that do not pass untouched and pass after some inert command.
    """
    found: set[str] = set()
    for commands in _inert_episodes(survey(task)):
        for passing in _play(task, commands, sandbox).after:
            found |= passing
    return frozenset(found)


def idle_rewards(task: Task, weak: frozenset[str], *, episodes: int = 20, sandbox: Any = "local") -> IdleRewards:
    """Play the agents that do no work.

    Args:
        task: The task.
        weak: From `weak_verifiers`.
        episodes: Number of random episodes; the commands of each are a function of its number and the task's paths.
        sandbox: Backend name or factory.

    Returns:
        What they were paid.
    """
    site = survey(task)
    named = _play(task, [_touch(site.named)], sandbox)
    played = [_play(task, random_commands(site, number), sandbox) for number in range(episodes)]
    best = max((len(episode.best) for episode in played), default=0)
    return IdleRewards(task.id, named.total, named.reward, tuple(episode.reward for episode in played), best, tuple(sorted(weak)))


def random_commands(site: Site, seed: int) -> list[str]:
    """Commands of one random episode: plausible, aimless, over the paths of a task.

    Args:
        site: The task.
        seed: Any integer; equal seeds give equal commands.
    """
    rng = random.Random(f"random-commands/{seed}")
    paths = [*site.paths, f"{site.workdir}/new"]
    commands = []
    for _ in range(RANDOM_COMMANDS):
        one, other = rng.choice(paths), rng.choice(paths)
        words = {"word": rng.choice(_WORDS), "other": rng.choice(_WORDS), "suffix": rng.choice(_SUFFIXES)}
        quoted = {"a": shlex.quote(one), "b": shlex.quote(other), "dir": shlex.quote(str(PurePosixPath(one).parent))}
        commands.append(rng.choice(_VOCABULARY).format(**words, **quoted))
    return commands


def _inert_episodes(site: Site) -> list[list[str]]:
    paths, files = " ".join(map(shlex.quote, site.paths)), " ".join(map(shlex.quote, site.files))
    if not paths:
        return []

    def each(words: str, command: str) -> str:
        return f"for path in {words}; do {command}; done 2>/dev/null"

    made = [_touch(site.files), *(each(files, f'[ -d "$path" ] || chmod {mode} "$path"') for mode in ("755", "600", "700", "644"))]
    filled = [each(files, f'[ -d "$path" ] || {fill}') for fill in ('echo junk >> "$path"', r'printf "#!/bin/sh\nexit 0\n" > "$path"')]
    gone = each(paths, 'rm -rf "$path"')
    others = [gone]
    for command in ('mkdir -p "$path"', 'ln -s /etc/hostname "$path"', 'ln -s nowhere "$path"', ': > "$path"'):
        others += [each(files, f'rm -rf "$path"; mkdir -p "${{path%/*}}"; {command}')]
    return [[*made, *filled], others, [each(paths, '[ -e "$path" ] || mkdir -p "$path"')]]


def _touch(paths: Sequence[str]) -> str:
    words = " ".join(map(shlex.quote, paths))
    return f'for path in {words}; do mkdir -p "${{path%/*}}"; [ -e "$path" ] || : > "$path"; done 2>/dev/null'


@dataclass(frozen=True, slots=True)
class _Episode:
    """Verifiers in all, the return, and which ones that did not pass untouched passed after each step."""

    total: int
    reward: float
    after: tuple[frozenset[str], ...]

    @property
    def best(self) -> frozenset[str]:
        return max(self.after, key=len, default=frozenset())


def _play(task: Task, commands: Sequence[str], sandbox: Any) -> _Episode:
    env = TerminalEnv(task=task, sandbox=sandbox, max_turns=len(commands) + 2, end_on_solved=False)
    try:
        untouched = env.reset(seed=0)[1]["verifiers"]
        reward, after = 0.0, []
        actions: list[Action] = [*commands, Submit()]
        for action in actions:
            _, gain, terminated, truncated, info = env.step(action)
            reward += float(gain)
            after.append(frozenset(name for name, passed in info["verifiers"].items() if passed and not untouched[name]))
            if terminated or truncated:
                break
        return _Episode(len(untouched), reward, tuple(after))
    finally:
        env.close()
