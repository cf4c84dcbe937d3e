"""Seeded task families: from ``family.py`` and a seed to a complete Harbor directory on disk.

A family is a Python file that exposes ``NAME``, ``DESCRIPTION``, ``CATEGORY``, ``LEVELS`` and
``generate(seed: int, level: int) -> Instance``, a pure function. Its instances are written once each to a cache, under the digest of their
contents, and are byte-identical on every machine.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from t1_env.errors import ConfigError, TaskError, UnknownTask
from t1_env.tasks.instance import Instance
from t1_env.tasks.schema import Split
from t1_env.tasks.task import content_digest, directory_digest

SPLITS: Final[Mapping[str, range]] = {
    "train": range(0, 1_000_000),
    "dev": range(1_000_000, 1_100_000),
    "test": range(2_000_000, 2_100_000),
}
"""Seeds of each split. They never overlap, so an instance belongs to exactly one split."""

assert tuple(SPLITS) == get_args(Split)

_TEST_SH: Final = """\
#!/bin/bash
# Harbor's entry point: run the verifiers, then write the reward (1 if all of them pass, else 0).
mkdir -p /logs/verifier
if ! python3 -c 'import pytest' 2>/dev/null; then
  apt-get update && apt-get install -y --no-install-recommends python3-pytest
fi
if python3 -m pytest -p no:cacheprovider -rA "$(dirname "$0")/test_outputs.py"; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""


@dataclass(frozen=True, slots=True)
class Family:
    """A loaded family.

    Args:
        name: Name, as in ``families/<name>``.
        description: One sentence.
        category: What kind of work it is.
        levels: Levels it can generate, easiest first.
        generate: ``generate(seed, level) -> Instance``.
        path: Its ``family.py``.
    """

    name: str
    description: str
    category: str
    levels: tuple[int, ...]
    generate: Callable[[int, int], Instance]
    path: Path


def split_of(seed: int) -> Split:
    """The split a seed belongs to.

    Raises:
        UnknownTask: It lies outside every split.
    """
    for split in get_args(Split):
        if seed in SPLITS[split]:
            found: Split = split
            return found
    ranges = ", ".join(f"{name} {seeds.start} to {seeds.stop - 1}" for name, seeds in SPLITS.items())
    raise UnknownTask(f"seed {seed} belongs to no split; expected one of: {ranges}")


def instance_id(name: str, level: int, seed: int) -> str:
    """Full id of an instance."""
    return f"families/{name}?level={level}&seed={seed}"


