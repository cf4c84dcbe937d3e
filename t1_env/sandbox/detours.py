"""Links of the agent's that lead into what is mounted for a verification.

Where a task's tests will lie is no secret, so an agent can put a link to the expected answers where its own answer should be, long before
these exist. In the clone such links are removed, in its throw-away layer; only what brings files that are worth a link is guarded, because
looking for links takes as long as the agent wrote many files.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator

_CODE = (".py", ".sh", ".pyc", ".toml", ".md")
# Where a process's own root, directory or descriptors are: which process that is, is known only when the link is followed.
_SOME_PROCESS = re.compile(r"/proc/[^/]+/(task/[^/]+/)?(root|cwd|exe|fd|map_files)(/|$)")


def brings_answers(directory: str) -> bool:
    """Whether a directory holds anything but code: files that a deliverable may be compared with."""
    return any(not name.endswith(_CODE) for _, _, names in os.walk(directory) for name in names)


def links_in(written: str, at: str) -> Iterator[str]:
    """Symlinks in a directory that an agent wrote to, not following any.

    Args:
        written: The directory.
        at: Where its contents are found in the clone.
    """
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with contextlib.suppress(FileNotFoundError), os.scandir(f"{written}{below}") as entries:
            for entry in entries:
                if entry.is_symlink():
                    yield f"{at}{below}/{entry.name}"
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{below}/{entry.name}")


def cut(links: Iterable[str], guarded: Iterable[str]) -> tuple[str, ...]:
    """Remove the links that lead into a guarded directory, or may do so when a verifier follows them; called in the clone's root.

    Args:
        links: Absolute paths.
        guarded: Absolute directories.

    Returns:
        What was removed.
    """
    places = tuple(f"{place.rstrip('/')}/" for place in guarded)
    removed = []
    for link in links:
        if _leads_in(link, places):
            with contextlib.suppress(OSError):  # masked meanwhile, or below another link that was removed
                os.unlink(link)
                removed.append(link)
    return tuple(removed)


def _leads_in(link: str, places: tuple[str, ...]) -> bool:
    try:
        first = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
        target = f"{os.path.realpath(link)}/"
    except OSError:  # through a process that even this one may not look into
        return True
    return target.startswith(places) or any(_SOME_PROCESS.match(place) for place in (first, target))
