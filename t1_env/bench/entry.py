"""What a measured clone runs: nothing, so that the cost is the clone's."""

from __future__ import annotations


def answer(payload: str) -> str:
    """Return the payload."""
    return payload