@functools.lru_cache(maxsize=256)
def load_family(path: Path) -> Family:
    """Import a ``family.py`` by its path.

    Raises:
        TaskError: It cannot be imported or lacks one of the names a family must expose.
    """
    name = path.parent.name
    spec = importlib.util.spec_from_file_location(f"t1_family_{name.replace('-', '_')}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise TaskError(f"{path}: not a Python file that can be imported")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a family is someone's code: whatever it raises on import is its fault
        raise TaskError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    expected = {"NAME": str, "DESCRIPTION": str, "CATEGORY": str, "LEVELS": tuple, "generate": Callable}
    for attribute, kind in expected.items():
        value = getattr(module, attribute, None)
        if not isinstance(value, kind):  # type: ignore[arg-type]
            raise TaskError(f"{path}: {attribute} = {value!r}: a family must expose {', '.join(expected)}")
    if name != module.NAME:
        raise TaskError(f"{path}: NAME = {module.NAME!r}: expected the name of its directory, {name!r}")
    if not module.LEVELS or not all(isinstance(level, int) and level >= 1 for level in module.LEVELS):
        raise TaskError(f"{path}: LEVELS = {module.LEVELS!r}: expected a non-empty tuple of integers from 1 up")
    return Family(name, module.DESCRIPTION, module.CATEGORY, tuple(module.LEVELS), module.generate, path)


def generate(family: Family, level: int, seed: int) -> Instance:
    """Generate one instance.

    Raises:
        UnknownTask: The family has no such level, or the seed belongs to no split.
    """
    if level not in family.levels:
        levels = ", ".join(map(str, family.levels))
        raise UnknownTask(f"family {family.name!r} has no level {level}; it has {levels}")
    split_of(seed)
    return family.generate(seed, level)


def render(family: Family, level: int, seed: int, instance: Instance) -> dict[str, tuple[bytes, bool]]:
    """Lay an instance out as a Harbor directory.

    Returns:
        Relative path -> (contents, is executable).
    """
    texts = {
        "task.toml": _task_toml(family, level, seed, instance),
        "instruction.md": instance.instruction,
        "environment/Dockerfile": _dockerfile(instance),
        "tests/test_outputs.py": instance.tests,
    }
    scripts = {"tests/test.sh": _TEST_SH, "solution/solve.sh": _solve_sh(instance)}
    slips = [{"step": slip.step, "command": slip.command, "kind": slip.kind} for slip in instance.slips]
    texts["solution/slips.json"] = json.dumps(slips, indent=1) + "\n"
    files = {f"environment/files/{name}": (file.content, False) for name, file in instance.files.items()}
    files |= {name: (text.encode(), False) for name, text in texts.items()}
    files |= {name: (text.encode(), True) for name, text in scripts.items()}
    return files


def _task_toml(family: Family, level: int, seed: int, instance: Instance) -> str:
    requires = ", ".join(json.dumps(program) for program in instance.requires)
    return f"""\
schema_version = "1.4"

[task]
name = "t1/{family.name}-{level}-{seed}"
description = {json.dumps(family.description)}

[metadata.t1]
family = {json.dumps(family.name)}
level = {level}
seed = {seed}
split = "{split_of(seed)}"
category = {json.dumps(family.category)}
requires = [{requires}]
verifier_class = "final-state"

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = 60.0

[environment]
network_mode = "no-network"
build_timeout_sec = 300.0
cpus = 1
memory_mb = 512
storage_mb = 256
workdir = "/app"
"""


def _dockerfile(instance: Instance) -> str:
    """The environment; modes are set by name because neither git nor a wheel keeps them."""
    lines = ["FROM debian:bookworm-slim", "WORKDIR /app"]
    if instance.files:
        lines.append("COPY files/ /app/")
    commands = [f"mkdir -p {' '.join(instance.directories)}"] if instance.directories else []
    by_mode: dict[int, list[str]] = {}
    for name, file in sorted(instance.files.items()):
        if file.mode != 0o644:
            by_mode.setdefault(file.mode, []).append(name)
    commands += [f"chmod {mode:o} {' '.join(names)}" for mode, names in sorted(by_mode.items())]
    if commands:
        lines.append("RUN " + " && ".join(commands))
    return "\n".join(lines) + "\n"


def _solve_sh(instance: Instance) -> str:
    parts = ["#!/bin/bash", "set -e", *(f"# step: {step.title}\n{step.command}" for step in instance.steps)]
    return "\n".join(parts) + "\n"


def cache_dir() -> Path:
    """Where instances are written: ``$T1_CACHE_DIR``, else ``$XDG_CACHE_HOME/t1-env``, else ``~/.cache/t1-env``; plus ``instances``."""
    if own := os.environ.get("T1_CACHE_DIR"):
        return Path(own).expanduser() / "instances"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "t1-env" / "instances"


def materialise(family: Family, level: int, seed: int) -> Path:
    """Write an instance to the cache, unless it is there already and intact.

    Safe when several processes do it at once: each writes a private directory and renames it into place.

    Returns:
        The Harbor directory.

    Raises:
        UnknownTask: The family has no such level, or the seed belongs to no split.
        ConfigError: The cache directory cannot be written.
    """
    files = render(family, level, seed, generate(family, level, seed))
    digest = content_digest((name, content, executable) for name, (content, executable) in files.items())
    root = cache_dir()
    target = root / digest[:2] / f"{family.name}-{level}-{seed}-{digest[:16]}"
    try:
        if target.is_dir():
            if directory_digest(target) == digest:
                return target
            shutil.rmtree(target, ignore_errors=True)  # damaged: written again below
        target.parent.mkdir(parents=True, exist_ok=True)
        private = Path(tempfile.mkdtemp(dir=target.parent, prefix=".new-"))
        try:
            _write(private, files)
            with contextlib.suppress(FileExistsError):
                _rename(private, target)
        finally:
            shutil.rmtree(private, ignore_errors=True)
    except OSError as error:
        where = error.filename or root
        raise ConfigError(f"cannot write task instances to {where}: {error.strerror}; set T1_CACHE_DIR to a writable directory") from None
    return target


def _rename(private: Path, target: Path) -> None:
    """Move a finished directory into place; ``FileExistsError`` when another process was first."""
    try:
        private.rename(target)
    except OSError as error:
        if target.is_dir():
            raise FileExistsError(target) from error
        raise


def _write(root: Path, files: Mapping[str, tuple[bytes, bool]]) -> None:
    root.chmod(0o755)
    for directory in sorted({(root / name).parent for name in files}):
        directory.mkdir(parents=True, exist_ok=True)
    for name, (content, executable) in files.items():
        path = root / name
        path.write_bytes(content)
        path.chmod(0o755 if executable else 0o644)
