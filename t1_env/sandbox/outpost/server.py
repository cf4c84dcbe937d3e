"""The far side's program: an outpost on its standard input and output, or behind a socket that outlives its connection.

Usage: ``boot.py native|namespaces|auto [--lease-s S] [--home DIRECTORY] [--listen SOCKET [--grace-s S]]`` or ``boot.py --attach SOCKET``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from t1_env.sandbox import launcher, syscalls
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.outpost import layout
from t1_env.sandbox.outpost.children import Children
from t1_env.sandbox.outpost.conversation import Conversation
from t1_env.sandbox.outpost.native import NativeSandbox
from t1_env.sandbox.outpost.service import MODES, Service
from t1_env.sandbox.owner import owner_id
from t1_env.sandbox.reaper import remove_tree

LABEL: Final = "outpost"
"""File in an outpost's home that says which process it is, as an owner label."""
DEFAULT_LEASE_S: Final = 900.0
DEFAULT_GRACE_S: Final = 120.0
_PID_OF_INIT: Final = 1
_COPY_BYTES: Final = 1 << 18
_BACKLOG: Final = 4


def main(arguments: Sequence[str], root: str) -> NoReturn:
    """Be an outpost; never returns.

    Args:
        arguments: The command line, without the program.
        root: Where the runtime lies.
    """
    own = layout.own_interpreter(root)
    if own is not None:
        launcher.PROGRAM.command, launcher.PROGRAM.executable = tuple(own[0]), own[1]
    options = _parse(arguments)
    if options.attach is not None:
        _attach(options.attach)
    stream: tuple[int, int] | None = None
    listener = None
    if options.listen is not None:
        listener = _listen(options.listen)
        if os.fork() != 0:
            listener.close()
            _attach(options.listen)
        os.setsid()
    else:
        stream = _take_standard_streams()
    _serve(options, stream, listener)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="t1-outpost", description="T1's server beside a sandbox; started by T1 itself.")
    parser.add_argument("mode", nargs="?", choices=MODES, default="native")
    parser.add_argument("--lease-s", type=float, default=DEFAULT_LEASE_S)
    parser.add_argument("--grace-s", type=float, default=DEFAULT_GRACE_S)
    parser.add_argument("--listen", metavar="SOCKET")
    parser.add_argument("--attach", metavar="SOCKET")
    parser.add_argument("--home", metavar="DIRECTORY", help="exists already, is for this outpost alone, and is removed at its end")
    return parser.parse_args(list(arguments))


def _serve(options: argparse.Namespace, stream: tuple[int, int] | None, listener: socket.socket | None) -> NoReturn:
    _ignore_signals(detached=listener is not None)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # neither its memory nor its descriptors are for the agent
    if options.home is not None:
        with open(os.path.join(options.home, LABEL), "w", encoding="ascii") as file:
            file.write(f"{owner_id()}\n")
    gc.collect()
    gc.freeze()
    service = Service(options.mode, _make_native)
    conversation = Conversation(service, options.mode, options.lease_s, options.grace_s, listener)
    if listener is not None:
        _leave_standard_streams()
    reason = conversation.hold(stream)
    if listener is not None:
        with contextlib.suppress(OSError):
            os.unlink(options.listen)
        listener.close()
    service.close()
    if options.home is not None:
        remove_tree(options.home)
    conversation.say_goodbye(reason)
    os._exit(0)


def _make_native(spec: SandboxSpec) -> NativeSandbox:
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent comes to us, and ends with us
    return NativeSandbox(spec, Children())


def _ignore_signals(*, detached: bool) -> None:
    """A first process that ignored nothing would be safe from the kernel's default actions only; Python's own handlers are not defaults."""
    ignored = [signal.SIGINT, signal.SIGPIPE, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU]
    if os.getpid() == _PID_OF_INIT:
        ignored += [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM]
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


# --------------------------------------------------------------------------------------------------------------------------- streams
def _take_standard_streams() -> tuple[int, int]:
    """Move standard input and output away, so that nothing printed by mistake gets between the frames."""
    stream = (os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in (0, 1):
        os.dup2(null, number)
    os.close(null)
    return stream


def _leave_standard_streams() -> None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)


def _listen(path: str) -> socket.socket:
    """A socket that only this user can connect to."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)
    return listener


def _attach(path: str) -> NoReturn:
    """Be a pipe between the standard streams and an outpost's socket; ends when either side does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError as error:
        sys.stderr.write(f"t1-outpost: nothing listens at {path}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(1)
    ways = {0: sock.fileno(), sock.fileno(): 1}
    poller = select.poll()
    for fd in ways:
        poller.register(fd, select.POLLIN)
    with contextlib.suppress(OSError):
        while True:
            for fd, _ in poller.poll():
                data = os.read(fd, _COPY_BYTES)
                if not data:
                    os._exit(0)
                view = memoryview(data)
                while view:
                    view = view[os.write(ways[fd], view) :]
    os._exit(0)
