"""A password that is used and never shown."""

from __future__ import annotations

import hmac
import os
from pathlib import Path
from typing import Any, Final, NoReturn

from t1_env.errors import ConfigError

_SHOWN: Final = "Secret('***')"


class Secret:
    """A password or passphrase. ``repr``, ``str`` and formatting show ``***``; only :meth:`reveal` gives it away.

    A secret that is held literally refuses to be pickled, as the pickle would show it. One that is read from a variable or a file
    (:meth:`from_env`, :meth:`from_file`) is pickled as the name of its source and read where it is needed, so that configurations
    can be sent to worker processes.

    Args:
        value: The password.
    """

    __slots__ = ("_kind", "_source")

    def __init__(self, value: str) -> None:
        if not isinstance(value, str):
            raise ConfigError(f"a secret must be a str, not {type(value).__name__}")  # the value itself is not for messages
        self._kind, self._source = "literal", value

    @classmethod
    def from_env(cls, name: str) -> Secret:
        """A secret held by an environment variable, read at each use.

        Args:
            name: Name of the variable.
        """
        return cls._from("env", name)

    @classmethod
    def from_file(cls, path: str | Path) -> Secret:
        """A secret that is the first line of a file, read at each use.

        Args:
            path: The file; ``~`` is expanded.
        """
        return cls._from("file", os.fspath(path))

    @classmethod
    def _from(cls, kind: str, source: str) -> Secret:
        secret = cls(source)
        secret._kind = kind
        return secret

    def reveal(self) -> str:
        """Return the password.

        Raises:
            ConfigError: Its variable is not set, or its file cannot be read.
        """
        if self._kind == "literal":
            return self._source
        if self._kind == "env":
            value = os.environ.get(self._source)
            if value is None:
                raise ConfigError(f"the environment variable {self._source} that holds a secret is not set")
            return value
        try:
            with open(os.path.expanduser(self._source), encoding="utf-8") as stream:
                return stream.readline().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the file {self._source!r} that holds a secret cannot be read: {reason}")

    def __repr__(self) -> str:
        return _SHOWN

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(_SHOWN, spec)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return self._kind == other._kind and hmac.compare_digest(self._source.encode(), other._source.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._kind, self._source))

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Secret:
        return self

    def __getstate__(self) -> NoReturn:
        raise ConfigError(_REFUSAL)  # whatever reads an object's state by this way would show it

    def __reduce__(self) -> tuple[Any, ...]:
        if self._kind == "literal":
            raise ConfigError(_REFUSAL)
        return (Secret.from_env if self._kind == "env" else Secret.from_file), (self._source,)


_REFUSAL: Final = (
    "a literal secret is not pickled, because the pickle would show it: use Secret.from_env('NAME') or Secret.from_file('PATH'), which are "
    "pickled as a name and read where they are needed"
)
