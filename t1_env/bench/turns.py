"""Whether a long history makes a turn more expensive."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Final

from t1_env.bench.catalogue import Benchmark, Settings
from t1_env.bench.figures import FigureSpec, at_most, ratio
from t1_env.bench.local import open_env, step_checked
from t1_env.bench.measure import Measured, MeasurementError, Role, Series, Tick
from t1_env.bench.shells import open_shell, run_checked
from t1_env.sandbox.local import LocalSandbox

YOUNG, OLD, SPAN = 3, 300, 5
"""Turns ``YOUNG`` and ``OLD``, and the ``SPAN - 1`` turns after each, are measured."""

_LINE: Final = "of a turn that prints what a build or a listing might"
_LINES: Final = 30
_COMMAND: Final = f'for ((i = 0; i < {_LINES}; i++)); do echo "line $i {_LINE}"; done'
"""About 2 kB from builtins alone: no new process hides what reading, filtering and the screen cost."""

_LIMIT: Final = 1.1

Episode = Callable[[], contextlib.AbstractContextManager[Callable[[], object]]]
"""Opens an episode and gives what plays one turn of it."""


def benchmarks(settings: Settings) -> list[Benchmark]:
    """Return the benchmarks of long episodes."""
    with_env = f"`env.step` (the same command; nothing changes, so no verifier runs) of {settings.task}"
    return [
        _benchmark("local-turns", "session", "`Session.run` and `Session.screen()`", session_episode, settings.count(20, least=4)),
        _benchmark("local-turns-env", "env.step", with_env, lambda: env_episode(settings.task), settings.count(20, least=4)),
    ]


def _benchmark(name: str, what: str, turn: str, episode: Episode, pairs: int) -> Benchmark:
    young, old = f"turn {YOUNG}", f"turn {OLD}"

    def run(tick: Tick) -> Measured:
        measured = {young: Series(Role.OURS), old: Series(Role.OURS)}
        order = random.Random(0)
        for done in range(pairs):
            early, late = age_pair(episode, order)
            measured[young].blocks.append(early)
            measured[old].blocks.append(late)
            tick((done + 1) / pairs)
        return measured

    definition = (
        f"{turn} of a command that prints {_LINES} lines (2 kB). Two episodes at a time, one at turn {OLD}, one at turn {YOUNG}, play "
        f"{SPAN} turns each in random alternation; the ratio of the two medians is taken for each pair of episodes; median of {pairs} "
        "pairs."
    )
    spec = FigureSpec(
        f"{name}-ratio", f"local: {what}, turn {OLD} / turn {YOUNG}", definition, "x", ratio(old, young), old, at_most(_LIMIT)
    )
    return Benchmark(name, f"what turn {OLD} costs beside turn {YOUNG} ({what})", (spec,), run)


def age_pair(episode: Episode, order: random.Random) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Play one episode to turn ``OLD`` and another to turn ``YOUNG``, then measure turns of both in alternation.

    Args:
        episode: Opens an episode.
        order: Decides who plays first in each alternation.

    Returns:
        Seconds of ``SPAN`` turns of the young and of the old episode.
    """
    with episode() as young, episode() as old:
        for turn, played in ((old, OLD - 1), (young, YOUNG - 1)):
            for _ in range(played):
                turn()
        samples: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(SPAN):
            for is_old in order.sample([False, True], 2):
                start = time.perf_counter()
                (old if is_old else young)()
                samples[is_old].append(time.perf_counter() - start)
    return tuple(samples[False]), tuple(samples[True])


@contextlib.contextmanager
def session_episode() -> Iterator[Callable[[], object]]:
    """An episode of bare shell and screen."""
    with open_shell(LocalSandbox()) as session:

        def turn() -> None:
            result = run_checked(session, _COMMAND)
            session.screen()
            _check_lines(result.output)

        yield turn


@contextlib.contextmanager
def env_episode(task: str) -> Iterator[Callable[[], object]]:
    """An episode of the environment."""
    with open_env(task) as env:
        yield lambda: _check_lines(step_checked(env, _COMMAND, verified=False)["output"])


def _check_lines(output: str) -> None:
    if output.count("\n") != _LINES:
        raise MeasurementError(f"a turn printed {output.count(chr(10))} lines, expected {_LINES}: {output[-200:]!r}")
