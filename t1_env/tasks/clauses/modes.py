"""Clauses about who may read, write and run files."""

from __future__ import annotations

from dataclasses import dataclass

from t1_env.tasks.clauses.files import short_line
from t1_env.tasks.instance import Builder

RULES = {
    0o600: "let only the owner read and write {}",
    0o644: "let all read but only the owner write {}",
    0o444: "let all read but nobody write {}",
    0o640: "let the group read but only the owner write {}",
    0o700: "let only the owner read, write and run {}",
    0o755: "let all read and run but only the owner write {}",
}
"""How an instruction words each mode. Whoever is not named gets nothing; the owner may always read."""

FILE_MODES = (0o600, 0o444, 0o640)
"""Modes for new files: none is what a file gets without a chmod."""

OPEN_FILE_MODES = (0o600, 0o644, 0o444, 0o640)
"""Modes for a file that everyone may write so far."""

SCRIPT_MODES = (0o700, 0o755)

_NEAR = {0o600: 0o640, 0o640: 0o644, 0o444: 0o644, 0o644: 0o600, 0o700: 0o755, 0o755: 0o700}


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that everyone may write, among others of its directory.

    Args:
        path: Path relative to /app.
        text: Its only line.
        others: Paths of the other files, of mode 644.
    """

    path: str
    text: str
    others: tuple[str, ...]


def find_open_file(build: Builder) -> OpenFile:
    """A directory of three files, one of which everyone may write; the oracle step finds it."""
    place = build.draw("place")
    paths = [f"{place}/{build.draw()}.txt" for _ in range(3)]
    text = short_line(build, paths[0])
    build.file(paths[0], [text], mode=0o666)
    for path in paths[1:]:
        build.file(path, [short_line(build, path)])
    said = f"find the file in {place} that all may write"
    build.say(said)
    build.needs("find")
    build.step(said, f"find {place} -perm 666")
    return OpenFile(paths[0], text, tuple(paths[1:]))


def set_mode(build: Builder, path: str, mode: int, *, called: str | None = None) -> str:
    """Ask for a mode of a file and set it; ``called`` is what the instruction calls the file. Returns the assertion that it holds."""
    said = RULES[mode].format(called or path)
    build.say(said)
    near = _NEAR[mode]
    slips = {"open-to-all": f"chmod 777 {path}", "near-mode": f"chmod {near:o} {path}", "forgotten-mode": f"cat {path}"}
    build.step(said, f"chmod {mode:o} {path}", slips=slips)
    right = f'assert mode("{path}") == 0o{mode:o}'
    build.test(f"mode_{mode:o}", said, right)
    return right


def close_open_file(build: Builder, mode: int) -> None:
    """Find the open file of a directory and set its mode; nothing else about the directory may change."""
    found = find_open_file(build)
    right = set_mode(build, found.path, mode, called="it")
    said = RULES[mode].format("it")
    others = [f'assert mode("{path}") == 0o644' for path in found.others]
    build.test("text_and_other_modes_kept", said, right, f'assert lines("{found.path}") == ["{found.text}"]', *others)


def script(build: Builder, path: str, mode: int) -> None:
    """A script that nobody may run yet gets a mode to run with."""
    text = ["#!/bin/bash", f"echo {short_line(build, path)}"]
    build.file(path, text)
    right = set_mode(build, path, mode)
    kept = f'assert lines("{path}") == {text}'.replace("'", '"')
    build.test("script_text_kept", RULES[mode].format(path), right, kept)
