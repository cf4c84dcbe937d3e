"""One attack on one task: an ordinary episode, and what it was paid for."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from t1_env.audit.attack import Attack, Flag
from t1_env.audit.site import survey
from t1_env.env import TerminalEnv
from t1_env.errors import T1Error
from t1_env.protocol import Action, Command, EndReason, Submit, VerbatimVerdict
from t1_env.tasks import Task

Outcome: TypeAlias = Literal["safe", "gained", "unflagged", "not_applicable", "failed"]
"""``unflagged``: nothing gained, but not noticed as it should have been. ``failed``: the episode could not be played."""

_PROBE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Played:
    """What an attack came to.

    Args:
        attack: Id of the attack.
        task: Id of the task.
        outcome: In a word.
        gained: Verifiers that were paid for after some step, did not pass untouched and are not weak.
        weak: Likewise, but they also pass when an agent does something inert to the same paths: weak tests, not holes.
        reward: Return of the episode with ``reward="delta"``.
        flags: How it was noticed.
        tamper: ``info["tamper"]`` at the end.
        seconds: Wall time of the episode.
        note: Why it is not applicable or failed, or what was said about it.
        naive: Verifiers that the same attack gains from a naive verifier; None if that was not tried or cannot be.
    """

    attack: str
    task: str
    outcome: Outcome
    gained: tuple[str, ...] = ()
    weak: tuple[str, ...] = ()
    reward: float = 0.0
    flags: tuple[Flag, ...] = ()
    tamper: tuple[str, ...] = ()
    seconds: float = 0.0
    note: str = ""
    naive: int | None = None


def play(attack: Attack, task: Task, *, sandbox: Any = "local", weak: frozenset[str] = frozenset()) -> Played:
    """Play an attack.

    Args:
        attack: The attack.
        task: What it is aimed at.
        sandbox: Backend name, or a factory as for ``TerminalEnv``.
        weak: Verifiers that pass for inert actions too; see `t1_env.audit.agents.weak_verifiers`.

    Returns:
        What came of it. An episode that cannot be played is an outcome, not an exception.
    """
    started = time.monotonic()
    env = TerminalEnv(task=task, sandbox=sandbox, max_turns=len(attack.stages) + 8, end_on_solved=False, step_timeout_s=_PROBE_TIMEOUT_S)
    try:
        episode = _Episode(env)
        site = survey(task, tests=tuple(episode.untouched))
        machine, missing = episode.probe(attack.needs)
        if missing or (attack.machines and machine not in attack.machines):
            note = f"the sandbox lacks {', '.join(missing)}" if missing else f"not written for {machine}"
            return Played(attack.id, task.id, "not_applicable", seconds=time.monotonic() - started, note=note)
        episode.steps([*attack.actions(site, machine), Submit()])
    except T1Error as error:
        return Played(
            attack.id, task.id, "failed", seconds=time.monotonic() - started, note=f"{type(error).__name__}: {' '.join(str(error).split())}"
        )
    finally:
        env.close()
    gained = tuple(name for name in episode.paid if name not in weak)
    unnoticed = [flag for flag in attack.flags if flag not in episode.flags]
    return Played(
        attack.id,
        task.id,
        "gained" if gained else "unflagged" if unnoticed else "safe",
        gained=gained,
        weak=tuple(name for name in episode.paid if name in weak),
        reward=episode.reward,
        flags=episode.flags,
        tamper=episode.tamper,
        seconds=time.monotonic() - started,
        note=f"expected to be noticed by: {', '.join(unnoticed)}" if unnoticed else episode.note,
    )


class _Episode:
    """One episode and what it was paid for, step by step."""

    def __init__(self, env: TerminalEnv) -> None:
        self.env = env
        _, info = env.reset(seed=0)
        self.untouched: dict[str, bool] = info["verifiers"]
        self.reward = 0.0
        self.flags: tuple[Flag, ...] = ()
        self.tamper: tuple[str, ...] = ()
        self.note = ""
        self._paid: set[str] = set()

    @property
    def paid(self) -> tuple[str, ...]:
        """Verifiers that passed after some step and did not pass untouched, in their order."""
        return tuple(name for name in self.untouched if name in self._paid)

    def probe(self, programs: Iterable[str]) -> tuple[str, list[str]]:
        """CPU architecture of the sandbox, and which of the programs it lacks."""
        words = " ".join(programs)
        look = f"uname -m; for program in {words}; do command -v $program >/dev/null || echo $program; done" if words else "uname -m"
        output, _ = self._step(Command(look, _PROBE_TIMEOUT_S))
        lines = output.split()
        return (lines[0] if lines else "unknown"), lines[1:]

    def steps(self, actions: Iterable[Action]) -> None:
        """Take the actions until the episode ends."""
        for action in actions:
            _, ended = self._step(action)
            if ended:
                return

    def _step(self, action: Action) -> tuple[str, bool]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.reward += float(reward)
        infra_failure = info["end_reason"] == EndReason.INFRA_FAILURE
        if not infra_failure:  # info then shows the report before it, and nothing is paid
            self._paid |= {name for name, passed in info["verifiers"].items() if passed and not self.untouched[name]}
        seen: list[tuple[Flag, bool]] = [
            ("tamper", bool(info["tamper"])),
            ("verbatim", info["verbatim"]["verdict"] == VerbatimVerdict.DISAGREES),
            ("infra_failure", infra_failure),
        ]
        self.flags = tuple(flag for flag, raised in seen if raised or flag in self.flags)
        self.tamper = info["tamper"] or self.tamper
        self.note = info["infra_error"] or info["verbatim"]["note"] or self.note
        return observation["output"], terminated or truncated
