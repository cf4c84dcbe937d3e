"""From what a user writes (an id, a path, a pattern, a family query, a list of those) to tasks."""

from __future__ import annotations

import difflib
import fnmatch
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import parse_qsl

from t1_env.errors import TaskError, UnknownTask
from t1_env.tasks.corpus import family_files, roots, task_directories
from t1_env.tasks.families import SPLITS, Family, instance_id, load_family, materialise, split_of
from t1_env.tasks.schema import parse_task_toml
from t1_env.tasks.task import Task, directory_digest, dockerfile_workdir, read_text, strip_canary

TaskSpec: TypeAlias = "str | Path | Task | Sequence[str | Path | Task]"
"""What ``resolve_tasks`` takes."""

_FAMILY_PREFIX = "families/"


def load_task(spec: str | Path, *, search: Sequence[str | Path] = ()) -> Task:
    """Load one task.

    Args:
        spec: A task directory, the id of a hand-written task, or the full id of a family instance
            (``families/<name>?level=1&seed=7``; level and seed default to the first level and the first seed of the split).
        search: Directories to look for ids in before the shipped corpus.

    Returns:
        The task.

    Raises:
        TaskError: The directory is malformed.
        UnknownTask: Nothing answers to ``spec``.
    """
    if isinstance(spec, str) and spec.startswith(_FAMILY_PREFIX):
        pools = _family_pools(spec, search)
        if len(pools) > 1:
            raise UnknownTask(f"{spec!r} names {len(pools)} families or levels; expected exactly one")
        return pools[0].at(0)
    path = _as_directory(spec)
    if path is not None:
        return _load_directory(path)
    known = dict(pair for root in reversed(roots(search)) for pair in task_directories(root))
    if spec in known:
        return _load_directory(known[str(spec)], task_id=str(spec))
    raise UnknownTask(_not_found(str(spec), [*known, *_family_names(search)]))


def list_tasks(*, search: Sequence[str | Path] = ()) -> tuple[str, ...]:
    """Ids of all hand-written tasks and of every family at each of its levels, sorted.

    Raises:
        ConfigError: A search directory does not exist, or the installation holds no corpus.
        TaskError: A family cannot be imported.
    """
    seeds = {task_id for root in roots(search) for task_id, _ in task_directories(root)}
    families = {f"{_FAMILY_PREFIX}{family.name}?level={level}" for family in _families(search) for level in family.levels}
    return (*sorted(families), *sorted(seeds))


@dataclass(frozen=True, slots=True)
class _Single:
    """A hand-written task in a source."""

    id: str
    path: Path

    def __len__(self) -> int:
        return 1

    def at(self, index: int) -> Task:
        return _load_directory(self.path, task_id=self.id)

    def ids(self) -> Iterator[str]:
        yield self.id


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A task that was given as an object."""

    task: Task

    def __len__(self) -> int:
        return 1

    def at(self, index: int) -> Task:
        return self.task

    def ids(self) -> Iterator[str]:
        yield self.task.id


@dataclass(frozen=True, slots=True)
class _Pool:
    """The instances of one family at one level whose seeds lie in a range."""

    family: Family
    level: int
    seeds: range

    def __len__(self) -> int:
        return len(self.seeds)

    def at(self, index: int) -> Task:
        seed = self.seeds[index]
        path = materialise(self.family, self.level, seed)
        return _load_directory(path, task_id=instance_id(self.family.name, self.level, seed))

    def ids(self) -> Iterator[str]:
        return (instance_id(self.family.name, self.level, seed) for seed in self.seeds)


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The tasks an environment draws from.

    Args:
        spec: How it was asked for.
        parts: Single tasks, and families at one level.
        search: Extra directories that ids are looked up in.
    """

    spec: str
    parts: tuple[_Single | _Loaded | _Pool, ...]
    search: tuple[str | Path, ...] = ()

    def __len__(self) -> int:
        """Number of distinct tasks."""
        return sum(len(part) for part in self.parts)

    def ids(self) -> Iterator[str]:
        """Ids of all tasks, in order (lazily: a family's split has many)."""
        for part in self.parts:
            yield from part.ids()

    def sample(self, rng_seed: int) -> Task:
        """Draw a task: a pure function of ``rng_seed``.

        Every part (a single task, or one family at one level) is equally likely, then every seed of a family.

        Args:
            rng_seed: Any integer.

        Raises:
            TaskError: The task drawn is malformed.
        """
        rng = random.Random(f"task-source/{rng_seed}")
        part = self.parts[rng.randrange(len(self.parts))]
        return part.at(rng.randrange(len(part)))

    def get(self, task_id: str) -> Task:
        """The task with this id: one of the source's own, else whatever ``load_task`` finds under it.

        Raises:
            UnknownTask: Nothing answers to ``task_id``.
            TaskError: The task is malformed.
        """
        for part in self.parts:
            if not isinstance(part, _Pool) and task_id in part.ids():
                return part.at(0)
        return load_task(task_id, search=self.search)


