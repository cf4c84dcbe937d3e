"""Where one sandbox lives on a server: a private directory and an outpost in it, with a way back when the connection breaks."""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from typing import Final, Literal

from t1_env.errors import SandboxDied, SandboxUnavailable, T1Error, TransportLost
from t1_env.sandbox import owner
from t1_env.sandbox.outpost.runtime import Runtime, make_runtime
from t1_env.sandbox.outpost.server import LABEL
from t1_env.sandbox.ssh.config import SshConfig
from t1_env.sandbox.ssh.connection import ChannelStream, ServerUnreachable, connect
from t1_env.sandbox.ssh.far import FarShell, quote
from t1_env.sandbox.ssh.survey import ALIVE, EPISODES, REMOVAL_LIMIT_S, RUNTIMES, Survey, settle, survey

MODES: Final = {"auto": "auto", "namespaces": "namespaces", "none": "native"}
_SOCKET: Final = "socket"
_UPLOAD_LIMIT_S: Final = 600.0
_GRACE_MARGIN_S: Final = 60.0
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 4.0
_KEPT_DAYS: Final = 30
"""A runtime that no sandbox used for so long is removed when a new one arrives."""
_COPY_BYTES: Final = 1 << 20


class Place:
    """The place of one sandbox. Holds no reference to the sandbox, so that a forgotten sandbox can end.

    Args:
        config: The server.
    """

    def __init__(self, config: SshConfig) -> None:
        self._config = config
        self._gone = threading.Event()
        self._attach = ""
        self._directory = ""
        self.address = config.host
        self.fate: T1Error | None = None
        self._sandboxes: set[int] = set()
        _places.add(self)

    def join(self, sandbox: object) -> None:
        """A sandbox begins to use the place."""
        with _places_lock:
            self._sandboxes.add(id(sandbox))

    def leave(self, sandbox: object) -> None:
        """A sandbox is done with the place; idempotent. After the last one, the next start there removes what may be left of it."""
        with _places_lock:
            self._sandboxes.discard(id(sandbox))

    def open(self) -> ChannelStream:
        """Make the place and start an outpost in it.

        Returns:
            A stream to it.

        Raises:
            SandboxUnavailable: The server cannot be reached, does not let us in, or cannot run an outpost.
            TransportLost: The connection broke meanwhile.
        """
        connection = connect(self._config)
        self.address = connection.address
        try:
            shell = FarShell(connection)
            found = survey(shell, self._config)
            settle(shell, found, in_use=directories_in_use())
            runtime, root = self._runtime(shell, found)
            name = f"{owner.file_name(owner.owner_id())}-{secrets.token_hex(6)}"
            directory = f"{found.directory}/{EPISODES}/{name}"
            arguments = [
                MODES[self._config.isolation],
                *("--lease-s", f"{self._config.lease_s:g}"),
                *("--grace-s", f"{self._config.reconnect_s + _GRACE_MARGIN_S:g}"),
                *("--home", directory),
            ]
            # Layers are kept for the next sandbox, and images that were imported over there are found; all else stays in this directory.
            stores = (
                f"cache={quote([found.directory])}/cache && export "
                'T1_CACHE_DIR="${T1_CACHE_DIR:-$cache}" T1_DATA_DIR="${T1_DATA_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/t1-env}"'
            )
            own = quote([directory])
            go = f"cd {own} && {stores} && export HOME={own}/home TMPDIR={own}/tmp && exec "
            start = quote(runtime.command(root, *arguments, "--listen", _SOCKET, python=found.python))
            self._attach = go + quote(runtime.command(root, "--attach", _SOCKET, python=found.python))
            self._directory = directory
            return shell.become(
                f"touch {quote([root])}; mkdir {quote([directory, f'{directory}/home', f'{directory}/tmp'])} && {go}{start}"
            )
        except BaseException:
            connection.close()
            raise

    def open_again(self) -> ChannelStream:
        """Return another stream to the same outpost after the first one was lost.

        A server that cannot be reached is tried again for ``reconnect_s``; one that refuses us is not.

        Raises:
            SandboxDied: The outpost is gone.
            TransportLost: There is no way back, or nobody wants it any more.
        """
        limit_s = min(self._config.reconnect_s, self._config.lease_s)
        deadline = time.monotonic() + limit_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self._return()
            except ServerUnreachable as error:
                reason = str(error)
            except TransportLost as error:
                reason = str(error)
            except SandboxDied as error:
                self.fate = SandboxDied(str(error))
                raise
            except T1Error as error:  # a key file that vanished meanwhile, another host key ...
                raise TransportLost(f"the way back to {self.address} is closed: {error}") from error
            if time.monotonic() + pause_s > deadline:
                raise TransportLost(f"no way back to {self.address} within {limit_s:.0f} s: {reason}")
            if self._gone.wait(pause_s):
                raise TransportLost("the sandbox is being closed")
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _return(self) -> ChannelStream:
        connection = connect(self._config)
        try:
            shell = FarShell(connection)
            label = quote([f"{self._directory}/{LABEL}"])
            if not shell.ask(f"{ALIVE}; alive {label} && echo alive=1").get("alive"):
                shell.ask(f"rm -rf {quote([self._directory])} 2> /dev/null", limit_s=REMOVAL_LIMIT_S)
                raise SandboxDied(f"the outpost at {self.address} is gone: something there ended it")
            if self._gone.is_set():
                raise TransportLost("the sandbox is being closed")
            return shell.become(self._attach)
        except BaseException:
            connection.close()
            raise

    def give_up(self) -> None:
        """Stop looking for a way back."""
        self._gone.set()

    # -------------------------------------------------------------------------------------------------------------------- runtime
    def _runtime(self, shell: FarShell, found: Survey) -> tuple[Runtime, str]:
        """The runtime to use and where it lies, sent there if it is not yet."""
        runtime = make_runtime(self._kind(found))
        if runtime.kind == "complete" and runtime.machine != found.machine:
            raise SandboxUnavailable(
                f"{self.address} has no Python 3.11 or later that can run an outpost, and this host's interpreter is for "
                f"{runtime.machine}, not for {found.machine}: install Python there, or name it with python="
            )
        name = f"{runtime.kind}-{runtime.digest}"
        root = f"{found.directory}/{RUNTIMES}/{name}"
        if name not in found.runtimes:
            self._send(shell, runtime, name, root)
        return runtime, root

    def _kind(self, found: Survey) -> Literal["pure", "complete"]:
        if self._config.runtime == "complete":
            return "complete"
        if found.python:
            return "pure"
        if self._config.runtime == "pure" or self._config.python is not None:
            wanted = f"{self._config.python!r}" if self._config.python else "python3"
            raise SandboxUnavailable(
                f"{self.address} has no usable {wanted}: it must be Python 3.11 or later with its whole standard library; "
                "runtime='complete' brings an interpreter along"
            )
        return "complete"

    def _send(self, shell: FarShell, runtime: Runtime, name: str, root: str) -> None:
        """Send a runtime, check it there, and put it in its place in one step; whoever is second throws his copy away."""
        private = f"{root}.{secrets.token_hex(6)}"
        packed = shell.ask("command -v gzip > /dev/null && echo gzip=1").get("gzip") == "1"
        parts = list(_compressed(runtime)) if packed else list(_plain(runtime))
        size = sum(map(len, parts))
        unpack = " | gzip -dc" if packed else ""
        steps = (
            f"mkdir {private} && {{ {{ head -c {size}{unpack} > {private}.tar; }} "
            f"&& sum=$(sha256sum < {private}.tar 2> /dev/null || shasum -a 256 < {private}.tar) && echo sum=${{sum%% *}} "
            f"&& tar -xf {private}.tar -C {private} < /dev/null && echo unpacked=1; }} 2> {private}.log; "
            f"read -r problem < {private}.log && echo problem=$problem; rm -f {private}.tar {private}.log"
        )
        said = shell.send_file(steps, size, parts, limit_s=_UPLOAD_LIMIT_S)
        complete = said.get("sum", "").startswith(runtime.digest) and said.get("unpacked") == "1"
        if complete:
            # mv moves *into* a directory that is there already: then another sandbox was first, and ours goes.
            shell.ask(
                f"mv {private} {root} 2> /dev/null; rm -rf {private} {root}/{os.path.basename(private)}; "
                f"find {os.path.dirname(root)} -mindepth 1 -maxdepth 1 -mtime +{_KEPT_DAYS} -exec rm -rf {{}} + 2> /dev/null"
            )
            return
        shell.ask(f"rm -rf {private}")
        problem = said.get("problem") or f"the digest over there is {said.get('sum', 'missing')!r}, expected {runtime.digest}"
        raise SandboxUnavailable(
            f"{self.address} could not take T1's runtime ({size >> 20} MiB packed) into {os.path.dirname(root)}: {problem}"
        )


_places: Final[weakref.WeakSet[Place]] = weakref.WeakSet()
_places_lock: Final = threading.Lock()


def directories_in_use() -> frozenset[str]:
    """Names of the directories, on whatever server, in which sandboxes of this process live."""
    with _places_lock:
        return frozenset(os.path.basename(place._directory) for place in list(_places) if place._directory and place._sandboxes)


def _plain(runtime: Runtime) -> Iterator[bytes]:
    with runtime.tar().open("rb") as file:
        while data := file.read(_COPY_BYTES):
            yield data


def _compressed(runtime: Runtime) -> Iterator[bytes]:
    packer = zlib.compressobj(level=1, wbits=31)  # 31: in the form of gzip
    for data in _plain(runtime):
        if packed := packer.compress(data):
            yield packed
    yield packer.flush()
