"""The build context: the files of a task's ``environment/`` directory that ``COPY`` and ``ADD`` can reach."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Final

from t1_env.errors import ImageBuildError

_IGNORE_FILE: Final = ".dockerignore"
_MAX_REMEMBERED: Final = 100_000
_SETTLED_NS: Final = 2_000_000_000
"""A file that changed less than this ago may change again within one tick of the clock of its times: its digest is not remembered."""


class BuildContext:
    """A directory to copy from; nothing outside it can be reached.

    Args:
        directory: The task's environment directory.
    """

    def __init__(self, directory: Path) -> None:
        self.root = directory.resolve()
        self._rules = _read_rules(self.root / _IGNORE_FILE)

    def find(self, pattern: str) -> list[Path]:
        """Files and directories that a ``COPY`` source names, sorted.

        Raises:
            ImageBuildError: There is no such file, it lies outside, or it is neither a file nor a directory.
        """
        relative = pattern.strip("/") or "."
        if any(character in relative for character in "*?["):
            found = sorted(path for path in self.root.glob(relative) if not self._ignored(path))
        else:
            found = [self.root / relative]
        for path in found:
            # Resolved, so that neither ".." nor a symlink reaches outside what the task ships.
            if not path.resolve().is_relative_to(self.root):
                raise ImageBuildError(f"{pattern!r} leads outside the environment directory")
            if not path.exists() or stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                raise ImageBuildError(f"{pattern!r}: no such file or directory in {self.root}")
            if self._ignored(path) and not path.is_dir():
                raise ImageBuildError(f"{pattern!r} is left out by {_IGNORE_FILE}")
        if not found:
            raise ImageBuildError(f"{pattern!r} matches nothing in {self.root}")
        return found

    def left_out(self, directory: Path) -> frozenset[str]:
        """Paths below ``directory`` that ``.dockerignore`` leaves out."""
        if not self._rules:
            return frozenset()
        found: set[str] = set()
        self._collect(str(directory), found)
        return frozenset(found)

    def _collect(self, directory: str, found: set[str]) -> bool:
        """Add what is left out below ``directory``; returns whether anything is left in."""
        anything = False
        for name in sorted(os.listdir(directory)):
            path = f"{directory}/{name}"
            ignored = self._ignored(Path(path))
            if os.path.isdir(path) and not os.path.islink(path):
                # A later rule may bring something in it back.
                kept = self._collect(path, found) if not ignored or any(keep for _, keep in self._rules) else False
                ignored = ignored and not kept
            if ignored:
                found.add(path)
            else:
                anything = True
        return anything

    def _ignored(self, path: Path) -> bool:
        relative = path.relative_to(self.root) if path.is_relative_to(self.root) else path.resolve().relative_to(self.root)
        names = [str(relative), *(str(parent) for parent in relative.parents if str(parent) != ".")]
        ignored = False
        for rule, keep in self._rules:
            if any(rule.fullmatch(name) for name in names):
                ignored = not keep
        return ignored


def digest_of(path: Path, left_out: frozenset[str] = frozenset()) -> str:
    """Digest of names, types, permission bits, contents and link targets of a file or tree; times and owners do not count.

    Raises:
        OSError: Something could not be read.
    """
    digest = hashlib.sha256()
    _add(digest, str(path), os.stat(path), "", left_out)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, path: str, status: os.stat_result, name: str, left_out: frozenset[str]) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISREG(status.st_mode):
        record = f"f {mode:o} {_FILES.digest(path, status)}"
    elif stat.S_ISLNK(status.st_mode):
        record = f"l {os.readlink(path)}"
    else:
        record = f"d {mode:o}"
    encoded = os.fsencode(f"{name}\0{record}")
    digest.update(len(encoded).to_bytes(4, "big") + encoded)
    if stat.S_ISDIR(status.st_mode):
        with os.scandir(path) as entries:
            children = sorted(entries, key=lambda entry: entry.name)
        for entry in children:
            if entry.path not in left_out:
                _add(digest, entry.path, entry.stat(follow_symlinks=False), f"{name}/{entry.name}", left_out)


class _FileDigests:
    """Digests of file contents, remembered for as long as nothing about the file changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[int, ...], str] = OrderedDict()

    def digest(self, path: str, status: os.stat_result) -> str:
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        with open(path, "rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if time.time_ns() - status.st_ctime_ns > _SETTLED_NS:
            with self._lock:
                self._known[key] = found
                if len(self._known) > _MAX_REMEMBERED:
                    self._known.popitem(last=False)
        return found


_FILES: Final = _FileDigests()


def _read_rules(path: Path) -> list[tuple[re.Pattern[str], bool]]:
    """The rules of an ignore file: a pattern, and whether what it matches is kept after all."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    rules = []
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        keep = text.startswith("!")
        pattern = str(PurePosixPath(text.removeprefix("!").strip().strip("/") or "."))
        rules.append((re.compile(_translate(pattern)), keep))
    return rules


def _translate(pattern: str) -> str:
    """The regular expression of one pattern: ``**`` is any number of directories, ``*`` and ``?`` stay within one."""
    expression, position = "", 0
    while position < len(pattern):
        rest = pattern[position:]
        if rest.startswith("**/"):
            expression, position = f"{expression}(?:.*/)?", position + 3
        elif rest.startswith("**"):
            expression, position = f"{expression}.*", position + 2
        elif rest[0] == "*":
            expression, position = f"{expression}[^/]*", position + 1
        elif rest[0] == "?":
            expression, position = f"{expression}[^/]", position + 1
        elif rest[0] == "[" and "]" in rest:
            end = rest.index("]")
            expression, position = f"{expression}[{rest[1:end]}]", position + end + 1
        elif rest[0] == "\\" and len(rest) > 1:
            expression, position = f"{expression}{re.escape(rest[1])}", position + 2
        else:
            expression, position = f"{expression}{re.escape(rest[0])}", position + 1
    return expression
