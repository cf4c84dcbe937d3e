"""records-merge: look at two lists, merge them in an order, take the first or last line, count, clean up.

What has to be decided: which column holds the number (found by looking), how to sort, which end, whether to delete.
"""

from __future__ import annotations

from t1_env.tasks.clauses import records
from t1_env.tasks.instance import Builder, Instance

NAME = "records-merge"
DESCRIPTION = "Merge two lists in the order asked for, pick a line, count lines and clean up."
CATEGORY = "data"
LEVELS = (1, 2, 3)

ROUNDS = {1: 1, 2: 2, 3: 4}


def generate(seed: int, level: int) -> Instance:
    """One instance; level 2 merges two pairs of lists, level 3 four."""
    build = Builder(NAME, level, seed)
    for number in range(ROUNDS[level]):
        _merge(build, number)
    return build.build()


def _merge(build: Builder, number: int) -> None:
    rng = build.stream(f"merge-{number}")
    lists = records.look_at_lists(build)
    path = f"{build.draw()}.txt"
    merged = records.merge(build, lists, path, rng.choice(records.ORDERS))
    records.end_line(build, path, merged, f"{build.draw()}.txt", rng.choice(("first", "last")))
    if build.level > 1 or rng.random() < 0.5:
        records.count_lines(build, path, merged, f"{build.draw()}.txt")
    else:
        records.delete_lists(build, lists)
    if build.level > 1:
        records.delete_lists(build, lists)
