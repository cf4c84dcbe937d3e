"""Verification where a sandbox cannot be cloned: what a task declares is fetched at the end and verified in a fresh local sandbox.

A server that refuses namespaces, or a backend of somebody else's, has no clone to run verifiers in, and running them beside the agent
would let it forge what they say. What can still be had are the task's deliverables: the paths it declares are read out as data, put in
place in a local sandbox that was built anew from the task's environment, and judged there. Nothing else of the agent takes part.
"""

from __future__ import annotations

import contextlib
import errno
import io
import posixpath
import secrets
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Final

from t1_env.errors import SandboxUnavailable
from t1_env.sandbox.base import Sandbox
from t1_env.sandbox.local import LocalSandbox
from t1_env.tasks import Task
from t1_env.tasks.schema import Artifact

SOURCE: Final = "declared"
"""``info["verifier_source"]`` of such a report."""
MAX_BYTES: Final = 256 << 20
"""Largest declared file or directory."""

_MISSING: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_TAR_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class DeclaredPath:
    """A file or directory that is what the task asks for.

    Args:
        path: Absolute.
        exclude: Patterns of names below it that are left out, as ``tar --exclude`` takes them.
    """

    path: str
    exclude: tuple[str, ...] = ()


class PristineSandbox(LocalSandbox):
    """A local sandbox that only verifiers ever run in, with what an agent delivered elsewhere put into it."""

    def remove(self, path: str) -> None:
        """Remove whatever is at an absolute path."""
        self.run(["rm", "-rf", "--", path])

    def unpack(self, archive: bytes, dest: str) -> None:
        """Unpack a tar archive below an absolute path.

        Raises:
            SandboxFileError: The archive is damaged or leads outside, or there is no room for it.
        """
        with tempfile.TemporaryFile() as file:
            file.write(archive)
            file.seek(0)
            self._ask_files({"op": "unpack", "dest": dest}, [file.fileno()])


def can_be_cloned(sandbox: Sandbox) -> bool:
    """Whether a started sandbox can be verified as it stands."""
    return "clone" in sandbox.capabilities


def declared_paths(task: Task, workdir: str) -> tuple[DeclaredPath, ...]:
    """Return the deliverables of a task: ``artifacts`` of ``[metadata.t1]``, and Harbor's own ``artifacts``.

    Args:
        task: The task.
        workdir: What relative paths start from.

    Returns:
        Each path once, in order; none lies below another.

    Raises:
        SandboxUnavailable: The task declares none.
    """
    found: dict[str, DeclaredPath] = {}
    for given in (*task.metadata.artifacts, *task.config.artifacts):
        artifact = Artifact(source=given) if isinstance(given, str) else given
        if artifact.service in (None, "main"):  # there are no other services here
            path = posixpath.normpath(posixpath.join(workdir, artifact.source))
            found.setdefault(path, DeclaredPath(path, artifact.exclude))
    paths = tuple(each for each in found.values() if not any(each.path.startswith(f"{other.rstrip('/')}/") for other in found))
    if not paths or "/" in found:
        raise SandboxUnavailable(
            f"{task.id} cannot be verified in this sandbox: it has no verification clones, so only paths that a task declares can be, and "
            f"this task declares {'all of /' if found else 'none'}. Choose another sandbox (one with namespaces), or list its deliverables "
            'as artifacts = ["out.txt"] under [metadata.t1] of its task.toml'
        )
    return paths


def fetch(source: Sandbox, paths: tuple[DeclaredPath, ...], target: PristineSandbox) -> tuple[str, ...]:
    """Make ``target`` have at each path what ``source`` has there.

    Whatever is wrong with a path (a device, no permission, a tar that the agent broke) is the agent's own doing: ``target`` keeps what it
    had there.

    Args:
        source: Where the agent worked; all that it says is taken for data.
        paths: What to fetch.
        target: A fresh sandbox.

    Returns:
        What could not be fetched, in words.

    Raises:
        SandboxError: The sandbox is gone, or the connection to it.
    """
    problems = []
    for declared in paths:
        try:
            _fetch_one(source, declared, target)
        except (OSError, tarfile.TarError) as error:
            what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            problems.append(f"{declared.path} could not be fetched: {what}")
    return tuple(problems)


