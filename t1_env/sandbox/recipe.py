"""What a Dockerfile comes to: the steps that change files, and the settings that are left at the end.

Everything that needs no sandbox is decided here: variables are replaced, sources found and read, words split. What is left of each
instruction is a ``Step`` whose ``key`` holds all that its outcome depends on besides the files below it, so that it can name a layer.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from t1_env.errors import ImageBuildError
from t1_env.sandbox import archives
from t1_env.sandbox.context import BuildContext, digest_of
from t1_env.sandbox.dockerfile import (
    NOTED,
    Instruction,
    is_heredoc,
    parse_dockerfile,
    parse_exec_form,
    parse_pairs,
    split_words,
    substitute,
)

_SHOWN_CHARACTERS: Final = 200
_DEFAULT_SHELL: Final = ("/bin/sh", "-c")
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64", "riscv64": "riscv64"}
_NOTES: Final = {
    "CMD": "is not run: the sandbox runs the agent's shell",
    "ENTRYPOINT": "is not run: the sandbox runs the agent's shell",
    "HEALTHCHECK": "is not run",
    "EXPOSE": "has no effect: the sandbox has a network of its own",
    "STOPSIGNAL": "has no effect",
    "VOLUME": "makes ordinary directories",
}


@dataclass(frozen=True, slots=True)
class Copy:
    """One thing to copy into the image.

    Args:
        source: Host file or directory, or the text itself.
        dest: Absolute path inside.
        mode: Permission bits; None to keep those of the source.
        owner: ``user[:group]`` as written after ``--chown``; None for root.
        unpack: Whether the source is an archive to unpack.
        left_out: Host paths below the source that are not copied.
    """

    source: Path | bytes
    dest: str
    mode: int | None = None
    owner: str | None = None
    unpack: bool = False
    left_out: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction that changes files, or the user.

    Args:
        line: Where it stands.
        keyword: ``RUN``, ``COPY``, ``ADD``, ``WORKDIR``, ``VOLUME`` or ``USER``.
        key: All that its outcome depends on, apart from what lies below.
        argv: Of ``RUN``: the program.
        stdin: Of ``RUN``: its input.
        env: Of ``RUN``: its variables.
        cwd: Of ``RUN``: its directory.
        copies: Of ``COPY`` and ``ADD``.
        directories: Of ``WORKDIR`` and ``VOLUME``: to be made if missing.
        user: Of ``USER``: as written.
    """

    line: int
    keyword: str
    key: str
    argv: tuple[str, ...] = ()
    stdin: bytes = b""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    copies: tuple[Copy, ...] = ()
    directories: tuple[str, ...] = ()
    user: str = ""

    @property
    def shown(self) -> str:
        """The instruction in a few words, for people."""
        parts = {"RUN": self.argv[-1:], "USER": (self.user,)}.get(self.keyword) or self.directories or [copy.dest for copy in self.copies]
        return f"{self.keyword} {' '.join(' '.join(parts).split())[:_SHOWN_CHARACTERS]}"


@dataclass(frozen=True, slots=True)
class Base:
    """What ``FROM`` stands for here.

    Args:
        env: Variables that it sets.
        path: Its PATH, which instructions may extend without setting it.
        workdir: Where its processes start.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    workdir: str | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole Dockerfile.

    Args:
        name: Its path, for errors.
        steps: In order.
        env: Variables that later processes get.
        workdir: Where later processes start; None if nothing says so.
        notes: What was read but has no effect, one line each.
    """

    name: str
    steps: tuple[Step, ...]
    env: Mapping[str, str]
    workdir: str | None
    notes: tuple[str, ...]


def read_recipe(environment_dir: Path, find_base: Callable[[str, int], Base]) -> Recipe:
    """Read ``environment_dir/Dockerfile``.

    Args:
        environment_dir: The root of what can be copied.
        find_base: Called with the name after ``FROM`` and its line.

    Raises:
        ImageBuildError: The file is missing, or holds something that is not supported; names the line.
    """
    path = environment_dir / "Dockerfile"
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ImageBuildError(f"{path}: cannot be read ({error}); a task needs a Dockerfile in its environment directory") from error
    return _Reading(str(path), BuildContext(environment_dir), find_base).run(parse_dockerfile(source, name=str(path)))


def line_error(name: str, line: int, reason: str) -> ImageBuildError:
    """An error that names the line of a Dockerfile."""
    return ImageBuildError(f"{name}:{line}: {reason}")


