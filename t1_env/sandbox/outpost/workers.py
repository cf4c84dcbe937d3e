"""Threads that serve requests: as many as are busy, up to a bound, kept for the next request."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

Job: TypeAlias = Callable[[], None]

_FIRST: Final = 2
_MOST: Final = 32
_STACK_BYTES: Final = 1 << 20


class Workers:
    """A pool that starts a thread when all are busy.

    Two threads are there from the beginning: under a full limit on processes, when no thread can be started, requests are still served.
    """

    def __init__(self) -> None:
        threading.stack_size(_STACK_BYTES)
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        for _ in range(_FIRST):
            self._add_thread()

    def submit(self, job: Job) -> None:
        """Run ``job``, which must not raise, in some thread; later if all are busy and there can be no more."""
        with self._lock:
            wanted = self._jobs.qsize() >= self._idle and self._threads < _MOST
        if wanted:
            with contextlib.suppress(RuntimeError):  # the process limit is reached: the job waits for a thread that there is
                self._add_thread()
        self._jobs.put(job)

    def _add_thread(self) -> None:
        threading.Thread(target=self._serve, name="t1-worker", daemon=True).start()
        with self._lock:
            self._threads += 1

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
            job()


class Strand:
    """A thread of its own for jobs that must follow one another: the steps of one shell.

    Raises:
        RuntimeError: No thread can be started.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def submit(self, job: Job) -> None:
        """Run ``job``, which must not raise, after those before it."""
        self._jobs.put(job)

    def end(self) -> None:
        """End the thread once its jobs are done."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
