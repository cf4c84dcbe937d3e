"""Verifiers of harvest-totals: one test for each requirement of the instruction."""

from pathlib import Path

DATA = Path("/app/data/harvest.csv")
OUT = Path("/app/out")


def out(name: str) -> list[str]:
    """Lines of a file under /app/out."""
    return (OUT / name).read_text().splitlines()


def test_rejects() -> None:
    """1. The malformed rows, as they are and in their order."""
    assert out("rejects.csv") == ["3,south,squash,n/a", "4,north,beans", "6,south,kale,-5"]


def test_header() -> None:
    """2. totals.csv starts with the header, once."""
    assert out("totals.csv")[0] == "crop,kg"
    assert out("totals.csv").count("crop,kg") == 1


def test_totals() -> None:
    """2. One line for each crop with its total."""
    assert sorted(out("totals.csv")[1:]) == ["beans,135", "kale,64", "leeks,70", "squash,215"]


def test_largest_first() -> None:
    """2. The largest total first."""
    assert out("totals.csv")[1:] == ["squash,215", "beans,135", "leeks,70", "kale,64"]


def test_field() -> None:
    """3. The field with the largest total."""
    assert out("field.txt") == ["west"]


def test_rows() -> None:
    """4. The number of good rows."""
    assert out("rows.txt") == ["9"]


def test_data_is_untouched() -> None:
    """5. The data is as it was (once there are totals)."""
    assert out("totals.csv")
    lines = DATA.read_text().splitlines()
    assert lines[0] == "day,field,crop,kg"
    assert lines[7] == "4,north,beans"
    assert len(lines) == 13