def _fetch_one(source: Sandbox, declared: DeclaredPath, target: PristineSandbox) -> None:
    try:
        data = source.get(declared.path, max_bytes=MAX_BYTES)
    except OSError as error:
        if error.errno == errno.EISDIR:
            archive = harmless_archive(_pack(source, declared))
            target.remove(declared.path)
            target.unpack(archive, declared.path)
        elif error.errno in _MISSING:
            target.remove(declared.path)
        else:
            raise
        return
    executable = source.run(["test", "-x", declared.path]).exit_code == 0
    target.remove(declared.path)
    target.put(data, declared.path, mode=0o755 if executable else 0o644)


def _pack(source: Sandbox, declared: DeclaredPath) -> bytes:
    """Return a directory as an archive, made by the agent's side."""
    spool = f"/tmp/.t1-{secrets.token_hex(8)}.tar"
    excludes = [f"--exclude={pattern}" for pattern in declared.exclude]
    try:
        result = source.run(["tar", "-C", declared.path, *excludes, "-cf", spool, "."], timeout_s=_TAR_TIMEOUT_S)
        if result.exit_code != 0:
            said = result.stderr.decode("utf-8", "replace").strip().splitlines()
            raise tarfile.TarError(f"tar ended with status {result.exit_code}: {said[-1] if said else 'it said nothing'}")
        return source.get(spool, max_bytes=MAX_BYTES)
    finally:
        source.run(["rm", "-f", "--", spool])


def harmless_archive(archive: bytes) -> bytes:
    """Write an archive again with only what stays below the directory it is unpacked into.

    Directories, files and symlinks stay, a hard link as a copy. Owners are root. Special files, names that lead outside and what would be
    written through a symlink are left out.

    Args:
        archive: An uncompressed tar archive from the agent's side.

    Returns:
        An archive of the rest.

    Raises:
        tarfile.TarError: It is not an archive, or what it holds is too large.
    """
    links: set[str] = set()
    written, size_bytes = io.BytesIO(), 0
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as given, tarfile.open(fileobj=written, mode="w") as kept:
        for member in given:
            name = posixpath.normpath(member.name)
            parents = {name[:index] for index, letter in enumerate(name) if letter == "/"}
            if name.startswith(("/", "../")) or name == ".." or parents & links:
                continue
            contents = _contents(given, member)
            if contents is None and not (member.isdir() or member.issym()):
                continue
            clean = tarfile.TarInfo(name)
            clean.mode, clean.mtime = member.mode, member.mtime
            if contents is None:
                clean.type, clean.linkname = (tarfile.DIRTYPE, "") if member.isdir() else (tarfile.SYMTYPE, member.linkname)
            else:
                clean.size = contents.seek(0, io.SEEK_END)  # of a sparse file as well: what it takes when it is written out
                contents.seek(0)
            size_bytes += clean.size
            if size_bytes > MAX_BYTES:
                raise tarfile.TarError(f"its files take more than {MAX_BYTES} bytes")
            (links.add if member.issym() else links.discard)(name)
            kept.addfile(clean, contents)
    return written.getvalue()


def _contents(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes] | None:
    """What a file or a hard link to one holds; None for everything else."""
    if not (member.isreg() or member.islnk()):
        return None
    try:
        return archive.extractfile(member)
    except (KeyError, RecursionError):  # a link to what is not there, or to itself
        return None


@contextlib.contextmanager
def pristine(target: PristineSandbox) -> Iterator[PristineSandbox]:
    """Start a fresh sandbox; it is gone afterwards."""
    try:
        target.start()
        yield target
    finally:
        target.close()
