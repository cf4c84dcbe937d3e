"""This side's hold on an outpost: requests out, answers in, from any number of threads."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from t1_env._version import __version__
from t1_env.errors import SandboxDied, SandboxError, SandboxUnavailable, T1Error, TransportLost
from t1_env.sandbox.outpost import records
from t1_env.sandbox.outpost.frames import MAGIC, PROTOCOL, Frame, FrameReader, Header, pack
from t1_env.sandbox.outpost.pulses import Pulses
from t1_env.sandbox.outpost.stream import Stream

PULSES: Final = Pulses()
_GREETING_TIMEOUT_S: Final = 60.0
_GOODBYE_TIMEOUT_S: Final = 10.0
_MOST_PULSE_S: Final = 15.0
_SILENCE_S: Final = 90.0


class Pending:
    """An answer that has not come yet."""

    __slots__ = ("_client", "_done", "_error", "_frame", "_number", "frame")

    def __init__(self, client: OutpostClient, number: int, frame: bytes) -> None:
        self._client = client
        self._number = number
        self._done = threading.Lock()
        self._done.acquire()
        self._frame: Frame | None = None
        self._error: T1Error | None = None
        self.frame = frame

    def result(self, timeout_s: float | None = None) -> Frame:
        """Wait for the answer.

        Args:
            timeout_s: For how long; None waits until it comes or the connection is lost.

        Returns:
            Header and blob.

        Raises:
            T1Error: The error that is the answer, or ``TransportLost`` or ``SandboxDied`` when there will be none.
            TimeoutError: The time ran out; the answer may still come.
        """
        if not self._done.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0.0)):
            raise TimeoutError
        self._done.release()
        if self._error is not None:
            raise self._error
        assert self._frame is not None
        return self._frame

    def forget(self) -> None:
        """The answer is not wanted any more."""
        self._client.forget(self._number)

    def resolve(self, frame: Frame) -> None:
        """Hand the answer over; called once, by the client."""
        if "error" in frame[0]:
            self._error = records.error_from_json(frame[0])
        self._frame = frame
        self._done.release()

    def fail(self, error: T1Error) -> None:
        """There will be no answer; called once, by the client."""
        self._error = error
        self._done.release()


class OutpostClient:
    """A conversation with an outpost. Thread-safe; a child forked from this process cannot use it.

    Args:
        stream: A fresh stream to the outpost.
        reconnect: Makes another stream to the same outpost when the first one broke; used once. None: a broken stream is the end.
        explain_loss: Asked when the stream ended without a goodbye: an error that knows more than "the connection broke", or None.

    Raises:
        SandboxUnavailable: What answers is not an outpost of this version.
        TransportLost: The stream broke before the greeting.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        reconnect: Callable[[], Stream] | None = None,
        explain_loss: Callable[[], T1Error | None] | None = None,
    ) -> None:
        self._stream = stream
        self._reconnect = reconnect
        self._explain_loss = explain_loss
        self._owner = os.getpid()
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._can_reconnect = reconnect is not None
        self._done: list[int] = []  # requests whose answers are here, or not wanted any more: the outpost need not keep them
        self._lost: T1Error | None = None
        self._goodbye: str | None = None
        self._connected = True
        self._closing = False
        self._users = 1
        self._incidents: list[str] = []
        self.sent: set[str] = set()
        """Digests of what the outpost is known to hold, for those who send it files to mount."""
        self._heard_at = time.monotonic()
        self._pulse: Pending | None = None
        self._unwatched = 0
        try:
            self.greeting, reader, early = _greet(stream, session="")
        except BaseException:
            stream.close()
            raise
        self.pulse_s = min(_MOST_PULSE_S, float(self.greeting["lease_s"]) / 4)
        self._reader = threading.Thread(target=self._receive_for_ever, args=(reader, early), name="t1-outpost-reader", daemon=True)
        self._reader.start()
        PULSES.add(self)

    @property
    def alive(self) -> bool:
        """Whether requests can be made."""
        return self._lost is None and not self._closing

    @property
    def incidents(self) -> tuple[str, ...]:
        """What befell the connection so far, oldest first."""
        return tuple(self._incidents)

    # ------------------------------------------------------------------------------------------------------------------ requests
    def submit(self, operation: str, blob: bytes = b"", **fields: Any) -> Pending:
        """Send a request.

        Args:
            operation: What is wanted.
            blob: Bytes that travel beside it.
            fields: The rest of the request, JSON-compatible.

        Returns:
            The answer to come.

        Raises:
            TransportLost: The connection is lost.
            SandboxDied: The outpost has ended, or was closed here.
        """
        with self._lock:
            if self._lost is not None:
                raise _again(self._lost)
            number = next(self._numbers)
            try:
                frame = pack({"id": number, "op": operation, "done": self._done, **fields}, blob)
            except ValueError as error:
                raise SandboxError(f"{operation}: {error}") from error
            self._done = []
            pending = self._pending[number] = Pending(self, number, frame)
            stream, connected = self._stream, self._connected
        if connected:
            try:
                with self._sending:
                    stream.send(frame)
            except TransportLost:
                stream.close()  # the reader finds out, and whether there is another way
        return pending

    def request(self, operation: str, blob: bytes = b"", *, answer_timeout_s: float = 120.0, **fields: Any) -> Frame:
        """Send a request and wait for its answer.

        Args:
            operation: What is wanted.
            blob: Bytes that travel beside it.
            answer_timeout_s: Limit on the wait.
            fields: The rest of the request, JSON-compatible.

        Returns:
            Header and blob of the answer.

        Raises:
            T1Error: The error that is the answer; ``TransportLost`` or ``SandboxDied`` when there will be none.
        """
        pending = self.submit(operation, blob, **fields)
        try:
            return pending.result(answer_timeout_s)
        except TimeoutError:
            pending.forget()
            raise SandboxError(f"the outpost did not answer {operation!r} within {answer_timeout_s:g} s") from None

    def forget(self, number: int) -> None:
        """Drop a request whose answer nobody wants."""
        with self._lock:
            if self._pending.pop(number, None) is not None and self._can_reconnect:
                self._done.append(number)

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside the block the outpost may be silent for as long as it likes: it is frozen on purpose."""
        with self._lock:
            self._unwatched += 1
        try:
            yield
        finally:
            with self._lock:
                self._unwatched -= 1
                self._heard_at = time.monotonic()

    # ----------------------------------------------------------------------------------------------------------------------- end
    def retain(self) -> OutpostClient:
        """Count another user: ``close`` ends the conversation when the last one is done."""
        with self._lock:
            self._users += 1
        return self

    def close(self) -> None:
        """Let the outpost end, and wait for it, once the last user is done. Never raises."""
        with self._lock:
            self._users -= 1
            if self._users > 0 or self._closing or self._owner != os.getpid():
                return
            self._closing = True
            stream, lost = self._stream, self._lost is not None
        if not lost:
            with contextlib.suppress(TransportLost, SandboxDied):
                self.submit("bye")
            self._reader.join(_GOODBYE_TIMEOUT_S)
        stream.close()
        self._lose(SandboxDied("the connection to the outpost was closed"))
        PULSES.remove(self)

    def abandon(self) -> None:
        """In a forked child: leave the parent's conversation alone."""
        self._sending, self._lock = threading.Lock(), threading.Lock()
        self._lose(SandboxDied("this sandbox belongs to the process that this one was forked from"))
        abandon = getattr(self._stream, "abandon", None)
        if callable(abandon):
            abandon()

    # ------------------------------------------------------------------------------------------------------------------- receiving
    def _receive_for_ever(self, reader: FrameReader, early: list[Frame]) -> None:
        while True:
            reason = self._receive(reader, early)
            again = None if self._goodbye is not None or self._closing else self._connect_again(reason)
            if again is None:
                break
            reader, early = again
        self._stream.close()
        self._lose(self._why_lost(reason))
        PULSES.remove(self)

    def _receive(self, reader: FrameReader, early: list[Frame]) -> str:
        """Take answers until the stream ends; returns why it did."""
        try:
            self._take(early)
            while data := self._stream.receive():
                self._heard_at = time.monotonic()
                self._take(reader.feed(data))
        except TransportLost as error:
            return str(error)
        return "the other side closed it"

    def _take(self, frames: list[Frame]) -> None:
        for frame in frames:
            number = frame[0].get("id")
            if number is None:
                if frame[0].get("event") == "goodbye":
                    self._goodbye = str(frame[0].get("reason"))
                continue
            with self._lock:
                pending = self._pending.pop(number, None)
                if pending is not None and self._can_reconnect:
                    self._done.append(number)
            if pending is not None:
                pending.resolve(frame)

    def _connect_again(self, reason: str) -> tuple[FrameReader, list[Frame]] | None:
        """Replace the stream and ask again what is not answered; None if that cannot be."""
        with self._lock:
            reconnect, self._reconnect = self._reconnect, None
            self._connected = False
        if reconnect is None:
            return None
        started = time.monotonic()
        self._stream.close()
        try:
            stream = reconnect()
            try:
                greeting, reader, early = _greet(stream, session=str(self.greeting["session"]))
                if greeting["session"] != self.greeting["session"]:
                    raise SandboxDied("another outpost answers in the place of this one")
                with self._lock:
                    self._stream, self._connected = stream, True
                    frames = [pending.frame for pending in self._pending.values()]
                    self._pulse = None
                    self._heard_at = time.monotonic()
                for frame in frames:
                    with self._sending:
                        stream.send(frame)
            except BaseException:
                stream.close()
                raise
        except SandboxError as error:
            self._incidents.append(f"connection lost ({reason}) and not restored: {error}")
            return None
        self._incidents.append(f"reconnected after {time.monotonic() - started:.1f} s")
        return reader, early

    def _why_lost(self, reason: str) -> T1Error:
        if self._closing:
            return SandboxDied("the connection to the outpost was closed")
        if self._goodbye is not None:
            return SandboxDied(f"the outpost has ended: {self._goodbye}")
        known = None if self._explain_loss is None else self._explain_loss()
        return known or TransportLost(f"the connection to the outpost broke: {reason}")

    def _lose(self, error: T1Error) -> None:
        with self._lock:
            self._lost = self._lost or error
            pending, self._pending = list(self._pending.values()), {}
        for each in pending:
            each.fail(_again(self._lost))

    def beat(self, now: float) -> None:
        """Send a pulse, so that the outpost knows it is still wanted; give the stream up when nothing came back for too long."""
        with self._lock:
            if self._lost is not None or not self._connected:
                return
            stream, silent = self._stream, not self._unwatched and now - self._heard_at > _SILENCE_S
            waiting = self._pulse is not None and self._pulse in self._pending.values()
        if silent and waiting:
            stream.close()
        elif not waiting and self._sending.acquire(timeout=0):
            self._sending.release()
            with contextlib.suppress(T1Error):
                self._pulse = self.submit("pulse")


