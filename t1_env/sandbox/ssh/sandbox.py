"""The SSH sandbox: an episode on another machine that runs an OpenSSH server, over one connection."""

from __future__ import annotations

import contextlib
import warnings
from typing import Final

from t1_env.errors import SandboxUnavailable, TransportLost
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.outpost.client import OutpostClient
from t1_env.sandbox.outpost.remote import RemoteSandbox
from t1_env.sandbox.reaper import Finding
from t1_env.sandbox.ssh.config import SshConfig
from t1_env.sandbox.ssh.connection import connect
from t1_env.sandbox.ssh.endpoint import import_paramiko
from t1_env.sandbox.ssh.far import FarShell
from t1_env.sandbox.ssh.place import Place, directories_in_use
from t1_env.sandbox.ssh.secret import Secret
from t1_env.sandbox.ssh.survey import settle, survey

__all__ = ["Secret", "SshConfig", "SshSandbox", "list_leftovers", "remove_leftovers"]

_SHOWN_CHARS: Final = 1000


class SshSandbox(RemoteSandbox):
    """A sandbox on a server that is reached by SSH.

    T1's own small server is brought there (once) and started for each sandbox. Where the server's kernel allows namespaces the sandbox is
    the very local sandbox, over there; else the login's own account, with a warning. One connection carries everything; when it breaks,
    one new connection takes its place and the sandbox goes on as if nothing had happened, which ``incidents`` tells.

    Args:
        spec: What to build; default ``SandboxSpec()``.
        config: The server; default ``SshConfig.load()``.

    Raises:
        ConfigError: The configuration names no host, or cannot be used.
        DependencyMissing: paramiko is not installed.
    """

    def __init__(self, spec: SandboxSpec | None = None, config: SshConfig | None = None) -> None:
        super().__init__(spec)
        self.config = SshConfig.load() if config is None else config
        import_paramiko()
        self._place = Place(self.config)
        self._place.join(self)

    def start(self) -> None:
        """Create it; does nothing when it is started already.

        Raises:
            SandboxUnavailable: The server cannot be reached, is not the one it should be, lets nobody in, or cannot run a sandbox.
            ImageBuildError: ``SandboxSpec.image`` cannot be built; names the Dockerfile line.
            TransportLost: The connection broke meanwhile, twice.
            SandboxDied: It was closed.
        """
        fresh = self._client is None
        super().start()
        if fresh and self.mode == "native":
            try:
                self._check_native()
            except BaseException:
                self.close()
                raise

    def _connect(self) -> OutpostClient:
        place = self._place
        stream = place.open()
        try:
            return OutpostClient(stream, reconnect=place.open_again, explain_loss=lambda: place.fate)
        except TransportLost as error:
            said = stream.errors().strip()
            if not said:
                raise
            raise SandboxUnavailable(f"no outpost starts at {place.address}; it said: {said[-_SHOWN_CHARS:]}") from error

    def _check_native(self) -> None:
        workdir = self.spec.workdir
        if self.run(["test", "-w", workdir]).exit_code != 0:
            raise SandboxUnavailable(
                f"without isolation the sandbox at {self._place.address} works in the server's own directories, and {workdir!r} cannot "
                "be written by this login: log in as a user who may, choose another workdir, or use a server that allows namespaces"
            )
        if self.config.isolation == "auto":
            warnings.warn(
                f"the SSH sandbox at {self._place.address} has NO ISOLATION: commands run as this login, in the server's own files, "
                "without limits, and only the paths that a task declares can be verified, elsewhere, at the end of an episode. "
                f"The server refuses namespaces: {self.mode_reason}",
                stacklevel=3,
            )

    def _sibling(self) -> SshSandbox:
        sibling = SshSandbox(self.spec, self.config)
        sibling._place = self._place
        self._place.join(sibling)
        return sibling

    def close(self) -> None:
        """Kill every process and remove every trace, over there as well. Idempotent, never raises."""
        client = self._client
        if client is not None and not client.alive:
            self._place.give_up()
        super().close()
        self._place.leave(self)


def list_leftovers(config: SshConfig) -> list[Finding]:
    """Say what sandboxes left on a server, and what ``remove_leftovers`` would do with it.

    Args:
        config: The server.

    Raises:
        SandboxUnavailable: The server cannot be reached, is not the one it should be, or lets nobody in.
        TransportLost: The connection broke meanwhile.
    """
    return remove_leftovers(config, dry_run=True)


def remove_leftovers(config: SshConfig, *, dry_run: bool = False) -> list[Finding]:
    """End and remove what sandboxes left on a server whose owner is gone, and nothing else's.

    An owner on this machine is looked for among the processes. One on another machine cannot be seen: what it left goes when its outpost
    has ended, which it does by itself when its lease runs out. Every start of a sandbox does this as well.

    Args:
        config: The server.
        dry_run: Only say what would be removed.

    Returns:
        What was found.

    Raises:
        SandboxUnavailable: The server cannot be reached, is not the one it should be, or lets nobody in.
        TransportLost: The connection broke meanwhile.
    """
    with contextlib.closing(connect(config)) as connection:
        shell = FarShell(connection)
        return settle(shell, survey(shell, config, python=False), in_use=directories_in_use(), dry_run=dry_run)
