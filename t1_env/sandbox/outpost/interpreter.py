"""The files of a runtime that are not T1's: the packages it needs, and for a complete one this host's interpreter with its libraries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import py_compile
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from t1_env.errors import SandboxUnavailable
from t1_env.sandbox.outpost import elf, layout

_PACKAGES: Final = ("pyte", "wcwidth", "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
_DISTRIBUTIONS: Final = ("pyte", "wcwidth", "pytest", "pluggy", "iniconfig", "packaging", "pygments")
# pytest colours Python and diffs; the other five hundred languages stay at home.
_LEXERS: Final = frozenset({"__init__.py", "_mapping.py", "diff.py", "python.py", "special.py"})
_LEFT_OUT: Final = frozenset(
    {
        "__pycache__",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
    }
)
_LEFT_OUT_EXTENSIONS: Final = re.compile(r"(_tkinter|_test|_ctypes_test|_xx|xx|readline|_gdbm|_dbm|_curses|nis|ossaudiodev|spwd)")
# Loaded by name at run time, so that no list of dependencies mentions them: thread exit, and users and hosts with an older glibc.
_LOADED_BY_NAME: Final = ("libgcc_s.so.1", "libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2")
_DEPENDENCY: Final = re.compile(r"^\s*(?P<name>\S+)(?: => (?P<path>/\S+))? \(0x[0-9a-f]+\)$", re.MULTILINE)
_MISSING: Final = re.compile(r"^\s*(\S+) => not found$", re.MULTILINE)
_TOOL_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a runtime.

    Args:
        name: Path in the runtime.
        source: File of this host.
        mode: Permission bits.
    """

    name: str
    source: Path
    mode: int


def package_members(*, compiled: bool, scratch: Path | None) -> Iterator[Member]:
    """The packages that T1's far side and its verifiers import.

    Args:
        compiled: Whether bytecode of this interpreter, and extension modules for it, are part of it.
        scratch: Where bytecode is written.
    """
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and not spec.submodule_search_locations and str(spec.origin).endswith(".py"):  # a single file
            yield from _python_file(Path(str(spec.origin)), f"{layout.PACKAGES}/{name}.py", scratch if compiled else None)
            continue
        if spec is None or not spec.submodule_search_locations:
            raise SandboxUnavailable(f"the package {name!r} is not installed as files; install T1 again: python -m pip install t1-terminal")
        top = Path(spec.submodule_search_locations[0])
        for path in sorted(top.rglob("*")):
            relative = path.relative_to(top)
            if not path.is_file() or "__pycache__" in relative.parts or "tests" in relative.parts:
                continue
            if name == "pygments" and relative.parts[0] == "lexers" and relative.name not in _LEXERS:
                continue
            if path.suffix in (".so", ".pyi", ".pyd"):
                continue
            yield from _python_file(path, f"{layout.PACKAGES}/{name}/{relative.as_posix()}", scratch if compiled else None)
    yield from _metadata()


def _metadata() -> Iterator[Member]:
    """Names and versions of the distributions: pytest asks for pluggy's when it prints its first lines."""
    for name in _DISTRIBUTIONS:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        notes = [file for file in files if file.name == "METADATA" and file.parent.suffix == ".dist-info"]
        if not notes:
            raise SandboxUnavailable(f"the package {name!r} is not installed as files; install T1 again: python -m pip install t1-terminal")
        yield Member(f"{layout.PACKAGES}/{notes[0]}", Path(str(notes[0].locate())), 0o644)


def interpreter_members(scratch: Path) -> list[Member]:
    """This interpreter, its standard library, its loader and every shared library they need.

    Raises:
        SandboxUnavailable: It is not a Linux program of the usual kind; says what is missing.
    """
    if sys.platform != "linux":
        raise SandboxUnavailable(
            f"a complete runtime can be made on Linux only, this is {sys.platform}; use one that has Python over there"
        )
    binary = Path(sys.executable).resolve()
    loader = elf.loader_of(binary)
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    inside = f"{sys.platlibdir}/python{sys.version_info.major}.{sys.version_info.minor}"
    script = scratch / "python"
    script.write_text(layout.SCRIPT_TEXT, encoding="ascii")
    members = [Member(layout.SCRIPT, script, 0o755)]
    extensions: list[Path] = []
    for path in sorted(standard.rglob("*.py")):
        relative = path.relative_to(standard)
        if not (_LEFT_OUT & set(relative.parts)) and not relative.parts[0].startswith("config-"):
            members += _python_file(path, f"{inside}/{relative.as_posix()}", scratch)
    for directory in sorted({Path(entry) for entry in sys.path if Path(entry).name == "lib-dynload"}):
        extensions += [path for path in sorted(directory.glob("*.so")) if not _LEFT_OUT_EXTENSIONS.match(path.name)]
    libraries = _libraries_of(loader, [binary, *extensions])
    programs = {layout.INTERPRETER: binary, layout.LOADER: loader}
    programs |= {f"{inside}/lib-dynload/{path.name}": path for path in extensions}
    programs |= {f"{layout.LIBRARIES}/{name}": path for name, path in libraries.items()}
    return members + [_isolated(name, path, scratch, is_loader=path == loader) for name, path in sorted(programs.items())]


def _isolated(name: str, path: Path, scratch: Path, *, is_loader: bool) -> Member:
    """A program or library that finds the others of the runtime and nothing else."""
    data = path.read_bytes()
    changed = elf.isolated_loader(data, str(path)) if is_loader else elf.without_search_paths(data)
    target = scratch / "programs" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(changed)
    return Member(name, target, 0o755)


def _python_file(path: Path, name: str, scratch: Path | None) -> Iterator[Member]:
    """A source file, and its bytecode, which is taken as it is: nobody changes the one without the other."""
    yield Member(name, path, 0o644)
    if scratch is None or path.suffix != ".py":
        return
    parent, _, file_name = name.rpartition("/")
    cached = f"{parent}/__pycache__/{file_name[:-3]}.{sys.implementation.cache_tag}.pyc"
    target = scratch / "bytecode" / cached
    try:
        py_compile.compile(
            str(path), cfile=str(target), dfile=name, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )
    except py_compile.PyCompileError:
        return  # a file that is not meant for this version of Python
    yield Member(cached, target, 0o644)


def _libraries_of(loader: Path, binaries: list[Path]) -> dict[str, Path]:
    """Every shared library that the given files need, directly or not: name -> file of this host."""
    found: dict[str, Path] = {}
    for binary in binaries:
        result = subprocess.run(
            [str(loader), "--list", str(binary)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TOOL_TIMEOUT_S,
            env={"PATH": os.defpath},
        )
        missing = _MISSING.findall(result.stdout)
        if result.returncode != 0 or missing:
            said = ", ".join(missing) or result.stderr.strip()[-300:]
            raise SandboxUnavailable(f"a complete runtime needs every shared library of {binary}; not found: {said}")
        for match in _DEPENDENCY.finditer(result.stdout):
            if match["path"] and match["name"] not in found and Path(match["path"]).resolve() != loader:
                found[match["name"]] = Path(match["path"]).resolve()
    for name in _LOADED_BY_NAME:
        for directory in sorted({path.parent for path in found.values()}):
            if name not in found and (directory / name).is_file():
                found[name] = (directory / name).resolve()
    return found
