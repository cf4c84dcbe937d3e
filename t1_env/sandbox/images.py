"""Building a task's environment inside a sandbox that has just started.

A thin subset of the Dockerfile language is executed in the sandbox itself: the base image is whatever the sandbox shows of the host, so
``FROM`` is required but not looked up. Anything outside the subset is an error that names the line.
"""

from __future__ import annotations

import stat
import tempfile
import time
from pathlib import Path, PurePosixPath
from typing import Final

from t1_env.errors import ImageBuildError, SandboxDied, SandboxError
from t1_env.sandbox.base import BuiltEnvironment, Sandbox
from t1_env.sandbox.dockerfile import Instruction, parse_dockerfile, parse_exec_form, parse_pairs, split_words, substitute

_ARCHIVES: Final = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
_OUTPUT_CHARACTERS: Final = 2000
_ROOT_OWNERS: Final = ("root", "0", "root:root", "0:0")


def build_environment(sandbox: Sandbox, environment_dir: Path, build_timeout_s: float = 600.0) -> BuiltEnvironment:
    """Execute ``environment_dir/Dockerfile`` in a started sandbox.

    Supported: ``FROM`` (once; the image name is ignored), ``WORKDIR``, ``ENV``, ``ARG``, ``COPY`` and ``ADD`` of files and directories
    under ``environment_dir`` (``--chmod``, ``--chown=root``), ``RUN`` in either form, ``USER root``, comments and continuation lines.

    Args:
        sandbox: Where to build.
        environment_dir: The task's ``environment/`` directory; the root of what can be copied.
        build_timeout_s: Wall-clock limit of the whole build in seconds.

    Returns:
        Variables and working directory to start later processes with.

    Raises:
        ImageBuildError: The file is missing, holds something unsupported, or a step failed; names the line.
        SandboxDied: The sandbox is gone.
    """
    path = environment_dir / "Dockerfile"
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ImageBuildError(f"{path}: cannot be read ({error}); a task needs a Dockerfile in its environment directory") from error
    instructions = parse_dockerfile(source, name=str(path))
    return _Build(sandbox, environment_dir.resolve(), str(path), time.monotonic() + build_timeout_s).run(instructions)


