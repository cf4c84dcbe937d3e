"""One SSH connection: reach the server, see that it is the right one, log in, start programs there.

paramiko is used below its ``SSHClient``, because that would add unknown keys when told to, tries whatever it finds and lets passwords stand
in tracebacks. Every wait here has a limit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from t1_env.errors import SandboxUnavailable, TransportLost
from t1_env.sandbox.ssh.auth import log_in
from t1_env.sandbox.ssh.config import SshConfig
from t1_env.sandbox.ssh.endpoint import Endpoint, import_paramiko, resolve
from t1_env.sandbox.ssh.trust import check_host, prefer_known_kinds

LOGGER: Final = "t1_env.ssh"
"""Name of the logger that paramiko writes to for our connections; silent unless it is set up."""

_SEND_LIMIT_S: Final = 60.0
_END_NEWS_S: Final = 0.25
_POLL_S: Final = 0.005
_JOIN_LIMIT_S: Final = 2.0
_SILENCE_MARGIN_S: Final = 10.0
_DROPPED_TRIES: Final = 6
_DROPPED_PAUSE_S: Final = 1.0
_RECEIVE_BYTES: Final = 1 << 18
_STDERR_KEPT: Final = 4096
_TURN_FACTOR: Final = 30

logging.getLogger(LOGGER).addHandler(logging.NullHandler())

_gates: Final[dict[tuple[str, int, int], threading.BoundedSemaphore]] = {}
_gates_lock: Final = threading.Lock()
os.register_at_fork(after_in_child=_gates.clear)  # turns that were taken by threads of the parent


def _gone() -> tuple[type[Exception], ...]:
    """What paramiko raises when a connection is gone."""
    return (import_paramiko().SSHException, OSError, EOFError)


class ServerUnreachable(SandboxUnavailable):
    """No server answers, as opposed to one that refuses us: it may be there again in a moment."""


class ChannelStream:
    """The standard input and output of a program on the server, as a ``Stream``.

    Args:
        connection: What it runs over; closed together with it.
        channel: The paramiko channel.
    """

    def __init__(self, connection: Connection, channel: Any) -> None:
        self._connection = connection
        self._channel = channel
        self._closed = False
        self._errors = b""

    def send(self, data: bytes) -> None:
        """Send all of it; see ``Stream.send``."""
        reason = "it was closed"
        if not self._closed:
            try:
                self._channel.sendall(data)
            except TimeoutError:
                reason = f"the server took nothing for {_SEND_LIMIT_S:.0f} s"
                self.close()
            except _gone() as error:
                reason = self._connection.reason or str(error) or "the server hung up"
            else:
                return
        raise TransportLost(f"the SSH connection to {self._connection.address} is gone: {reason}")

    def receive(self) -> bytes:
        """Wait for bytes and return at least one; empty when the program has ended; see ``Stream.receive``."""
        while True:
            data = b""
            try:
                data = self._channel.recv(_RECEIVE_BYTES)
                self._drain_errors()
            except TimeoutError:  # the channel has one limit for both directions, and here nothing to say is no fault
                continue
            except _gone():  # it was telling the server that there is room for more
                self._connection.close()
            if data:
                return data
            if self._has_ended():
                return b""
            raise TransportLost(f"the SSH connection to {self._connection.address} is gone: {self._connection.reason or 'it ended'}")

    def errors(self) -> str:
        """The last part of what the program wrote to its standard error."""
        with contextlib.suppress(*_gone()):
            self._drain_errors()
        return self._errors.decode("utf-8", "replace")

    def exit_status(self, timeout_s: float) -> int | None:
        """Exit status of the program; None if it did not end in time or was killed."""
        if not self._channel.status_event.wait(timeout_s) or self._channel.exit_status < 0:
            return None
        return int(self._channel.exit_status)

    def close(self) -> None:
        """End the program's input and the connection. Idempotent, never raises."""
        self._closed = True
        self._connection.close()

    def abandon(self) -> None:
        """In a forked child: leave the parent's stream alone."""
        self._closed = True
        self._channel.lock = threading.Lock()  # a thread that there is none of here may have held it
        self._connection.abandon()

    def _has_ended(self) -> bool:
        """At the end of the stream: whether the program has ended, or the stream was closed here; False if the connection was lost."""
        deadline = time.monotonic() + _END_NEWS_S
        while not self._closed and self._channel.exit_status < 0:
            # A killed program has no status; its channel is closed then, but the news of that look like those of a lost connection.
            if self._connection.lost() or time.monotonic() >= deadline:
                return not self._connection.lost()
            time.sleep(_POLL_S)
        return True

    def _drain_errors(self) -> None:
        while self._channel.recv_stderr_ready():
            self._errors = (self._errors + self._channel.recv_stderr(_RECEIVE_BYTES))[-_STDERR_KEPT:]


