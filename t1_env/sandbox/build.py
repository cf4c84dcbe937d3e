"""Carrying out the steps of a Dockerfile in a sandbox that runs."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from t1_env.errors import ImageBuildError, SandboxDied, SandboxError
from t1_env.sandbox.base import BuiltEnvironment, Sandbox
from t1_env.sandbox.owner import directory_prefix
from t1_env.sandbox.recipe import Base, Copy, Recipe, Step, line_error, read_recipe

_OUTPUT_CHARACTERS: Final = 2000
_MAX_OUTPUT_BYTES: Final = 1 << 24  # what matters of it stands at its end
_ROOT: Final = ("root", "0", "root:root", "0:0", "root:0", "0:root")
_NETWORK: Final = re.compile(
    r"could ?n.t resolve|could not resolve|temporary failure (?:in name resolution|resolving)|name or service not known|unknown host"
    r"|network is unreachable|no route to host|failed to establish a new connection|getaddrinfo|EAI_AGAIN|ENETUNREACH|ENOTFOUND|bad address"
    r"|unable to locate package|has no installation candidate|could not find a version that satisfies|no such host|connection refused",
    re.IGNORECASE,
)


def build_environment(sandbox: Sandbox, environment_dir: Path, build_timeout_s: float = 600.0) -> BuiltEnvironment:
    """Carry out ``environment_dir/Dockerfile`` in a started sandbox of any kind; its ``FROM`` is what the sandbox already holds.

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
    deadline = time.monotonic() + build_timeout_s

    def base(_: str, __: int) -> Base:
        shown = sandbox.run(["/bin/sh", "-c", 'printf %s "$PATH"'], cwd="/")
        return Base(path=shown.stdout.decode("utf-8", "surrogateescape"))

    recipe = read_recipe(environment_dir, base)
    executor = Executor(sandbox, recipe, deadline)
    for step in recipe.steps:
        executor.execute(step)
    return BuiltEnvironment(env=recipe.env, workdir=recipe.workdir, notes=recipe.notes)


class Executor:
    """Carries out steps, one after the other.

    Args:
        sandbox: Where.
        recipe: What the steps belong to.
        deadline: When the build runs out of time (``time.monotonic``).
    """

    def __init__(self, sandbox: Sandbox, recipe: Recipe, deadline: float) -> None:
        self._sandbox = sandbox
        self._recipe = recipe
        self._deadline = deadline

    def execute(self, step: Step) -> None:
        """Carry out one step.

        Raises:
            ImageBuildError: It failed; names the line.
            SandboxDied: The sandbox is gone.
        """
        if time.monotonic() > self._deadline:
            raise self._error(step, "the build ran out of time")
        try:
            if step.keyword == "RUN":
                self._run(step)
            elif step.keyword == "USER":
                self.become(step)
            for copy in step.copies:
                self._copy(copy)
            for directory in step.directories:
                self.make_directory(directory)
        except SandboxDied:
            raise
        except SandboxError as error:
            if isinstance(error, ImageBuildError):
                raise
            raise self._error(step, _explain(error)) from error

    def become(self, step: Step) -> None:
        """Carry out ``USER``."""
        if step.user not in _ROOT:
            raise self._error(step, f"USER {step.user}: only root is supported by this sandbox")

    def make_directory(self, path: str) -> None:
        """Make a directory, and those above it, if missing."""
        with tempfile.TemporaryDirectory(prefix=directory_prefix("build")) as empty:
            self._sandbox.put(Path(empty), path)

    def copy_tree(self, copy: Copy, source: Path) -> None:
        """Copy a directory."""
        if copy.owner is not None and copy.owner not in _ROOT:
            raise ImageBuildError(f"--chown={copy.owner}: only root is supported by this sandbox")
        if not copy.left_out and copy.mode is None:
            self._sandbox.put(source, copy.dest)
            return
        with tempfile.TemporaryDirectory(prefix=directory_prefix("build")) as staged:
            target = Path(staged, "tree")
            shutil.copytree(source, target, symlinks=True, ignore=lambda at, names: [n for n in names if f"{at}/{n}" in copy.left_out])
            if copy.mode is not None:
                for path in target.rglob("*"):
                    if not path.is_symlink():
                        path.chmod(copy.mode)
            self._sandbox.put(target, copy.dest)

    def copy_file(self, copy: Copy, source: Path | bytes) -> None:
        """Copy a file."""
        if copy.owner is not None and copy.owner not in _ROOT:
            raise ImageBuildError(f"--chown={copy.owner}: only root is supported by this sandbox")
        self._sandbox.put(source, copy.dest, mode=copy.mode)

    def unpack(self, copy: Copy, source: Path) -> None:
        """Unpack an archive."""
        raise ImageBuildError(f"{source.name}: ADD does not unpack archives in this sandbox; COPY it and unpack it with RUN")

    def _copy(self, copy: Copy) -> None:
        try:
            if isinstance(copy.source, bytes) or not (copy.unpack or copy.source.is_dir()):
                self.copy_file(copy, copy.source)
            elif copy.unpack:
                self.unpack(copy, copy.source)
            else:
                self.copy_tree(copy, copy.source)
        except ImageBuildError as error:
            # Wrapped so that it gets its line like every other failure of the sandbox.
            raise SandboxError(str(error)) from error

    def _run(self, step: Step) -> None:
        result = self._sandbox.run(
            step.argv,
            stdin=step.stdin,
            env=step.env,
            cwd=step.cwd,
            timeout_s=max(self._deadline - time.monotonic(), 0.001),
            max_output_bytes=_MAX_OUTPUT_BYTES,
        )
        if result.timed_out:
            raise self._error(step, "the build ran out of time")
        if result.exit_code != 0:
            output = (result.stdout + result.stderr).decode("utf-8", "replace")
            reason = f"RUN ended with status {result.exit_code}: {output[-_OUTPUT_CHARACTERS:].strip() or 'no output'}"
            if _NETWORK.search(output):
                reason += "\n(there is no network while an image is built here: put what RUN would fetch into the environment directory, "
                reason += "or import an image that has it; see docs/images.md)"
            raise self._error(step, reason)

    def _error(self, step: Step, reason: str) -> ImageBuildError:
        return line_error(self._recipe.name, step.line, reason)


def _explain(error: SandboxError) -> str:
    """What went wrong, in the terms of a Dockerfile rather than of the request that failed."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    operation, _, reason = error.strerror.partition(": ")
    return f"{reason or operation}: {error.filename}" if error.filename else reason or operation
