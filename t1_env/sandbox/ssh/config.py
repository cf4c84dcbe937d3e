"""How to reach an SSH server and what to do there: ``SshConfig``, and where it is read from."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from t1_env.config import reject_unknown
from t1_env.errors import ConfigError
from t1_env.sandbox.ssh.hostkeys import check_fingerprint
from t1_env.sandbox.ssh.secret import Secret

CONFIG_VARIABLE: Final = "T1_SSH_CONFIG"
"""Environment variable that names the TOML file to read."""
VARIABLE_PREFIX: Final = "T1_SSH_"
"""``T1_SSH_HOST``, ``T1_SSH_PORT`` ...: one variable for each field; they win over the file."""
DEFAULT_FILE: Final = "~/.config/t1/ssh.toml"
DEFAULT_OPENSSH_FILE: Final = "~/.ssh/config"

ISOLATION_MODES: Final = ("auto", "namespaces", "none")
RUNTIMES: Final = ("auto", "pure", "complete")
_SECRETS: Final = ("password", "passphrase")


@dataclass(frozen=True, slots=True)
class SshConfig:
    """An SSH server and how sandboxes run there.

    What is left None is looked up in the OpenSSH client's configuration (``~/.ssh/config``: ``HostName``, ``Port``, ``User``,
    ``IdentityFile``, ``IdentitiesOnly``, ``UserKnownHostsFile``, ``HostKeyAlias``, ``ProxyJump``, ``ProxyCommand``), so ``host`` may be an
    alias from there.

    Args:
        host: Name or address of the server, or an alias of ``~/.ssh/config``.
        port: TCP port; default 22.
        user: Login; default the present user's.
        key_file: Private key to log in with; default the usual ones of ``~/.ssh``.
        agent: Whether keys of a running ssh-agent are tried.
        password: Tried when no key is accepted. Never shown; see ``Secret``. A ``str`` is taken as a literal secret.
        passphrase: Of encrypted private keys. Treated like ``password``.
        known_hosts_file: File with the keys of known hosts; default those of OpenSSH.
        host_fingerprint: ``"SHA256:..."`` of the host key; when given it alone decides and known_hosts files are not read.
        ssh_config_file: OpenSSH client configuration; ``"none"`` to read none.
        connect_timeout_s: Limit in seconds for each of: reaching the server, the handshake, logging in, starting a program there.
        keepalive_s: Seconds between signs of life. A server that answers none for three times as long is taken for lost.
        lease_s: Seconds without a word from this process after which the remote side ends by itself and cleans up.
        reconnect_s: How long a way back to a lost sandbox is looked for, once, before it counts as lost. Not longer than ``lease_s``.
        remote_dir: Directory there for T1's files, for this login alone; ``~`` is the login's home.
        isolation: ``"namespaces"`` demands them, ``"none"`` runs in a plain directory, ``"auto"`` takes namespaces where the server allows
            them and says so in a warning where it does not.
        python: Python 3.11 or later over there; default: look for one, and bring one along if there is none.
        runtime: ``"pure"`` needs a Python there, ``"complete"`` brings one along, ``"auto"`` brings one where none is found.
        max_logins: Logins that this process has under way at a time. A default server drops some of more than ten.

    Raises:
        ConfigError: A value cannot be used.
    """

    host: str
    port: int | None = None
    user: str | None = None
    key_file: str | None = None
    agent: bool = True
    password: Secret | None = field(default=None, repr=False)
    passphrase: Secret | None = field(default=None, repr=False)
    known_hosts_file: str | None = None
    host_fingerprint: str | None = None
    ssh_config_file: str = DEFAULT_OPENSSH_FILE
    connect_timeout_s: float = 20.0
    keepalive_s: float = 10.0
    lease_s: float = 300.0
    reconnect_s: float = 30.0
    remote_dir: str = "~/.cache/t1"
    isolation: str = "auto"
    python: str | None = None
    runtime: str = "auto"
    max_logins: int = 4

    def __post_init__(self) -> None:
        _check_host(self.host)
        for name in ("user", "python"):
            _check_text(name, getattr(self, name))
        for name in ("key_file", "known_hosts_file", "ssh_config_file", "remote_dir"):
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
            _check_text(name, getattr(self, name))
        for name in _SECRETS:
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, Secret(value))
            elif value is not None and not isinstance(value, Secret):
                raise ConfigError(f"{name}: expected a Secret or a str, not {type(value).__name__}")
        if self.port is not None:
            _check_number("port", self.port, 1, 65535, whole=True)
        _check_number("connect_timeout_s", self.connect_timeout_s, 1, 3600)
        _check_number("keepalive_s", self.keepalive_s, 1, 3600)
        _check_number("reconnect_s", self.reconnect_s, 0, 3600)
        _check_number("lease_s", self.lease_s, 5, 86400)
        _check_number("max_logins", self.max_logins, 1, 1000, whole=True)
        _check_choice("isolation", self.isolation, ISOLATION_MODES)
        _check_choice("runtime", self.runtime, RUNTIMES)
        if not isinstance(self.agent, bool):
            raise ConfigError(f"agent={self.agent!r}: expected True or False")
        if self.host_fingerprint is not None:
            object.__setattr__(self, "host_fingerprint", check_fingerprint(str(self.host_fingerprint)))
        if not re.fullmatch(r"(~/|/)[A-Za-z0-9_./@+-]*", self.remote_dir) or not self.remote_dir.strip("~/."):
            raise ConfigError(
                f"remote_dir={self.remote_dir!r}: expected a directory of T1's own that starts with / or ~/, of letters, digits and"
                " _ . / @ + - alone"
            )

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> SshConfig:
        """Return what ``sandbox="ssh"`` uses: the TOML file, with ``T1_SSH_*`` variables over it.

        The file is the one named by ``T1_SSH_CONFIG``, else ``~/.config/t1/ssh.toml`` if it exists. Its keys are the arguments of
        ``SshConfig``; for ``password`` and ``passphrase`` also ``password_env``, ``password_file`` and the like.

        Args:
            environ: Variables to look at; default those of this process.

        Raises:
            ConfigError: No host is named anywhere, the file cannot be read, a key is unknown or a value cannot be used.
        """
        environ = os.environ if environ is None else environ
        values = {**_from_file(environ.get(CONFIG_VARIABLE)), **_from_variables(environ)}
        if "host" not in values:
            raise ConfigError(
                f"sandbox 'ssh' does not know which host to use: set {VARIABLE_PREFIX}HOST (a name, or an alias of ~/.ssh/config), write "
                f'host = "..." to {DEFAULT_FILE} or to a file named by {CONFIG_VARIABLE}, or pass '
                "functools.partial(SshSandbox, config=SshConfig(...))"
            )
        return cls(**values)


def _from_file(named: str | None) -> dict[str, Any]:
    path = Path(named or DEFAULT_FILE).expanduser()
    if not named and not path.exists():
        return {}
    try:
        with path.open("rb") as stream:
            table = tomllib.load(stream)
            mode = os.fstat(stream.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"the SSH configuration {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problem = str(error)
    else:
        reject_unknown(table, _keys(), f"key of {path}")
        if mode & 0o077 and any(name in table for name in _SECRETS):
            raise ConfigError(
                f"{str(path)!r} holds a password and others may read it: chmod 600 {path}, or use password_env or password_file"
            )
        return _with_secrets(table)
    raise ConfigError(f"the SSH configuration {str(path)!r} is not TOML: {problem}")


def _from_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    keys = {f"{VARIABLE_PREFIX}{name.upper()}": name for name in _keys()}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if variable not in keys:
            near = difflib.get_close_matches(variable, keys, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(sorted(keys))}"
            raise ConfigError(f"unknown environment variable {variable}: {hint}")
        name = keys[variable]
        if name in _SECRETS:  # read where it is needed, so that a configuration can be sent to workers
            values[name] = Secret.from_env(variable)
        else:
            values[name] = _parsed(variable, name, text)
    return _with_secrets(values)


def _parsed(variable: str, name: str, text: str) -> Any:
    kind = {field.name: str(field.type) for field in fields(SshConfig)}.get(name, "str")
    try:
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
    except ValueError:
        raise ConfigError(f"{variable}={text!r}: expected a number") from None
    if kind == "bool":
        if text.lower() not in ("1", "0", "true", "false", "yes", "no"):
            raise ConfigError(f"{variable}={text!r}: expected true or false")
        return text.lower() in ("1", "true", "yes")
    return text


def _with_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """``password_env`` and ``password_file`` become ``password``."""
    result = dict(values)
    for name in _SECRETS:
        sources = [key for key in (name, f"{name}_env", f"{name}_file") if key in result]
        if len(sources) > 1:
            raise ConfigError(f"{' and '.join(sources)} are both given: expected one of them")
        if (variable := result.pop(f"{name}_env", None)) is not None:
            result[name] = Secret.from_env(str(variable))
        if (path := result.pop(f"{name}_file", None)) is not None:
            result[name] = Secret.from_file(str(path))
    return result


def _keys() -> tuple[str, ...]:
    names = tuple(field.name for field in fields(SshConfig))
    return (*names, *(f"{name}_{source}" for name in _SECRETS for source in ("env", "file")))


def _check_host(host: Any) -> None:
    if not isinstance(host, str) or not re.fullmatch(r"[A-Za-z0-9_.:%-]+", host) or host.startswith("-"):
        hint = ""
        if isinstance(host, str) and "@" in host:
            user, _, rest = host.rpartition("@")
            hint = f"; write host={rest.partition(':')[0]!r}, user={user!r}"
        raise ConfigError(f"host={host!r}: expected a host name, an address or an alias of ~/.ssh/config{hint}")
    if host.count(":") == 1:
        name, _, port = host.partition(":")
        raise ConfigError(f"host={host!r}: the port goes into port: host={name!r}, port={port}")


def _check_text(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value or any(ord(char) < 32 for char in value)):
        raise ConfigError(f"{name}={value!r}: expected text without control characters")


def _check_number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r}: expected {'an integer' if whole else 'a number'} from {low} to {high}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join(choices)}{hint}")
