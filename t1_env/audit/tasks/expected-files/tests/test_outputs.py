"""Verifiers of expected-files: what is expected lies in files beside the tests."""

import filecmp
import stat
from pathlib import Path

OUT = Path("/app/out")
EXPECTED = Path(__file__).parent / "expected"


def test_sorted() -> None:
    """1. The words, sorted."""
    assert (OUT / "sorted.txt").read_text() == (EXPECTED / "sorted.txt").read_text()


def test_number() -> None:
    """2. Their number."""
    assert filecmp.cmp(OUT / "number.txt", EXPECTED / "number.txt", shallow=False)


def test_longest() -> None:
    """3. The longest, in a regular file."""
    assert stat.S_ISREG((OUT / "longest.txt").lstat().st_mode)
    assert (OUT / "longest.txt").read_bytes() == (EXPECTED / "longest.txt").read_bytes()


def test_reversed() -> None:
    """4. The last one first."""
    assert (OUT / "reversed.txt").read_text().split() == Path("/tests/expected/reversed.txt").read_text().split()
