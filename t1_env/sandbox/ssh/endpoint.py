"""Where a connection really goes: an ``SshConfig`` with the OpenSSH client's own configuration behind it."""

from __future__ import annotations

import getpass
import glob
import os
import re
import shlex
from dataclasses import dataclass, replace
from typing import Any, Final

from t1_env.errors import ConfigError, DependencyMissing
from t1_env.sandbox.ssh.config import DEFAULT_OPENSSH_FILE, SshConfig
from t1_env.sandbox.ssh.hostkeys import default_files

DEFAULT_KEYS: Final = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_MAX_INCLUDES: Final = 64
_MAX_JUMPS: Final = 8
_INCLUDE: Final = re.compile(r"^\s*include(?:\s*=\s*|\s+)(.+)$", re.IGNORECASE)

_BLOCK: Final = re.compile(r"^\s*(?:host|match)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server, fully named.

    Args:
        host: Name or address to connect to.
        port: TCP port.
        user: Login.
        key_files: Private keys to try, in order; those that must exist come first.
        named_keys: How many of ``key_files`` were asked for by name and must exist.
        agent: Whether keys of an agent are tried.
        agent_only_named: Whether only agent keys that are also in ``key_files`` are tried.
        known_hosts_files: Where host keys are looked up.
        host_key_name: Name to look up there, without port rules; None for host and port.
        proxy_command: Program whose standard input and output are the connection; None to connect directly.
        jump: Server to go through; None to connect directly.
    """

    host: str
    port: int
    user: str
    key_files: tuple[str, ...]
    named_keys: int
    agent: bool
    agent_only_named: bool
    known_hosts_files: tuple[str, ...]
    host_key_name: str | None = None
    proxy_command: str | None = None
    jump: tuple[SshConfig, Endpoint] | None = None

    @property
    def address(self) -> str:
        """``user@host:port``, for messages."""
        return f"{self.user}@{self.host}:{self.port}"


def import_paramiko() -> Any:
    """Return the ``paramiko`` module.

    Raises:
        DependencyMissing: It is not installed.
    """
    try:
        import paramiko
    except ImportError as error:
        raise DependencyMissing("sandbox 'ssh' needs paramiko: python -m pip install 't1-terminal[ssh]'") from error
    return paramiko


def resolve(config: SshConfig, *, jumps: int = 0) -> Endpoint:
    """Return the server that a configuration means.

    Args:
        config: The configuration; what it leaves None comes from the OpenSSH client's.
        jumps: How many jump hosts led here.

    Raises:
        ConfigError: The OpenSSH configuration cannot be read, or its jump hosts go in a circle.
    """
    found = _lookup(config)
    host = str(found.get("hostname", config.host))
    user = config.user or found.get("user") or getpass.getuser()
    port = config.port or _port(found.get("port", "22"), config.host)
    named = (config.key_file,) if config.key_file else tuple(found.get("identityfile", ()))
    known = config.known_hosts_file or found.get("userknownhostsfile")
    only_named = bool(named) and str(found.get("identitiesonly", "no")).lower() == "yes"
    endpoint = Endpoint(
        host=host,
        port=port,
        user=user,
        key_files=tuple(os.path.expanduser(path) for path in named or DEFAULT_KEYS),
        named_keys=1 if config.key_file else 0,
        agent=config.agent,
        agent_only_named=only_named,
        known_hosts_files=tuple(os.path.expanduser(path) for path in _words(known, config)) if known else default_files(),
        host_key_name=found.get("hostkeyalias"),
    )
    jump = str(found.get("proxyjump", "none"))
    if jump.lower() != "none":
        if jumps >= _MAX_JUMPS:
            raise ConfigError(f"ProxyJump in {config.ssh_config_file} leads from {config.host!r} through more than {_MAX_JUMPS} hosts")
        return replace(endpoint, jump=_jump(config, jump, jumps + 1))
    return replace(endpoint, proxy_command=found.get("proxycommand"))


def _jump(config: SshConfig, text: str, jumps: int) -> tuple[SshConfig, Endpoint]:
    """The last host of a ProxyJump list; those before it are what it is reached through."""
    *before, last = text.split(",")
    match = re.fullmatch(r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>\[[^\]]+\]|[^:]+)(?::(?P<port>\d+))?/?", last.strip())
    if match is None:
        raise ConfigError(f"ProxyJump {text!r} of {config.ssh_config_file}: expected [user@]host[:port][,...]")
    port = int(match["port"]) if match["port"] else None
    jump_config = SshConfig(
        host=match["host"].strip("[]"),
        port=port,
        user=match["user"],
        agent=config.agent,
        passphrase=config.passphrase,
        ssh_config_file=config.ssh_config_file,
        connect_timeout_s=config.connect_timeout_s,
        keepalive_s=config.keepalive_s,
    )
    endpoint = resolve(jump_config, jumps=jumps)
    if before:
        endpoint = replace(endpoint, jump=_jump(config, ",".join(before), jumps + 1), proxy_command=None)
    return jump_config, endpoint


def _lookup(config: SshConfig) -> dict[str, Any]:
    if config.ssh_config_file == "none":
        return {}
    paramiko = import_paramiko()
    path = os.path.expanduser(config.ssh_config_file)
    if not os.path.exists(path):
        if config.ssh_config_file != DEFAULT_OPENSSH_FILE:
            raise ConfigError(f"ssh_config_file={config.ssh_config_file!r} does not exist")
        return {}
    try:
        # What comes first wins, in the %p and %r of a ProxyCommand as well.
        given = [f"{word} {value}" for word, value in (("Port", config.port), ("User", config.user)) if value is not None]
        parsed = paramiko.SSHConfig.from_text("\n".join([*given, *_lines(path, [0])]))
        return dict(parsed.lookup(config.host))
    # A malformed file or a condition that needs an optional package: paramiko has an exception of its own for some of it only.
    except (OSError, ValueError, paramiko.SSHException, ImportError, LookupError) as error:
        raise ConfigError(f"the OpenSSH configuration {path!r} cannot be used: {error}; ssh_config_file='none' leaves it out") from error


def _lines(path: str, count: list[int]) -> list[str]:
    """Lines of a file, those of the files it includes in their place."""
    count[0] += 1
    if count[0] > _MAX_INCLUDES:
        raise ConfigError(f"the OpenSSH configuration includes more than {_MAX_INCLUDES} files; the last is {path!r}")
    lines: list[str] = []
    block = "Host *"
    with open(path, encoding="utf-8", errors="surrogateescape") as stream:
        for line in stream.read().splitlines():
            include = _INCLUDE.match(line)
            if include is None:
                lines.append(line)
                block = line if _BLOCK.match(line) else block
                continue
            for pattern in shlex.split(include[1], comments=True):
                # Relative names are relative to ~/.ssh in a user's file; so is this one, wherever the file itself lies.
                full = os.path.join(os.path.expanduser("~/.ssh"), os.path.expanduser(pattern))
                for included in sorted(glob.glob(full)):
                    lines += [*_lines(included, count), block]  # what follows belongs to the block it stands in, not to an included one
    return lines


def _port(value: Any, host: str) -> int:
    text = str(value)
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError(f"Port {text!r} of host {host!r} in the OpenSSH configuration: expected a number from 1 to 65535")
    return int(text)


def _words(known: str, config: SshConfig) -> list[str]:
    return [config.known_hosts_file] if config.known_hosts_file else shlex.split(known)
