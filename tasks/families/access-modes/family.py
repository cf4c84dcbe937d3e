"""access-modes: find the file that is open to everyone, set modes, write a line to a private file or give a script the right to run.

What has to be decided: which file (found by looking), which of six modes a sentence means, ``>`` or ``>>``.
"""

from __future__ import annotations

from t1_env.tasks.clauses import files, modes
from t1_env.tasks.instance import Builder, Instance

NAME = "access-modes"
DESCRIPTION = "Decide who may read, write and run files, one of which has to be found first."
CATEGORY = "permissions"
LEVELS = (1, 2, 3)

ROUNDS = {1: 1, 2: 2, 3: 4}


def generate(seed: int, level: int) -> Instance:
    """One instance; level 2 has two rounds of requirements, level 3 four."""
    build = Builder(NAME, level, seed)
    for number in range(ROUNDS[level]):
        _grant(build, number)
    return build.build()


def _grant(build: Builder, number: int) -> None:
    rng = build.stream(f"grant-{number}")
    modes.close_open_file(build, rng.choice(modes.OPEN_FILE_MODES))
    if rng.random() < 0.6:
        path = f"{build.draw()}.txt"
        files.write_line(build, path, "create")
        modes.set_mode(build, path, rng.choice(modes.FILE_MODES))
    else:
        files.write_line(build, f"{build.draw()}.txt", rng.choice(("replace", "append")))
        modes.script(build, f"{build.draw()}.sh", rng.choice(modes.SCRIPT_MODES))
