"""The connection to a Docker daemon: one client for each process, its failures as T1's errors, and a brake on starting containers."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final

from t1_env.errors import DependencyMissing, SandboxDied, SandboxError, SandboxUnavailable, TransportLost
from t1_env.sandbox.docker.config import DockerConfig
from t1_env.sandbox.owner import LABEL as OWNER_LABEL
from t1_env.sandbox.owner import owner_id

KIND_LABEL: Final = "t1.kind"
"""Label that says what a thing is for: ``sandbox``, ``clone``, ``commit``, ``task-image``, ``runtime`` or ``runtime-filler``."""

_MOST_CONNECTIONS: Final = 256
_ADVICE: Final = (
    "install Docker Engine and start it (systemctl start docker), set DOCKER_HOST if it listens elsewhere, "
    "and if the permission is denied add this user to the group 'docker'"
)


class DeadlineExpired(SandboxError):
    """A long request to the daemon was cut off at its time limit."""


class Daemon:
    """A Docker daemon as this process talks to it. Thread-safe; get one from `daemon_for`.

    Args:
        config: Where it is and how to treat it.

    Raises:
        DependencyMissing: The docker SDK is not installed.
        SandboxUnavailable: No daemon answers; the message says what to do.
    """

    def __init__(self, config: DockerConfig) -> None:
        self.config = config
        self.sdk = _import_sdk()
        # The errors of the HTTP library below the SDK are OSErrors, except those of reading a body, which come from one layer below. Looked
        # up now, because a sandbox may be closed while the interpreter goes down and imports nothing any more.
        lower = importlib.import_module("urllib3.exceptions")
        self._broken: tuple[type[BaseException], ...] = (self.sdk.errors.DockerException, OSError, lower.HTTPError)
        self._slots = threading.BoundedSemaphore(config.max_concurrent_starts)
        self._pace = threading.Lock()
        self._next_start = 0.0
        self._version = "auto"
        self.api: Any = None
        try:
            self.api = self._client(config.request_timeout_s)
            self._version = self.api.api_version
            self.info: Mapping[str, Any] = self.api.info()
        except (self.sdk.errors.DockerException, OSError) as error:
            _close_leaked(error)
            self.close()
            raise SandboxUnavailable(f"no Docker daemon answers at {self.url}: {_reason(error)}; {_ADVICE}") from error
        if self.info.get("OSType", "linux") != "linux":
            self.close()
            raise SandboxUnavailable(f"the Docker daemon at {self.url} runs {self.info['OSType']} containers; switch it to Linux ones")

    @property
    def url(self) -> str:
        """Where it listens, for messages."""
        return self.config.base_url or os.environ.get("DOCKER_HOST") or "its default socket"

    @property
    def identity(self) -> str:
        """The daemon's own identity: another one has other images and volumes, even at the same address."""
        return str(self.info.get("ID", ""))

    @property
    def is_local(self) -> bool:
        """Whether it is reached through a socket of this machine, so that its files may be readable here."""
        return str(self.api.base_url).startswith("http+docker://localhost")

    def labels(self, kind: str) -> dict[str, str]:
        """Labels of something that this process makes and that must not outlive it."""
        return {**self.config.labels, KIND_LABEL: kind, OWNER_LABEL: owner_id()}

    @contextlib.contextmanager
    def doing(self, what: str, *, gone: str | None = None) -> Iterator[None]:
        """Turn what goes wrong in the block into T1's errors.

        Args:
            what: What is being done, for the message; follows "cannot".
            gone: Message of the `SandboxDied` that "not found" (or "not running") means; None if it means nothing special.

        Raises:
            SandboxDied: See ``gone``.
            TransportLost: The daemon does not answer.
            SandboxError: It refused.
        """
        try:
            yield
        except self.sdk.errors.APIError as error:
            reason = error.explanation or str(error)
            if gone is not None and (error.status_code == 404 or "is not running" in reason or "No such container" in reason):
                raise SandboxDied(f"{gone} ({reason})") from error
            raise SandboxError(f"cannot {what}: the Docker daemon says: {reason}") from error
        except self._broken as error:
            _close_leaked(error)
            raise TransportLost(f"cannot {what}: the Docker daemon at {self.url} does not answer: {_reason(error)}") from error

    @contextlib.contextmanager
    def start_slot(self) -> Iterator[None]:
        """Wait for one's turn to make the daemon start or commit a container; many at once slow each other down to time-outs."""
        with self._slots:
            with self._pace:
                now = time.monotonic()
                begin = max(now, self._next_start)
                self._next_start = begin + self.config.start_interval_s
            time.sleep(max(0.0, begin - now))
            yield

    def messages(self, what: str, timeout_s: float, request: Callable[[Any], Iterator[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        """Make a request that answers with a stream of messages (a build, a pull), and cut it off at a time limit.

        Args:
            what: What is being done, for messages of errors.
            timeout_s: Limit for all of it.
            request: Called with a client of its own; returns the stream.

        Yields:
            The messages.

        Raises:
            DeadlineExpired: The limit passed. The daemon stops what it was doing as soon as it sees that nobody listens any more.
            TransportLost: The daemon does not answer.
            SandboxError: It refused.
        """
        responses: list[Any] = []
        expired = threading.Event()

        def cut_off() -> None:
            expired.set()
            for response in responses:
                with contextlib.suppress(self.sdk.errors.DockerException, OSError, AttributeError):  # it has ended by itself meanwhile
                    self.sdk.types.CancellableStream(iter(()), response).close()

        with self.doing(what):
            client = self._client(timeout_s)
        client.hooks["response"].append(lambda response, **_: responses.append(response))
        timer = threading.Timer(timeout_s, cut_off)
        timer.daemon = True
        timer.start()
        try:
            with self.doing(what):
                yield from request(client)
            if expired.is_set():
                raise DeadlineExpired(f"cannot {what}: it took longer than {timeout_s:g} s")
        except SandboxError as error:
            if expired.is_set() or "timed out" in str(error).lower():
                raise DeadlineExpired(f"cannot {what}: it took longer than {timeout_s:g} s") from error
            raise
        finally:
            timer.cancel()
            for response in responses:
                response.close()
            client.close()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        if self.api is not None:
            self.api.close()

    def _client(self, timeout_s: float) -> Any:
        if self.config.base_url is not None:
            settings: dict[str, Any] = {"base_url": self.config.base_url}
        else:
            settings = self.sdk.utils.kwargs_from_env()
        client = self.sdk.APIClient(version=self._version, timeout=timeout_s, max_pool_size=_MOST_CONNECTIONS, **settings)
        # A connection for each request: kept ones would have to be counted as descriptors, and are stale once the daemon was restarted.
        client.headers["Connection"] = "close"
        adapter = client.get_adapter(client.base_url)
        if hasattr(adapter, "socket_path"):
            # The SDK makes a pool of connections for every path and closes the eldest, also while another thread is about to use it.
            get_connection = adapter.get_connection
            adapter.get_connection = lambda _, proxies=None: get_connection(client.base_url, proxies)
        return client


_daemons: dict[tuple[object, ...], Daemon] = {}
_daemons_lock: Final = threading.Lock()


def daemon_for(config: DockerConfig) -> Daemon:
    """Return this process's connection to a daemon; sandboxes whose settings agree share it, and with it the brake on starts.

    Args:
        config: Settings.

    Raises:
        DependencyMissing: The docker SDK is not installed.
        SandboxUnavailable: No daemon answers; the message says what to do.
    """
    where = config.base_url or tuple(os.environ.get(name) for name in ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"))
    # A forked child must not use its parent's connections.
    key = (os.getpid(), where, *(getattr(config, name) for name in config.__slots__ if name != "labels"), *sorted(config.labels.items()))
    with _daemons_lock:
        daemon = _daemons.get(key)
        if daemon is None:
            daemon = _daemons[key] = Daemon(config)
            if len(_daemons) == 1:
                atexit.register(_close_all)
        return daemon


def _close_all() -> None:
    for key, daemon in _daemons.items():
        if key[0] == os.getpid():
            daemon.close()


def _import_sdk() -> ModuleType:
    try:
        return importlib.import_module("docker")
    except ImportError as error:
        message = "the Docker sandbox needs the docker SDK: python -m pip install 't1-terminal[docker]'"
        raise DependencyMissing(f"{message} ({error})") from error


def _reason(error: BaseException) -> str:
    """The innermost cause: the libraries between wrap it several times."""
    seen: BaseException = error
    while (inner := seen.__cause__ or seen.__context__) is not None:
        seen = inner
    return str(seen) or type(seen).__name__


def _close_leaked(error: BaseException) -> None:
    """Close the sockets of failed connections, which the SDK leaves to the garbage collector."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        cause = pending.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        pending += [cause.__cause__, cause.__context__]
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            sock = frame.f_locals.get("sock")
            if frame.f_code.co_name == "connect" and isinstance(sock, socket.socket):
                sock.close()