os.register_at_fork(after_in_child=PULSES.abandon)


def _greet(stream: Stream, session: str) -> tuple[Header, FrameReader, list[Frame]]:
    """Introduce ourselves and read the outpost's greeting; returns it, the reader and what came right behind it."""
    reader = FrameReader()
    timer = threading.Timer(_GREETING_TIMEOUT_S, stream.close)
    timer.daemon = True
    timer.start()
    try:
        with contextlib.suppress(TransportLost):  # what it said before it ended is still there to be read
            stream.send(MAGIC + pack({"op": "attach", "session": session, "version": __version__, "protocol": PROTOCOL}))
        frames: list[Frame] = []
        while not frames:
            data = stream.receive()
            if not data:
                raise TransportLost(_no_greeting(reader))
            frames = reader.feed(data)
    finally:
        timer.cancel()
    greeting = frames[0][0]
    if not greeting.get("hello") or greeting.get("protocol") != PROTOCOL or greeting.get("version") != __version__:
        raise SandboxUnavailable(
            f"the outpost is T1 {greeting.get('version')!r} with protocol {greeting.get('protocol')!r}, this is T1 {__version__!r} with "
            f"protocol {PROTOCOL}: both sides must be the same version"
        )
    return greeting, reader, frames[1:]


def _no_greeting(reader: FrameReader) -> str:
    said = reader.preface.decode("utf-8", "replace").strip()
    return f"no outpost answered before the connection ended; it printed {said[-500:]!r}" if said else "no outpost answered"


def _again(error: T1Error) -> T1Error:
    """The same error, once for each of those it is raised to."""
    return type(error)(*error.args)
