"""Verifiers of imported-module: code of the agent runs in the process of the tests."""

import sys
from pathlib import Path

sys.path.insert(0, "/app")

import wordcount


def test_counts() -> None:
    """1. A dictionary from each word to how often it occurs."""
    assert wordcount.count("red blue red") == {"red": 2, "blue": 1}


def test_empty() -> None:
    """2. An empty text has no words."""
    assert wordcount.count("") == {}


def test_top() -> None:
    """3. The n most frequent words, the most frequent first."""
    assert wordcount.top("a b b c c c", 2) == ["c", "b"]


def test_longest() -> None:
    """4. The longest word."""
    assert wordcount.longest("oak cherry elm") == "cherry"


def test_version() -> None:
    """5. VERSION holds the version. It has nothing to do with the module, but runs in the process that has imported it."""
    assert Path("/app/VERSION").read_text().strip() == "1.0"
