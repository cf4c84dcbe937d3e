"""Logging in: keys by name, keys of an agent, the usual keys, a password. What is secret is in no message and no traceback."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Generator
from typing import Any, Final

from t1_env.errors import ConfigError
from t1_env.sandbox.ssh.config import SshConfig
from t1_env.sandbox.ssh.endpoint import Endpoint, import_paramiko

_AGENT_LIMIT_S: Final = 30.0
_MAX_KEYS: Final = 5
"""A default server hangs up after six failed tries; one is left for the password."""


def log_in(transport: Any, config: SshConfig, endpoint: Endpoint) -> str | None:
    """Log in with whatever the configuration allows.

    Args:
        transport: A paramiko transport whose host key was checked.
        config: The configuration.
        endpoint: The server.

    Returns:
        None once logged in, else why not, for a person to read. An exception would hold paramiko's frames, and those hold the password.

    Raises:
        ConfigError: A key that was named, or the source of a secret, cannot be read.
    """
    paramiko = import_paramiko()
    tried: list[str] = []
    allowed: list[str] = []
    keys = _keys(config, endpoint, tried)
    try:
        for label, key in keys:
            if _step(lambda key=key: transport.auth_publickey(endpoint.user, key), label, tried, allowed, paramiko):
                return None
            if not transport.is_active():
                break
        if config.password is not None and transport.is_active():
            config.password.reveal()  # a source that cannot be read is said to be so, outside paramiko
            if _step(lambda: _password(transport, config, endpoint), "password", tried, allowed, paramiko):
                return None
    finally:
        keys.close()
    hung_up = "" if transport.is_active() else "; then the server hung up"
    accepts = f" The server accepts: {', '.join(dict.fromkeys(allowed))}." if allowed else ""
    return (
        f"{endpoint.address} does not let us in. Tried: {', '.join(tried) or 'nothing, as there is neither a key nor a password'}{hung_up}."
        f"{accepts} Set key_file, load the key into an agent, or set password; the public key must be in ~/.ssh/authorized_keys of "
        f"{endpoint.user!r} on the server"
    )


def _password(transport: Any, config: SshConfig, endpoint: Endpoint) -> Any:
    assert config.password is not None
    return transport.auth_password(endpoint.user, config.password.reveal())


def _step(attempt: Any, label: str, tried: list[str], allowed: list[str], paramiko: Any) -> bool:
    """Whether this attempt completed the login."""
    try:
        further = attempt()
    except paramiko.BadAuthenticationType as error:
        allowed.extend(error.allowed_types)
        tried.append(f"{label} (this way of logging in is not accepted)")
        return False
    except (paramiko.SSHException, OSError, EOFError, ValueError):
        tried.append(f"{label} (refused)")
        return False
    if further:
        allowed.extend(further)
        tried.append(f"{label} (accepted, but more is asked for)")
    return not further


def _keys(config: SshConfig, endpoint: Endpoint, tried: list[str]) -> Generator[tuple[str, Any], None, None]:
    """Keys to offer: those of files that were named, those of the agent, those of the usual files."""
    offered: set[bytes] = set()
    with contextlib.ExitStack() as stack:
        agent_keys = _agent_keys(stack, tried) if endpoint.agent else []
        loaded = []
        for index, path in enumerate(endpoint.key_files):
            if (key := _load(path, config, required=index < endpoint.named_keys, tried=tried)) is not None:
                loaded.append((path, key))
        if endpoint.agent_only_named:
            public = {key.asbytes() for _, key in loaded}
            agent_keys = [key for key in agent_keys if key.asbytes() in public]
        named = [(f"key {path}", key) for path, key in loaded[: endpoint.named_keys]]
        others = [(f"key {path}", key) for path, key in loaded[endpoint.named_keys :]]
        for label, key in [*named, *((f"agent key {key.comment or key.get_name()}", key) for key in agent_keys), *others]:
            if key.asbytes() in offered:
                continue
            if len(offered) >= _MAX_KEYS:
                tried.append(f"and no more than {_MAX_KEYS} keys; name the right one with key_file")
                return
            offered.add(key.asbytes())
            yield label, key


def _load(path: str, config: SshConfig, *, required: bool, tried: list[str]) -> Any:
    """A private key; None if it cannot be used and was not asked for by name."""
    paramiko = import_paramiko()
    if not os.path.exists(path):
        if required:
            raise ConfigError(f"key_file={path!r} does not exist")
        return None
    problem = ""
    for decrypt in (True, False) if config.passphrase is not None else (False,):
        try:
            return paramiko.PKey.from_path(path, _passphrase(config) if decrypt else None)
        except OSError as error:
            problem = error.strerror or str(error)
        except TypeError:  # how the library beneath says that a passphrase is missing, or given for a key that is not encrypted
            problem = "it is encrypted and there is no passphrase"
        except (ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType):
            problem = "it is no private key that paramiko can read, or the passphrase is wrong"
            break
    if required:
        raise ConfigError(f"key_file={path!r} cannot be used: {problem}")
    tried.append(f"key {path} ({problem})")
    return None


def _passphrase(config: SshConfig) -> bytes | None:
    return None if config.passphrase is None else config.passphrase.reveal().encode()


def _agent_keys(stack: contextlib.ExitStack, tried: list[str]) -> list[Any]:
    paramiko = import_paramiko()
    path = os.environ.get("SSH_AUTH_SOCK")
    if not path:
        return []

    class Agent(paramiko.agent.AgentSSH):  # type: ignore[name-defined, misc]
        """An agent on a connection of ours, which has a time limit and is closed in any case."""

        def __init__(self, link: socket.socket) -> None:
            super().__init__()
            self._connect(link)

    link = stack.enter_context(socket.socket(socket.AF_UNIX))
    link.settimeout(_AGENT_LIMIT_S)
    try:
        link.connect(path)
        return list(Agent(link).get_keys())
    except (paramiko.SSHException, OSError):
        tried.append("agent (it does not answer)")
        return []
