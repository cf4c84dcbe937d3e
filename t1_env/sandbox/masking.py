"""What an agent did to the base system that can make a program of it lie, and a layer that takes it back.

A verifier that runs ``git``, ``sha256sum`` or ``python3`` relies on these programs being what they were when the environment was built. The
agent is root and can replace them, put another program of that name earlier in ``PATH``, or have the dynamic loader or an interpreter
load something first. All of this is found in what the agent wrote (``find_masks``), and a clone can be given a view without it
(``mask_layer.py``): a layer above the agent's writes that holds the files as they were.

Programs, libraries and data under the system directories count, whoever changed them. Of ``/etc`` only what steers the loader, shells and
interpreters does, and of the home directory the settings of programs that verifiers ask: the rest is configuration, which is what many
tasks are about. New programs, libraries and packages stay unless they take the place of something that was there.
"""

from __future__ import annotations

import filecmp
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from t1_env.sandbox import files, trees
from t1_env.sandbox.base import CloneView

STEERING: Final = re.compile(
    r"/etc/(ld\.so\.(preload|cache|conf)|ld\.so\.conf\.d/.*|profile|profile\.d/.*|bash\.bashrc|bashrc|bash_env|gitconfig"
    r"|python[^/]*/.*|perl/.*)"
)
"""What counts under ``/etc``, new or changed."""
_LINKS: Final = "/etc/alternatives/"
"""What counts under ``/etc`` if it was there before: the links behind programs of which a system has several."""

_START_UP: Final = ("sitecustomize", "usercustomize")
_SETTINGS: Final = (".gitconfig", ".config/git", ".sqliterc", ".config/sqlite3", ".curlrc", ".config/curlrc", ".wgetrc", ".gdbinit")
"""Below the home directory. What shells read there is not among it: that is often what a task is about."""
_PACKAGES: Final = ("site-packages", "dist-packages")
_HARDWARE: Final = ("glibc-hwcaps", "haswell", "tls", "x86_64", "xeon_phi", "avx512_1")
_LIBRARY_DIRECTORIES: Final = re.compile(r"/(usr/)?(local/)?lib(32|64|x32)?(/[^/]+-linux-[^/]+)?")
_LIBRARY: Final = re.compile(r".+\.so(\.[0-9.]+)?")
_PYTHON: Final = re.compile(r"/(python|pypy)[0-9.]*(/|$)")
_MODULE_SUFFIX: Final = re.compile(r"(\.[^./]+)?\.(py|pyc|so)")
_IMPORTS: Final = re.compile(rb"^import[ \t]", re.MULTILINE)
_MAX_PTH_BYTES: Final = 1 << 16
_MAX_COMPARED_BYTES: Final = 1 << 25


@dataclass(frozen=True, slots=True)
class Part:
    """One overlay of a sandbox's root.

    Args:
        name: Of the part.
        at: Where it is mounted in the sandbox, ``""`` for the root.
        written: Host directory with what the agent wrote.
        lowers: What lay below it, topmost first.
        base: The bottom ones of these, which are the base system.
        only: Top-level names to look at; None for all.
    """

    name: str
    at: str
    written: str
    lowers: tuple[str, ...]
    base: tuple[str, ...]
    only: frozenset[str] | None = None


@dataclass(slots=True)
class Masks:
    """What is to be taken back.

    Args:
        changed: Absolute path -> part, for what the base system has and the agent changed, replaced or removed.
        shadows: Absolute path -> part, for what is new and takes the place of something of the base system.
        caches: Absolute path -> part, for compiled copies of the base system's Python files: they say nothing by themselves, so they are
            left out of every view and are not worth a word.
    """

    changed: dict[str, str] = field(default_factory=dict)
    shadows: dict[str, str] = field(default_factory=dict)
    caches: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.changed or self.shadows)

    @property
    def names(self) -> list[str]:
        """Sorted paths of what a restored view differs in."""
        return sorted({*self.changed, *self.shadows})


def find_masks(parts: Sequence[Part], view: CloneView, links: Mapping[str, str]) -> Masks:
    """Look through what a (frozen) sandbox wrote.

    Args:
        parts: The overlays of its root.
        view: Search path and exemptions.
        links: Top-level symlink -> its target, as far as the agent cannot change them.

    Returns:
        What to take back.
    """
    masks = Masks()
    exempt = tuple(f"{_resolve(path, links).rstrip('/')}/" for path in view.writable)

    def is_exempt(path: str) -> bool:
        return f"{path}/".startswith(exempt)

    for part in parts:
        for path, entry in _new_and_changed(part):
            if not is_exempt(path):
                found = _judge(part, path, entry, parts, masks)
                if found is not None:
                    found[path] = part.name
    programs = _shadowing_programs(parts, [_resolve(each, links) for each in view.search_path])
    for part, path in (*programs, *_home_settings(parts, view.home)):
        if is_exempt(path) or path in masks.changed:
            continue
        original = find_original(part.lowers, path[len(part.at) :])
        if original is None:
            masks.shadows[path] = part.name
        elif not _is_same(f"{part.written}{path[len(part.at) :]}", original):
            masks.changed[path] = part.name
    return masks


