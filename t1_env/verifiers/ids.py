"""The frozen list of a task's verifiers: what is counted, in which order, and where its verdicts come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Final

RUNNER: Final = "runner"
"""The source of verdicts that T1's own runner takes; every other source is something that the task's own script leaves."""


class FrozenIds(tuple[str, ...]):
    """Ids of a task's verifiers. They are what is counted, whatever a later run reports.

    Args:
        ids: Verifier ids in order.
        source: Where they were found and their verdicts are read: ``"runner"``, or the best source that the task's own script left
            (``VerifierReport.source``).
    """

    source: str

    def __new__(cls, ids: Iterable[str] = (), source: str = RUNNER) -> FrozenIds:
        """Freeze ids."""
        frozen = super().__new__(cls, ids)
        frozen.source = source
        return frozen

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the list; see `ids_digest`."""
        return ids_digest(self)


def ids_digest(ids: Sequence[str]) -> str:
    """SHA-256 (hex) of a list of verifier ids; written beside results so that two lists can be told apart."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def source_of(ids: Sequence[str]) -> str:
    """Where the verdicts on a list of ids come from; a plain sequence is the runner's."""
    return ids.source if isinstance(ids, FrozenIds) else RUNNER
