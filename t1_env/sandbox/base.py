"""What a sandbox is: the protocol that ``local``, ``docker``, ``ssh`` and third-party backends implement.

A sandbox is a private machine for one episode: a filesystem, a process tree and no network. It starts processes (optionally on a
terminal of its own), moves files, says whether its filesystem changed, and runs a trusted Python function in a copy-on-write clone of
itself while the agent's processes stand still.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ImageSource:
    """What a sandbox's filesystem starts from, as a task describes it.

    Args:
        environment_dir: Directory with a ``Dockerfile``, the root of what it can copy; None without one.
        docker_image: Name of a ready image; a backend that knows it uses it instead of building.
        build_timeout_s: Wall-clock limit of a build in seconds.
    """

    environment_dir: Path | None = None
    docker_image: str | None = None
    build_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class BuiltEnvironment:
    """What an image or a build leaves behind beside files: settings that every later process should get.

    Args:
        env: Variables set by ``ENV``.
        workdir: The last ``WORKDIR``, or None if there was none.
        user: The last ``USER``: whom processes run as unless told otherwise; None for root.
        base: What the filesystem really started from, in a few words, where that may differ from what ``FROM`` says; empty if unknown.
        notes: What the image asks for and this backend leaves out, one line each.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    base: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What to build. Limits that a backend cannot enforce are reported by ``Sandbox.capabilities``.

    Args:
        workdir: Absolute working directory inside the sandbox; created if missing.
        env: Variables every process starts with, on top of a small fixed base. Nothing is inherited from the host.
        hostname: Fixed, so that transcripts are deterministic.
        memory_mb: Memory limit of all processes together in MiB, or None; what files take is bounded by ``storage_mb``.
        storage_mb: Size limit of everything the sandbox writes, in MiB.
        max_processes: Limit on processes and threads.
        cpus: CPU share, fractional allowed, or None.
        network: Whether the sandbox may reach the network. The local sandbox offers loopback only.
        image: What the filesystem starts from; None for the backend's bare base.
        hide: Host paths that must not be visible inside even if they lie under an allowed system directory (task tests, solutions).
    """

    workdir: str = "/app"
    env: Mapping[str, str] = field(default_factory=dict)
    hostname: str = "t1"
    memory_mb: int | None = 2048
    storage_mb: int = 1024
    max_processes: int = 256
    cpus: float | None = None
    network: bool = False
    image: ImageSource | None = None
    hide: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Outcome of ``Sandbox.run``.

    Args:
        exit_code: Exit status; 128 + n for a signal; None if it ran out of time.
        stdout: Captured bytes (bounded by the caller's ``max_output_bytes``; the rest is dropped).
        stderr: Captured bytes, bounded likewise.
        timed_out: Whether it was killed at its time limit.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class CloneView:
    """How a verification clone sees the sandbox, where it is not simply as the agent left it.

    Args:
        restored: Whether files of the base system that the agent changed, removed or shadowed are there as they were. In either case the
            result names them (``CloneResult.masked``).
        search_path: Directories of ``PATH``, in order: a new program that hides one of the base system further on is a shadow.
        home: Home directory of the verifiers' user: settings of programs and start-up files of Python in it count as shadows.
        writable: Paths that the agent may change, with what lies below them: never restored.
        live: Whether the clone joins the agent's network namespace and the agent's processes run on, so that its servers answer. The files
            are a copy, taken while nothing moved.
    """

    restored: bool = False
    search_path: tuple[str, ...] = ()
    home: str = "/root"
    writable: tuple[str, ...] = ()
    live: bool = False


@dataclass(frozen=True, slots=True)
class CloneResult:
    """Outcome of ``Sandbox.run_in_clone``.

    Args:
        payload: What the entry function returned, as JSON-compatible data; None when ``error`` is set.
        seconds: Wall time, freeze to thaw.
        error: Machinery failure (clone could not be made, the function raised or ran out of time), else None.
        masked: Files of the base system that the agent changed, removed or shadowed, sorted; only looked for if a ``CloneView`` was given.
    """

    payload: Any
    seconds: float
    error: str | None = None
    masked: tuple[str, ...] = ()


class SandboxProcess(Protocol):
    """A process inside a sandbox."""

    pid: int
    """Process id as the host sees it (for ``/proc``), 0 where the backend cannot know it."""
    pty_fd: int | None
    """Master side of its terminal, owned by the caller once returned; None without one."""

    def poll(self) -> int | None:
        """Exit status if it has ended (128 + n for a signal n), else None. Never blocks."""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end; None when the time ran out first."""

    def kill(self, signal: int = 9) -> None:
        """Signal the process; a no-op once it has ended."""


