"""What an attacker knows about a task: paths, modules and programs, read from its instruction and its tests, never from its solution.

Paths come from the instruction, as an agent reads it, and from the tests. No agent sees the tests; an attack that is aimed with their help
is stronger than an agent's could be.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from t1_env.tasks.task import Task, read_text

MAX_PATHS: Final = 40

_IN_TEXT: Final = re.compile(r"(?<![\w.~/-])(/?(?:[\w.+-]+/)*[\w.+-]*\w)")
_HAS_SUFFIX: Final = re.compile(r"[A-Za-z_].*\.[A-Za-z]\w{0,7}$|\w/")
_SYSTEM: Final = ("bin", "boot", "dev", "lib", "lib64", "logs", "proc", "sbin", "sys", "tests", "usr")
_RUNS: Final = frozenset({"run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput", "system", "popen"})
_PATH_CLASSES: Final = frozenset({"Path", "PosixPath", "PurePath", "PurePosixPath"})


@dataclass(frozen=True, slots=True)
class Site:
    """What an attack is aimed at.

    Args:
        workdir: Where the agent starts.
        paths: Absolute paths of what is asked for and what is given, in the order in which they are named.
        named: Those that the instruction names.
        modules: Modules that the tests import and that are neither pytest's nor the standard library's: the agent's.
        module_files: Where the tests would find them, or, without any, files in the working directory named like what the tests import.
        programs: Names of programs that the tests execute.
        fixtures: Files that the tests bring along, relative to their directory.
        tests: Ids of the verifiers.
    """

    workdir: str
    paths: tuple[str, ...]
    named: tuple[str, ...]
    modules: tuple[str, ...]
    module_files: tuple[str, ...]
    programs: tuple[str, ...]
    fixtures: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Paths that are files rather than directories, as far as names tell."""
        above = {str(parent) for path in self.paths for parent in PurePosixPath(path).parents}
        return tuple(path for path in self.paths if path not in above)


def survey(task: Task, *, tests: tuple[str, ...] = ()) -> Site:
    """Read a task as an attacker would.

    Args:
        task: The task.
        tests: Ids of its verifiers.

    Returns:
        What was found.
    """
    named = _useful(_in_instruction(task.instruction, task.workdir), task.workdir)
    found = _TestReader(task.instruction)
    for path in sorted(task.tests_dir.rglob("*.py")):
        try:
            found.visit(ast.parse(read_text(path)))
        except SyntaxError:  # such a file is no verifier, and no business of an attacker
            continue
    paths = _useful([*named, *(_resolve(path, task.workdir) for path in found.paths)], task.workdir)
    foreign = tuple(name for name in found.modules if name not in sys.stdlib_module_names | {"pytest"})
    below = tuple(dict.fromkeys((task.workdir, *(path for path in found.import_directories if path.startswith("/")))))
    module_files = tuple(f"{directory.rstrip('/')}/{name}.py" for directory in below for name in foreign or found.modules)
    brought = (path for path in sorted(task.tests_dir.rglob("*")) if path.is_file() and path.suffix not in (".py", ".pyc", ".sh"))
    return Site(
        workdir=task.workdir,
        paths=paths[:MAX_PATHS],
        named=named[:MAX_PATHS],
        modules=foreign,
        module_files=module_files,
        programs=tuple(dict.fromkeys(found.programs)),
        fixtures=tuple(path.relative_to(task.tests_dir).as_posix() for path in brought),
        tests=tests,
    )


def _in_instruction(text: str, workdir: str) -> Iterator[str]:
    for word in _IN_TEXT.findall(text):
        if word.startswith("/") or _HAS_SUFFIX.search(word):
            yield _resolve(word, workdir)


def _resolve(path: str, workdir: str) -> str:
    """Absolute and without ``.`` and ``..``; an attack never leaves it to chance where that leads."""
    parts: list[str] = []
    for part in (PurePosixPath(workdir) / path).parts[1:]:
        if part == "..":
            del parts[-1:]
        elif part != ".":
            parts.append(part)
    return "/" + "/".join(parts)


def _useful(paths: Iterator[str] | list[str], workdir: str) -> tuple[str, ...]:
    """Each once, without the working directory, what is above it, and the system's own directories."""
    above = {workdir.rstrip("/") or "/", *(str(parent) for parent in PurePosixPath(workdir).parents)}
    return tuple(path for path in dict.fromkeys(paths) if path not in above and path.split("/")[1] not in _SYSTEM)


class _TestReader(ast.NodeVisitor):
    """Collects paths, imports and programs from the source of tests."""

    def __init__(self, instruction: str) -> None:
        self.paths: list[str] = []
        self.modules: list[str] = []
        self.programs: list[str] = []
        self.import_directories: list[str] = []
        self._instruction = instruction
        self._values: dict[str, str] = {}

    def visit_Assign(self, node: ast.Assign) -> None:
        """Remember what names of paths stand for."""
        value = self._fold(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name) and value is not None:
                self._values[target.id] = value
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        """A module."""
        self.modules += [alias.name.partition(".")[0] for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """A module."""
        if node.module and not node.level:
            self.modules.append(node.module.partition(".")[0])

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """``Path / "name"``."""
        value = self._fold(node)
        if value is not None and isinstance(node.op, ast.Div):
            self.paths.append(value)
        else:
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """A path in quotes, or a name that the instruction has too."""
        value = node.value
        if isinstance(value, str) and _IN_TEXT.fullmatch(value) and (value.startswith("/") or self._is_named(value)):
            self.paths.append(value)

    def visit_Call(self, node: ast.Call) -> None:
        """A program that is executed, or a directory that modules come from."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        if name in _RUNS and node.args:
            first = node.args[0]
            word = self._fold(first.elts[0] if isinstance(first, ast.List | ast.Tuple) and first.elts else first)
            if word and word.split():
                self.programs.append(PurePosixPath(word.split()[0]).name)
        elif name in ("insert", "append") and ast.unparse(node.func).startswith("sys.path."):
            self.import_directories += [value for value in map(self._fold, node.args) if value is not None]
        self.generic_visit(node)

    def _is_named(self, value: str) -> bool:
        return bool(_HAS_SUFFIX.search(value)) and value in self._instruction

    def _fold(self, node: ast.expr) -> str | None:
        """The value of an expression over constant strings and paths, or None."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.Name):
            return self._values.get(node.id)
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
            parts = [self._fold(argument) for argument in node.args]
            if name in {*_PATH_CLASSES, "str"} and parts and None not in parts:
                return str(PurePosixPath(*(part for part in parts if part is not None)))
            return None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Add):
            left, right = self._fold(node.left), self._fold(node.right)
            if left is not None and right is not None:
                return str(PurePosixPath(left) / right) if isinstance(node.op, ast.Div) else left + right
        return None
