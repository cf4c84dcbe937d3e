"""A plain ``sh`` on the server that takes our orders before an outpost runs there: look around, take files, start it.

The server runs commands through the login's shell, whose start-up files may print anything; so the first thing it does for us is to start
``sh`` with a script of one line, which says a word that nobody else knows and then carries out one line of shell after the other. Nothing
of it depends on which shell the login has, and nothing of the answers on what was printed before the word.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Iterable
from typing import Final

from t1_env.errors import SandboxUnavailable
from t1_env.sandbox.ssh.connection import ChannelStream, Connection

_MAX_NOISE_BYTES: Final = 1 << 20
_SHOWN_NOISE: Final = 300
_CHUNK_BYTES: Final = 1 << 18
# Without ', ! and \, which mean different things within quotes to different login shells; on one line, because some allow no more.
_LOOP: Final = 'printf "%s%s" T1- "$1"; echo; while IFS= read -r line; do eval "$line"; done'


class FarShell:
    """An ``sh`` on the server at our command. Its stream becomes that of the program it turns into.

    Args:
        connection: A connection; closed with the stream.

    Raises:
        SandboxUnavailable: The login gives no usable shell; shows what it printed instead.
        TransportLost: The connection broke meanwhile.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        word = secrets.token_hex(16)
        self.stream: ChannelStream = connection.execute(f"exec sh -c '{_LOOP}' t1 {word}")
        self._received = b""
        self._find_word(f"T1-{word}\n".encode())

    def ask(self, line: str, *, limit_s: float | None = None) -> dict[str, str]:
        """Have a line of shell carried out that prints ``name=value`` lines.

        Args:
            line: One line. Its programs must not read standard input.
            limit_s: Limit in seconds; default that of the connection.

        Returns:
            What it printed.

        Raises:
            SandboxUnavailable: The shell ended instead.
            TransportLost: The connection broke meanwhile, or there was no answer in time.
        """
        assert "\n" not in line
        end = secrets.token_hex(8)
        self.stream.send(f"{line}; echo {end}\n".encode())
        return self._answer(end, limit_s)

    def _answer(self, end: str, limit_s: float | None) -> dict[str, str]:
        with self._connection.within(limit_s):
            while f"{end}\n".encode() not in self._received:
                self._more("stopped in the middle of being set up")
        text, _, self._received = self._received.partition(f"{end}\n".encode())
        pairs = (line.partition("=") for line in text.decode("utf-8", "surrogateescape").splitlines())
        return {name: value for name, separator, value in pairs if separator}

    def send_file(self, line: str, size_bytes: int, parts: Iterable[bytes], *, limit_s: float) -> dict[str, str]:
        """Like ``ask``, with bytes for the line's programs to read: exactly as many as they are told of.

        Args:
            line: One line of shell, whose programs read ``size_bytes`` from standard input.
            size_bytes: How many bytes.
            parts: The bytes.
            limit_s: Limit in seconds for what happens after the last byte.
        """
        end = secrets.token_hex(8)
        self.stream.send(f"{line}; echo {end}\n".encode())
        sent = 0
        for part in parts:
            for start in range(0, len(part), _CHUNK_BYTES):
                self.stream.send(part[start : start + _CHUNK_BYTES])
            sent += len(part)
        assert sent == size_bytes, f"announced {size_bytes} bytes, sent {sent}"
        return self._answer(end, limit_s)

    def become(self, line: str) -> ChannelStream:
        """Have a last line carried out, which ends with ``exec``; return the stream of the program."""
        self.stream.send(f"{line}; exit 125\n".encode())  # what comes next is meant for the program and never for the shell
        if self._received.strip():
            raise SandboxUnavailable(f"{self._connection.address}: something prints into the connection: {_shown(self._received)}")
        return self.stream

    # ---------------------------------------------------------------------------------------------------------------- internals
    def _find_word(self, word: bytes) -> None:
        with self._connection.within(None):
            while word not in self._received:
                if len(self._received) > _MAX_NOISE_BYTES:
                    self.stream.close()
                    raise SandboxUnavailable(
                        f"the login at {self._connection.address} prints without end instead of starting sh: {_shown(self._received)}"
                    )
                self._more("gives no shell to work with")
        self._received = self._received.partition(word)[2]

    def _more(self, trouble: str) -> None:
        data = self.stream.receive()
        if not data:
            status = self.stream.exit_status(1.0)
            self.stream.close()
            said = _shown(self._received + self.stream.errors().encode("utf-8", "replace"))
            raise SandboxUnavailable(f"the login at {self._connection.address} {trouble}: it ended with status {status} and said: {said}")
        self._received += data


def quote(words: Iterable[str]) -> str:
    """Return words as ``sh`` reads them."""
    return shlex.join(list(words))


def _shown(data: bytes) -> str:
    return repr(data.decode("utf-8", "replace").strip()[-_SHOWN_NOISE:]) if data.strip() else "nothing"