@runtime_checkable
class Sandbox(Protocol):
    """A private machine for one episode. All methods are thread-safe and raise ``SandboxDied`` once it is gone."""

    isolation: str
    """``"namespaces"``, ``"container"``, ``"remote"`` or ``"none"``."""
    capabilities: frozenset[str]
    """Of ``{"clone", "fork", "freeze", "memory_limit", "process_limit", "storage_limit", "cpu_limit", "network_off",
    "syscall_filter", "views", "live"}``; with either of the last two ``run_in_clone`` takes a ``view``, restored or live."""

    def start(self) -> None:
        """Create it, with ``SandboxSpec.image`` in it.

        Raises:
            SandboxUnavailable: This machine cannot; nothing is left behind.
            ImageBuildError: The image cannot be built; names the Dockerfile line.
        """

    @property
    def built(self) -> BuiltEnvironment:
        """Variables and working directory that the image left; empty before ``start`` and without an image."""

    @property
    def alive(self) -> bool:
        """Whether it is started and its processes can run."""

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pty_size: tuple[int, int] | None = None,
        fds: Mapping[int, int] | None = None,
    ) -> SandboxProcess:
        """Start a process, in a session of its own.

        Args:
            argv: Program and arguments; the program is looked up in the sandbox's PATH.
            env: Extra variables on top of the sandbox's.
            cwd: Working directory; default ``SandboxSpec.workdir``. Falls back to ``/`` if it is gone.
            pty_size: (rows, cols) to give it a controlling terminal as descriptors 0-2; the master comes back in ``pty_fd``.
            fds: Child descriptor number -> descriptor of the calling process to put there. Without a pty, missing 0-2 are /dev/null.
                Everything else is closed in the child. The caller keeps and closes its own copies.
        """

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float = 60.0,
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Run a process without a terminal to its end and capture its output. On time-out it and its session are killed."""

    def put(self, source: Path | bytes, dest: str, *, mode: int | None = None) -> None:
        """Copy a host file, a whole host directory (its contents into ``dest``) or bytes to an absolute path; parents are created."""

    def get(self, path: str, *, max_bytes: int = 1 << 24) -> bytes:
        """Read a regular file, resolved inside the sandbox (a symlink can never reach the host)."""

    def generation(self) -> str:
        """A fingerprint of everything the sandbox's processes wrote: equal fingerprints mean the filesystem did not change."""

    def run_in_clone(
        self,
        entry: str,
        payload: Any,
        *,
        mounts: Mapping[str, Path] | None = None,
        timeout_s: float = 60.0,
        view: CloneView | None = None,
    ) -> CloneResult:
        """Freeze the sandbox, run a trusted Python function in a copy-on-write clone of its filesystem, discard the clone, thaw.

        The function runs in fresh mount, pid, network, ipc and uts namespaces, in a process forked from a warm interpreter.

        Args:
            entry: ``"package.module:function"``, importable from T1's own installation, taking ``payload`` and returning JSON data.
            payload: JSON-compatible argument.
            mounts: Absolute path in the clone -> host path, mounted read-only there and nowhere else.
            timeout_s: Everything in the clone is killed after this.
            view: How the clone sees the sandbox; only where the capabilities say so.
        """

    def fork(self) -> Sandbox:
        """Return a started sandbox whose filesystem is a copy of this one's as it stands; processes are not copied.

        The two share nothing afterwards. This one is frozen while the copy is taken.

        Raises:
            SandboxError: This backend cannot (``"fork"`` is not among its capabilities), or the copy failed.
        """

    def close(self) -> None:
        """Kill every process and remove every trace. Idempotent, never raises."""


@runtime_checkable
class KillsAll(Protocol):
    """A sandbox that can be emptied of processes without being lost: the way out when nothing can be started in it any more."""

    def kill_all(self) -> None:
        """SIGKILL every process that the agent started, and wait until none is left; the sandbox and its files stay.

        Works under a full process limit, where no new process could do it.

        Raises:
            SandboxError: Some process could not be killed in time.
            SandboxDied: The sandbox is gone.
        """


@runtime_checkable
class ReportsIncidents(Protocol):
    """A sandbox that can say what befell its connection; ``info["incidents"]`` carries it to whoever reads the episode."""

    @property
    def incidents(self) -> tuple[str, ...]:
        """What happened so far, oldest first, e.g. ``"reconnected after 1.2 s"``; empty if nothing did."""