def _judge(part: Part, path: str, entry: os.DirEntry[str], parts: Sequence[Part], masks: Masks) -> dict[str, str] | None:
    """Which of the lists of ``masks`` something new or changed belongs on; None if it may stay."""
    in_etc = path.startswith("/etc/")
    if in_etc and not path.startswith(_LINKS) and not STEERING.fullmatch(path):
        return None
    if _is_cache(part, path):
        return masks.caches
    if _exists(part.base, path, part.at):
        return None if _is_same(entry.path, find_original(part.lowers, path[len(part.at) :])) else masks.changed
    if in_etc:
        return None if path.startswith(_LINKS) else masks.shadows
    return masks.shadows if _is_shadow(part, path, entry, parts) else None


def find_original(lowers: Iterable[str], relative: str) -> str | None:
    """Where a part's lower directories have a path; None if they do not, or if one of them takes it away."""
    for lower in lowers:
        path = f"{lower}{relative}"
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            if _hides(lower, relative):
                return None
            continue
        return None if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0 else path
    return None


def layers_of(lowers: Iterable[str], relative: str) -> tuple[str, ...]:
    """The directories that a directory of a part is made of without what the agent wrote, topmost first."""
    found = []
    for lower in lowers:
        path = f"{lower}{relative}"
        try:
            is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            if _hides(lower, relative):
                break
            continue
        if not is_directory:
            break
        found.append(path)
        if trees.is_opaque(path) or _hides(lower, relative):
            break
    return tuple(found)


# ------------------------------------------------------------------------------------------------------------------- what is found
def _new_and_changed(part: Part) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """(path inside, entry) of everything written to a part; directories only where they replace what was there, or are new."""
    pending = [""]
    while pending:
        relative = pending.pop()
        if len(relative) > files.LONG_PATH:
            continue  # no base system is that deep
        try:
            with os.scandir(f"{part.written}{relative}") as entries:
                children = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in children:
            if part.only is not None and not relative and entry.name not in part.only:
                continue
            below = f"{relative}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                pending.append(below)
                if not trees.is_opaque(entry.path) and _exists(part.lowers, below, ""):
                    continue  # only merged
            yield f"{part.at}{below}", entry


def _exists(lowers: Iterable[str], path: str, at: str) -> bool:
    return any(os.path.lexists(f"{lower}{path[len(at) :]}") for lower in lowers)


def _is_same(written: str, original: str | None) -> bool:
    """Whether what was written is what had been there: the same link, or a file with the same look and contents."""
    try:
        status = os.lstat(written)
        before = os.lstat(original) if original is not None else None
        if before is None or (status.st_mode, status.st_uid, status.st_gid) != (before.st_mode, before.st_uid, before.st_gid):
            return False
        if stat.S_ISLNK(status.st_mode):
            return os.readlink(written) == os.readlink(str(original))
        same_size = stat.S_ISREG(status.st_mode) and status.st_size == before.st_size <= _MAX_COMPARED_BYTES
        return same_size and filecmp.cmp(written, str(original), shallow=False)
    except OSError:
        return False


def _is_shadow(part: Part, path: str, entry: os.DirEntry[str], parts: Sequence[Part]) -> bool:
    """Whether something new takes the place of something of the base system: a library, a start-up file, a Python module."""
    directory, _, name = path.rpartition("/")
    stem = name.partition(".")[0]
    if stem in _START_UP:
        return True
    if name.endswith(".pth") and directory.rpartition("/")[2] in _PACKAGES:
        return _runs_code(entry.path)
    if _LIBRARY.fullmatch(name) and _is_searched_by_loader(directory):
        return any(_has_library(each, name) for each in parts)
    if _PYTHON.search(directory) and (entry.is_dir(follow_symlinks=False) or _MODULE_SUFFIX.fullmatch(name[len(stem) :])):
        return _exists(part.base, f"{directory}/{stem}.py", part.at) or _exists(part.base, f"{directory}/{stem}/__init__.py", part.at)
    return False


def _is_cache(part: Part, path: str) -> bool:
    """Whether it is a compiled copy of a Python file of the base system."""
    directory, _, name = path.rpartition("/")
    parent, _, last = directory.rpartition("/")
    return last == "__pycache__" and name.endswith(".pyc") and _exists(part.base, f"{parent}/{name.partition('.')[0]}.py", part.at)


def _is_searched_by_loader(directory: str) -> bool:
    for name in _HARDWARE:
        directory = directory.partition(f"/{name}")[0]
    return _LIBRARY_DIRECTORIES.fullmatch(directory) is not None


