"""hand-over: recombine what the other families ask for, on one file: fetch it, count in it, protect it, clean up behind it.

Meant to be held out from training: every part occurs in another family, the combination and part of the wording do not.
"""

from __future__ import annotations

from t1_env.tasks.clauses import files, logs, modes
from t1_env.tasks.instance import Builder, Instance

NAME = "hand-over"
DESCRIPTION = "Fetch a log found by looking, count lines in it, decide who may read it and clean up behind it."
CATEGORY = "files"
LEVELS = (1, 2, 3)

ROUNDS = {1: 1, 2: 2, 3: 4}


def generate(seed: int, level: int) -> Instance:
    """One instance; level 2 hands over two logs, level 3 four."""
    build = Builder(NAME, level, seed)
    for number in range(ROUNDS[level]):
        _hand_over(build, number)
    return build.build()


def _hand_over(build: Builder, number: int) -> None:
    rng = build.stream(f"hand-over-{number}")
    level = rng.choice(logs.LOG_LEVELS)
    scene = files.look_into(build, ("log", "tmp", "txt"), contents={"log": _log(build, number, level)})
    target = build.draw("place")
    build.directory(target)
    path = files.transfer(build, scene, "log", target, move=rng.random() < 0.5)
    logs.count_hits(build, logs.Log(path, scene.contents["log"], level), f"{build.draw()}.txt")
    modes.set_mode(build, path, rng.choice(modes.FILE_MODES), called="the log in " + target)
    deleted, kept = rng.choice((("tmp", "txt"), ("txt", "tmp")))
    files.delete(build, scene, deleted, keep=kept)


def _log(build: Builder, number: int, level: str) -> tuple[str, ...]:
    return logs.log_lines(build, f"hand-over-{number}", level, hits=build.stream(f"hits-{number}").randrange(1, 4))
