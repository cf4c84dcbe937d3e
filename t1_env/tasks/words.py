"""The words that seeded families draw names from: few, short and lower-case.

Small tokenizers give each of them a token of its own, which keeps copying a name a matter of one or two tokens. None is a shell
command, a file suffix or a word of the instructions.
"""

from __future__ import annotations

from typing import Final

# fmt: off
NAMES: Final[tuple[str, ...]] = (
    "ant", "ash", "bay", "bee", "birch", "bud", "clay", "cove", "crow", "dawn", "deer", "dew", "dove", "dune", "elm", "fern", "fig",
    "finch", "flax", "fog", "fox", "gull", "hare", "hay", "hazel", "iris", "ivy", "jade", "kelp", "lark", "leaf", "lily", "lime", "lynx",
    "mint", "moss", "oak", "owl", "pear", "pine", "plum", "quail", "reed", "rose", "rye", "sage", "seal", "swan", "teal", "vole", "wren",
    "yew",
)
"""Stems of file names and words of short texts."""

PLACES: Final[tuple[str, ...]] = (
    "attic", "barn", "cabin", "dock", "den", "hall", "loft", "mill", "nook", "pier", "porch", "shed", "shop", "stall", "yard",
)
"""Names of directories."""

USERS: Final[tuple[str, ...]] = ("ada", "ben", "cleo", "dan", "eva", "finn", "gus", "hana", "ike", "jo", "kai", "lea", "max", "nia")
"""Names of people, for records and logs."""
# fmt: on
