"""Where tasks live: the corpus that ships with T1, and directories of a user's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from t1_env.errors import ConfigError


def corpus_root() -> Path:
    """Directory of the shipped corpus: inside an installed wheel, or beside the package in a source tree.

    Raises:
        ConfigError: The installation holds no corpus.
    """
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "_tasks", package.parent / "tasks"):
        if (candidate / "seeds").is_dir() and (candidate / "families").is_dir():
            return candidate
    raise ConfigError(f"the task corpus is missing: expected {package / '_tasks'}; reinstall t1-terminal")


def roots(search: Sequence[str | Path] = ()) -> tuple[Path, ...]:
    """Directories to look for ids in: the given ones first, then the shipped corpus.

    Raises:
        ConfigError: A given one is not a directory.
    """
    given = []
    for item in search:
        path = Path(item).expanduser()
        if not path.is_dir():
            raise ConfigError(f"task search path {str(path)!r} is not a directory")
        given.append(path.resolve())
    return (*given, corpus_root())


def task_directories(root: Path) -> Iterator[tuple[str, Path]]:
    """(id, directory) of every hand-written task below ``root``, sorted by id; the id is the path relative to ``root``."""
    for file in sorted(root.rglob("task.toml")):
        yield file.parent.relative_to(root).as_posix(), file.parent


def family_files(root: Path) -> Iterator[tuple[str, Path]]:
    """(name, ``family.py``) of every family below ``root``, sorted by name."""
    for file in sorted((root / "families").glob("*/family.py")):
        yield file.parent.name, file
