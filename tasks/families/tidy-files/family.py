"""tidy-files: look into a directory, move or copy one file, delete another, write a line.

What has to be decided: which file (its name is found by looking), ``mv`` or ``cp``, whether and what to delete, ``>`` or ``>>``.
"""

from __future__ import annotations

from t1_env.tasks.clauses import files
from t1_env.tasks.instance import Builder, Instance

NAME = "tidy-files"
DESCRIPTION = "Move, copy and delete files found by looking, and write short lines."
CATEGORY = "files"
LEVELS = (1, 2, 3)

SUFFIXES = ("log", "tmp", "txt")
SCENES = {1: 1, 2: 2, 3: 4}


def generate(seed: int, level: int) -> Instance:
    """One instance; level 2 has two directories to tidy, level 3 four, both with counts."""
    build = Builder(NAME, level, seed)
    for number in range(SCENES[level]):
        _tidy(build, number)
    return build.build()


def _tidy(build: Builder, number: int) -> None:
    rng = build.stream(f"tidy-{number}")
    kept, sent, deleted = rng.sample(SUFFIXES, 3)
    target = build.draw("place")
    build.directory(target)
    move = rng.random() < 0.5
    files.write_line(build, f"{build.draw()}.txt", rng.choice(("replace", "append")))
    scene = files.look_into(build, SUFFIXES)
    files.transfer(build, scene, sent, target, move=move)
    files.delete(build, scene, deleted, keep=kept)
    if build.level > 1:
        files.count_files(build, scene.place, 1 if move else 2, f"{build.draw()}.txt")