def resolve_tasks(spec: TaskSpec, *, search: Sequence[str | Path] = ()) -> TaskSource:
    """Resolve what a user asked for.

    Args:
        spec: An id (``seeds/hello-file``), a path of a task directory, a pattern over ids (``seeds/*``), a family query
            (``families/tidy-files?level=2&split=test``; keys ``level``, ``seed``, ``split`` and ``n``, the number of seeds to use; the name
            may be a pattern), a ``Task``, or a list of those.
        search: Directories to look for ids in before the shipped corpus.

    Returns:
        A source with at least one task. Directories are not read before a task is drawn.

    Raises:
        UnknownTask: Nothing answers to ``spec``; the message suggests the nearest name.
        TaskError: ``spec`` is of no such kind, or a family cannot be imported.
    """
    items: Sequence[str | Path | Task] = [spec] if isinstance(spec, str | Path | Task) else spec
    if not isinstance(items, Sequence):
        raise TaskError(f"a task must be an id, a path, a pattern, a Task or a list of those, got {type(spec).__name__}: {spec!r}")
    if not items:
        raise UnknownTask("the list of tasks is empty; expected at least one id, path, pattern or Task")
    parts = tuple(part for item in items for part in _resolve_one(item, search))
    return TaskSource(", ".join(item.id if isinstance(item, Task) else str(item) for item in items), parts, tuple(search))


def _resolve_one(item: str | Path | Task, search: Sequence[str | Path]) -> Sequence[_Single | _Loaded | _Pool]:
    if isinstance(item, Task):
        return [_Loaded(item)]
    if not isinstance(item, str | Path):
        raise TaskError(f"a task must be an id, a path, a pattern or a Task, got {type(item).__name__}: {item!r}")
    if isinstance(item, str) and item.startswith(_FAMILY_PREFIX):
        return _family_pools(item, search)
    path = _as_directory(item)
    if path is not None:
        return [_Single(_directory_id(path), path)]
    known = dict(pair for root in reversed(roots(search)) for pair in task_directories(root))
    names = fnmatch.filter(known, str(item)) if isinstance(item, str) and any(mark in item for mark in "*?[") else [str(item)]
    found = [_Single(name, known[name]) for name in sorted(names) if name in known]
    if not found:
        raise UnknownTask(_not_found(str(item), [*known, *_family_names(search)]))
    return found


def _as_directory(spec: str | Path) -> Path | None:
    """``spec`` as a task directory: a ``Path``, a string that starts like a path, or one that is a directory with a ``task.toml``."""
    if isinstance(spec, str) and "\0" in spec:
        raise UnknownTask(f"task {spec!r} contains a NUL character")
    path = Path(spec).expanduser()
    if isinstance(spec, Path) or spec.startswith(("/", "./", "../", "~")) or spec in (".", ".."):
        if not path.is_dir():
            raise UnknownTask(f"no task directory at {str(path)!r}; expected a directory with task.toml, instruction.md and tests/")
        return path.resolve()
    return path.resolve() if (path / "task.toml").is_file() else None


def _directory_id(path: Path) -> str:
    """Id of a task given by its path: the corpus id if it lies there, else the directory's name."""
    for root in roots():
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return path.name


def _families(search: Sequence[str | Path]) -> list[Family]:
    files = dict(pair for root in reversed(roots(search)) for pair in family_files(root))
    return [load_family(files[name]) for name in sorted(files)]


def _family_names(search: Sequence[str | Path]) -> list[str]:
    return [f"{_FAMILY_PREFIX}{name}" for root in roots(search) for name, _ in family_files(root)]


