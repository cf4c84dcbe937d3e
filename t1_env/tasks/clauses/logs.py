"""Clauses about logs: find the log that has lines of one level, extract and count them, then delete or empty the log."""

from __future__ import annotations

from dataclasses import dataclass

from t1_env.tasks.clauses.files import short_line
from t1_env.tasks.instance import Builder
from t1_env.tasks.words import NAMES, USERS

LOG_LEVELS = ("ERROR", "INFO", "WARN")


@dataclass(frozen=True, slots=True)
class Log:
    """A log file.

    Args:
        path: Path relative to /app.
        lines: All its lines.
        level: The level that the instruction asks for.
    """

    path: str
    lines: tuple[str, ...]
    level: str

    @property
    def hits(self) -> tuple[str, ...]:
        """Lines of the level asked for."""
        return tuple(line for line in self.lines if f" {self.level} " in line)


def log_lines(build: Builder, part: str, level: str, *, hits: int) -> tuple[str, ...]:
    """Lines in order of time; ``hits`` of them are of ``level``, two to four are not."""
    rng = build.stream(f"log-{part}")
    others = [other for other in LOG_LEVELS if other != level]
    levels = [level] * hits + [rng.choice(others) for _ in range(rng.randrange(2, 5))]
    rng.shuffle(levels)
    minute = rng.randrange(10)
    lines = []
    for each in levels:
        lines.append(f"{minute // 60 + 8:02}:{minute % 60:02} {each} {rng.choice(USERS)} {rng.choice(NAMES)}")
        minute += rng.randrange(1, 20)
    return tuple(lines)


def find_log(build: Builder, level: str) -> tuple[Log, Log]:
    """A directory with two logs, one of which has lines of ``level``; returns that one and the other."""
    place = build.draw("place")
    paths = [f"{place}/{build.draw()}.log" for _ in range(2)]
    rng = build.stream(f"find-{place}")
    wanted = Log(paths[0], log_lines(build, paths[0], level, hits=rng.randrange(2, 4)), level)
    other = Log(paths[1], log_lines(build, paths[1], level, hits=0), level)
    for log in (wanted, other):
        build.file(log.path, log.lines)
    said = f"find the log in {place} with {level} lines"
    build.say(said)
    build.needs("grep")
    build.step(said, f"grep -l {level} {place}/*")
    return wanted, other


def extract(build: Builder, log: Log, target: str, how: str) -> None:
    """Write lines of the level to ``target``; ``how`` is ``all``, ``first`` or ``append`` (to a file that exists)."""
    everything = f"grep {log.level} {log.path}"
    first = f"grep -m1 {log.level} {log.path}"
    wrong_level = next(level for level in LOG_LEVELS if level != log.level)
    before: tuple[str, ...] = ()
    if how == "first":
        said = f"write its first {log.level} line to {target}"
        right, slips = f"{first} > {target}", {"all-for-first": f"{everything} > {target}"}
    elif how == "all":
        said = f"write its {log.level} lines to {target}"
        right, slips = f"{everything} > {target}", {"first-for-all": f"{first} > {target}"}
    else:
        before = (short_line(build, target),)
        build.file(target, before)
        said = f"append its {log.level} lines to {target}"
        right, slips = f"{everything} >> {target}", {"replace-for-append": f"{everything} > {target}"}
    slips["wrong-level"] = right.replace(log.level, wrong_level)
    build.say(said)
    build.step(said, right, slips=slips)
    wanted = list(log.hits[:1] if how == "first" else log.hits)
    last = f'assert lines("{target}")[-1] == "{wanted[-1]}"'
    build.test("last_line_extracted", said, last)
    build.test("lines_extracted", said, f'assert lines("{target}") == {[*before, *wanted]}'.replace("'", '"'))


def count_hits(build: Builder, log: Log, target: str) -> None:
    """Write the number of lines of the level to ``target``."""
    said = f"count its {log.level} lines into {target}"
    build.say(said)
    build.needs("grep")
    command = f"grep -c {log.level} {log.path} > {target}"
    slips = {"lines-for-number": f"grep {log.level} {log.path} > {target}", "all-lines-counted": f"wc -l < {log.path} > {target}"}
    build.step(said, command, slips=slips)
    build.test("hits_counted", said, f'assert lines("{target}") == ["{len(log.hits)}"]')


def dispose(build: Builder, log: Log, other: Log, how: str) -> None:
    """Delete or empty the log that was found (``how`` is ``delete`` or ``empty``); the other log must stay."""
    place = log.path.partition("/")[0]
    forgotten = {"forgotten": f"ls {place}"}
    if how == "delete":
        said = "delete that log"
        build.step(said, f"rm {log.path}", slips=forgotten | {"empty-for-delete": f"> {log.path}"})
        done = f'assert not (APP / "{log.path}").exists()'
    else:
        said = "empty that log"
        build.step(said, f"> {log.path}", slips=forgotten | {"delete-for-empty": f"rm {log.path}"})
        done = f'assert lines("{log.path}") == []'
    build.say(said)
    kept = f'assert lines("{other.path}") == {list(other.lines)}'.replace("'", '"')
    build.test("log_deleted" if how == "delete" else "log_emptied", said, done)
    build.test("other_log_kept", said, done, kept)
