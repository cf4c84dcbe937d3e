"""Clauses about files and short texts: look into a directory, move, copy, delete, write a line, count files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from t1_env.tasks.instance import Builder

LINE_BITS = ("old", "raw", "top", "end", "big", "low", "new", "dry", "wet", "hot")
"""First words of the lines that files start with."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A directory with one file of each of several suffixes.

    Args:
        place: The directory.
        names: Suffix -> file name.
        contents: Suffix -> the file's lines.
    """

    place: str
    names: dict[str, str]
    contents: dict[str, tuple[str, ...]]

    def path(self, suffix: str) -> str:
        """Path of the file with this suffix, relative to /app."""
        return f"{self.place}/{self.names[suffix]}"

    def holds(self, path: str, suffix: str) -> str:
        """Assertion that ``path`` has the contents of the file with this suffix."""
        return f'assert lines("{path}") == {list(self.contents[suffix])}'.replace("'", '"')


def short_line(build: Builder, part: str) -> str:
    """A line for a file that exists from the start; told apart from any line an instruction asks for."""
    rng = build.stream(f"line-{part}")
    return f"{rng.choice(LINE_BITS)} {rng.randrange(10, 100)}"


def look_into(build: Builder, suffixes: tuple[str, ...], *, contents: Mapping[str, tuple[str, ...]] | None = None) -> Scene:
    """A directory whose file names only a look reveals.

    Args:
        build: The instance.
        suffixes: One file each.
        contents: Suffix -> lines, where a file is to hold more than a short line.
    """
    place = build.draw("place")
    scene = Scene(place, {}, {})
    for suffix in suffixes:
        scene.names[suffix] = f"{build.draw()}.{suffix}"
        scene.contents[suffix] = (contents or {}).get(suffix) or (short_line(build, f"{place}-{suffix}"),)
        build.file(scene.path(suffix), scene.contents[suffix])
    return scene


def find(build: Builder, scene: Scene, suffix: str) -> None:
    """Look for the scene's file with ``suffix``; what is printed decides the next command."""
    build.step(f"find the .{suffix} file in {scene.place}", f"ls {scene.place}/*.{suffix}")


def transfer(build: Builder, scene: Scene, suffix: str, target: str, *, move: bool) -> str:
    """Move or copy the scene's file with ``suffix`` into the existing directory ``target``; returns its new path."""
    verb = "move" if move else "copy"
    said = f"{verb} the .{suffix} file in {scene.place} to {target}"
    build.say(said)
    find(build, scene, suffix)
    source, name = scene.path(suffix), scene.names[suffix]
    right, wrong = ("mv", "cp") if move else ("cp", "mv")
    build.step(said, f"{right} {source} {target}/", slips={f"{wrong}-for-{right}": f"{wrong} {source} {target}/"})
    arrived = scene.holds(f"{target}/{name}", suffix)
    build.test(f"{suffix}_file_arrives", said, arrived)
    if move:
        build.test(f"{suffix}_file_left", said, arrived, f'assert not (APP / "{source}").exists()')
    else:
        build.test(f"{suffix}_file_stays", said, arrived, scene.holds(source, suffix))
    return f"{target}/{name}"


def delete(build: Builder, scene: Scene, suffix: str, keep: str) -> None:
    """Delete the scene's file with ``suffix``; the one with suffix ``keep`` must stay."""
    said = f"delete the .{suffix} file in {scene.place}"
    build.say(said)
    find(build, scene, suffix)
    slips = {"forgotten-delete": f"ls {scene.place}", "directory-deleted": f"rm -r {scene.place}"}
    build.step(said, f"rm {scene.path(suffix)}", slips=slips)
    gone = f'assert not (APP / "{scene.path(suffix)}").exists()'
    build.test(f"{suffix}_file_gone", said, gone)
    build.test(f"{keep}_file_kept", said, gone, scene.holds(scene.path(keep), keep))


def write_line(build: Builder, path: str, how: str) -> None:
    """Write a line of two words to ``path``; ``how`` is ``create``, ``replace`` or ``append`` (the last two bring a file to start from)."""
    words = f"{build.draw()} {build.draw()}"
    wrong_words = f"echo {words.split()[0]} {'>>' if how == 'append' else '>'} {path}"
    if how == "create":
        said = f"write {words} to {path}"
        build.step(said, f"echo {words} > {path}", slips={"half-a-line": wrong_words})
        build.test("new_file_written", said, f'assert lines("{path}") == ["{words}"]')
    else:
        before = short_line(build, path)
        build.file(path, [before])
        replace = how == "replace"
        said = f"overwrite {path} with {words}" if replace else f"append {words} to {path}"
        right, wrong = (">", ">>") if replace else (">>", ">")
        kind = "append-for-replace" if replace else "replace-for-append"
        build.step(said, f"echo {words} {right} {path}", slips={kind: f"echo {words} {wrong} {path}", "half-a-line": wrong_words})
        last = f'assert lines("{path}")[-1] == "{words}"'
        build.test("line_is_last", said, last)
        expected = f'["{words}"]' if replace else f'["{before}", "{words}"]'
        build.test("old_text_gone" if replace else "old_text_kept", said, last, f'assert lines("{path}") == {expected}')
    build.say(said)


def count_files(build: Builder, place: str, expected: int, target: str) -> None:
    """Write the number of files in ``place`` to the new file ``target``."""
    said = f"count the files in {place} into {target}"
    build.say(said)
    build.step(said, f"ls {place} | wc -l > {target}", slips={"names-for-number": f"ls {place} > {target}"})
    build.test("number_of_files", said, f'assert lines("{target}") == ["{expected}"]')
