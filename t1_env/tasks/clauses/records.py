"""Clauses about small tables: merge lists in some order, take the first or last line, count lines, delete the lists."""

from __future__ import annotations

from dataclasses import dataclass

from t1_env.tasks.instance import Builder
from t1_env.tasks.words import NAMES

ORDERS = ("smallest", "largest", "name")
"""Smallest number first, largest number first, or by name."""


@dataclass(frozen=True, slots=True)
class Lists:
    """Two lists of lines that hold a number and a name.

    Args:
        place: Their directory.
        contents: Path relative to /app -> lines.
        number_first: Whether a line reads ``12 fern`` or ``fern 12``.
        rows: (number, name) of every line.
    """

    place: str
    contents: dict[str, tuple[str, ...]]
    number_first: bool
    rows: tuple[tuple[int, str], ...]

    def in_order(self, order: str) -> list[str]:
        """All lines, ordered."""
        if order == "name":
            rows = sorted(self.rows, key=lambda row: row[1])
        else:
            rows = sorted(self.rows, reverse=order == "largest")
        return [self.line(row) for row in rows]

    def line(self, row: tuple[int, str]) -> str:
        """How a row reads."""
        return f"{row[0]} {row[1]}" if self.number_first else f"{row[1]} {row[0]}"


def look_at_lists(build: Builder) -> Lists:
    """A directory with two lists; only a look shows whether numbers or names come first."""
    place = build.draw("place")
    rng = build.stream(f"lists-{place}")
    # One, two and three digits each occur, so that the order of numbers differs from the order of their digits.
    numbers = [rng.randrange(2, 10), rng.randrange(10, 20), rng.randrange(20, 100), rng.randrange(100, 200), rng.randrange(200, 1000)]
    numbers = [*numbers[: rng.randrange(4, 6)]]
    names = rng.sample(NAMES, len(numbers))
    rng.shuffle(numbers)
    rows = tuple(zip(numbers, names, strict=True))
    number_first = rng.random() < 0.5
    cut = 2 if len(rows) == 4 else rng.randrange(2, 4)
    lists = Lists(place, {}, number_first, rows)
    for part in (rows[:cut], rows[cut:]):
        path = f"{place}/{build.draw()}.txt"
        lists.contents[path] = tuple(lists.line(row) for row in part)
        build.file(path, lists.contents[path])
    build.step(f"look at the lists in {place}", f"cat {place}/*")
    return lists


def merge(build: Builder, lists: Lists, target: str, order: str) -> list[str]:
    """Merge the lists in an order; returns the lines of the merged file."""
    wording = {"smallest": "by number", "largest": "by number, largest first,", "name": "by name"}[order]
    said = f"sort the lists in {lists.place} {wording} into {target}"
    build.say(said)
    number_key, name_key = ("-n", "-k2") if lists.number_first else ("-k2n", "-k1")
    flags = {"smallest": number_key, "largest": f"{number_key}r", "name": name_key}
    command = "sort {} {}/* > {}"
    lexical = "-k1" if lists.number_first else "-k2"
    slips = {"unsorted": f"cat {lists.place}/* > {target}"}
    if order == "name":
        slips["number-for-name"] = command.format(number_key, lists.place, target)
    else:
        opposite = "largest" if order == "smallest" else "smallest"
        slips["wrong-end-first"] = command.format(flags[opposite], lists.place, target)
        slips["digits-for-number"] = command.format(lexical, lists.place, target)
    merged = lists.in_order(order)
    as_they_are = [line for content in _by_path(lists.contents) for line in content]
    if as_they_are == merged:
        del slips["unsorted"]
    build.step(said, command.format(flags[order], lists.place, target), slips=slips)
    complete = f'assert sorted(lines("{target}")) == {sorted(merged)}'.replace("'", '"')
    build.test("merged_file_is_complete", said, complete)
    build.test("merged_file_is_in_order", said, f'assert lines("{target}") == {merged}'.replace("'", '"'))
    return merged


def _by_path(contents: dict[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [contents[path] for path in sorted(contents)]


def end_line(build: Builder, merged_path: str, merged: list[str], target: str, which: str) -> None:
    """Write the ``first`` or ``last`` line of the merged file to ``target``."""
    said = f"write its {which} line to {target}"
    build.say(said)
    right, wrong = ("head", "tail") if which == "first" else ("tail", "head")
    slips = {"wrong-end": f"{wrong} -n 1 {merged_path} > {target}", "whole-file": f"cat {merged_path} > {target}"}
    build.step(said, f"{right} -n 1 {merged_path} > {target}", slips=slips)
    build.test(f"{which}_line", said, f'assert lines("{target}") == ["{merged[0 if which == "first" else -1]}"]')


def count_lines(build: Builder, merged_path: str, merged: list[str], target: str) -> None:
    """Write the number of lines of the merged file to ``target``."""
    said = f"count its lines into {target}"
    build.say(said)
    slips = {"bytes-for-lines": f"wc -c < {merged_path} > {target}", "name-beside-number": f"wc -l {merged_path} > {target}"}
    build.step(said, f"wc -l < {merged_path} > {target}", slips=slips)
    build.test("lines_counted", said, f'assert lines("{target}") == ["{len(merged)}"]')


def delete_lists(build: Builder, lists: Lists) -> None:
    """Delete both lists."""
    said = f"delete the lists in {lists.place}"
    build.say(said)
    build.step(said, f"rm {lists.place}/*", slips={"forgotten-delete": f"ls {lists.place}"})
    build.test("lists_deleted", said, *(f'assert not (APP / "{path}").exists()' for path in sorted(lists.contents)))
