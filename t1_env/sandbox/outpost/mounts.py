"""Which host files were sent to be mounted, by content."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from t1_env.sandbox.outpost import scan, transfer


class MountDigests:
    """Content digests of host files and directories, computed again only when their metadata changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[str, str]] = {}

    def of(self, source: Path) -> str:
        """Return the content digest of a host path."""
        status = os.stat(source)
        mark = f"{status.st_ino}-{status.st_size}-{status.st_ctime_ns}-{scan.fingerprint((str(source),), frozenset())}"
        with self._lock:
            known = self._known.get(source)
        if known is not None and known[0] == mark:
            return known[1]
        digest = transfer.digest_of(source)
        with self._lock:
            self._known[source] = (mark, digest)
        return digest
