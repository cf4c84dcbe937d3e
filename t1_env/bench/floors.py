"""The least that things cost on this machine: the same work without a sandbox and without T1."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import tty
from collections.abc import Iterator
from typing import Final

from t1_env.bench.measure import MeasurementError

_READ_SIZE: Final = 1 << 16
_WAIT_S: Final = 10.0


@contextlib.contextmanager
def raw_pty() -> Iterator[int]:
    """Give the master of a raw terminal at whose other end ``cat`` echoes what is written."""
    master, slave = os.openpty()
    try:
        try:
            tty.setraw(slave)
            process = subprocess.Popen(["cat"], stdin=slave, stdout=slave, stderr=subprocess.DEVNULL)
        finally:
            os.close(slave)
        try:
            yield master
        finally:
            process.kill()
            process.wait(_WAIT_S)
    finally:
        os.close(master)


def pty_round_trip(master: int) -> None:
    """Send one byte to ``cat`` and read it back."""
    os.write(master, b"x")
    if os.read(master, 1) != b"x":
        raise MeasurementError("a byte that was sent through a raw terminal did not come back")


def subprocess_true() -> None:
    """Run ``/bin/true`` from this process."""
    subprocess.run(["/bin/true"], check=True)


def bash_true() -> None:
    """Run ``bash -c true`` from this process: what a command costs that starts a shell of its own."""
    subprocess.run(["bash", "--noprofile", "--norc", "-c", "true"], check=True)


def output_through_pipe(command: str, size_bytes: int) -> None:
    """Run a command by ``bash -c`` and read what it prints from a pipe, keeping nothing."""
    with subprocess.Popen(["bash", "--noprofile", "--norc", "-c", command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        _read_all(process.stdout.fileno(), size_bytes)


def output_through_pty(command: str, size_bytes: int) -> None:
    """Run a command by ``bash -c`` and read what it prints from a raw terminal, keeping nothing."""
    master, slave = os.openpty()
    try:
        try:
            tty.setraw(slave)
            process = subprocess.Popen(["bash", "--noprofile", "--norc", "-c", command], stdout=slave, stdin=subprocess.DEVNULL)
        finally:
            os.close(slave)
        try:
            _read_all(master, size_bytes)
        finally:
            process.wait(_WAIT_S)
    finally:
        os.close(master)


def _read_all(fd: int, size_bytes: int) -> None:
    left = size_bytes
    while left > 0:
        try:
            block = os.read(fd, _READ_SIZE)
        except OSError:  # EIO: everybody has let go of the terminal
            block = b""
        if not block:
            raise MeasurementError(f"a command printed {size_bytes - left} bytes, expected {size_bytes}")
        left -= len(block)


def spawn_rate(runs: int) -> float:
    """Return how many ``/bin/true`` per second the machine starts when one plain bash loop for each CPU does nothing else.

    Args:
        runs: Commands of each loop.
    """
    cpus = len(os.sched_getaffinity(0))
    command = f"for ((i = 0; i < {runs}; i++)); do /bin/true; done"
    start = time.perf_counter()
    loops = [subprocess.Popen(["bash", "--noprofile", "--norc", "-c", command]) for _ in range(cpus)]
    for loop in loops:
        loop.wait()
    return cpus * runs / (time.perf_counter() - start)
