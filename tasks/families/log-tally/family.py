"""log-tally: find the log that has lines of one level, extract and count them, then keep, delete or empty it.

What has to be decided: which log (found by looking), all lines or the first, lines or their number, ``>`` or ``>>``, ``rm`` or empty.
"""

from __future__ import annotations

from t1_env.tasks.clauses import logs
from t1_env.tasks.instance import Builder, Instance

NAME = "log-tally"
DESCRIPTION = "Find the log with lines of one level, extract and count them, then keep, delete or empty the log."
CATEGORY = "logs"
LEVELS = (1, 2, 3)

ROUNDS = {1: 1, 2: 2, 3: 4}


def generate(seed: int, level: int) -> Instance:
    """One instance; level 2 has two directories of logs, level 3 four."""
    build = Builder(NAME, level, seed)
    for number in range(ROUNDS[level]):
        _tally(build, number)
    return build.build()


def _tally(build: Builder, number: int) -> None:
    rng = build.stream(f"tally-{number}")
    wanted, other = logs.find_log(build, rng.choice(logs.LOG_LEVELS))
    logs.extract(build, wanted, f"{build.draw()}.txt", rng.choice(("all", "first", "append")))
    logs.count_hits(build, wanted, f"{build.draw()}.txt")
    logs.dispose(build, wanted, other, rng.choice(("delete", "empty")))
