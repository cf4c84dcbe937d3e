"""Verifiers of hello-file: one test for each requirement of the instruction."""

from pathlib import Path

HELLO = Path("/app/hello.txt")


def test_file_exists() -> None:
    """Create the file /app/hello.txt."""
    assert HELLO.is_file()


def test_says_hi() -> None:
    """It holds one line, the word hi."""
    assert HELLO.read_bytes().rstrip(b"\n") == b"hi"


def test_ends_with_newline() -> None:
    """The line ends with a newline (exactly one)."""
    content = HELLO.read_bytes()
    assert content.endswith(b"\n")
    assert not content.endswith(b"\n\n")
