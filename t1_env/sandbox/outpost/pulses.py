"""One thread that lets every outpost of this process know, now and then, that it is still wanted."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol


class Beats(Protocol):
    """What needs a pulse."""

    pulse_s: float
    """How often."""

    def beat(self, now: float) -> None:
        """Send one. Must neither wait nor raise."""

    def abandon(self) -> None:
        """In a forked child: it belongs to the parent."""


class Pulses:
    """Keeps the pulse of everything that was added, in a thread that is there as long as there is anything."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._members: weakref.WeakSet[Beats] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, member: Beats) -> None:
        """Begin."""
        with self._lock:
            self._members.add(member)
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat_for_ever, name="t1-outpost-pulse", daemon=True)
                self._thread.start()
        self._news.set()

    def remove(self, member: Beats) -> None:
        """Stop."""
        with self._lock:
            self._members.discard(member)
        self._news.set()

    def abandon(self) -> None:
        """In a forked child: let go of everything; the thread was not copied."""
        members = list(self._members)
        self._reset()
        for member in members:
            member.abandon()

    def _beat_for_ever(self) -> None:
        while True:
            self._news.clear()
            with self._lock:
                members = list(self._members)
                if not members:
                    self._thread = None  # the next to be added starts another
                    return
            now = time.monotonic()
            for member in members:
                member.beat(now)
            pause_s = min(member.pulse_s for member in members)
            del members, member  # held by nobody while this thread waits
            self._news.wait(pause_s)