def _has_library(part: Part, name: str) -> bool:
    for base in part.base:
        for directory in _library_directories(base, part.at):
            if os.path.lexists(f"{directory}/{name}"):
                return True
    return False


def _library_directories(base: str, at: str) -> Iterator[str]:
    """The directories of a base system that the loader searches."""
    names = ("lib", "lib64", "lib32", "libx32")
    tops = [f"{base}/{prefix}{name}" for prefix in (("", "local/") if at == "/usr" else ("", "usr/", "usr/local/")) for name in names]
    if at not in ("", "/usr"):
        tops = [base] if at[1:] in names else []
    for top in tops:
        if not os.path.isdir(top):
            continue
        yield top
        with os.scandir(top) as entries:
            yield from (entry.path for entry in entries if "-linux-" in entry.name and entry.is_dir())


def _runs_code(path: str) -> bool:
    """Whether a .pth file does more than name directories; anything but a small regular file is taken to."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return True
    with os.fdopen(fd, "rb") as stream:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_PTH_BYTES:
            return True
        return _IMPORTS.search(stream.read(_MAX_PTH_BYTES)) is not None


def _shadowing_programs(parts: Sequence[Part], search_path: Sequence[str]) -> Iterator[tuple[Part, str]]:
    """New programs that are found before one of the base system that has the same name; a directory that is a new link, as a whole."""
    for index, directory in enumerate(search_path):
        part = _part_of(parts, directory)
        if part is None:
            continue
        names, link = _names_in(part, directory)
        if link is not None and not _exists(part.base, link, part.at):
            yield part, link
        for name in names:
            if _exists(part.base, f"{directory}/{name}", part.at):
                continue  # changed, not new
            for later in search_path[index + 1 :]:
                other = _part_of(parts, later)
                if other is not None and _exists(other.base, f"{later}/{name}", other.at):
                    yield part, f"{directory}/{name}"
                    break


def _home_settings(parts: Sequence[Part], home: str) -> Iterator[tuple[Part, str]]:
    """What programs that verifiers ask would read from the home directory before anything else: their settings, Python's start-up files."""
    part = _part_of(parts, home)
    if part is None:
        return
    home = home.rstrip("/")
    for setting in _SETTINGS:
        directory, _, name = setting.rpartition("/")
        names, link = _names_in(part, f"{home}/{directory}".rstrip("/"))
        if link is not None:
            yield part, link
        elif name in names:
            yield part, f"{home}/{setting}"
    local = f"{home}/.local/lib"
    versions, link = _names_in(part, local)
    if link is not None:
        yield part, link
    for version in versions:
        directory = f"{local}/{version}/site-packages"
        names, link = _names_in(part, directory)
        if link is not None:
            yield part, link
        for name in names:
            path = f"{directory}/{name}"
            if name.partition(".")[0] in _START_UP or (name.endswith(".pth") and _runs_code(f"{part.written}{path[len(part.at) :]}")):
                yield part, path


def _names_in(part: Part, directory: str) -> tuple[list[str], str | None]:
    """What was written into a directory, never following a link; and the link, if there is one on the way."""
    done = part.at
    for name in directory[len(part.at) :].split("/")[1:]:
        done = f"{done}/{name}"
        path = f"{part.written}{done[len(part.at) :]}"
        if os.path.islink(path):
            return [], done
        if not os.path.isdir(path):
            return [], None
    try:
        return os.listdir(f"{part.written}{directory[len(part.at) :]}"), None
    except OSError:
        return [], None


def _part_of(parts: Sequence[Part], path: str) -> Part | None:
    """The part that holds an absolute path."""
    matching = [part for part in parts if f"{path}/".startswith(f"{part.at}/")]
    return max(matching, key=lambda part: len(part.at), default=None)


def _resolve(path: str, links: Mapping[str, str]) -> str:
    """An absolute path with its top-level link (``/bin``) replaced by what that stands for."""
    top, separator, rest = path.strip("/").partition("/")
    return f"/{links.get(top, top)}{separator}{rest}"


def _hides(lower: str, relative: str) -> bool:
    """Whether a lower directory that has nothing at a path keeps what lies below it from being seen."""
    done = lower
    for name in relative.split("/")[1:]:
        if trees.is_opaque(done):
            return True
        done = f"{done}/{name}"
        try:
            status = os.lstat(done)
        except OSError:
            return False
        if not stat.S_ISDIR(status.st_mode):
            return True  # a whiteout, or a file where a directory would have to be
    return False


def view_from_json(fields: Mapping[str, Any]) -> CloneView:
    """The inverse of ``view_to_json``."""
    return CloneView(fields["restored"], tuple(fields["search_path"]), fields["home"], tuple(fields["writable"]), fields["live"])


def view_to_json(view: CloneView) -> dict[str, Any]:
    """A view as it travels in a request."""
    return {
        "restored": view.restored,
        "search_path": list(view.search_path),
        "home": view.home,
        "writable": list(view.writable),
        "live": view.live,
    }