class Connection:
    """A connection that is logged in.

    Args:
        transport: The paramiko transport.
        endpoint: Where it goes.
        underlying: What it runs over and what is closed with it: jump hosts, a proxy program.
        limit_s: Limit in seconds for starting a program.
    """

    def __init__(self, transport: Any, endpoint: Endpoint, underlying: contextlib.ExitStack, limit_s: float) -> None:
        self._transport = transport
        self._underlying = underlying
        self._limit_s = limit_s
        self.address = endpoint.address

    def execute(self, command: str) -> ChannelStream:
        """Start a program, without a terminal.

        Args:
            command: Command line for the login's shell.

        Returns:
            Its input and output.

        Raises:
            SandboxUnavailable: The server refuses.
            TransportLost: The connection broke meanwhile, or the server did not answer in time.
        """
        paramiko = import_paramiko()
        with _within(self._transport, self._limit_s) as late:
            try:
                channel = self._transport.open_session(timeout=self._limit_s + _SILENCE_MARGIN_S)
                channel.settimeout(_SEND_LIMIT_S)
                channel.exec_command(command)
                return ChannelStream(self, channel)
            except paramiko.ChannelException as error:
                reason, lost = f"refuses a session ({error.text}); does its MaxSessions or a forced command forbid it?", False
            except _gone() as error:
                reason, lost = self.reason or str(error) or "the server hung up", self.lost()
        if late.is_set():
            raise TransportLost(f"the SSH server {self.address} did not start a program within {self._limit_s:.0f} s")
        if lost:
            raise TransportLost(f"the SSH connection to {self.address} is gone: {reason}")
        raise SandboxUnavailable(f"the SSH server {self.address} {reason}")

    @contextlib.contextmanager
    def within(self, limit_s: float | None) -> Iterator[None]:
        """Hang up if the block takes longer.

        Args:
            limit_s: Limit in seconds; None takes the connection's own.

        Raises:
            TransportLost: It did.
        """
        allowed_s = self._limit_s if limit_s is None else limit_s
        with _within(self._transport, allowed_s) as late:
            try:
                yield
            except TransportLost:
                if not late.is_set():
                    raise
        if late.is_set():
            raise TransportLost(
                f"the SSH server {self.address} did not answer within {allowed_s:.0f} s; if it is only busy, raise connect_timeout_s"
            )

    @property
    def reason(self) -> str:
        """Why the connection ended, where that is known."""
        error = self._transport.saved_exception
        return "the server hung up" if isinstance(error, EOFError) else str(error) if error is not None else ""

    def lost(self) -> bool:
        """Whether the connection is gone."""
        return not self._transport.is_active() or self._transport.saved_exception is not None

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connection without a word to the server."""
        self._transport.active = False
        self._transport.packetizer.close()
        self._underlying.pop_all()

    def close(self) -> None:
        """Hang up. Idempotent, never raises."""
        _hang_up(self._transport)
        self._underlying.close()


def connect(config: SshConfig) -> Connection:
    """Connect and log in.

    Args:
        config: Where to.

    Raises:
        SandboxUnavailable: The server cannot be reached, is not the one it should be, or lets nobody in.
        ConfigError: The OpenSSH configuration cannot be used.
        DependencyMissing: paramiko is not installed.
    """
    return _connect(config, resolve(config))


def _connect(config: SshConfig, endpoint: Endpoint) -> Connection:
    gate = _gate(endpoint, config.max_logins)
    # A whole batch of sandboxes may be started at once; each waits for its turn, and the turns are bounded.
    if not gate.acquire(timeout=_TURN_FACTOR * config.connect_timeout_s):
        raise SandboxUnavailable(f"{config.max_logins} logins at {endpoint.address} are under way and none of them comes to an end")
    try:
        for tries_left in reversed(range(_DROPPED_TRIES)):
            underlying = contextlib.ExitStack()
            try:
                transport = _shake_hands(config, endpoint, underlying, patient=tries_left > 0)
                if transport is not None:
                    return Connection(transport, endpoint, underlying, config.connect_timeout_s)
            except BaseException:
                underlying.close()
                raise
            underlying.close()
            time.sleep(random.uniform(0.3, 1.0) * _DROPPED_PAUSE_S * (_DROPPED_TRIES - tries_left))
    finally:
        gate.release()
    raise AssertionError("the last try returns or raises")


def _shake_hands(config: SshConfig, endpoint: Endpoint, underlying: contextlib.ExitStack, *, patient: bool) -> Any:
    """Return a logged-in transport; None if the server dropped us before it said a word and there is patience left.

    That is what a server does which has too many logins under way (MaxStartups); any other refusal is final.
    """
    paramiko = import_paramiko()
    limit_s = config.connect_timeout_s
    transport = paramiko.Transport(_reach(config, endpoint, underlying))
    underlying.callback(_hang_up, transport)
    transport.set_log_channel(LOGGER)
    transport.daemon = True
    # Longer than what is waited below, so that a server that says nothing is never taken for one that hung up or refused.
    longer_s = limit_s + _SILENCE_MARGIN_S
    transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = transport.channel_timeout = longer_s
    prefer_known_kinds(transport, endpoint)
    reason = ""
    try:
        transport.start_client(timeout=limit_s)
    except _gone() as error:
        if patient and not transport.remote_version:
            return None
        reason = str(error) or "the server hung up"
    else:  # it also returns when the time is up
        reason = "" if transport.initial_kex_done else "no answer"
    if reason:
        raise ServerUnreachable(
            f"{endpoint.address} does not complete the SSH handshake within {limit_s:.0f} s: {reason}. Is an SSH server on this port, "
            "and does its MaxStartups allow for this many logins at a time?"
        )
    check_host(transport.get_remote_server_key(), config, endpoint)
    with _within(transport, limit_s) as late:
        failure = log_in(transport, config, endpoint)
    if late.is_set():
        raise ServerUnreachable(f"{endpoint.address} did not answer the login within {limit_s:.0f} s")
    if failure is not None:
        raise (SandboxUnavailable if transport.is_active() else ServerUnreachable)(failure)
    transport.set_keepalive(max(1, round(config.keepalive_s)))
    return transport


def _reach(config: SshConfig, endpoint: Endpoint, underlying: contextlib.ExitStack) -> Any:
    """Something like a socket that leads to the server."""
    if endpoint.jump is not None:
        return _through(endpoint, underlying)
    if endpoint.proxy_command is not None:
        return _proxy(endpoint.proxy_command, underlying)
    try:
        link = socket.create_connection((endpoint.host, endpoint.port), timeout=config.connect_timeout_s)
    except socket.gaierror as error:
        reason = (
            f"the name {endpoint.host!r} cannot be resolved ({error.strerror}); is it an alias that {config.ssh_config_file} should know?"
        )
    except ConnectionRefusedError:
        reason = "the connection is refused; is an SSH server running there, on this port?"
    except TimeoutError:
        reason = f"no answer within {config.connect_timeout_s:.0f} s"
    except OSError as error:
        reason = str(error.strerror or error)
    else:
        underlying.callback(link.close)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: signs of life that nobody acknowledges end the connection
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(3000 * config.keepalive_s))
        return link
    raise ServerUnreachable(f"cannot reach {endpoint.address}: {reason}")


def _through(endpoint: Endpoint, underlying: contextlib.ExitStack) -> Any:
    assert endpoint.jump is not None
    jump_config, jump_endpoint = endpoint.jump
    jump = _connect(jump_config, jump_endpoint)
    underlying.callback(jump.close)
    try:
        return jump._transport.open_channel(
            "direct-tcpip", (endpoint.host, endpoint.port), ("127.0.0.1", 0), timeout=jump_config.connect_timeout_s
        )
    except _gone() as error:
        reason = str(error)
    raise ServerUnreachable(f"cannot reach {endpoint.address} through {jump_endpoint.address}: {reason}")


def _proxy(command: str, underlying: contextlib.ExitStack) -> socket.socket:
    ours, theirs = socket.socketpair()
    underlying.callback(ours.close)
    with theirs:
        # The user's own words from ~/.ssh/config, which the OpenSSH client hands to a shell as well.
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"], stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL
        )
    underlying.callback(_end_program, process)
    return ours


def _end_program(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _gate(endpoint: Endpoint, max_logins: int) -> threading.BoundedSemaphore:
    with _gates_lock:
        return _gates.setdefault((endpoint.host, endpoint.port, max_logins), threading.BoundedSemaphore(max_logins))


def _hang_up(transport: Any) -> None:
    # Its reader looks up only ten times a second; an end of the stream it sees at once. There may be none any more.
    with contextlib.suppress(OSError, AttributeError):
        transport.sock.shutdown(socket.SHUT_RDWR)
    transport.close()
    if transport.is_alive() and transport is not threading.current_thread():
        transport.join(_JOIN_LIMIT_S)


@contextlib.contextmanager
def _within(transport: Any, limit_s: float) -> Iterator[threading.Event]:
    """Hang up if the block takes longer: some of paramiko's waits have no limit of their own. The event tells whether that happened."""
    late = threading.Event()

    def end() -> None:
        late.set()
        _hang_up(transport)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        timer.join(2 * _JOIN_LIMIT_S)