def _family_pools(spec: str, search: Sequence[str | Path]) -> list[_Pool]:
    """The pools that a ``families/<name>?...`` query stands for."""
    pattern, _, query = spec.removeprefix(_FAMILY_PREFIX).partition("?")
    options = _parse_query(spec, query)
    files = dict(pair for root in reversed(roots(search)) for pair in family_files(root))
    names = sorted(fnmatch.filter(files, pattern))
    if not names:
        raise UnknownTask(_not_found(f"{_FAMILY_PREFIX}{pattern}", [f"{_FAMILY_PREFIX}{name}" for name in files]))
    pools = []
    for family in (load_family(files[name]) for name in names):
        level = options.get("level", family.levels[0])
        if level not in family.levels:
            raise UnknownTask(f"{spec!r}: family {family.name!r} has no level {level}; it has {', '.join(map(str, family.levels))}")
        pools.append(_Pool(family, int(level), _seed_range(spec, options)))
    return pools


def _parse_query(spec: str, query: str) -> dict[str, int | str]:
    options: dict[str, int | str] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key in options:
            raise UnknownTask(f"{spec!r}: {key} is given twice")
        if key == "split":
            if value not in SPLITS:
                raise UnknownTask(f"{spec!r}: split = {value!r}: expected one of {', '.join(SPLITS)}")
            options[key] = value
        elif key in ("level", "seed", "n"):
            if not (value.isascii() and value.isdigit() and len(value) < 10):
                raise UnknownTask(f"{spec!r}: {key} = {value!r}: expected a whole number")
            options[key] = int(value)
        else:
            raise UnknownTask(f"{spec!r}: unknown key {key!r}; expected level, seed, split or n")
    return options


def _seed_range(spec: str, options: dict[str, int | str]) -> range:
    """Seeds that a query selects: one, the first ``n`` of a split, or a whole split (``train`` unless named)."""
    if "seed" in options:
        seed = int(options["seed"])
        split = split_of(seed)
        if options.get("split", split) != split:
            raise UnknownTask(f"{spec!r}: seed {seed} belongs to the {split} split, not to {options['split']}")
        if "n" in options:
            raise UnknownTask(f"{spec!r}: seed and n exclude each other")
        return range(seed, seed + 1)
    seeds = SPLITS[str(options.get("split", "train"))]
    count = int(options.get("n", len(seeds)))
    if not 1 <= count <= len(seeds):
        raise UnknownTask(f"{spec!r}: n = {count}: expected 1 to {len(seeds)}")
    return seeds[:count]


def _not_found(spec: str, names: Sequence[str]) -> str:
    """Message for an unknown id, with the nearest known one."""
    if not spec:
        return "the task id is empty; `t1-env tasks list` shows all"
    tails = {name.rpartition("/")[2]: name for name in names}
    near = difflib.get_close_matches(spec, names, n=1, cutoff=0.5) or [
        tails[tail] for tail in difflib.get_close_matches(spec.rpartition("/")[2], list(tails), n=1, cutoff=0.5)
    ]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no task answers to {spec!r}{hint} (`t1-env tasks list` shows all)"


def _load_directory(path: Path, *, task_id: str | None = None) -> Task:
    """Read a Harbor directory."""
    toml, instruction_file = path / "task.toml", path / "instruction.md"
    if not toml.is_file():
        old = " (task.yaml is the Terminal-Bench 1 format, which is not supported)" if (path / "task.yaml").is_file() else ""
        raise TaskError(f"{path}: task.toml is missing; expected a Harbor task directory{old}")
    config, metadata = parse_task_toml(read_text(toml), file=toml)
    if config.steps is not None:
        raise TaskError(f"{toml}: steps: multi-step tasks are not supported; expected a task with one instruction.md")
    if not instruction_file.is_file():
        raise TaskError(f"{instruction_file} is missing; expected the text the agent is given")
    instruction = strip_canary(read_text(instruction_file))
    if not instruction:
        raise TaskError(f"{instruction_file} is empty; expected the text the agent is given")
    if not any((path / "tests").glob("test*")):
        raise TaskError(f"{path / 'tests'}: expected test.sh or test_*.py files")
    environment = path / "environment"
    dockerfile = environment / "Dockerfile"
    compose = any((environment / name).is_file() for name in ("docker-compose.yaml", "docker-compose.yml"))
    if not (dockerfile.is_file() or compose or config.environment.docker_image):
        raise TaskError(f"{dockerfile} is missing; expected it, a docker-compose.yaml, or environment.docker_image in task.toml")
    workdir = config.environment.workdir
    if workdir is None:
        workdir = dockerfile_workdir(read_text(dockerfile)) if dockerfile.is_file() else "/app"
    return Task(
        id=task_id if task_id is not None else _directory_id(path),
        path=path,
        instruction=instruction,
        config=config,
        metadata=metadata,
        digest=directory_digest(path),
        workdir=workdir,
    )
