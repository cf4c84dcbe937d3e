"""What a process that runs inside a verification clone can know about it; None where it does not hold."""

from __future__ import annotations

bare_root: str | None = None
"""Directory with the same filesystem but without what was mounted for this one call (a task's tests): a root for programs to be started in.
Only a process that may change its root can use it; no program that it starts can leave it again."""
