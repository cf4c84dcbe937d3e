"""The one thing a connection must offer: bytes both ways."""

from __future__ import annotations

from typing import Protocol


class Stream(Protocol):
    """Bytes to and from the standard input and output of an outpost: a Docker attachment, an SSH channel, a pipe.

    One thread receives while others send (one at a time). ``close`` may be called from any thread and wakes up the one that receives.
    """

    def send(self, data: bytes) -> None:
        """Send all of it.

        Raises:
            TransportLost: The connection is gone.
        """

    def receive(self) -> bytes:
        """Wait for bytes and return at least one; empty at the end.

        Raises:
            TransportLost: The connection broke.
        """

    def close(self) -> None:
        """End the connection. Idempotent, never raises."""
