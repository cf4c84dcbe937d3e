"""A sandbox at the far end of a connection: the ``Sandbox`` protocol over an outpost."""

from __future__ import annotations

import abc
import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from t1_env.errors import ConfigError, SandboxDied, SandboxError, T1Error
from t1_env.sandbox import checks
from t1_env.sandbox.base import BuiltEnvironment, CloneResult, CloneView, ExecResult, SandboxProcess, SandboxSpec
from t1_env.sandbox.images import build_environment
from t1_env.sandbox.local import SandboxFileError
from t1_env.sandbox.masking import view_to_json
from t1_env.sandbox.outpost import records, transfer
from t1_env.sandbox.outpost.client import OutpostClient
from t1_env.sandbox.outpost.frames import Header
from t1_env.sandbox.outpost.mounts import MountDigests
from t1_env.sandbox.outpost.remote_process import RemoteProcess
from t1_env.sandbox.outpost.remote_shell import RemoteShell
from t1_env.shell.config import ShellConfig

_SLACK_S: Final = 120.0
"""What a request may take beside what was asked for: the far side may be slow, and a dead connection is noticed otherwise."""
_FILES_TIMEOUT_S: Final = 600.0
_transfers: Final = itertools.count(1)


class RemoteSandbox(abc.ABC):
    """A sandbox that an outpost serves. A backend says how to reach the outpost, and overrides what it can do better from outside.

    Args:
        spec: What to build; default ``SandboxSpec()``.
    """

    isolation = "remote"

    def __init__(self, spec: SandboxSpec | None = None) -> None:
        self.spec = spec if spec is not None else SandboxSpec()
        self.capabilities: frozenset[str] = frozenset()
        self.mode = ""
        self.mode_reason: str | None = None
        self._client: OutpostClient | None = None
        self._number = 0
        self._built = BuiltEnvironment()
        self._closed = False
        self._start_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._digests = MountDigests()

    # ------------------------------------------------------------------------------------------------------ what a backend says
    @abc.abstractmethod
    def _connect(self) -> OutpostClient:
        """Make the place, start an outpost there and return a conversation with it, which this sandbox then closes.

        Raises:
            SandboxUnavailable: It cannot be had from this machine; nothing is left behind.
            ImageBuildError: The image cannot be built.
        """

    def _far_spec(self) -> SandboxSpec:
        """What the far side is asked for."""
        return self.spec

    def _build(self) -> BuiltEnvironment:
        """Make the environment of the task in a place that has no layers of its own, step by step, once the sandbox runs."""
        image = self.spec.image
        if image is None or image.environment_dir is None:
            return BuiltEnvironment()
        return build_environment(self, image.environment_dir, image.build_timeout_s)

    def _remove(self) -> None:  # noqa: B027  (a backend whose place goes away with the outpost has nothing to do)
        """Remove the place, once the conversation is over; must not raise."""

    # ------------------------------------------------------------------------------------------------------------------ life cycle
    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Create it; does nothing when it is started already; see ``Sandbox.start``."""
        with self._start_lock:
            if self._closed:
                raise SandboxDied("this sandbox was closed; make a new one")
            if self._client is not None:
                return
            client = self._connect()
            try:
                image, timeout_s = self._send_image(client)
                spec = records.spec_to_json(self._far_spec())
                reply, _ = client.request("start", spec=spec, image=image, answer_timeout_s=timeout_s + _FILES_TIMEOUT_S)
                self._adopt(client, reply)
                if self.mode == "native":
                    self._built = self._build()
            except BaseException:
                self._client = None
                client.close()
                self._remove()
                raise

    def _send_image(self, client: OutpostClient) -> tuple[Header | None, float]:
        """Send what a sandbox over there is built from, where it is one that builds; returns how it is named there and its time limit."""
        image = self.spec.image
        if image is None or client.greeting["mode"] == "native":
            return None, 0.0
        digest = None if image.environment_dir is None else self._send_mount(client, image.environment_dir.resolve())
        fields = {
            "digest": digest,
            "shown_as": str(image.environment_dir),
            "docker_image": image.docker_image,
            "build_timeout_s": image.build_timeout_s,
        }
        return fields, image.build_timeout_s

    def _adopt(self, client: OutpostClient, reply: Header) -> None:
        """Become the sandbox that the outpost told of."""
        self._client = client
        self._number = int(reply["sandbox"])
        self.mode, self.mode_reason = str(reply["mode"]), reply.get("reason")
        self.capabilities = frozenset(reply["capabilities"])
        self._built = records.built_from_json(reply["built"])
        if self.mode == "native":
            self.isolation = "none"
        weakref.finalize(self, client.close)

    @property
    def built(self) -> BuiltEnvironment:
        """Variables and working directory that the image left; empty before ``start`` and without an image."""
        return self._built

    @property
    def alive(self) -> bool:
        """Whether it is started and its processes can run."""
        client = self._client
        if client is None or self._closed or not client.alive:
            return False
        if self.mode == "native":
            return True
        try:
            return bool(self._ask("alive")[0]["alive"])
        except T1Error:
            return False

    @property
    def incidents(self) -> tuple[str, ...]:
        """What befell the connection so far; see ``ReportsIncidents``."""
        return () if self._client is None else self._client.incidents

    def close(self) -> None:
        """Kill every process and remove every trace. Idempotent, never raises."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            client = self._client
            if client is not None:
                if client.alive:
                    with contextlib.suppress(T1Error):  # it is gone, which is what is wanted
                        client.request("close", sandbox=self._number)
                client.close()
                self._remove()

    # ------------------------------------------------------------------------------------------------------------------ processes
    def open_shell(self, config: ShellConfig) -> RemoteShell:
        """Return a shell that is driven over there, not started yet; see ``OffersShell``."""
        return RemoteShell(self._live(), self._number, config)

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pty_size: tuple[int, int] | None = None,
        fds: Mapping[int, int] | None = None,
    ) -> SandboxProcess:
        """Start a process, in a session of its own; see ``Sandbox.spawn``.

        With ``pty_size``, ``pty_fd`` is one end of a socket pair through which the terminal's bytes travel; it is not a terminal itself,
        and reads nothing at the end. Its owner closes it.

        Raises:
            ConfigError: ``fds`` is given: descriptors of this process do not reach the far side. Use ``run``, a terminal or ``open_shell``.
        """
        if fds:
            raise ConfigError(f"spawn(fds={sorted(fds)}): descriptors of this process do not reach a remote sandbox; use run() or pty_size")
        checks.check_spawn(argv, env, {})
        reply, _ = self._ask("spawn", argv=list(argv), env=dict(env or {}), cwd=cwd, pty=pty_size)
        return RemoteProcess(self._live(), self._number, int(reply["process"]), terminal=pty_size is not None)

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
        """Run a process without a terminal to its end and capture its output; see ``Sandbox.run``."""
        checks.check_spawn(argv, env, {})
        header, blob = self._ask(
            "run",
            stdin,
            answer_timeout_s=timeout_s + _SLACK_S,
            argv=list(argv),
            env=dict(env or {}),
            cwd=cwd,
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
        )
        return records.exec_result_from_frame(header, blob)

    def kill_all(self) -> None:
        """SIGKILL every process that the agent started; see ``KillsAll``."""
        self._ask("kill_all")

    # ---------------------------------------------------------------------------------------------------------------------- files
    def put(self, source: Path | bytes, dest: str, *, mode: int | None = None) -> None:
        """Copy a host file, a whole host directory (its contents into ``dest``) or bytes to an absolute path; see ``Sandbox.put``."""
        checks.check_path(dest)
        tree = isinstance(source, Path) and source.is_dir()
        if tree and mode is not None:
            raise ConfigError(f"put({str(source)!r}): mode applies to a single file, not to a directory")
        entries: Iterable[tuple[transfer.Entry, bytes]]
        if isinstance(source, Path):
            entries = transfer.entries_of_tree(str(source)) if tree else transfer.entries_of_file(str(source), mode)
        else:
            entries = transfer.entries_of_bytes(source, 0o644 if mode is None else mode)
        self._send_entries(self._live(), "put", entries, sandbox=self._number, dest=dest, tree=tree, timed=isinstance(source, Path))

    def _send_entries(self, client: OutpostClient, operation: str, entries: Iterable[tuple[transfer.Entry, bytes]], **fields: Any) -> None:
        number = next(_transfers)
        groups = transfer.batches(entries)
        while True:
            try:
                group, blob, final = next(groups)
            except OSError as error:
                raise SandboxFileError(error.errno, f"put: cannot read the host file: {error.strerror}", str(error.filename)) from error
            client.request(operation, blob, answer_timeout_s=_FILES_TIMEOUT_S, transfer=number, entries=group, final=final, **fields)
            if final:
                return

    def get(self, path: str, *, max_bytes: int = 1 << 24) -> bytes:
        """Read a regular file, resolved inside the sandbox; see ``Sandbox.get``."""
        checks.check_path(path)
        parts: list[bytes] = []
        left, number = max_bytes, None
        while True:
            header, part = self._ask(
                "get", answer_timeout_s=_FILES_TIMEOUT_S, path=path, max_bytes=left, total_bytes=max_bytes, download=number
            )
            parts.append(part)
            left, number = left - len(part), header["more"]
            if number is None:
                return b"".join(parts)

    def generation(self) -> str:
        """A fingerprint of everything the sandbox's processes wrote; see ``Sandbox.generation``."""
        return str(self._ask("generation", answer_timeout_s=_FILES_TIMEOUT_S)[0]["generation"])

    def system_changes(self) -> dict[str, str]:
        """Files of the base system that were changed since the start; empty where the far side cannot tell."""
        return dict(self._ask("system_changes", answer_timeout_s=_FILES_TIMEOUT_S)[0]["files"])

    # --------------------------------------------------------------------------------------------------------------------- clones
    def run_in_clone(
        self,
        entry: str,
        payload: Any,
        *,
        mounts: Mapping[str, Path] | None = None,
        timeout_s: float = 60.0,
        view: CloneView | None = None,
    ) -> CloneResult:
        """Freeze the sandbox and run a trusted function in a clone of it over there; see ``Sandbox.run_in_clone``.

        ``mounts`` are sent once for each content, to a place that nothing in the sandbox can read.
        """
        digests = {}
        for target, source in (mounts or {}).items():
            checks.check_path(target)
            if not Path(source).exists():
                raise ConfigError(f"run_in_clone: mounts[{target!r}] = {str(source)!r} does not exist on the host")
            digests[target] = self._send_mount(self._live(), Path(source).resolve())
        header, _ = self._ask(
            "clone",
            answer_timeout_s=timeout_s + _SLACK_S,
            entry=entry,
            payload=payload,
            mounts=digests,
            timeout_s=timeout_s,
            view=None if view is None else view_to_json(view),
        )
        return records.clone_result_from_json(header)

    def _send_mount(self, client: OutpostClient, source: Path) -> str:
        digest = self._digests.of(source)
        if digest not in client.sent:
            if not client.request("has_mount", digest=digest)[0]["has"]:
                tree = source.is_dir()
                entries = transfer.entries_of_tree(str(source)) if tree else transfer.entries_of_file(str(source))
                self._send_entries(client, "put_mount", entries, digest=digest, tree=tree)
            client.sent.add(digest)
        return digest

    def fork(self) -> RemoteSandbox:
        """Return a started sandbox whose filesystem is a copy of this one's; see ``Sandbox.fork``."""
        reply, _ = self._ask("fork", answer_timeout_s=_FILES_TIMEOUT_S)
        copy = self._sibling()
        copy._adopt(self._live().retain(), reply)
        copy._built = self._built
        return copy

    def _sibling(self) -> RemoteSandbox:
        """A sandbox object like this one, not started, for a copy that the same outpost serves."""
        raise SandboxError(f"{type(self).__name__} cannot be forked")

    # -------------------------------------------------------------------------------------------------------------------- internals
    def _live(self) -> OutpostClient:
        if self._closed or self._client is None:
            raise SandboxDied("this sandbox was closed" if self._closed else "this sandbox is not started: call start() first")
        return self._client

    def _ask(self, operation: str, blob: bytes = b"", *, answer_timeout_s: float = _SLACK_S, **fields: Any) -> tuple[Header, bytes]:
        return self._live().request(operation, blob, answer_timeout_s=answer_timeout_s, sandbox=self._number, **fields)
