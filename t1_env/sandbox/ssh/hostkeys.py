"""Whether an SSH server is the one it should be: ``known_hosts`` files and fingerprints. Nothing here ever adds a key."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from t1_env.errors import ConfigError

_FINGERPRINT: Final = re.compile(r"SHA256:[A-Za-z0-9+/]{43}=?")
_MARKERS: Final = ("@cert-authority", "@revoked")


class Verdict(Enum):
    """What the ``known_hosts`` files say about a key."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class KnownKey:
    """One line of a ``known_hosts`` file that applies to a host.

    Args:
        kind: Key type, such as ``ssh-ed25519``.
        blob: The public key in SSH wire form.
        revoked: Whether the line says that the key must not be trusted.
        place: ``FILE:LINE``, for messages.
    """

    kind: str
    blob: bytes
    revoked: bool
    place: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and the line it rests on.

    Args:
        verdict: The verdict.
        line: The line that knows, revokes or contradicts the key; None for an unknown host.
    """

    verdict: Verdict
    line: KnownKey | None = None


def fingerprint(blob: bytes) -> str:
    """Return the fingerprint of a public key as OpenSSH prints it.

    Args:
        blob: The key in SSH wire form.

    Returns:
        ``SHA256:`` and 43 characters of base64.
    """
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode("ascii").rstrip("=")


def check_fingerprint(text: str) -> str:
    """Return a fingerprint in the form that ``fingerprint`` gives.

    Raises:
        ConfigError: It is no SHA-256 fingerprint.
    """
    if not _FINGERPRINT.fullmatch(text):
        raise ConfigError(
            f"host_fingerprint={text!r}: expected 'SHA256:' and 43 characters of base64, as printed on the server by "
            "`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`"
        )
    return text.rstrip("=")


def host_names(host: str, port: int) -> tuple[str, ...]:
    """Return the names under which a host may stand in ``known_hosts``: plain for port 22, ``[host]:port`` for others."""
    host = host.lower()
    return (host,) if port == 22 else (f"[{host}]:{port}",)


def known_keys(names: Sequence[str], files: Iterable[str]) -> list[KnownKey]:
    """Return the keys that ``known_hosts`` files hold for a host; files that do not exist hold none.

    Args:
        names: Names of the host, from ``host_names``.
        files: Paths of the files.

    Raises:
        ConfigError: A file exists and cannot be read.
    """
    found = []
    for path in files:
        try:
            with open(path, encoding="utf-8", errors="replace") as stream:
                lines = stream.readlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"the known_hosts file {path!r} cannot be read: {error.strerror}") from error
        for number, line in enumerate(lines, 1):
            key = _parse_line(line, names, f"{path}:{number}")
            if key is not None:
                found.append(key)
    return found


def judge(blob: bytes, known: Sequence[KnownKey]) -> Judgement:
    """Say whether a key is one that the host is known by.

    Args:
        blob: The key that the server showed, which it has proved to own.
        known: What ``known_keys`` found for this host.

    Returns:
        ``REVOKED`` if any line revokes it, else ``KNOWN`` if any line has it, else ``CHANGED`` if the host is known by other keys.
    """
    ours = [key for key in known if hmac.compare_digest(key.blob, blob)]
    for key in ours:
        if key.revoked:
            return Judgement(Verdict.REVOKED, key)
    if ours:
        return Judgement(Verdict.KNOWN, ours[0])
    trusted = [key for key in known if not key.revoked]
    return Judgement(Verdict.CHANGED, trusted[0]) if trusted else Judgement(Verdict.UNKNOWN)


def _parse_line(line: str, names: Sequence[str], place: str) -> KnownKey | None:
    """The key on a line if the line applies to one of the names; lines of other forms apply to nobody, as for OpenSSH."""
    words = line.split()
    if not words or words[0].startswith("#"):
        return None
    marker = ""
    if words[0].startswith("@"):
        marker = words.pop(0)
        if marker not in _MARKERS or marker == "@cert-authority":  # host certificates are not offered to us, as we do not ask for them
            return None
    if len(words) < 3 or not any(_matches(words[0], name) for name in names):
        return None
    try:
        blob = base64.b64decode(words[2], validate=True)
    except binascii.Error:
        return None
    return KnownKey(words[1], blob, marker == "@revoked", place)


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        parts = patterns.split("|")
        try:
            salt, digest = base64.b64decode(parts[2]), base64.b64decode(parts[3])
        except (IndexError, binascii.Error):
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), "sha1").digest(), digest)
    found = False
    for pattern in patterns.lower().split(","):
        negated = pattern.startswith("!")
        # In known_hosts only * and ? are special: the brackets around a name with a port are themselves.
        if fnmatch.fnmatchcase(name, pattern.lstrip("!").replace("[", "[[]")):
            if negated:
                return False
            found = True
    return found


def default_files() -> tuple[str, ...]:
    """The files that the OpenSSH client reads by default."""
    return (os.path.expanduser("~/.ssh/known_hosts"), os.path.expanduser("~/.ssh/known_hosts2"), "/etc/ssh/ssh_known_hosts")
