"""What this process has on Docker daemons and still uses.

A daemon that is killed or restarted takes no orders to remove anything, and a request that it was killed over may have been carried out
all the same. So everything that must not outlive its use carries a serial number, and what has the label of this process but a number that
is no longer held is a leftover, which the next start removes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

from t1_env.sandbox.docker.daemon import Daemon

SERIAL_LABEL: Final = "t1.serial"
"""Label of containers and committed images: a number that the process named by their owner label gives once."""

_serials: Final = itertools.count()
_held: Final[set[str]] = set()
_images: Final[dict[str, Holding]] = {}
_untidy: Final[set[str]] = set()


class Holding:
    """A container or an image that is about to be made. Whoever makes it lets go of it in the end.

    Args:
        daemon: Where.
        kind: What it is for (label ``t1.kind``).
    """

    def __init__(self, daemon: Daemon, kind: str) -> None:
        self._serial = str(next(_serials))
        self._where = daemon.identity
        self.labels = {**daemon.labels(kind), SERIAL_LABEL: self._serial}
        _held.add(self._serial)

    def name(self, image: str) -> None:
        """Note which image came of it, for ``let_go_of_image``."""
        _images[image] = self

    def let_go(self, *, removed: bool) -> None:
        """It is not used any more.

        Args:
            removed: Whether it is known to be gone from the daemon.
        """
        _held.discard(self._serial)
        if not removed:
            _untidy.add(self._where)


def let_go_of_image(image: str, *, removed: bool) -> None:
    """A committed image is not used any more; see ``Holding.let_go``. Does nothing for others."""
    holding = _images.pop(image, None)
    if holding is not None:
        holding.let_go(removed=removed)


def is_left_over(labels: Mapping[str, str]) -> bool:
    """Whether this process, which the labels name as the owner, does not use what carries them."""
    return SERIAL_LABEL in labels and labels[SERIAL_LABEL] not in _held


def mark_untidy(daemon: Daemon) -> None:
    """Something may be left on a daemon."""
    _untidy.add(daemon.identity)


def take_untidy(daemon: Daemon) -> bool:
    """Whether something may be left on a daemon; who asks looks for it, and marks it again if it is still there."""
    untidy = daemon.identity in _untidy
    _untidy.discard(daemon.identity)
    return untidy