class _Build:
    """One build; holds the state that instructions change."""

    def __init__(self, sandbox: Sandbox, context: Path, name: str, deadline: float) -> None:
        self._sandbox = sandbox
        self._context = context
        self._name = name
        self._deadline = deadline
        self._base: dict[str, str] = {}
        self._env: dict[str, str] = {}
        self._args: dict[str, str] = {}
        self._workdir: PurePosixPath | None = None

    def run(self, instructions: tuple[Instruction, ...]) -> BuiltEnvironment:
        for instruction in instructions:
            if time.monotonic() > self._deadline:
                raise self._error(instruction, "the build ran out of time")
            try:
                getattr(self, f"_do_{instruction.keyword.lower()}")(instruction)
            except SandboxDied:
                raise
            except SandboxError as error:
                if isinstance(error, ImageBuildError):
                    raise
                raise self._error(instruction, str(error)) from error
        return BuiltEnvironment(env=dict(self._env), workdir=None if self._workdir is None else str(self._workdir))

    # ------------------------------------------------------------------------------------------------------------- instructions
    def _do_from(self, instruction: Instruction) -> None:
        """The base is the sandbox itself."""

    def _do_env(self, instruction: Instruction) -> None:
        if "PATH" in instruction.text and not self._base:  # the one variable that Dockerfiles extend without having set it
            shown = self._sandbox.run(["/bin/sh", "-c", 'printf %s "$PATH"'], cwd="/")
            self._base["PATH"] = shown.stdout.decode("utf-8", "surrogateescape")
        self._env.update(parse_pairs(instruction, self._variables, self._name))

    def _do_arg(self, instruction: Instruction) -> None:
        for word in split_words(instruction, self._name):
            key, _, default = word.partition("=")
            self._args[key] = substitute(default, self._variables)

    def _do_user(self, instruction: Instruction) -> None:
        user = substitute(instruction.text, self._variables)
        if user not in _ROOT_OWNERS:
            raise self._error(instruction, f"USER {user}: only root is supported by the local sandbox")

    def _do_workdir(self, instruction: Instruction) -> None:
        self._workdir = self._inside(substitute(instruction.text, self._variables))
        with tempfile.TemporaryDirectory() as empty:
            self._sandbox.put(Path(empty), str(self._workdir))

    def _do_run(self, instruction: Instruction) -> None:
        if instruction.text.startswith(("--", "<<")):
            raise self._error(instruction, "RUN flags and heredocs are not supported by the local sandbox")
        argv = parse_exec_form(instruction.text) or ["/bin/sh", "-c", instruction.text]
        result = self._sandbox.run(
            argv,
            env={**self._args, **self._env},
            cwd=str(self._workdir or "/"),
            timeout_s=max(self._deadline - time.monotonic(), 0.001),
        )
        if result.timed_out:
            raise self._error(instruction, "the build ran out of time")
        if result.exit_code != 0:
            output = (result.stdout + result.stderr).decode("utf-8", "replace")[-_OUTPUT_CHARACTERS:].strip()
            raise self._error(instruction, f"RUN ended with status {result.exit_code}: {output or 'no output'}")

    def _do_add(self, instruction: Instruction) -> None:
        self._copy(instruction)

    def _do_copy(self, instruction: Instruction) -> None:
        self._copy(instruction)

    # ------------------------------------------------------------------------------------------------------------------ details
    @property
    def _variables(self) -> dict[str, str]:
        return {**self._base, **self._args, **self._env}

    def _copy(self, instruction: Instruction) -> None:
        words = parse_exec_form(instruction.text) or split_words(instruction, self._name)
        mode, words = self._copy_options(instruction, words)
        if len(words) < 2:
            raise self._error(instruction, f"{instruction.keyword} needs a source and a destination")
        *patterns, destination = (substitute(word, self._variables) for word in words)
        sources = [source for pattern in patterns for source in self._sources(instruction, pattern)]
        into = destination.endswith("/") or destination in (".", "..")
        if len(sources) > 1 and not into:
            raise self._error(instruction, f"{instruction.keyword} of {len(sources)} sources needs a destination that ends in '/'")
        target = self._inside(destination)
        for source in sources:
            if source.is_dir():
                self._sandbox.put(source, str(target))
            else:
                self._sandbox.put(source, str(target / source.name if into else target), mode=mode)

    def _copy_options(self, instruction: Instruction, words: list[str]) -> tuple[int | None, list[str]]:
        mode = None
        rest = list(words)
        while rest and rest[0].startswith("--"):
            option, _, value = rest.pop(0).partition("=")
            if option == "--chmod" and value.isdigit() and not set(value) - set("01234567"):
                mode = int(value, 8) & 0o7777
            elif not (option == "--chown" and value in _ROOT_OWNERS):
                raise self._error(instruction, f"{instruction.keyword} {option}={value} is not supported by the local sandbox")
        return mode, rest

    def _sources(self, instruction: Instruction, pattern: str) -> list[Path]:
        if "://" in pattern or pattern.startswith("git@"):
            raise self._error(instruction, f"{pattern!r}: a sandbox has no network; put the file into the environment directory")
        if instruction.keyword == "ADD" and pattern.endswith(_ARCHIVES):
            raise self._error(instruction, f"{pattern!r}: ADD does not unpack archives here; COPY it and unpack it with RUN")
        relative = pattern.strip("/") or "."
        if any(character in relative for character in "*?["):
            found = sorted(self._context.glob(relative))
        else:
            found = [self._context / relative]
        for path in found:
            # Resolved, so that neither ".." nor a symlink reaches outside what the task ships.
            if not path.resolve().is_relative_to(self._context):
                raise self._error(instruction, f"{pattern!r} leads outside the environment directory")
            if not path.exists() or stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                raise self._error(instruction, f"{pattern!r}: no such file or directory in {self._context}")
        if not found:
            raise self._error(instruction, f"{pattern!r} matches nothing in {self._context}")
        return found

    def _inside(self, path: str) -> PurePosixPath:
        base = self._workdir or PurePosixPath("/")
        parts: list[str] = []
        for part in (base / path).parts[1:]:
            if part == "..":
                del parts[-1:]
            else:
                parts.append(part)
        return PurePosixPath("/", *parts)

    def _error(self, instruction: Instruction, reason: str) -> ImageBuildError:
        return ImageBuildError(f"{self._name}:{instruction.line}: {reason}")