class _Reading:
    """The state that instructions change while they are read."""

    def __init__(self, name: str, context: BuildContext, find_base: Callable[[str, int], Base]) -> None:
        self._name = name
        self._context = context
        self._find_base = find_base
        self._global_args: dict[str, str] = {}
        self._args: dict[str, str] = {}
        self._env: dict[str, str] = {}
        self._path: dict[str, str] = {}
        self._workdir: PurePosixPath | None = None
        self._shell: tuple[str, ...] = _DEFAULT_SHELL
        self._in_stage = False
        self._steps: list[Step] = []
        self._notes: list[str] = []

    def run(self, instructions: tuple[Instruction, ...]) -> Recipe:
        for instruction in instructions:
            if instruction.keyword in NOTED:
                self._note(instruction)
            else:
                getattr(self, f"_read_{instruction.keyword.lower()}")(instruction)
        workdir = None if self._workdir is None else str(self._workdir)
        return Recipe(self._name, tuple(self._steps), dict(self._env), workdir, tuple(self._notes))

    # ------------------------------------------------------------------------------------------------------------- instructions
    def _read_from(self, instruction: Instruction) -> None:
        words = split_words(instruction, self._name)
        while words and words[0].startswith("--"):
            option, _, value = words.pop(0).partition("=")
            architecture = _ARCHITECTURES.get(platform.machine(), platform.machine())
            if option != "--platform" or substitute(value, self._global_args) not in (f"linux/{architecture}", ""):
                raise self._error(instruction, f"FROM {option}={value}: this machine runs linux/{architecture} only")
        if not (len(words) == 1 or (len(words) == 3 and words[1].upper() == "AS")):
            raise self._error(instruction, f"FROM expects an image and optionally AS and a name, got {instruction.text!r}")
        name = substitute(words[0], self._global_args)
        if not name:
            raise self._error(instruction, f"FROM {words[0]}: the variable is not set")
        base = self._find_base(name, instruction.line)
        self._env, self._path = dict(base.env), {"PATH": base.path} if base.path else {}
        self._workdir = None if base.workdir is None else PurePosixPath(base.workdir)
        self._in_stage = True

    def _read_env(self, instruction: Instruction) -> None:
        self._env.update(parse_pairs(instruction, self._variables, self._name))

    def _read_arg(self, instruction: Instruction) -> None:
        args = self._args if self._in_stage else self._global_args
        for word in split_words(instruction, self._name):
            key, separator, default = word.partition("=")
            if separator:
                args[key] = substitute(default, self._variables if self._in_stage else args)
            elif key in self._global_args:
                args[key] = self._global_args[key]

    def _read_user(self, instruction: Instruction) -> None:
        user = substitute(instruction.text, self._variables)
        self._add(Step(instruction.line, "USER", _key("USER", user), user=user))

    def _read_workdir(self, instruction: Instruction) -> None:
        self._workdir = self._inside(substitute(instruction.text, self._variables))
        directories = (str(self._workdir),)
        self._add(Step(instruction.line, "WORKDIR", _key("WORKDIR", *directories), directories=directories))

    def _read_volume(self, instruction: Instruction) -> None:
        self._note(instruction)
        words = parse_exec_form(instruction.text) or split_words(instruction, self._name)
        directories = tuple(str(self._inside(substitute(word, self._variables))) for word in words)
        self._add(Step(instruction.line, "VOLUME", _key("VOLUME", *directories), directories=directories))

    def _read_shell(self, instruction: Instruction) -> None:
        shell = parse_exec_form(instruction.text)
        if shell is None:
            raise self._error(instruction, f'SHELL expects the form ["program", "-c"], got {instruction.text!r}')
        self._shell = tuple(shell)

    def _read_run(self, instruction: Instruction) -> None:
        text = instruction.text
        while text.startswith("--"):
            option, _, text = text.partition(" ")
            text = text.strip()
            if option != "--network=none":
                raise self._error(instruction, f"RUN {option} is not supported by the local sandbox")
        if not text:
            raise self._error(instruction, "RUN needs a command")
        argv, stdin = self._command(instruction, text)
        env = {**self._args, **self._env}
        cwd = str(self._workdir or "/")
        key = _key("RUN", argv, hashlib.sha256(stdin).hexdigest(), sorted(env.items()), cwd)
        self._add(Step(instruction.line, "RUN", key, argv=argv, stdin=stdin, env=env, cwd=cwd))

    def _command(self, instruction: Instruction, text: str) -> tuple[tuple[str, ...], bytes]:
        exec_form = parse_exec_form(text)
        if exec_form is not None:
            return tuple(exec_form), b""
        if not instruction.heredocs:
            return (*self._shell, text), b""
        if not is_heredoc(text):
            return (*self._shell, f"{text}\n{instruction.body}\n"), b""
        script = instruction.heredocs[0].text
        if script.startswith("#!"):
            first, _, _ = script.partition("\n")
            return (*first[2:].split(), "/dev/stdin"), script.encode()
        return (*self._shell, script), b""

    def _read_add(self, instruction: Instruction) -> None:
        self._read_copy(instruction)

    def _read_copy(self, instruction: Instruction) -> None:
        words = parse_exec_form(instruction.text) or split_words(instruction, self._name)
        mode, owner, words = self._copy_options(instruction, words)
        if len(words) < 2:
            raise self._error(instruction, f"{instruction.keyword} needs a source and a destination")
        *sources, destination = words
        destination = substitute(destination, self._variables)
        into = destination.endswith("/") or destination in (".", "..")
        texts = list(instruction.heredocs)
        found: list[tuple[Path | bytes, str]] = []
        for source in sources:
            if instruction.heredocs and is_heredoc(source):
                heredoc = texts.pop(0)
                text = substitute(heredoc.text, self._variables) if heredoc.expand else heredoc.text
                found.append((text.encode(), heredoc.word))
            else:
                found += [(path, path.name) for path in self._find(instruction, substitute(source, self._variables))]
        if len(found) > 1 and not into:
            raise self._error(instruction, f"{instruction.keyword} of {len(found)} sources needs a destination that ends in '/'")
        target = self._inside(destination)
        unpack = instruction.keyword == "ADD"
        try:
            copies = tuple(self._copy(source, str(target), f"/{name}" if into else "", mode, owner, unpack) for source, name in found)
            key = _key(instruction.keyword, [_copy_key(copy) for copy in copies])
        except OSError as error:
            raise self._error(instruction, f"{error.filename}: {error.strerror}") from error
        self._add(Step(instruction.line, instruction.keyword, key, copies=copies))

    # ------------------------------------------------------------------------------------------------------------------ details
    @property
    def _variables(self) -> dict[str, str]:
        return {**self._path, **self._args, **self._env}

    def _copy(self, source: Path | bytes, target: str, name: str, mode: int | None, owner: str | None, unpack: bool) -> Copy:
        """One thing to copy; ``name`` is what a file is called in the directory ``target``, or empty if that is the file."""
        file = target.rstrip("/") + name
        if isinstance(source, bytes):
            return Copy(source, file, 0o644 if mode is None else mode, owner)
        if source.is_dir():
            return Copy(source, target, mode, owner, left_out=self._context.left_out(source))
        if unpack and _unpacks(source):
            return Copy(source, target, owner=owner, unpack=True)
        return Copy(source, file, mode, owner)

    def _copy_options(self, instruction: Instruction, words: list[str]) -> tuple[int | None, str | None, list[str]]:
        mode, owner = None, None
        rest = list(words)
        while rest and rest[0].startswith("--"):
            option, _, value = rest.pop(0).partition("=")
            value = substitute(value, self._variables)
            if option == "--chmod" and value.isdigit() and not set(value) - set("01234567"):
                mode = int(value, 8) & 0o7777
            elif option == "--chown" and value:
                owner = value
            elif option != "--link" or value not in ("", "true", "false"):
                shown = f"{option}={value}" if value else option
                raise self._error(instruction, f"{instruction.keyword} {shown} is not supported by the local sandbox")
        return mode, owner, rest

    def _find(self, instruction: Instruction, pattern: str) -> list[Path]:
        if "://" in pattern or pattern.startswith("git@"):
            raise self._error(instruction, f"{pattern!r}: a sandbox has no network; put the file into the environment directory")
        try:
            return self._context.find(pattern)
        except ImageBuildError as error:
            raise self._error(instruction, str(error)) from error

    def _inside(self, path: str) -> PurePosixPath:
        base = self._workdir or PurePosixPath("/")
        parts: list[str] = []
        for part in (base / path).parts[1:]:
            if part == "..":
                del parts[-1:]
            else:
                parts.append(part)
        return PurePosixPath("/", *parts)

    def _note(self, instruction: Instruction) -> None:
        if instruction.keyword in _NOTES:
            self._notes.append(f"line {instruction.line}: {instruction.keyword} {_NOTES[instruction.keyword]}")

    def _add(self, step: Step) -> None:
        self._steps.append(step)

    def _error(self, instruction: Instruction, reason: str) -> ImageBuildError:
        return line_error(self._name, instruction.line, reason)


def _unpacks(path: Path) -> bool:
    with path.open("rb") as stream:
        return archives.is_archive(stream)


def _copy_key(copy: Copy) -> list[Any]:
    if isinstance(copy.source, bytes):
        content = f"text {hashlib.sha256(copy.source).hexdigest()}"
    else:
        content = f"{'dir' if copy.source.is_dir() else 'file'} {digest_of(copy.source, copy.left_out)}"
    return [content, copy.dest, copy.mode, copy.owner, copy.unpack]


def _key(*parts: Any) -> str:
    return json.dumps(parts)
