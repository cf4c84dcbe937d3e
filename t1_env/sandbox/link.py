"""The host process's hold on one running sandbox: two sockets, and the promise that closing them ends it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import signal
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

from t1_env.errors import SandboxDied, SandboxError, SandboxUnavailable
from t1_env.sandbox import launcher, wire
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.hierarchies import cgroup_name, remove_cgroup
from t1_env.sandbox.stacking import Stack

_CLOSE_TIMEOUT_S: Final = 5.0
_ERRNOS_OF_REFUSAL: Final = frozenset({errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL, errno.ENOSPC, errno.ENODEV, errno.EUSERS})
_serial: Final = itertools.count()


class _LauncherDied(SandboxError):
    """The zygote was killed before, or while, it did what was asked."""


class Link:
    """The descriptors that tie a host process to one running sandbox, and who may use them when."""

    def __init__(self, name: str, keeper: socket.socket, init: socket.socket, keeper_pidfd: int) -> None:
        self._name = name
        self._owner = os.getpid()
        self._keeper = keeper
        self._init = init
        self._keeper_pidfd = keeper_pidfd
        self._keeper_lock = threading.Lock()
        self._init_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._closed = False
        _links.add(self)

    @classmethod
    def open(
        cls, owner: object, spec: SandboxSpec, stack: Stack | None = None, *, copy_of: Link | None = None
    ) -> tuple[Link, frozenset[str]]:
        """Have a keeper forked and wait for its first message.

        Args:
            owner: When this object is garbage-collected, or the interpreter exits, the sandbox is closed.
            spec: What to build.
            stack: What its root starts from; default the host's system directories.
            copy_of: Another sandbox, on the same stack, whose writes it starts with.

        Returns:
            The link and the sandbox's capabilities.

        Raises:
            SandboxUnavailable: The kernel refused something; says what to enable.
            SandboxError: The sandbox could not be started for another reason.
        """
        fields = {
            "root": (stack if stack is not None else Stack()).to_json(),
            "workdir": spec.workdir,
            "env": dict(spec.env),
            "hostname": spec.hostname,
            "memory_mb": spec.memory_mb,
            "storage_mb": spec.storage_mb,
            "max_processes": spec.max_processes,
            "cpus": spec.cpus,
            "hide": sorted({str(path) for given in (*spec.hide, *launcher.installation_paths()) for path in (given, given.resolve())}),
        }
        try:
            link, capabilities = cls._open(fields, copy_of)
        except _LauncherDied:
            link, capabilities = cls._open(fields, copy_of)  # nothing had been started; there is another one now
        weakref.finalize(owner, link.close)  # also runs at interpreter exit
        return link, capabilities

    @classmethod
    def _open(cls, fields: Mapping[str, Any], copy_of: Link | None) -> tuple[Link, frozenset[str]]:
        ours, theirs = socket.socketpair()
        name = cgroup_name(next(_serial))
        try:
            with theirs, contextlib.ExitStack() as lending:
                handed = [theirs.fileno()]
                if copy_of is not None:
                    lender, borrower = socket.socketpair()
                    lending.callback(lender.close)
                    lending.callback(borrower.close)
                    handed.append(borrower.fileno())
                launcher.LAUNCHER.request({"op": "start", "name": name, "spec": fields}, handed)
                if copy_of is not None:
                    borrower.close()  # the new keeper's is the only one left: its end is noticed
                    copy_of._lend(lender)
            ours.settimeout(launcher.START_TIMEOUT_S)
            reply, fds = wire.receive(ours)
            ours.settimeout(None)
            if "error" in reply:
                if reply.get("errno") in _ERRNOS_OF_REFUSAL:
                    raise SandboxUnavailable(launcher.explain_refusal(reply["error"], reply["errno"]))
                raise SandboxError(f"the sandbox could not be started: {reply['error']}")
        except BaseException as error:
            ours.close()
            remove_cgroup(name)
            if isinstance(error, (wire.Disconnected, TimeoutError)):
                kind = _LauncherDied if isinstance(error, wire.Disconnected) and launcher.LAUNCHER.died else SandboxError
                raise kind("the sandbox's keeper ended while starting; is the machine out of memory or processes?") from error
            raise
        return cls(name, ours, socket.socket(fileno=fds[0]), fds[1]), frozenset(reply["capabilities"])

    @property
    def alive(self) -> bool:
        """Whether keeper and pid 1 are both there, and this is the process that started them."""
        if self._closed or self._owner != os.getpid():
            return False
        poller = select.poll()
        try:
            for sock in (self._keeper, self._init):
                poller.register(sock, select.POLLRDHUP)
        except ValueError:  # closed by another thread since the check above
            return False
        return not poller.poll(0)

    def ask_keeper(self, request: wire.Message, fds: Sequence[int] = ()) -> tuple[wire.Message, list[int]]:
        """Send a request to the keeper and return its reply, which may be an error, and descriptors."""
        return self._ask(self._keeper, self._keeper_lock, request, fds)

    def _lend(self, lender: socket.socket) -> None:
        """Have this sandbox stand still while the keeper at the other end of ``lender`` copies its files."""
        reply, _ = self.ask_keeper({"op": "lend"}, [lender.fileno()])
        if "error" in reply:
            raise SandboxError(f"the sandbox could not be held still to be copied: {reply['error']}")

    def ask_init(self, request: wire.Message, fds: Sequence[int] = ()) -> tuple[wire.Message, list[int]]:
        """Send a request to pid 1 and return its reply and descriptors; raises ``SandboxError`` when it could not be done."""
        reply, received = self._ask(self._init, self._init_lock, request, fds)
        if "error" in reply:
            raise SandboxError(f"the sandbox could not do {request['op']!r}: {reply['error']}")
        return reply, received

    def _ask(self, sock: socket.socket, lock: threading.Lock, request: wire.Message, fds: Sequence[int]) -> tuple[wire.Message, list[int]]:
        with lock:
            if not self.alive:
                raise SandboxDied("this sandbox is gone: it was closed, or its first process was killed")
            try:
                wire.send(sock, request, fds)
                return wire.receive(sock)
            except (wire.Disconnected, OSError) as error:
                raise SandboxDied(f"the sandbox died while it was asked to {request['op']!r}") from error

    def close(self) -> None:
        """End the sandbox and wait until nothing of it is left. Idempotent, never raises."""
        with self._close_lock:
            if self._closed or self._owner != os.getpid():
                return
            self._closed = True
            # Not only for the keeper: a thread that waits for an answer wakes up too.
            for sock in (self._keeper, self._init):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            poller = select.poll()
            poller.register(self._keeper_pidfd, select.POLLIN)
            if not poller.poll(_CLOSE_TIMEOUT_S * 1000):
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(self._keeper_pidfd, signal.SIGKILL)
            remove_cgroup(self._name)
            with self._keeper_lock, self._init_lock:
                self._release()

    def abandon(self) -> None:
        """In a forked child: close the copies of the parent's descriptors."""
        if not self._closed:
            self._closed = True
            self._release()

    def _release(self) -> None:
        self._keeper.close()
        self._init.close()
        os.close(self._keeper_pidfd)


_links: Final[weakref.WeakSet[Link]] = weakref.WeakSet()


def _abandon_links() -> None:
    for link in list(_links):
        link.abandon()


os.register_at_fork(after_in_child=_abandon_links)
