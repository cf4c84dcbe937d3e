"""The sandbox's ``/etc``: a short allow-list of the host's public settings around a synthetic core.

Nothing else of the host's ``/etc`` is ever visible, and a file is taken only if everybody on the host may read it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import stat
from typing import Final

ALLOWED: Final[tuple[str, ...]] = (
    "adduser.conf",
    "alternatives",
    "ca-certificates.conf",
    "crypto-policies",
    "debian_version",
    "deluser.conf",
    "fonts",
    "gai.conf",
    "host.conf",
    "inputrc",
    "java-*",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "login.defs",
    "lsb-release",
    "magic",
    "magic.mime",
    "manpath.config",
    "mime.types",
    "os-release",
    "pam.conf",
    "pam.d",
    "perl",
    "pki/ca-trust",
    "pki/tls/certs",
    "pki/tls/openssl.cnf",
    "protocols",
    "python3*",
    "redhat-release",
    "rpc",
    "security/*.conf",
    "services",
    "shells",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "vim",
    "xattr.conf",
)
"""Patterns, relative to ``/etc``, of what is copied from the host."""

_NEVER: Final = ("private", "*.key", "*.pem.key", "shadow*", "gshadow*", "opasswd")

_FILES: Final[dict[str, str]] = {
    "passwd": (
        "root:x:0:0:root:/root:/bin/bash\n"
        "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
        "bin:x:2:2:bin:/bin:/usr/sbin/nologin\n"
        "sys:x:3:3:sys:/dev:/usr/sbin/nologin\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": (
        "root:x:0:\ndaemon:x:1:\nbin:x:2:\nsys:x:3:\nadm:x:4:\ntty:x:5:\ndisk:x:6:\nmail:x:8:\nsudo:x:27:\n"
        "shadow:x:42:\nutmp:x:43:\nstaff:x:50:\nusers:x:100:\nnogroup:x:65534:\n"
    ),
    "shadow": "root:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\nservices: files\nprotocols: files\n",
    "resolv.conf": "",
    "fstab": "",
    "profile": 'for file in /etc/profile.d/*.sh; do [ -r "$file" ] && . "$file"; done\nunset file\n',
    "timezone": "Etc/UTC\n",
    "machine-id": "",
}
_LINKS: Final[dict[str, str]] = {"mtab": "/proc/self/mounts", "localtime": "/usr/share/zoneinfo/UTC"}
_DIRECTORIES: Final = ("profile.d", "skel", "default", "cron.d", "opt")


def build_etc(target: str, source: str = "/etc") -> None:
    """Fill the empty directory ``target`` with the sandbox's ``/etc``.

    Args:
        target: Existing directory to fill.
        source: The host's ``/etc``.
    """
    for pattern in ALLOWED:
        parent, _, name = pattern.rpartition("/")
        try:
            found = sorted(fnmatch.filter(os.listdir(os.path.join(source, parent)), name))
        except OSError:
            continue  # this distribution has no such directory
        for entry in found:
            os.makedirs(os.path.join(target, parent), exist_ok=True)
            _copy(os.path.join(source, parent, entry), os.path.join(target, parent, entry))
    for name in _DIRECTORIES:
        os.makedirs(os.path.join(target, name), exist_ok=True)
    for name, text in _FILES.items():
        path = os.path.join(target, name)
        with open(path, "w", encoding="ascii") as stream:
            stream.write(text)
        os.chmod(path, 0o600 if name == "shadow" else 0o644)
    for name, destination in _LINKS.items():
        os.symlink(destination, os.path.join(target, name))


def digest() -> str:
    """Digest of what is written rather than copied; changes with T1 alone."""
    said = json.dumps([ALLOWED, _NEVER, sorted(_FILES.items()), sorted(_LINKS.items()), _DIRECTORIES])
    return hashlib.sha256(said.encode()).hexdigest()


def _copy(source: str, target: str) -> None:
    """Copy a file, link or tree, leaving out whatever is not public."""
    if any(fnmatch.fnmatch(os.path.basename(source), pattern) for pattern in _NEVER):
        return
    try:
        status = os.lstat(source)
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(source), target)
        elif stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_IROTH:
            os.mkdir(target, 0o755)
            for name in sorted(os.listdir(source)):
                _copy(os.path.join(source, name), os.path.join(target, name))
        elif stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IROTH:
            shutil.copyfile(source, target)
            os.chmod(target, stat.S_IMODE(status.st_mode) & 0o755)
    except (FileNotFoundError, PermissionError):
        return  # changed under us, or closed to this user: the sandbox does without it
