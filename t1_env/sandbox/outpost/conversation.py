"""The outpost's side of the stream: frames in, answers out, and what to do when the stream is lost."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from t1_env._version import __version__
from t1_env.errors import TransportLost
from t1_env.sandbox.outpost.frames import MAGIC, PROTOCOL, FrameReader, Header, pack
from t1_env.sandbox.outpost.service import Service

_READ_BYTES: Final = 1 << 18


class _Peer:
    """One stream: descriptors to read from and to write to."""

    def __init__(self, in_fd: int, out_fd: int) -> None:
        self.in_fd = in_fd
        self.out_fd = out_fd
        self.reader = FrameReader()
        self.attached = False

    def close(self) -> None:
        for fd in {self.in_fd, self.out_fd}:
            with contextlib.suppress(OSError):
                os.close(fd)


class Conversation:
    """Takes requests from one attached stream at a time and sends the answers.

    Where a lost stream may be replaced (``listener``), every answer is kept until the other side says that it has it: a request that
    comes again is answered from memory, or when it is done; it is never done twice.

    Args:
        service: Does what is asked.
        mode: What the service serves, for the greeting.
        lease_s: Ends the outpost when nothing was heard for so long; whoever uses it sends a pulse now and then.
        grace_s: With a listener, ends it when no stream was attached for so long.
        listener: Where new streams arrive; None if there is only the first.
    """

    def __init__(self, service: Service, mode: str, lease_s: float, grace_s: float, listener: socket.socket | None = None) -> None:
        self._service = service
        self._mode = mode
        self._lease_s = lease_s
        self._grace_s = grace_s
        self._listener = listener
        self._session = secrets.token_hex(16)
        self._sending = threading.Lock()
        self._current: _Peer | None = None
        self._memory: dict[int, bytes | None] = {}  # request id -> its answer, None while it is being worked on
        self._memory_lock = threading.Lock()
        self._begun = False
        self._ending = False

    def hold(self, first: tuple[int, int] | None) -> str:
        """Converse until it is over.

        Args:
            first: Descriptors of the first stream, or None to wait for one at the listener.

        Returns:
            Why it is over.
        """
        poller = select.poll()
        peers: dict[int, _Peer] = {}
        if first is not None:
            peers[first[0]] = _Peer(*first)
            poller.register(first[0], select.POLLIN)
        if self._listener is not None:
            poller.register(self._listener, select.POLLIN)
        heard_at = time.monotonic()
        while not self._ending:
            allowed_s = self._lease_s if self._current is not None or self._listener is None else min(self._grace_s, self._lease_s)
            # A frozen outpost may wake up long after its time: what arrived meanwhile is looked at before the clock is.
            ready = poller.poll(max(0.0, heard_at + allowed_s - time.monotonic()) * 1000)
            if not ready and time.monotonic() >= heard_at + allowed_s:
                return f"nothing was heard for {allowed_s:g} s"
            for fd, _ in ready:
                if self._listener is not None and fd == self._listener.fileno():
                    self._accept(peers, poller)
                    continue
                peer = peers[fd]
                if self._receive(peer):
                    heard_at = time.monotonic() if peer is self._current else heard_at
                    continue
                poller.unregister(fd)
                del peers[fd]
                self._drop(peer)
                if peer.attached:
                    heard_at = time.monotonic()
                if self._listener is None:
                    return "the stream ended"
        return "asked to end"

    def say_goodbye(self, reason: str) -> None:
        """Tell the other side, if it is there, that the outpost ends on purpose."""
        self._send(pack({"event": "goodbye", "reason": reason}))

    # ------------------------------------------------------------------------------------------------------------------- streams
    def _accept(self, peers: dict[int, _Peer], poller: select.poll) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            fd = self._listener.accept()[0].detach()
            peers[fd] = _Peer(fd, fd)
            poller.register(fd, select.POLLIN)

    def _receive(self, peer: _Peer) -> bool:
        """Take what has arrived; False when the stream is over or makes no sense."""
        try:
            data = os.read(peer.in_fd, _READ_BYTES)
            if not data:
                return False
            for header, blob in peer.reader.feed(data):
                if peer.attached:
                    self._take(header, blob)
                elif not self._attach(peer, header):
                    return False
        except (OSError, TransportLost, KeyError, TypeError, ValueError):
            return False
        return True

    def _attach(self, peer: _Peer, header: Header) -> bool:
        """Greet a new stream, which takes the place of the one before if it belongs to the same user of the outpost."""
        if header.get("op") != "attach":
            return False
        resumed = self._begun
        if resumed and not secrets.compare_digest(str(header.get("session")), self._session):
            return False
        greeting = {
            "hello": True,
            "version": __version__,
            "protocol": PROTOCOL,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "mode": self._mode,
            "pid": os.getpid(),
            "uid": os.getuid(),
            "session": self._session,
            "resumed": resumed,
            "lease_s": self._lease_s,
        }
        with self._sending:
            before, self._current = self._current, peer
            if before is not None:
                with contextlib.suppress(OSError):  # its reader finds the end and drops it
                    socket.socket(fileno=os.dup(before.in_fd)).shutdown(socket.SHUT_RDWR)
        self._begun = peer.attached = True
        self._send(MAGIC + pack(greeting))
        return True

    def _drop(self, peer: _Peer) -> None:
        with self._sending:
            if self._current is peer:
                self._current = None
        peer.close()

    def _send(self, frame: bytes) -> None:
        with self._sending:
            peer = self._current
            if peer is None:
                return
            view = memoryview(frame)
            try:
                while view:
                    view = view[os.write(peer.out_fd, view) :]
            except OSError:  # lost: the reader finds out, and whoever comes next asks again
                self._current = None

    # ------------------------------------------------------------------------------------------------------------------ requests
    def _take(self, header: Header, blob: bytes) -> None:
        number = int(header["id"])
        if self._listener is not None:
            with self._memory_lock:
                for done in header["done"]:
                    self._memory.pop(done, None)
        if header["op"] == "pulse":
            self._send(pack({"id": number}))
            return
        if header["op"] == "bye":
            self._ending = True
            return
        if self._listener is not None and not self._remember(number):
            return
        self._service.serve(header, blob, self._reply_to(number))

    def _remember(self, number: int) -> bool:
        """Note a request; False if it is a known one that came again."""
        with self._memory_lock:
            if number not in self._memory:
                self._memory[number] = None
                return True
            answer = self._memory[number]
        if answer is not None:
            self._send(answer)
        return False

    def _reply_to(self, number: int) -> Callable[[Header, bytes], None]:
        def reply(header: Header, blob: bytes) -> None:
            try:
                frame = pack({"id": number, **header}, blob)
            except ValueError as error:
                frame = pack({"id": number, "error": "SandboxError", "message": f"the answer cannot be sent: {error}"})
            if self._listener is not None:
                with self._memory_lock:
                    if number in self._memory:
                        self._memory[number] = frame
            self._send(frame)

        return reply
