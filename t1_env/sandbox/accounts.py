"""Users of a sandbox: what the ``USER`` of an image stands for, read from the sandbox's own ``/etc/passwd`` and ``/etc/group``."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from t1_env.sandbox import files

_MAX_FILE_BYTES: Final = 1 << 20
_MAX_ID: Final = 65535


@dataclass(frozen=True, slots=True)
class Account:
    """A user that processes can run as.

    Args:
        name: Login name; the number as text for a user without one.
        uid: User id.
        gid: Primary group id.
        groups: Supplementary group ids.
        home: Home directory.
    """

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Account:
        """The inverse of ``to_json``."""
        return cls(data["name"], data["uid"], data["gid"], tuple(data["groups"]), data["home"])

    def to_json(self) -> dict[str, Any]:
        """For a message or a file."""
        return {"name": self.name, "uid": self.uid, "gid": self.gid, "groups": list(self.groups), "home": self.home}


def resolve(root_fd: int, user: str) -> Account:
    """Look a user up as ``USER`` and ``--chown`` mean it.

    Args:
        root_fd: The root whose ``/etc`` is read.
        user: ``name``, ``uid``, ``name:group``, ``uid:gid`` and their mixtures.

    Raises:
        OSError: There is no such user or group (``ENOENT``), or its number is above 65535.
    """
    name, separator, group = user.partition(":")
    entry = _find(_lines(root_fd, "/etc/passwd", 7), name)
    if entry is not None:
        login, uid, gid, home = entry[0], _number(entry[2]), _number(entry[3]), entry[5] or "/"
    elif name.isdecimal():
        login, uid, gid, home = name, _number(name), 0, "/"
    elif name == "root":
        login, uid, gid, home = "root", 0, 0, "/root"
    else:
        raise OSError(errno.ENOENT, f"no user {name!r} in the image's /etc/passwd")
    groups = _lines(root_fd, "/etc/group", 4)
    if not separator:
        return Account(login, uid, gid, tuple(sorted({_number(line[2]) for line in groups if login in line[3].split(",")})), home)
    found = _find(groups, group)
    if found is None and not group.isdecimal():
        raise OSError(errno.ENOENT, f"no group {group!r} in the image's /etc/group")
    return Account(login, uid, _number(group if found is None else found[2]), (), home)


def _find(lines: list[list[str]], name: str) -> list[str] | None:
    """The line of a name, or else of a number."""
    return next((line for line in lines if line[0] == name), None) or next((line for line in lines if line[2] == name), None)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_ID:
        raise OSError(errno.EINVAL, f"a user or group id must be a number from 0 to {_MAX_ID}, got {text!r}")
    return int(text)


def _lines(root_fd: int, path: str, fields: int) -> list[list[str]]:
    """The well-formed lines of a file such as passwd(5); none if it is missing."""
    try:
        fd = files.open_for_reading(root_fd, path)
    except FileNotFoundError:
        return []
    with os.fdopen(fd, "rb") as stream:
        text = stream.read(_MAX_FILE_BYTES).decode("utf-8", "surrogateescape")
    split = [line.split(":") for line in text.splitlines()]
    return [line for line in split if len(line) == fields and line[2].isdecimal()]
